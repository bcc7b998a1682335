"""Finds out when tensor-parallel ranks meet in a pass, and how much they exchange.

A *meeting* is a collective in the middle of a pass. One pass on the meta device finds all meetings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from workbench.experiment import Experiment
from workbench.host.core.valueless import make_outline
from workbench.host.memory.batches import make_example, move_to_device
from workbench.host.passes.checkpointing import checkpoint_units
from workbench.host.passes.coded_exchange import MeetingKind, cut_parts
from workbench.host.passes.stage_module import StageModule, cut_batch
from workbench.host.passes.tensor_parallel import compute_together, copy_slice
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.stage_cuts import StageCuts, cut_model
from workbench.host.placement.tensor_split import TensorSplit
from workbench.partitions import Partition, Whole
from workbench.rank import Memory, StrategyError
from workbench.settings import KnobError
from workbench.settings.describe_error import text_of
from workbench.tasks import Learner


class PlannedMeeting(NamedTuple):
    """A planned meeting.

    share:  the part of the pass before it, 0 to 1
    brings: a tensor like each rank's
    """

    share: float
    meeting: MeetingKind
    brings: Tensor


class CodecWork(NamedTuple):
    """A codec's work: how ("encode" or "decode"), what ("activation" or "gradient")."""

    phase: str
    how: str
    what: str
    nbytes: int


class PassPlan(NamedTuple):
    """The meetings of a pass through a model or a piece.

    All ranks compute equally much between meetings, no matter which common parameters they own.

    forward:  in order, with shares of floating-point operations
    backward: in order, with shares of parameter elements that have their gradients
    come:     by parameter name, the share of a backward after which its gradient is complete
    """

    forward: tuple[PlannedMeeting, ...] = ()
    backward: tuple[PlannedMeeting, ...] = ()
    come: Mapping[str, float] = MappingProxyType({})
    coded: tuple[CodecWork, ...] = ()

    def meetings_of_phase(self, phase: str) -> list[PlannedMeeting]:
        return list(self.backward if phase == "backward" else self.forward)

    def list_ready_shares(self, layout: ParameterLayout) -> list[float]:
        """Returns, by bucket, the share of a backward that fills it and all earlier buckets."""
        return list(accumulate((max(self.come.get(p.name, 0.0) for p in b.parts) for b in layout.buckets), max))


_PLANNED: WeakKeyDictionary[Learner, dict[Any, tuple[PassPlan, ...]]] = WeakKeyDictionary()


def find_plans(e: Experiment, learner: Learner, split: TensorSplit) -> tuple[PassPlan, ...]:
    """Returns the meetings by piece, found once for all ranks of a process.

    Raises KnobError if the model does not run on the meta device.
    """
    way, made = e.partition, _PLANNED.setdefault(learner, {})
    key = way.layers, way.depth, way.pieces, way.cuts, way.micro_batches, e.batch
    if key not in made:
        with torch.random.fork_rng():
            try:
                part = copy_slice(make_outline(learner), split, 0)
                stages = cut_model(e, part, learner) if way.depth > 1 else None
                batch = move_to_device(make_example(learner, e, "cpu"), "meta")
                made[key] = plan_meetings(part, learner, split, batch, stages, way.micro_batches, way.layers)
            except (KnobError, StrategyError) as error:
                raise KnobError(f"partition={type(way).__name__}: {error}") from error
            except Exception as error:
                raise KnobError(
                    f"partition={type(way).__name__}: the exchanges inside a pass are not known, because the model "
                    f"does not run on the meta device ({text_of(error)}); take a task whose model does, or train on "
                    f"real ranks"
                ) from error
    return made[key]


def find_arrival_order(plans: tuple[PassPlan, ...]) -> list[str]:
    """Orders parameters by the arrival of their gradients."""
    return list(dict.fromkeys(name for plan in reversed(plans) for name in plan.come))


