"""Decides how the remaining ranks of a generation go on. Equal votes make all ranks decide alike.

Whole replicas go on from the furthest rank's step. Ranks with parts go on from the pieces that they have together
(`host/elastic/recovery_sources.py`), or from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.experiment import Experiment
from workbench.host.core.data_positions import describe_repeats
from workbench.host.elastic import recovery_sources
from workbench.host.elastic.generation_view import SurvivorView
from workbench.host.elastic.recovery_sources import PieceSources, find_agreed_step
from workbench.host.elastic.reentry import Membership, RecoverySource, choose_survivors
from workbench.host.elastic.voting import NextGeneration, Quorum, RankReport, describe_loss
from workbench.host.reconfigure.changes import has_common_step
from workbench.partitions import Whole
from workbench.settings import Json, KnobError
from workbench.settings.rank_text import conjugate_be, format_ranks


@dataclass(frozen=True, kw_only=True)
class RemainingRank:
    """A remaining rank, as its host knows it.

    member, place, size: its number in the run; its place among `size` ranks of the ended generation
    find_missing:        returns counted ranks outside these members: lost ones, and new ones that still run
    checkpoint_path:     returns the path of the checkpoint before a step
    """

    member: int
    place: int
    size: int
    run: SurvivorView
    mark: Callable[[str, Mapping[str, Json]], None]
    find_missing: Callable[[Collection[int]], tuple[list[int], list[int]]]
    checkpoint_path: Callable[[int], str]


def plan_shrink(survivor: RemainingRank, quorum: Quorum) -> NextGeneration:
    """Raises KnobError, and records it, if so few cannot train under these settings."""
    try:
        in_parts = any(report.holds_part for report in quorum.by_place.values())
        return (_plan_from_parts if in_parts else _plan_from_replicas)(survivor, quorum)
    except KnobError as error:
        if quorum.furthest_report.member == survivor.member:
            mark_end_reason(survivor.mark, error)
        raise


def _plan_from_replicas(survivor: RemainingRank, quorum: Quorum) -> NextGeneration:
    first = quorum.furthest_report
    e, places = choose_survivors(_read_experiment(survivor, quorum, first), quorum.remaining_places)
    came = quorum.make_membership(places)
    spare = [quorum.by_place[other].member for other in quorum.remaining_places if other not in places]
    gone, left_out = survivor.find_missing((*came.members, *spare))
    processes = [quorum.by_place[other].process for other in places]
    text = (
        f"{describe_loss(gone)}; {format_ranks(came.members)} went on from step {came.step}"
        f"{_describe_left_out(left_out)}"
    )
    if spare:
        text += f", and {format_ranks(spare)} {conjugate_be(spare)} not needed, because so many cannot train alike"
    text += f"; progress: {quorum.vote_text}"
    mark = {"members": came.members, "gone": [*gone, *left_out, *spare], "spare": spare, "step": came.step,
            "text": text, "settings": e.plain(), "voted": quorum.vote_rows}  # fmt: skip
    _mark_unread(survivor, gone, first)
    return NextGeneration(
        came,
        e,
        first.changes,
        first.answers,
        first.paused,
        first.credit,
        quorum.list_requests(),
        processes,
        mark,
        quorum.count_examples_used(came.step),
    )


def mark_end_reason(mark: Callable[[str, Mapping[str, Json]], None], why: object) -> None:
    """Records why the run ends."""
    lost = "a rank or its connection is lost"
    mark("members", {"text": f"{lost}, and the run cannot go on without it: {why}"})


def _plan_from_parts(survivor: RemainingRank, quorum: Quorum) -> NextGeneration:
    """Raises KnobError if a piece and a checkpoint are missing."""
    reports, reason = quorum.by_place, ""
    if any(report.holds_whole for report in reports.values()):
        return _plan_from_gathered(survivor, quorum)
    remembers = any(one.has_optimizer_state for one in reports.values())
    how = (
        "with other ranks' copies of the lost parts" if len(reports) < survivor.size else "with the parts of each rank"
    )
    for changes in sorted({one.changes for one in reports.values()}, reverse=True):
        first = max(
            (one for one in reports.values() if one.changes == changes),
            key=lambda one: (*one.progress_key, -one.member),
        )
        e = _read_experiment(survivor, quorum, first)
        there = {place: {bound[0]: find_agreed_step(bound) for bound in one.boundaries if bound[1] == changes}
                 for place, one in reports.items()}  # fmt: skip
        found = recovery_sources.find_sources(e, survivor.size, remembers, there)
        if found is not None:
            at = recovery_sources.map_pieces(e, survivor.size, remembers)
            try:
                return _plan_from_pieces(survivor, quorum, first, e, found, at, how)
            except KnobError as error:
                reason = reason or str(error)
    common = set.intersection(*(set(one.checkpoint_steps) for one in reports.values()))
    e = _read_experiment(survivor, quorum, quorum.furthest_report)
    if not common:
        raise KnobError(explain_missing(e, reason))
    return _plan_from_checkpoint(survivor, quorum, e, max(common))


def _plan_from_gathered(survivor: RemainingRank, quorum: Quorum) -> NextGeneration:
    whole = {place: one for place, one in quorum.by_place.items() if one.holds_whole}
    first = max(whole.values(), key=lambda one: (*one.progress_key, -one.member))
    holders = tuple(sorted(place for place, one in whole.items() if one.progress_key == first.progress_key))
    found = PieceSources(first.step, (holders,), dict.fromkeys(holders, first.step))
    e, at = _read_experiment(survivor, quorum, first), recovery_sources.PieceMap(1, (0,) * survivor.size)
    return _plan_from_pieces(survivor, quorum, first, e, found, at, "with the whole model that ranks had gathered")


def _read_experiment(survivor: RemainingRank, quorum: Quorum, of: RankReport) -> Experiment:
    same = of.settings == quorum.by_place[survivor.place].settings
    known: Experiment = survivor.run.experiment
    return known if same else Experiment.read(of.settings, known.task)


def explain_missing(e: Experiment, reason: str = "") -> str:
    """Names the setting that would have let the run go on."""
    strategy, way = type(e.strategy).__name__, type(e.partition).__name__
    if reason:
        return f"{reason}; and there is no checkpoint to go back to: take save_every=100, or more replicas"
    if e.partition.size > 1:
        return (
            f"partition={way}: no other rank has the lost part, and there is no checkpoint to go back to; take "
            f"save_every=100, or ranks={2 * e.partition.size} or more, so that each part exists twice"
        )
    what = "its tables" if e.strategy.tables else "its shard"
    other = "" if e.strategy.tables else ", or HSDP(), whose groups each have all shards"
    return (
        f"strategy={strategy}: no other rank has {what}, and there is no checkpoint to go back to; take "
        f"save_every=100{other}"
    )


def _plan_from_pieces(
    survivor: RemainingRank,
    quorum: Quorum,
    first: RankReport,
    e: Experiment,
    found: PieceSources,
    at: recovery_sources.PieceMap,
    how: str,
) -> NextGeneration:
    """Raises KnobError if ranks cannot train or lack a piece."""
    left = recovery_sources.sort_by_need(found, at.at, quorum.remaining_places)
    if e.strategy.shards and at.ways > 1:  # their layout must be known
        left = [place for place in left if place in found.steps]
    to, places = choose_survivors(e, left, survivor.run.require_trainable)
    new = {place: number for number, place in enumerate(places)}
    groups = [tuple(place for place in group if place in new) for group in found.sources]
    sources = tuple(tuple(new[place] for place in group) for group in groups
                    if len({at.at[place] for place in group}) == at.ways)  # fmt: skip
    if not sources:
        raise KnobError(f"ranks={len(places)}: the ranks that are left can train, but they lack parts of the model")
    steps = tuple(found.steps.get(place, -1) for place in places)
    was = e if at.ways > 1 else replace(e, partition=Whole())
    salvaged = RecoverySource(was, first.changes, survivor.size, sources, steps)
    furthest = tuple(sorted({place for group in sources for place in group}))
    came = Membership(
        _list_members(quorum, places),
        places,
        furthest,
        tuple(sorted(group[0] for group in sources)),
        found.step,
        salvaged,
    )
    text = f"went on from step {found.step}, {how}"
    return _make_generation(survivor, quorum, first, (came, to, e), text)


def _plan_from_checkpoint(survivor: RemainingRank, quorum: Quorum, e: Experiment, step: int) -> NextGeneration:
    to, places = choose_survivors(e, quorum.remaining_places, survivor.run.require_trainable)
    everyone = tuple(range(len(places)))
    came = Membership(
        _list_members(quorum, places),
        places,
        everyone,
        everyone,
        step,
        RecoverySource(e, quorum.furthest_report.changes, survivor.size, checkpoint=survivor.checkpoint_path(step)),
    )
    undone = quorum.furthest_report.step - step
    text = (
        f"went back to the checkpoint before step {step}, because no other rank had the same parts: {undone} "
        f"step{'s are' if undone != 1 else ' is'} lost"
    )
    return _make_generation(survivor, quorum, quorum.furthest_report, (came, to, e), text)


def _list_members(quorum: Quorum, places: Sequence[int]) -> tuple[int, ...]:
    return tuple(quorum.by_place[place].member for place in places)


def _make_generation(
    survivor: RemainingRank,
    quorum: Quorum,
    first: RankReport,
    how: tuple[Membership, Experiment, Experiment],
    how_text: str,
) -> NextGeneration:
    came, to, e = how
    spare = [quorum.by_place[place].member for place in quorum.remaining_places if place not in came.places]
    gone, left_out = survivor.find_missing((*came.members, *spare))
    text = f"{describe_loss(gone)}; {format_ranks(came.members)} {how_text}{_describe_left_out(left_out)}"
    if spare:
        text += f", and {format_ranks(spare)} {conjugate_be(spare)} not needed, because so many cannot train alike"
    if to.partition != e.partition:
        ranks = f"{to.partition.size} rank{'s' * (to.partition.size > 1)}"
        text += f"; a replica now takes {ranks}, partition={type(to.partition).__name__}"
    text += f"; progress: {quorum.vote_text}"
    mark = {"members": came.members, "gone": [*gone, *left_out, *spare], "spare": spare, "step": came.step,
            "text": text, "settings": to.plain(), "back": max(0, quorum.furthest_report.step - came.step),
            "voted": quorum.vote_rows}  # fmt: skip
    processes = [quorum.by_place[place].process for place in came.places]
    _mark_unread(survivor, gone, quorum.furthest_report)
    return NextGeneration(
        came,
        to,
        first.changes,
        first.answers,
        first.paused,
        first.credit,
        quorum.list_requests(first),
        processes,
        mark,
        quorum.count_examples_used(came.step),
    )


def _describe_left_out(left_out: list[int]) -> str:
    return f", and joining {format_ranks(left_out)} {conjugate_be(left_out)} left out" if left_out else ""


def _mark_unread(survivor: RemainingRank, gone: list[int], first: RankReport) -> None:
    run = survivor.run
    if gone and run.learner.indexed and not has_common_step(run.experiment) and survivor.member == first.member:
        why = f"how much {format_ranks(gone)} had read is unknown, because ranks do not train in lockstep"
        survivor.mark("data", describe_repeats(why))
