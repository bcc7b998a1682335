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
from workbench.host.core.meta import outline
from workbench.host.memory.batches import example, to_device
from workbench.host.passes.checkpointing import checkpointing
from workbench.host.passes.coded import Combining, parts_of
from workbench.host.passes.piece import Piece, micro_batches
from workbench.host.passes.together import computing, slice_of
from workbench.host.placement.cutting import Stages, cut
from workbench.host.placement.layout import Layout
from workbench.host.placement.splitting import Split
from workbench.partitions import Partition, Whole
from workbench.rank import Memory, StrategyError
from workbench.settings import KnobError
from workbench.settings.said import text_of
from workbench.tasks import Learner


class Planned(NamedTuple):
    """A meeting of a pass.

    share:  the part of the pass before it, 0 to 1
    brings: a tensor like each rank's
    """

    share: float
    meeting: Combining
    brings: Tensor


class Coded(NamedTuple):
    """A codec's work in a pass.

    how:    "encode" or "decode"
    what:   "activation" or "gradient"
    nbytes: the size of the tensor
    """

    phase: str
    how: str
    what: str
    nbytes: int


class Plans(NamedTuple):
    """The meetings of a pass through a model or one piece of it.

    forward:  in order, with shares of floating-point operations
    backward: in order, with shares of parameter elements that have their gradients
    come:     by parameter name, the share of a backward after which its gradient is complete
    coded:    the codecs' work in both

    All ranks compute equally much between meetings, no matter which common parameters they own.
    """

    forward: tuple[Planned, ...] = ()
    backward: tuple[Planned, ...] = ()
    come: Mapping[str, float] = MappingProxyType({})
    coded: tuple[Coded, ...] = ()

    def of(self, phase: str) -> list[Planned]:
        """Returns the meetings of a phase."""
        return list(self.backward if phase == "backward" else self.forward)

    def ready(self, layout: Layout) -> list[float]:
        """Returns, by bucket, the share of a backward that fills it and all earlier buckets."""
        return list(accumulate((max(self.come.get(p.name, 0.0) for p in b.parts) for b in layout.buckets), max))


_PLANNED: WeakKeyDictionary[Learner, dict[Any, tuple[Plans, ...]]] = WeakKeyDictionary()


def plans_of(e: Experiment, learner: Learner, split: Split) -> tuple[Plans, ...]:
    """Returns the meetings by piece of the model, found once for all ranks of a process.

    Raises KnobError if the model does not run on the meta device.
    """
    way, made = e.partition, _PLANNED.setdefault(learner, {})
    key = way.layers, way.depth, way.pieces, way.cuts, way.micro_batches, e.batch
    if key not in made:
        with torch.random.fork_rng():
            try:
                part = slice_of(outline(learner), split, 0)
                stages = cut(e, part, learner) if way.depth > 1 else None
                batch = to_device(example(learner, e, "cpu"), "meta")
                made[key] = planned(part, learner, split, batch, stages, way.micro_batches, way.layers)
            except (KnobError, StrategyError) as error:  # it already says what to do
                raise KnobError(f"partition={type(way).__name__}: {error}") from error
            except Exception as error:
                raise KnobError(
                    f"partition={type(way).__name__}: when ranks meet in a pass cannot be told, for the model does not "
                    f"run on the meta device ({text_of(error)}); take a task whose model does, or train it on real "
                    f"ranks"
                ) from error
    return made[key]


def arrival_of(plans: tuple[Plans, ...]) -> list[str]:
    """Returns the parameters in the order of their gradients, given the plans of all pieces."""
    return list(dict.fromkeys(name for plan in reversed(plans) for name in plan.come))


