"""Prepares a rank for its next generation: takes it back to a boundary and keeps its own state."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch

from workbench.experiment import Experiment
from workbench.experiment.partitioned import drawn
from workbench.host.core.answers import Done
from workbench.host.core.views import RankView
from workbench.host.elastic.reentry import Came, Salvaged
from workbench.host.elastic.salvage import in_parts
from workbench.host.elastic.settling import nowhere
from workbench.host.elastic.views import GenerationView
from workbench.host.elastic.voting import Next, Said
from workbench.host.placement import absent, sliced
from workbench.host.placement.move import State
from workbench.host.transfer import handover
from workbench.host.transfer.boundary import Boundary, copy_boundary, stood
from workbench.rank import Memory, Rank
from workbench.tasks import at_rate

Asked = tuple[list[dict[str, Any]], Done, bool, int]  # asked, done, paused, credit, as in Said
NOTHING: Asked = [], {}, False, 0


def refused(run: GenerationView, saved: Sequence[int], alive: bool = False) -> str:
    """Returns why `run`'s rank could not go on without another; "" if it could.

    saved: as in Said; alive: whether perhaps only a wire is lost and no rank. The vote finds out.
    """
    e, rollback = run.experiment, run.rollback
    if rollback is None:
        return "not all ranks have begun to train"
    if e.task.leads:
        return "the loop that makes its steps goes on only with the ranks that it began with"
    if in_parts(e) and rollback.copies == 1 and not (rollback.coming or saved or (alive and rollback.kept)):
        return nowhere(e)
    if rollback.open or not (rollback.wanted or rollback.free):
        name = type(e.strategy).__name__
        return (f"with on_death='end' and on_hang='wait' no rank keeps a way back to the last boundary under {name} "
                f"with {type(e.compressor).__name__}; stop the run, and begin with on_death='go on'")  # fmt: skip
    return ""


def went_back(run: GenerationView) -> bool:
    """Puts `run`'s rank at a boundary if it is not at one. Returns whether it holds only a part of the state."""
    parts, run.bounds, rollback = False, [], run.rollback
    if rollback is not None:
        run.rank.step += rollback.back()
        run.outer = rollback.outer
        parts, run.bounds = rollback.void or in_parts(run.experiment), rollback.bounds()
    run.optimizer.zero_grad(set_to_none=True)  # from a step that does not count
    return parts


def said(run: GenerationView, member: int, parts: bool, saved: Sequence[int], asked: Asked = NOTHING,
         process: Sequence[Any] = ()) -> Said:  # fmt: skip
    """Returns the report of a rank that went back. saved: the steps of checkpoints that it sees if it holds `parts`"""
    e, rank, rollback = run.experiment, run.rank, run.rollback
    used = run.reads.used_before(rank.step) if run.reads is not None else ()
    return Said(member, rank.step, run.obeyed, e.strategy.trains(rank.id, rank.size), *asked, e.plain(), list(process),
                parts, [(*b.bound, b.apart) for b in run.bounds], bool(rollback and rollback.remembers), saved,
                bool(rollback and rollback.void and rollback.together is not None), used)  # fmt: skip


class StateBefore:
    """A rank's state before it enters a generation, until the generation has formed.

    A generation changes parameters, buffers, optimizer state, settings and plans. `restore` puts all of it back. Make
    this before `hand_down`.
    """

    def __init__(self, run: GenerationView, to: Next) -> None:
        self.run = run
        self.steering = {name: copy(value) for name, value in vars(run.steering).items() if name != "run"}
        self.settings = {name: getattr(run, name) for name in ("experiment", "obeyed", "_made", "outer", "former")}
        self.settings |= {name: list(getattr(run, name)) for name in ("planned", "taken", "bounds")}
        self.settings["rate"], self.optimizer = copy(run.rate), run.optimizer
        self.whole: Boundary | None = None
        if to.came.salvaged is not None:  # no one changes the values in `bounds`
            return
        if in_parts(run.experiment):  # the ranks have come together, and the newest boundary is whole
            self.settings["bounds"] = [copy_boundary(b) for b in run.bounds]
        else:
            self.whole = stood(run, (run.rank.step, run.obeyed))

    def restore(self) -> None:
        """Gives the rank that state again."""
        run = self.run
        if run.experiment.bucket_mb != self.settings["experiment"].bucket_mb:
            run.cut_anew(self.settings["experiment"].bucket_mb)
        for name, value in self.settings.items():
            setattr(run, name, value)
        vars(run.steering).update(self.steering)
        run.steering.run = run
        if self.whole is None:
            return
        run.use_optimizer(self.optimizer)
        at_rate(self.optimizer, run.rank.lr)
        _put_back(run, self.whole.state)


