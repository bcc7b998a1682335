"""Decides how the remaining ranks of a generation go on. All ranks use the same votes and decide alike.

Whole replicas go on from the step of the furthest rank. Ranks that held parts go on from the pieces that they have
together (`host/elastic/salvage.py`), or from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.experiment import Experiment
from workbench.host.core.dealing import may_come_again
from workbench.host.elastic import salvage
from workbench.host.elastic.reentry import Came, Salvaged, fitting
from workbench.host.elastic.salvage import Found, alike
from workbench.host.elastic.views import SurvivorView
from workbench.host.elastic.voting import Heard, Next, Said, are, lost, named
from workbench.host.reconfigure.changes import in_step
from workbench.partitions import Whole
from workbench.settings import Json, KnobError


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A remaining rank, as its host knows it.

    member, place, size: its number in the run and its place among `size` ranks of the ended generation
    run:        its training loop; mark: writes a Mark
    missed:     returns the counted ranks that are not in these members: lost ranks, and new ranks that still run
    checkpoint: returns the path of the checkpoint before a step
    """

    member: int
    place: int
    size: int
    run: SurvivorView
    mark: Callable[[str, Mapping[str, Json]], None]
    missed: Callable[[Collection[int]], tuple[list[int], list[int]]]
    checkpoint: Callable[[int], str]


def fewer(who: Survivor, heard: Heard) -> Next:
    """Returns how the remaining ranks go on.

    Raises KnobError if so few cannot train under these settings, and records that.
    """
    try:
        return (_settled if any(said.parts for said in heard.by_place.values()) else _whole)(who, heard)
    except KnobError as error:
        if heard.first.member == who.member:
            say_why_not(who.mark, error)
        raise


def _whole(who: Survivor, heard: Heard) -> Next:
    """The same as `fewer` if each remaining rank has the whole model."""
    first = heard.first
    e, places = fitting(_settings(who, heard, first), heard.left)
    came = heard.came(places)
    spare = [heard.by_place[other].member for other in heard.left if other not in places]
    gone, left_out = who.missed((*came.members, *spare))
    processes = [heard.by_place[other].process for other in places]
    text = f"{lost(gone)}; {named(came.members)} went on from step {came.step}{_beside(left_out)}"
    if spare:
        text += f", and {named(spare)} {are(spare)} not needed, for so many cannot train alike"
    text += f"; the vote: {heard.text}"
    mark = {"members": came.members, "gone": [*gone, *left_out, *spare], "spare": spare, "step": came.step,
            "text": text, "settings": e.plain(), "voted": heard.voted}  # fmt: skip
    _say_unread(who, gone, first)
    return Next(came, e, first.changes, first.done, first.paused, first.credit, heard.asked(), processes, mark,
                heard.used(came.step))  # fmt: skip


def say_why_not(mark: Callable[[str, Mapping[str, Json]], None], why: object) -> None:
    """Records in a Mark why the run does not go on."""
    lost = "a rank, or a wire to it, is lost"
    mark("members", {"text": f"{lost}, and the run cannot go on without it: {why}"})


def _settled(who: Survivor, heard: Heard) -> Next:
    """The same as `fewer` if ranks held parts. Raises KnobError if a piece is missing and there is no checkpoint."""
    said, reason = heard.by_place, ""
    if any(one.whole for one in said.values()):
        return _brought(who, heard)
    remembers = any(one.remembers for one in said.values())
    how = "with what others have of the same parts" if len(said) < who.size else "with what each of them had"
    for changes in sorted({one.changes for one in said.values()}, reverse=True):
        first = max((one for one in said.values() if one.changes == changes), key=lambda one: (*one.far, -one.member))
        e = _settings(who, heard, first)
        there = {place: {bound[0]: alike(bound) for bound in one.bounds if bound[1] == changes}
                 for place, one in said.items()}  # fmt: skip
        found = salvage.found(e, who.size, remembers, there)
        if found is not None:
            at = salvage.pieces(e, who.size, remembers)
            try:
                return _together(who, heard, first, e, found, at, how)
            except KnobError as error:
                reason = reason or str(error)
    common = set.intersection(*(set(one.saved) for one in said.values()))
    e = _settings(who, heard, heard.first)
    if not common:
        raise KnobError(nowhere(e, reason))
    return _from_saved(who, heard, e, max(common))


