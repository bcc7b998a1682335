"""Checks in advance whether another experiment can train and lay out the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from math import prod
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn

from workbench.compressors import Compressor, inside
from workbench.experiment import Experiment
from workbench.host.core.rank_view import RankView
from workbench.host.memory.batches import make_example
from workbench.host.passes.checkpointing import list_units
from workbench.host.passes.recomputing import find_recomputed
from workbench.host.placement import unmaterialized
from workbench.host.placement.optimizer_slots import read_slots
from workbench.host.placement.replica_spread import ReplicaSpread, find_spread
from workbench.host.placement.sliced_parameter import whole_shape
from workbench.host.reconfigure.policy_view import TryingView
from workbench.host.reconfigure.trial_batch import check_parts, check_spread
from workbench.host.reconfigure.trial_units import require_submodels
from workbench.host.transfer.handover import find_shards
from workbench.rank import COMPLEX, FLOATS, Part, StrategyError
from workbench.settings import KnobError
from workbench.tasks import Learner

if TYPE_CHECKING:
    from workbench.strategies import Strategy


def refuses_model(e: Experiment, model: nn.Module, learner: Learner) -> str | None:
    """Returns why `e` cannot train the model, and what to do; or None."""
    shapes = {name: whole_shape(p) for name, p in model.named_parameters() if p.requires_grad}
    if reason := refuses_dtypes(e, {n: str(p.dtype)[6:] for n, p in model.named_parameters() if p.requires_grad}):
        return reason
    spread = find_spread(e, model, learner)
    for rank in range(len(spread)) if spread else (0,):
        mine = spread.select_trained(rank, set(shapes)) if spread else set(shapes)
        if spread and not mine:
            return _explain_barren_slice(e, spread, rank)
        here = {
            name: spread.shape_of_part(name, shape) if spread else shape
            for name, shape in shapes.items()
            if name in mine
        }
        parts = [Part(name, shape, 0, prod(shape)) for name, shape in here.items()]
        said = [e.strategy.refuses_model(parts), *(c.refuses_model(parts) for c in inside(e.compressor))]
        if reason := next((reason for reason in said if reason), None):
            return f"{reason} (for the part of one rank: a replica is split into {spread})" if spread else reason
    return None


def refuses_dtypes(e: Experiment, dtypes: Mapping[str, str]) -> str | None:
    """Returns why a member of `e` cannot train these dtypes; or None."""
    wrapped = [("compressor=Dense", compressor) for compressor in inside(e.compressor)]
    every: list[tuple[str, Strategy | Compressor]] = [("strategy=DDP", e.strategy), *wrapped]
    for other, member in every:
        odd = next(((name, dtype) for name, dtype in dtypes.items() if dtype not in member.dtypes), None)
        if odd is not None:
            path, known = other.partition("=")[0], ", ".join(member.dtypes)
            would = f"take {other}, or convert" if odd[1] in FLOATS + COMPLEX else "convert"
            return (f"{path}={type(member).__name__}: takes parameters of {known}, and {odd[0]} has {odd[1]}; "
                    f"{would} the parameter")  # fmt: skip
    return None


def _explain_barren_slice(e: Experiment, spread: ReplicaSpread, rank: int) -> str:
    stage, index = spread.locate_rank(rank)
    said = f"partition={type(e.partition).__name__}: slice {index} of {e.partition.slices}"
    said += f" of stage {stage}" if spread.stages else ""
    would = "other cuts, fewer stages, or of=Whole()" if spread.stages else "partition=Whole()"
    return (
        f"{said} would have no parameters to train, because the plan splits no matrix there and other ranks own the "
        f"whole parameters; take {would}, or split more of the model's matrices"
    )


def list_tables(run: RankView, wanted: Experiment) -> tuple[str, ...]:
    """Returns the embedding tables that batches read, if the strategy keeps tables on servers."""
    return wanted.strategy.list_tables(run.learner, lambda: make_example(run.learner, wanted, "cpu"), run.layout)


def require_trainable(run: TryingView, wanted: Experiment) -> None:
    """Raises KnobError if `wanted` cannot train `run`'s model."""
    if reason := refuses_model(wanted, run.model, run.learner):
        raise KnobError(reason)
    here = {
        n: p
        for n, p in run.model.named_parameters()
        if p.requires_grad and not isinstance(p, unmaterialized.UnmaterializedParameter)
    }
    if reason := wanted.strategy.refuses_values({n: p.detach() for n, p in here.items()}):
        raise KnobError(reason)
    require_submodels(run, wanted)
    try:
        list_tables(run, wanted)
    except StrategyError as error:
        raise KnobError(f"strategy={type(wanted.strategy).__name__}: {error}") from None
    now, way = run.experiment, wanted.partition
    if way.size > 1 and (not run.spread or (way, wanted.batch) != (now.partition, now.batch)):
        _require_tried(run, wanted)
    if wanted.strategy.by_pieces and not run.layout.has_sizes_only:
        _require_parts(run, wanted)
    spread = find_spread(wanted, run.model, run.learner)
    list_units(run.model, run.learner, way)
    find_recomputed(wanted, run.learner, spread.split if spread else None)
    if has_other_layout(now, wanted):
        _require_movable_slots(run, wanted)


