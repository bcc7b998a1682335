"""Where those go on from who are left of ranks that held parts: from what they have together, or from a checkpoint.

All hear the same in the vote and so settle the same, without another word. See `host/salvage.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.engine import membership
from workbench.engine.collectives import connect_store
from workbench.engine.membership import Heard, Next, Said, are, lost, named
from workbench.experiment import Experiment
from workbench.experiment.partitioned import drawn
from workbench.host import absent, salvage, sliced
from workbench.host.boundary import Boundary
from workbench.host.changes import in_step
from workbench.host.dealing import may_come_again
from workbench.host.layout import Layout
from workbench.host.reentry import Came, Salvaged, fitting
from workbench.host.salvage import Found
from workbench.host.saved.regain import regained
from workbench.host.saved.reread import Former
from workbench.partitions import Whole
from workbench.record import checkpoints
from workbench.settings import KnobError

if TYPE_CHECKING:
    from workbench.engine.session import Session
    from workbench.engine.training import Training


def saved(session: Session) -> list[int]:
    """The steps before which there are checkpoints of this run that are whole, as far as this rank sees."""
    if session.run_dir is None:
        return []
    return [int(path.name[5:]) for path in checkpoints.found(Path(session.run_dir) / checkpoints.FOLDER)]


def settled(session: Session, heard: Heard) -> Next:
    """How those go on who are left. Raises KnobError where they do not have everything, and no checkpoint has."""
    said, reason = heard.by_place, ""
    if any(one.whole for one in said.values()):
        return _brought(session, heard)
    remembers = any(one.remembers for one in said.values())
    for changes in sorted({one.changes for one in said.values()}, reverse=True):
        first = max((one for one in said.values() if one.changes == changes), key=lambda one: (*one.far, -one.member))
        e = _settings(session, heard, first)
        there = {place: [step for step, made in one.bounds if made == changes] for place, one in said.items()}
        found = salvage.found(e, session.rank.size, remembers, there)
        if found is not None:
            at = salvage.pieces(e, session.rank.size, remembers)
            try:
                return _together(session, heard, first, e, found, at)
            except KnobError as error:
                reason = reason or str(error)
    common = set.intersection(*(set(one.saved) for one in said.values()))
    e = _settings(session, heard, heard.first)
    if not common:
        raise KnobError(nowhere(e, reason))
    return _from_saved(session, heard, e, max(common))


def _brought(session: Session, heard: Heard) -> Next:
    """They go on from those who have all, for they were coming together when a rank was lost."""
    whole = {place: one for place, one in heard.by_place.items() if one.whole}
    first = max(whole.values(), key=lambda one: (*one.far, -one.member))
    holders = tuple(sorted(place for place, one in whole.items() if one.far == first.far))
    found, size = Found(first.step, (holders,), dict.fromkeys(holders, first.step)), session.rank.size
    e, at = _settings(session, heard, first), salvage.Pieces(1, (0,) * size)
    return _together(session, heard, first, e, found, at, "with all of the model, which they had brought together")


def _settings(session: Session, heard: Heard, of: Said) -> Experiment:
    """A rank's experiment; to read it may need files of every family."""
    same = of.settings == heard.by_place[session.rank.id].settings
    known = session.set_up_already.experiment
    return known if same else Experiment.read(of.settings, known.task)


def nowhere(e: Experiment, reason: str = "") -> str:
    """Why nobody can go on, and what would have let them."""
    strategy, way = type(e.strategy).__name__, type(e.partition).__name__
    if reason:
        return f"{reason}; and there is no checkpoint to go back to: take save_every=100, or more replicas"
    if e.partition.size > 1:
        return (
            f"partition={way}: nobody else has what the rank held, and there is no checkpoint to go back to; take "
            f"save_every=100, or ranks={2 * e.partition.size} or more, so that each part is there twice"
        )
    what = "its tables" if e.strategy.tables else "its shard"
    other = "" if e.strategy.tables else ", or HSDP(), whose groups each have all shards"
    return (
        f"strategy={strategy}: nobody else has {what}, and there is no checkpoint to go back to; take "
        f"save_every=100{other}"
    )


def _together(session: Session, heard: Heard, first: Said, e: Experiment, found: Found, at: salvage.Pieces,
              how: str = "with what others have of the same parts") -> Next:  # fmt: skip
    """They have everything together. Raises KnobError where so many cannot train, or not with all of it."""
    left = salvage.first_to_stay(found, at.at, heard.left)
    if e.strategy.shards and at.ways > 1:  # who has no such boundary does not know how shards lay
        left = [place for place in left if place in found.steps]
    to, places = fitting(e, left, session.set_up_already.able)
    new = {place: number for number, place in enumerate(places)}
    groups = [tuple(place for place in group if place in new) for group in found.sources]
    sources = tuple(tuple(new[place] for place in group) for group in groups
                    if len({at.at[place] for place in group}) == at.ways)  # fmt: skip
    if not sources:
        raise KnobError(f"ranks={len(places)}: so many are left that can train, and not all parts are with them")
    steps = tuple(found.steps.get(place, -1) for place in places)
    was = e if at.ways > 1 else replace(e, partition=Whole())
    salvaged = Salvaged(was, first.changes, session.rank.size, sources, steps)
    furthest = tuple(sorted({place for group in sources for place in group}))
    came = Came(_members(heard, places), places, furthest, tuple(sorted(group[0] for group in sources)), found.step,
                salvaged)  # fmt: skip
    text = f"went on from step {found.step}, {how}"
    return _next(session, heard, first, (came, to, e), text)