def _brought(who: Survivor, heard: Heard) -> Next:
    """Goes on from the ranks that have everything: a rank was lost while they assembled the state."""
    whole = {place: one for place, one in heard.by_place.items() if one.whole}
    first = max(whole.values(), key=lambda one: (*one.far, -one.member))
    holders = tuple(sorted(place for place, one in whole.items() if one.far == first.far))
    found = Found(first.step, (holders,), dict.fromkeys(holders, first.step))
    e, at = _settings(who, heard, first), salvage.Pieces(1, (0,) * who.size)
    return _together(who, heard, first, e, found, at, "with all of the model, which they had brought together")


def _settings(who: Survivor, heard: Heard, of: Said) -> Experiment:
    """Returns a rank's experiment. To read it may need files of every family."""
    same = of.settings == heard.by_place[who.place].settings
    known: Experiment = who.run.experiment
    return known if same else Experiment.read(of.settings, known.task)


def nowhere(e: Experiment, reason: str = "") -> str:
    """Returns why the run cannot go on and which setting would have let it."""
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


def _together(who: Survivor, heard: Heard, first: Said, e: Experiment, found: Found, at: salvage.Pieces,
              how: str) -> Next:  # fmt: skip
    """Goes on from the pieces. Raises KnobError if so many ranks cannot train or lack a piece."""
    left = salvage.first_to_stay(found, at.at, heard.left)
    if e.strategy.shards and at.ways > 1:  # a rank without this boundary does not know how shards were laid out
        left = [place for place in left if place in found.steps]
    to, places = fitting(e, left, who.run.able)
    new = {place: number for number, place in enumerate(places)}
    groups = [tuple(place for place in group if place in new) for group in found.sources]
    sources = tuple(tuple(new[place] for place in group) for group in groups
                    if len({at.at[place] for place in group}) == at.ways)  # fmt: skip
    if not sources:
        raise KnobError(f"ranks={len(places)}: so many are left that can train, and not all parts are with them")
    steps = tuple(found.steps.get(place, -1) for place in places)
    was = e if at.ways > 1 else replace(e, partition=Whole())
    salvaged = Salvaged(was, first.changes, who.size, sources, steps)
    furthest = tuple(sorted({place for group in sources for place in group}))
    came = Came(_members(heard, places), places, furthest, tuple(sorted(group[0] for group in sources)), found.step,
                salvaged)  # fmt: skip
    text = f"went on from step {found.step}, {how}"
    return _next(who, heard, first, (came, to, e), text)


def _from_saved(who: Survivor, heard: Heard, e: Experiment, step: int) -> Next:
    """Goes back to a checkpoint on all ranks."""
    to, places = fitting(e, heard.left, who.run.able)
    everyone = tuple(range(len(places)))
    came = Came(_members(heard, places), places, everyone, everyone, step,
                Salvaged(e, heard.first.changes, who.size, saved=who.checkpoint(step)))  # fmt: skip
    undone = heard.first.step - step
    text = (
        f"went back to the checkpoint before step {step}, for nobody else had the same parts: {undone} "
        f"step{'s are' if undone != 1 else ' is'} lost"
    )
    return _next(who, heard, heard.first, (came, to, e), text)


def _members(heard: Heard, places: Sequence[int]) -> tuple[int, ...]:
    return tuple(heard.by_place[place].member for place in places)


def _next(who: Survivor, heard: Heard, first: Said, how: tuple[Came, Experiment, Experiment], how_text: str) -> Next:
    came, to, e = how
    spare = [heard.by_place[place].member for place in heard.left if place not in came.places]
    gone, left_out = who.missed((*came.members, *spare))
    text = f"{lost(gone)}; {named(came.members)} {how_text}{_beside(left_out)}"
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
    _say_unread(who, gone, heard.first)
    return Next(came, to, first.changes, first.done, first.paused, first.credit, heard.asked(first), processes, mark,
                heard.used(came.step))  # fmt: skip


def _beside(left_out: list[int]) -> str:
    """Returns the text about new ranks that do not take part."""
    return f", and {named(left_out)}, to come then, {are(left_out)} left out" if left_out else ""


def _say_unread(who: Survivor, gone: list[int], first: Said) -> None:
    """Records once that the lost ranks' position in their data is unknown, if so."""
    run = who.run
    if gone and run.learner.indexed and not in_step(run.experiment) and who.member == first.member:
        why = f"nobody knows how much {named(gone)} had read, for ranks keep no step in common"
        who.mark("data", may_come_again(why))