def plan_meetings(part: nn.Module, learner: Learner, split: TensorSplit, batch: object, stages: StageCuts | None = None,
            count: int = 1, layers: Partition = Whole()) -> tuple[PassPlan, ...]:  # noqa: B008  # fmt: skip
    """Returns the meetings by piece of the model, from the first of `count` micro-batches.

    Raises the model's own error if it does not run on the meta device.

    part: the model on the meta device, with one rank's slices
    """
    seen: list[PlannedMeeting] = []
    coded: list[CodecWork] = []
    came: dict[str, float] = {}
    done = 0.0

    def ask(meeting: MeetingKind, x: Tensor) -> Tensor:
        seen.append(PlannedMeeting(done if turned else counter.get_total_flops(), meeting, x.detach()))
        return make_answer_like(meeting, x, split.ways)

    def does(name: str, work: Callable[[], Any], nbytes: int) -> Any:
        how, what, *_ = name.split(" ")
        coded.append(CodecWork("backward" if turned else "forward", how, what, nbytes))
        return work()

    def has_come(name: str, p: nn.Parameter) -> None:
        nonlocal done
        done += p.numel()
        came[name] = done

    trained = [(name, p) for name, p in part.named_parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(partial(has_come, name)) for name, p in trained]
    found: list[PassPlan] = []
    try:
        with (
            compute_together(part, split, 0, ask, draws=False, coding=layers.inside(Memory()), coded=does) as together,
            torch.enable_grad(),
            checkpoint_units(part, learner, layers),
        ):
            ways = PiecePasses(part, learner, stages, cut_batch(batch, count)[0])
            for number in range(ways.count):
                turned = False
                with FlopCounterMode(display=False) as counter, together.sum_partials(ways.list_params(number)):
                    ways.run_forward(number)
                found.append(PassPlan(_normalize_shares(seen, counter.get_total_flops()), coded=tuple(coded)))
                seen.clear()
                coded.clear()
            for number in reversed(range(ways.count)):
                turned, done = True, 0.0
                ways.run_backward(number)
                shares = {name: at / done for name, at in came.items()}
                also = found[number].coded + tuple(coded)
                found[number] = found[number]._replace(backward=_normalize_shares(seen, done), come=shares, coded=also)
                seen.clear()
                coded.clear()
                came.clear()
    finally:
        for hook in hooks:
            hook.remove()
        part.zero_grad(set_to_none=True)
    return tuple(found)


def _normalize_shares(seen: list[PlannedMeeting], whole: float) -> tuple[PlannedMeeting, ...]:
    return tuple(planned._replace(share=planned.share / (whole or 1.0)) for planned in seen)


class PiecePasses:
    """Runs a model or its pieces in one process."""

    def __init__(self, model: nn.Module, learner: Learner, stages: StageCuts | None, batch: object) -> None:
        self._model, self._learner, self._batch = model, learner, batch
        self._ways = (
            [StageModule(model, stages.pieces_of_stage(k), k, len(stages)) for k in range(len(stages))]
            if stages
            else []
        )
        self.count = len(stages.pieces) if stages else 1
        self._x: Any = None
        self._grad: Any = 1.0

    def list_params(self, number: int) -> list[nn.Parameter] | None:
        """None: the whole model's."""
        chunk, stage = divmod(number, len(self._ways) or 1)
        return self._ways[stage].list_params(chunk) if self._ways else None

    def run_forward(self, number: int) -> int:
        """Returns the output's bytes."""
        if not self._ways:
            self._x = self._learner.loss(self._model, self._batch)
        else:
            chunk, stage = divmod(number, len(self._ways))
            self._x = self._ways[stage].run_forward(self._learner.loss, self._batch, self._x, 0, chunk)
        return int(self._x.nbytes)

    def run_backward(self, number: int) -> None:
        if not self._ways:
            self._x.backward()
        else:
            chunk, stage = divmod(number, len(self._ways))
            self._grad = self._ways[stage].run_backward(self._grad, 0, chunk)


def make_answer_like(meeting: MeetingKind, x: Tensor, ways: int) -> Tensor:
    """Returns a tensor of the answer's shape."""
    if meeting.what == "gather":
        return torch.cat([x] * ways, meeting.dim)
    return torch.empty_like(x) if meeting.what in ("sum", "swap") else torch.empty_like(cut_parts(x, ways, meeting)[0])
