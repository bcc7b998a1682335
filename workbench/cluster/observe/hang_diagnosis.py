"""Finds the ranks that hold a run up, from a table.

It has no clock, socket or thread. A rank that waits for other ranks is a victim. The cause is a rank in its own code,
or silent, while other ranks wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from workbench.settings.rank_text import conjugate_have, conjugate_wait, format_ranks

MIN_STALL = 10.0  # seconds
FIRST_STEP_STALL = 30.0  # seconds, in the first step, without a known length
STALL_STEPS = 5.0  # usual step lengths
BRIEF_WAIT_SHARE = 0.1  # of that patience: shorter waits are normal
LONG_WAIT_SHARE = 0.3  # of that patience: the status line names longer waits


class RankPlace(NamedTuple):
    """One rank's last place.

    waits:           only other ranks can end its operation
    stalled_seconds: without a move
    silent_seconds:  without an answer or a row
    limit_factor:    factor on the limit, if it took long in this operation before
    process:         the system's report on its process, or ""
    own:             a script waits in its own collective, unknown to the strategy
    """

    step: int
    op: str
    waits: bool
    stalled_seconds: float
    silent_seconds: float
    limit_factor: float = 1.0
    process: str = ""
    own: bool = False


class StallVerdict(NamedTuple):
    """`text` describes the ranks `stalled_ranks`, which have stood for `seconds`.

    is_certain: whether they certainly hang: at most half of all, and no other rank is in its own code for long
    """

    text: str
    stalled_ranks: tuple[int, ...]
    seconds: float
    is_certain: bool = False


def find_patience(usual: float | None) -> float:
    """Returns the seconds before a stall. usual: seconds of a step; None: none has ended"""
    return FIRST_STEP_STALL if usual is None else max(MIN_STALL, STALL_STEPS * usual)


def find_stall(table: Mapping[int, RankPlace], limit: float) -> StallVerdict | None:
    """Returns which ranks hold the run up for more than `limit` seconds, or None."""
    silent = {r for r, seen in table.items() if seen.silent_seconds >= limit * seen.limit_factor}
    slow = {r for r, seen in table.items() if seen.stalled_seconds >= limit * seen.limit_factor}
    stuck = {r for r in slow if not table[r].waits} - silent
    if silent or stuck:
        return _describe_stalled(table, silent, stuck, limit)
    if len(table) > 1 and all(seen.waits and seen.stalled_seconds >= limit for seen in table.values()):
        return _all_wait(table)
    return None


def _describe_stalled(table: Mapping[int, RankPlace], silent: set[int], stuck: set[int], limit: float) -> StallVerdict:
    parts = []
    for ranks in _group_alike(table, silent):
        seen, seconds = table[ranks[0]], max(table[r].silent_seconds for r in ranks)
        said = [seen.process, f"last seen in {_describe_place(seen)}" if seen.op else ""]
        last = f" ({'; '.join(filter(None, said))})" if any(said) else ""
        parts.append(f"{format_ranks(ranks)} {conjugate_have(ranks)} said nothing for {seconds:.0f} s{last}")
    for ranks in _group_alike(table, stuck):
        seconds = max(table[r].stalled_seconds for r in ranks)
        parts.append(
            f"{format_ranks(ranks)} {conjugate_have(ranks)} been in {_describe_place(table[ranks[0]])} "
            f"for {seconds:.0f} s"
        )
    stalled = silent | stuck
    others = set(table) - stalled
    if rest := _describe_rest(table, others, BRIEF_WAIT_SHARE * limit):
        parts.append(rest)
    seconds = max([table[r].stalled_seconds for r in stalled] + [table[r].silent_seconds for r in silent])
    clear = all(table[r].waits or table[r].stalled_seconds <= BRIEF_WAIT_SHARE * limit for r in others)
    return StallVerdict("; ".join(parts), tuple(sorted(stalled)), seconds, clear and len(stalled) <= len(others))


def _describe_rest(table: Mapping[int, RankPlace], others: set[int], brief: float) -> str:
    """Describes the other ranks. A wait of at most `brief` seconds is none."""
    waiting: dict[str, list[int]] = {}
    for rank in sorted(others):
        if table[rank].waits and table[rank].stalled_seconds > brief:
            waiting.setdefault(table[rank].op, []).append(rank)
    texts = [f"{_list_ranks(ranks)} {conjugate_wait(ranks)} in {op}" for op, ranks in waiting.items()]
    if going := sorted(others.difference(*waiting.values())):
        texts.append(f"{_list_ranks(going)} {'go' if len(going) > 1 else 'goes'} on")
    return ", ".join(texts)


def _all_wait(table: Mapping[int, RankPlace]) -> StallVerdict:
    """Judges a table of waiting ranks, with the largest group as the norm."""
    groups = sorted(_group_alike(table, table), key=lambda ranks: (len(ranks), table[ranks[0]].step))
    seconds = min(seen.stalled_seconds for seen in table.values())
    if len(groups) == 1:
        text = f"all ranks have waited in {_describe_place(table[groups[0][0]])} for {seconds:.0f} s"
        return StallVerdict(text, tuple(sorted(table)), seconds)
    if (past := _went_past(table)) is not None:
        inside = sorted(set(table) - set(past))
        text = (
            f"{format_ranks(past)} went past {_describe_place(table[inside[0]])}, in which "
            f"{format_ranks(inside)} {conjugate_wait(inside)}, and {conjugate_wait(past)} in "
            f"{_describe_place(table[past[0]])}; no rank has moved for {seconds:.0f} s"
        )
        return StallVerdict(text, tuple(past), seconds)
    stalled = groups[:1] if len(groups[0]) < len(groups[-1]) else groups
    parts = [f"{format_ranks(ranks)} {conjugate_wait(ranks)} in {_describe_place(table[ranks[0]])}" for ranks in groups]
    text = f"no rank has moved for {seconds:.0f} s: {', '.join(parts)}"
    return StallVerdict(text, tuple(sorted(r for ranks in stalled for r in ranks)), seconds)


def _went_past(table: Mapping[int, RankPlace]) -> list[int] | None:
    """Returns the ranks that skipped a collective of their script in which at least as many other ranks wait; or None.

    Such a rank waits in the strategy's operation of the same step, or a later one.
    """
    inside = [rank for rank, seen in table.items() if seen.own]
    past = sorted(rank for rank in table if rank not in inside)
    if not inside or not past or len(past) > len(inside) or len({table[rank].op for rank in inside}) > 1:
        return None
    reached = max(table[rank].step for rank in inside)
    return past if all(table[rank].step >= reached for rank in past) else None


def _group_alike(table: Mapping[int, RankPlace], ranks: Iterable[int]) -> list[list[int]]:
    found: dict[tuple[int, str, str], list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault((table[rank].step, table[rank].op, table[rank].process), []).append(rank)
    return list(found.values())


def _describe_place(seen: RankPlace) -> str:
    own = {"data iterator": "its data iterator", "step": "its strategy's own code", "": "an unknown operation"}
    return f"{own.get(seen.op, seen.op)} of step {seen.step}"


def _list_ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
