"""Cuts a model into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from workbench.experiment import Experiment
from workbench.host.placement.balancing import find_balanced_cut
from workbench.host.placement.sliced_parameter import whole_numel
from workbench.settings import KnobError
from workbench.tasks import Learner, TaskError, decoder_parts


@dataclass(frozen=True)
class StageCuts:
    """A model in consecutive pieces. Piece k is on stage k modulo the number of stages.

    pieces: the Modules of each piece, in order
    shares: each piece's share of the compute, estimated from numbers of parameters
    names:  by stage, the names of its parameters (trained and frozen) and buffers
    """

    count: int
    pieces: tuple[tuple[nn.Module, ...], ...]
    shares: tuple[float, ...]
    names: tuple[frozenset[str], ...]

    def __len__(self) -> int:
        return self.count

    def __str__(self) -> str:
        """Returns the parts on each stage, as "0–2 | 3–6"."""
        ends = [0, *accumulate(len(parts) for parts in self.pieces)]
        spans = [_format_range(a, b - 1) for a, b in pairwise(ends)]
        return "parts " + " | ".join(", ".join(spans[stage :: self.count]) for stage in range(self.count))

    def pieces_of_stage(self, stage: int) -> list[tuple[nn.Module, ...]]:
        return list(self.pieces[stage :: self.count])

    def compute_share(self, stage: int) -> float:
        return sum(self.shares[stage :: self.count])

    @property
    def piece_starts(self) -> tuple[int, ...]:
        """The first parts of pieces 1, 2, ..."""
        return tuple(accumulate(len(parts) for parts in self.pieces[:-1]))

    def compute_cost(self, times: Sequence[float], piece: int) -> float:
        """Returns a piece's share of `times` over its expected share; above 1 the piece is slower."""
        every = [0, *self.piece_starts, len(times)]
        took = sum(times[every[piece] : every[piece + 1]])
        return took / sum(times) / self.shares[piece]


_CUTS = "workbench cuts"  # the model's attribute


def cut_model(e: Experiment, model: nn.Module, learner: Learner) -> StageCuts:
    """Cuts `model` as `e` says. Raises KnobError if that is impossible."""
    made: dict[tuple[int, int, tuple[int, ...]], StageCuts]
    made = model.__dict__.setdefault(_CUTS, {})  # without values, simulated ranks share the model
    key = e.partition.depth, e.partition.pieces, e.partition.cuts
    if key not in made:
        made[key] = _make_stages(e, model, learner)
    return made[key]


def _make_stages(e: Experiment, model: nn.Module, learner: Learner) -> StageCuts:
    count, each, parts = e.partition.depth, e.partition.pieces, list_parts(model, learner)
    said = f"partition={type(e.partition).__name__}"
    if len(parts) < count * each:
        what = f"{count} stages of {each} pieces" if each > 1 else f"{count} stages"
        most = f"at most {len(parts)} {'pieces in all' if each > 1 else 'stages'}" if len(parts) > 1 else "Whole()"
        have = f"{len(parts)} parts" if len(parts) > 1 else "one part"
        raise KnobError(f"{said}: the model has {have}, too few for {what}; take {most}, or a deeper model")
    if (begins := e.partition.cuts) and begins[-1] >= len(parts):
        raise KnobError(
            f"cuts={list(begins)}: the model has {len(parts)} parts, numbered from 0 to {len(parts) - 1}, and no cut "
            f"may be larger; take smaller numbers, or cuts=[]"
        )
    weights = [estimate_compute(part) for part in parts]
    ends = [0, *(begins or find_balanced_cut([weights], count * each)), len(parts)]
    pieces = tuple(tuple(parts[a:b]) for a, b in pairwise(ends))
    stage_parts = [[part for piece in pieces[stage::count] for part in piece] for stage in range(count)]
    own = {id(x): name for name, x in (*model.named_parameters(), *model.named_buffers())}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    names = tuple(frozenset(own[id(x)] for x in _list_tensors(some) if id(x) in own) for some in stage_parts)
    for name in (name for where, name in own.items() if where in trained):
        stages = [stage for stage, has in enumerate(names) if name in has]
        if len(stages) > 1:
            raise KnobError(
                f"{said}: parameter {name} is tied: stages {' and '.join(map(str, stages))} would each need it; "
                f"untie it, or take fewer stages, so that one stage has all parts that share it"
            )
        if not stages:
            raise KnobError(f"{said}: parameter {name} is in no part of the model; let `parts` return one that has it")
    if empty := [stage for stage, some in enumerate(stage_parts) if not trained & {id(x) for x in _list_tensors(some)}]:
        would = "other cuts, or cuts=[]" if begins else "fewer stages, or a model whose parts are more alike"
        raise KnobError(f"stages={count}: stage {empty[0]} would have no parameters to train; take {would}")
    total = sum(weights)
    return StageCuts(count, pieces, tuple(sum(weights[a:b]) / total for a, b in pairwise(ends)), names)


def list_parts(model: nn.Module, learner: Learner) -> list[nn.Module]:
    """Returns the parts between which `model` may be cut. Raises KnobError if nothing names them."""
    if learner.parts is not None:
        try:
            return list(learner.parts(model))
        except TaskError as error:
            raise KnobError(f"partition=Pipeline: {error}") from error
    if isinstance(model, nn.Sequential):
        return list(model)
    if (found := decoder_parts(model)) is not None:
        return found
    raise KnobError(
        f"partition=Pipeline: a {type(model).__name__} has no declared cuts; make the model a Sequential, or give "
        f"the task `parts`: model -> a list of Modules that, one after the other, compute the model"
    )


def find_tied_and_untrained(parts: Sequence[nn.Module]) -> tuple[set[int], set[int]]:
    """Returns parts that share parameters with the part before, and untrained parts."""
    last = {id(p): number for number, part in enumerate(parts) for p in part.parameters()}
    first: dict[int, int] = {}
    for number, part in enumerate(parts):
        for p in part.parameters():
            first.setdefault(id(p), number)
    together = {at for p, number in first.items() for at in range(number + 1, last[p] + 1)}
    barren = {number for number, part in enumerate(parts) if not any(p.requires_grad for p in part.parameters())}
    return together, barren


def run_parts(parts: Sequence[nn.Module], *inputs: object, **named: object) -> Any:
    """Calls the parts in order."""
    x = parts[0](*inputs, **named)
    for part in parts[1:]:
        x = part(x)
    return x


@contextmanager
def replace_forward(model: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Inside, `model` calls `forward`."""
    own = model.__dict__.get("forward")
    model.__dict__["forward"] = forward  # found before the class's forward
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if own is not None:
            model.__dict__["forward"] = own


def _list_tensors(parts: Iterable[nn.Module]) -> Iterator[Tensor]:
    for part in parts:
        yield from part.parameters()
        yield from part.buffers()


def estimate_compute(part: nn.Module) -> int:
    """Counts a part's parameters without embedding tables, plus 1."""
    looked_up = {id(m.weight) for m in part.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    return 1 + sum(whole_numel(p) for p in part.parameters() if id(p) not in looked_up)


def _format_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"
