"""Prepares a rank for its next generation."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch

from workbench.experiment import Experiment
from workbench.experiment.partition_rules import find_random_seed
from workbench.host.core.rank_view import RankView
from workbench.host.core.request_answers import Done
from workbench.host.elastic.generation_view import GenerationView
from workbench.host.elastic.recovery_sources import has_parts
from workbench.host.elastic.reentry import Membership, RecoverySource
from workbench.host.elastic.shrink_plan import explain_missing
from workbench.host.elastic.voting import NextGeneration, RankReport
from workbench.host.placement import sliced_parameter as sliced
from workbench.host.placement import unmaterialized
from workbench.host.placement.move_state import State
from workbench.host.transfer import handover
from workbench.host.transfer.boundary import Boundary, copy_boundary, make_boundary
from workbench.rank import Rank
from workbench.tasks import at_rate

RequestState = tuple[list[dict[str, Any]], Done, bool, int]  # as in RankReport
NO_REQUESTS: RequestState = [], {}, False, 0


def explain_refusal(run: GenerationView, saved: Sequence[int], alive: bool = False) -> str:
    """Returns why the rank could not go on without another; or "".

    saved: as in RankReport; alive: whether perhaps only a wire is lost
    """
    e, rollback = run.experiment, run.rollback
    if rollback is None:
        return "not all ranks have begun to train"
    if e.task.has_own_loop:
        return "the training loop of the task cannot lose or replace ranks"
    if has_parts(e) and rollback.copies == 1 and not (rollback.is_gathering or saved or (alive and rollback.kept)):
        return explain_missing(e)
    if rollback.open or not (rollback.is_wanted or rollback.is_free):
        name = type(e.strategy).__name__
        return (f"with on_death='end' and on_hang='wait' ranks under {name} with {type(e.compressor).__name__} keep "
        f"no state of the last step boundary; stop the run, and start it with on_death='go on'")  # fmt: skip
    return ""


def return_to_boundary(run: GenerationView) -> bool:
    """Puts `run`'s rank at a boundary. Returns whether it holds only a part of the state."""
    parts, carried, rollback = False, run.carried._replace(bounds=()), run.rollback
    if rollback is not None:
        run.rank.step += rollback.go_back()
        parts = rollback.is_void or has_parts(run.experiment)
        carried = carried._replace(bounds=rollback.list_bounds(), outer=rollback.outer)
    run.carried = carried
    run.optimizer.zero_grad(set_to_none=True)  # from a step that does not count
    return parts


def make_rank_report(
    run: GenerationView,
    member: int,
    parts: bool,
    saved: Sequence[int],
    asked: RequestState = NO_REQUESTS,
    process: Sequence[Any] = (),
) -> RankReport:
    """Call it after `return_to_boundary`. saved: steps of visible checkpoints if the rank holds `parts`"""
    e, rank, rollback = run.experiment, run.rank, run.rollback
    used = run.reads.list_boundaries(rank.step) if run.reads is not None else ()
    return RankReport(
        member,
        rank.step,
        run.queue.obeyed,
        e.strategy.trains(rank.id, rank.size),
        *asked,
        e.plain(),
        list(process),
        parts,
        [(*b.bound, b.apart) for b in run.carried.bounds],
        bool(rollback and rollback.has_slots),
        saved,
        bool(rollback and rollback.is_void and rollback.whole_state is not None),
        used,
    )


class StateBefore:
    """A rank's state before a generation, until that has formed.

    A generation changes parameters, buffers, optimizer state, settings and plans. Make this before `hand_down_state`.
    """

    def __init__(self, run: GenerationView, to: NextGeneration) -> None:
        self.run = run
        self.policy_runner = {name: copy(value) for name, value in vars(run.policy_runner).items() if name != "run"}
        self.settings = {name: getattr(run, name) for name in ("experiment", "carried")}
        self.settings |= {"queue": run.queue.copy(), "rate": copy(run.rate)}
        self.optimizer = run.optimizer
        self.whole: Boundary | None = None
        if to.membership.salvaged is not None:  # nothing changes the values in `bounds`
            return
        if has_parts(run.experiment):  # the ranks have assembled, so the newest boundary is whole
            bounds = [copy_boundary(b) for b in run.carried.bounds]
            self.settings["carried"] = run.carried._replace(bounds=bounds)
        else:
            self.whole = make_boundary(run, (run.rank.step, run.queue.obeyed))

    def restore_state(self) -> None:
        run = self.run
        if run.experiment.bucket_mb != self.settings["experiment"].bucket_mb:
            run.resize_own_buckets(self.settings["experiment"].bucket_mb)
        for name, value in self.settings.items():
            setattr(run, name, value)
        vars(run.policy_runner).update(self.policy_runner)
        run.policy_runner.follow_rank(run)
        if self.whole is None:
            return
        run.use_optimizer(self.optimizer)
        at_rate(self.optimizer, run.rank.lr)
        _load_state(run, self.whole.state)