def planned(part: nn.Module, learner: Learner, split: Split, batch: Any, stages: Stages | None = None,
            count: int = 1, layers: Partition = Whole()) -> tuple[Plans, ...]:  # noqa: B008  # fmt: skip
    """Returns the meetings by piece of the model, from the first of `count` micro-batches.

    part:   the model on the meta device, with one rank's slices
    stages: how it is cut into stages
    layers: how the ranks of a stage compute its layers

    Raises the model's own error if it does not run on the meta device.
    """
    seen: list[Planned] = []
    coded: list[Coded] = []
    came: dict[str, float] = {}
    done = 0.0

    def ask(meeting: Combining, x: Tensor) -> Tensor:
        seen.append(Planned(done if turned else counter.get_total_flops(), meeting, x.detach()))
        return answer_like(meeting, x, split.ways)

    def does(name: str, work: Callable[[], Any], nbytes: int) -> Any:
        how, what, *_ = name.split(" ")
        coded.append(Coded("backward" if turned else "forward", how, what, nbytes))
        return work()

    def has_come(name: str, p: nn.Parameter) -> None:
        nonlocal done
        done += p.numel()
        came[name] = done

    trained = [(name, p) for name, p in part.named_parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(partial(has_come, name)) for name, p in trained]
    found: list[Plans] = []
    try:
        with computing(part, split, 0, ask, draws=False, coding=layers.inside(Memory()), coded=does) as together, \
             torch.enable_grad(), checkpointing(part, learner, layers):  # fmt: skip
            ways = Passes(part, learner, stages, micro_batches(batch, count)[0])
            for number in range(ways.count):
                turned = False
                with FlopCounterMode(display=False) as counter, together.summing(ways.params(number)):
                    ways.forward(number)
                found.append(Plans(_shared(seen, counter.get_total_flops()), coded=tuple(coded)))
                seen.clear()
                coded.clear()
            for number in reversed(range(ways.count)):
                turned, done = True, 0.0
                ways.backward(number)
                shares = {name: at / done for name, at in came.items()}
                also = found[number].coded + tuple(coded)
                found[number] = found[number]._replace(backward=_shared(seen, done), come=shares, coded=also)
                seen.clear()
                coded.clear()
                came.clear()
    finally:
        for hook in hooks:
            hook.remove()
        part.zero_grad(set_to_none=True)
    return tuple(found)


def _shared(seen: list[Planned], whole: float) -> tuple[Planned, ...]:
    return tuple(planned._replace(share=planned.share / (whole or 1.0)) for planned in seen)


class Passes:
    """Runs a model, or its pieces in order, forward and backward in one process."""

    def __init__(self, model: nn.Module, learner: Learner, stages: Stages | None, batch: Any) -> None:
        self._model, self._learner, self._batch = model, learner, batch
        self._ways = [Piece(model, stages.of(k), k, len(stages)) for k in range(len(stages))] if stages else []
        self.count = len(stages.pieces) if stages else 1
        self._x: Any = None
        self._grad: Any = 1.0

    def params(self, number: int) -> list[nn.Parameter] | None:
        """Returns a piece's parameters; None: the whole model's."""
        chunk, stage = divmod(number, len(self._ways) or 1)
        return self._ways[stage].params(chunk) if self._ways else None

    def forward(self, number: int) -> int:
        """Runs a piece forward, and returns its output's bytes."""
        if not self._ways:
            self._x = self._learner.loss(self._model, self._batch)
        else:
            chunk, stage = divmod(number, len(self._ways))
            self._x = self._ways[stage].forward(self._learner.loss, self._batch, self._x, 0, chunk)
        return int(self._x.nbytes)

    def backward(self, number: int) -> None:
        if not self._ways:
            self._x.backward()
        else:
            chunk, stage = divmod(number, len(self._ways))
            self._grad = self._ways[stage].backward(self._grad, 0, chunk)


def answer_like(meeting: Combining, x: Tensor, ways: int) -> Tensor:
    """Returns a tensor of the answer's shape."""
    if meeting.what == "gather":
        return torch.cat([x] * ways, meeting.dim)
    return torch.empty_like(x) if meeting.what in ("sum", "swap") else torch.empty_like(parts_of(x, ways, meeting)[0])