def _put_back(run: RankView, state: State) -> None:
    """Copies these flat values by name into the whole model and optimizer of `run`."""
    layout, optimizer = run.layout, run.optimizer
    with torch.no_grad():
        for name, x in [*handover.parameters(layout).items(), *run.model.named_buffers()]:
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


def hand_down(before: GenerationView, rank: Rank, to: Next) -> None:
    """Gives `rank` the state of `before`, the same rank in the previous generation."""
    rank.memory = before.rank.memory.copied()
    before.plan_again(to.changes)
    if (salvaged := to.came.salvaged) is None:
        if rank.id in to.came.trained:
            _count_ranks_behind(before, to.came)
        return _adopt(before, to.experiment, rank.step)
    before.bounds = [copy_boundary(b) for b in (_boundary_of(before, salvaged, rank.id),) if b is not None]
    own = before.bounds[0] if before.bounds else None
    rank.memory = Memory(rank.memory.seed)
    if own is not None:  # whole even if it had slices
        rank.memory.buffers.update(own.whole_memory(before.model, before.experiment.compressor))
    _lie_whole(before, to.experiment, to.came.step)


def _count_ranks_behind(run: RankView, came: Came) -> None:
    """Counts each rank that lacks the newest mean of all ranks as if it stood at that mean.

    So a step that `run`'s rank has made since then weighs as much in the next mean as if all ranks were that far.
    """
    anchor = run.experiment.strategy.anchor(run.state)
    if not came.behind or anchor is None:
        return
    kept, share = anchor.buffers.get("anchor", {}), came.behind / (came.behind + len(came.trained))
    with torch.no_grad():
        for name, x in handover.parameters(run.layout).items():
            if name in kept:
                x.lerp_(kept[name].view(x.shape), share)


def _adopt(run: GenerationView, e: Experiment, step: int) -> None:
    """Adopts settings of the furthest rank that affect what a rank keeps."""
    was = run.experiment
    run.rate.change(was, e, step)
    if e.bucket_mb != was.bucket_mb:
        run.cut_anew(e.bucket_mb)
    if e.optimizer != was.optimizer:
        run.use_optimizer(run.make_optimizer(e))
    run.experiment = e


def _lie_whole(run: GenerationView, e: Experiment, step: int) -> None:
    """Gives the model memory for all parameters without values, and drops its earlier layout."""
    was = run.experiment
    run.rate.change(was, e, run.rank.step)
    run.rate.begun = min(run.rate.begun, step)
    run.experiment = e
    run.lie_bare(drawn(e, run.rank.id, step))
    for p in run.model.parameters():
        if p.requires_grad and not p.is_meta:
            shape = sliced.shape_of(p)
            like = absent.data_of(p)
            absent.come(p)
            sliced.lay(p, torch.zeros(shape, dtype=like.dtype, device=like.device), shape)
    run.spread = None
    run.lie_anew()


def _boundary_of(run: GenerationView, salvaged: Salvaged, place: int) -> Boundary | None:
    """Returns the boundary to which this rank goes back; None if it holds nothing that counts."""
    if salvaged.saved or salvaged.steps[place] < 0:
        return None
    return next(b for b in run.bounds if b.bound == (salvaged.steps[place], salvaged.changes))