def _load_state(run: RankView, state: State) -> None:
    layout, optimizer = run.layout, run.optimizer
    with torch.no_grad():
        for name, x in [*handover.list_parameters(layout).items(), *run.model.named_buffers()]:
            if name in state:
                x.copy_(state[name].view(x.shape))
    for place in layout.order:
        remembered = optimizer.state.get(place.param, {})
        tensors = {slot: x for slot, x in remembered.items() if isinstance(x, torch.Tensor)}
        if tensors and not any(f"{slot}/{place.name}" in state for slot in tensors):
            del optimizer.state[place.param]
            continue
        for slot, x in tensors.items():
            x.copy_(state[f"{slot}/{place.name}"].view(x.shape))


def hand_down_state(before: GenerationView, rank: Rank, to: NextGeneration) -> None:
    """Hands down `before`, the same rank in the previous generation."""
    rank.memory.copy_from(before.rank.memory)
    replan_changes(before, to.changes)
    if (salvaged := to.membership.salvaged) is None:
        if rank.id in to.membership.trained:
            _count_ranks_behind(before, to.membership)
        return _adopt_settings(before, to.experiment, rank.step)
    found = _find_boundary(before, salvaged, rank.id)
    own = None if found is None else copy_boundary(found)
    before.carried = before.carried._replace(bounds=() if own is None else (own,))
    rank.memory.begin_anew()
    if own is not None:  # even if it had slices
        rank.memory.buffers.update(own.widen_memory(before.model, before.experiment.compressor))
    _allocate_model(before, to.experiment, to.membership.step)


def replan_changes(run: GenerationView, changes: int) -> None:
    """Makes `changes` the number of made changes, and reports undone ones to the policy."""
    if run.queue.undo_changes(changes):
        run.policy_runner.undo_changes(changes)


def _count_ranks_behind(run: RankView, came: Membership) -> None:
    """Counts each rank that lacks the newest mean as if it stood at that mean.

    So a step since then weighs as much as if all ranks were that far.
    """
    anchor = run.experiment.strategy.anchor(run.state)
    if not came.behind or anchor is None:
        return
    kept, share = anchor.buffers.get("anchor", {}), came.behind / (came.behind + len(came.trained))
    with torch.no_grad():
        for name, x in handover.list_parameters(run.layout).items():
            if name in kept:
                x.lerp_(kept[name].view(x.shape), share)


def _adopt_settings(run: GenerationView, e: Experiment, step: int) -> None:
    was = run.experiment
    if e.bucket_mb != was.bucket_mb:
        run.resize_own_buckets(e.bucket_mb)
    if e.optimizer != was.optimizer:
        run.use_optimizer(run.make_optimizer(e))
    run.adopt_settings(e, step)


def _allocate_model(run: GenerationView, e: Experiment, step: int) -> None:
    run.adopt_settings(e, run.rank.step)
    run.rate.go_back(step)
    run.release_state(find_random_seed(e, run.rank.id, step))
    for p in run.model.parameters():
        if p.requires_grad and not p.is_meta:
            shape = sliced.whole_shape(p)
            like = unmaterialized.read_data(p)
            unmaterialized.make_present(p)
            sliced.set_slice(p, torch.zeros(shape, dtype=like.dtype, device=like.device), shape)
    run.reallocate_state()


def _find_boundary(run: GenerationView, salvaged: RecoverySource, place: int) -> Boundary | None:
    if salvaged.checkpoint or salvaged.steps[place] < 0:
        return None
    return next(b for b in run.carried.bounds if b.bound == (salvaged.steps[place], salvaged.changes))