_TRIED: WeakKeyDictionary[Learner, dict[tuple[Hashable, int], str]] = WeakKeyDictionary()  # reasons, or ""


def _require_tried(run: TryingView, wanted: Experiment) -> None:
    way = wanted.partition

    def tried(model: nn.Module, batch: object) -> None:
        spread = find_spread(wanted, model, run.learner)
        assert spread is not None
        check_spread(model, run.learner, spread, batch, way.micro_batches)

    key = (way.dims(), way.pieces, way.cuts, way.sequences, way.micro_batches, run.layout.has_sizes_only)
    _try_once(run, wanted, key, tried)


def _require_parts(run: TryingView, wanted: Experiment) -> None:
    said = f"strategy={type(wanted.strategy).__name__}"
    _try_once(run, wanted, said, lambda model, batch: check_parts(model, run.learner, batch, said))


def _try_once(run: TryingView, wanted: Experiment, what: Hashable, tried: Callable[[nn.Module, object], None]) -> None:
    made = _TRIED.setdefault(run.learner, {})
    if (key := (what, wanted.batch)) not in made:
        made[key] = _run_trial(run, wanted, tried)
    if made[key]:
        raise KnobError(made[key])


def _run_trial(run: TryingView, wanted: Experiment, tried: Callable[[nn.Module, object], None]) -> str:
    batch, learner = run.make_example(wanted), run.learner
    with torch.random.fork_rng():
        torch.manual_seed(wanted.seed)
        model = run.model if run.layout.has_sizes_only else learner.model().to(run.layout.order[0].param.device).train()
        try:
            tried(model, batch)
        except KnobError as error:
            return str(error)
    return ""


def _require_movable_slots(run: TryingView, wanted: Experiment) -> None:
    """Raises KnobError if a shape does not show how to move state."""
    if find_shards(run, run.experiment.strategy) is not None:  # elementwise optimizers only
        return
    shapes = {place.name: place.param.shape for place in run.layout.order}
    for name, x in read_slots(run.layout, run.optimizer).items():
        if x.numel() > 1 and x.shape != shapes[name.partition("/")[2]]:
            raise KnobError(
                f"partition={type(wanted.partition).__name__}: {type(run.optimizer).__name__} stores {name} in "
                f"another shape than the parameter, so ranks cannot move it; take optimizer=AdamW() or SGD()"
            )


def has_other_layout(was: Experiment, wanted: Experiment) -> bool:
    """Whether replicas get another layout."""
    one, other = ((way.dims(), way.pieces, way.cuts, way.sequences) for way in (was.partition, wanted.partition))
    return one != other