def _from_saved(session: Session, heard: Heard, e: Experiment, step: int) -> Next:
    """All go back to a checkpoint."""
    to, places = fitting(e, heard.left, session.set_up_already.able)
    path = str(Path(session.run_dir or ".") / checkpoints.FOLDER / checkpoints.name(step))
    everyone = tuple(range(len(places)))
    came = Came(_members(heard, places), places, everyone, everyone, step,
                Salvaged(e, heard.first.changes, session.rank.size, saved=path))  # fmt: skip
    undone = heard.first.step - step
    text = (
        f"went back to the checkpoint before step {step}, for nobody else had the same parts: {undone} "
        f"step{'s are' if undone != 1 else ' is'} lost"
    )
    return _next(session, heard, heard.first, (came, to, e), text)


def _members(heard: Heard, places: Sequence[int]) -> tuple[int, ...]:
    return tuple(heard.by_place[place].member for place in places)


def _next(session: Session, heard: Heard, first: Said, how: tuple[Came, Experiment, Experiment], how_text: str) -> Next:
    came, to, e = how
    spare = [heard.by_place[place].member for place in heard.left if place not in came.places]
    gone, left_out = missed(session, (*came.members, *spare))
    text = f"{lost(gone)}; {named(came.members)} {how_text}{beside(left_out)}"
    if spare:
        text += f", and {named(spare)} {are(spare)} not needed, for so many cannot train alike"
    if to.partition != e.partition:
        ranks = f"{to.partition.size} rank{'s' * (to.partition.size > 1)}"
        text += f"; a replica lies on {ranks} now, partition={type(to.partition).__name__}"
    text += f"; the vote: {heard.text}"
    mark = {"members": came.members, "gone": [*gone, *left_out, *spare], "spare": spare, "step": came.step,
            "text": text, "settings": to.plain(), "back": max(0, heard.first.step - came.step),
            "voted": heard.voted}  # fmt: skip
    processes = [heard.by_place[place].process for place in came.places]
    say_unread(session, gone, heard.first)
    return Next(came, to, first.changes, first.done, first.paused, first.credit, heard.asked(first), processes, mark,
                heard.used(came.step))  # fmt: skip


def missed(session: Session, here: Collection[int]) -> tuple[list[int], list[int]]:
    """Who is counted and not `here`: who is lost; and who lives and was only to come."""
    store, away = connect_store(*session.where, session.base), [m for m in session.counted if m not in here]
    left_out = [m for m in away if m not in session.members and membership.runs(store.get(f"member {m}"))]
    return [m for m in away if m not in left_out], left_out


def beside(left_out: list[int]) -> str:
    """What is said of those who were only to come."""
    return f", and {named(left_out)}, to come then, {are(left_out)} left out" if left_out else ""


def say_unread(session: Session, gone: list[int], first: Said) -> None:
    """Marks, once, that nobody knows how far those who are gone had come in their data, if that is so."""
    known = session.set_up_already
    if gone and known.learner.indexed and not in_step(known.experiment) and session.member == first.member:
        why = f"nobody knows how much {named(gone)} had read, for ranks keep no step in common"
        session.mark("data", may_come_again(why))


# -- on each rank, between two generations --


def lie_whole(training: Training, e: Experiment, step: int) -> None:
    """The model has memory for all of it, with no values yet, and nothing of how it lay is left."""
    was, model = training.experiment, training.model
    training.rate.change(was, e, training.rank.step)
    training.rate.begun = min(training.rate.begun, step)
    training.experiment = e
    training.host.lie(None, drawn(e, training.rank.id, step))
    for p in model.parameters():
        if p.requires_grad:
            shape = sliced.shape_of(p)
            like = absent.data_of(p)
            absent.come(p)
            sliced.lay(p, torch.zeros(shape, dtype=like.dtype, device=like.device), shape)
    training.spread = None
    training.layout = Layout(model, e.bucket_mb)
    training.optimizer = training.make_optimizer(e)


def memory_of(training: Training, salvaged: Salvaged, place: int) -> dict[str, dict[str, Any]]:
    """What this rank's compressor remembered at the boundary that it goes back to, whole where it had slices."""
    own = boundary_of(training, salvaged, place)
    return own.whole_memory(training.model, training.experiment.compressor) if own is not None else {}


def former(path: str) -> Former:
    """A checkpoint to which all go back. Raises RunError where it cannot be read."""
    checkpoint = checkpoints.Checkpoint.open(path)
    files = checkpoints.Bytes(checkpoint)
    images = [regained(checkpoint, files, place, alone=True) for place in range(checkpoint.ranks)]
    return Former(checkpoint.settings, images)


def boundary_of(training: Training, salvaged: Salvaged, place: int) -> Boundary | None:
    """The boundary that this rank goes back to; None where it has nothing that counts."""
    if salvaged.saved or salvaged.steps[place] < 0:
        return None
    return next(b for b in training.bounds if b.bound == (salvaged.steps[place], salvaged.changes))
