"""Finds the ranks that are left after a loss, and the state of each.

[Note: A vote] A rank that notices a lost peer stores a report: its step, its number of changes, and the requests that
it has not obeyed. When each other rank has reported, has left or is dead, it writes the list of present ranks. The
first list written counts (compare and set). So the vote needs no leader, and a late rank finds that the other ranks
went on. The present rank that is furthest decides what counts. The result holds once all ranks that go on have met for
it; nothing changes before. If a rank is lost until then, all ranks that voted, even unneeded ones, vote again with the
same reports.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from workbench.host.elastic.voting import Quorum, RankReport
from workbench.record.process import alive, this_process

POLL_SECONDS = 0.01  # seconds between two looks into the store
REPORT_TIMEOUT = 10.0  # seconds for a living rank's report, unless 5 of its steps last longer


class LeftBehind(RuntimeError):
    """The other ranks went on without this one."""


class NotNeeded(RuntimeError):
    """Fewer ranks go on, and this one is not needed."""


def describe_process() -> list[Any]:
    """Returns host, pid and start, by which other ranks can check this process."""
    return [platform.node(), *this_process()]


def store_process(store: Any, place: int, process: list[Any] | None = None) -> None:
    """Stores a rank's process, by which other ranks check whether it runs. Default: this process"""
    store.set(f"process {place}", json.dumps(process or describe_process()))


def await_reports(store: Any, what: str, place: int | None, processes: list[list[Any]], look: Callable[[], None],
           members: Sequence[int] = ()) -> None:  # fmt: skip
    """Waits until all ranks have reported `what` in the store, for example before they open wires.

    place: of this rank; None if it only waits; processes: of the ranks, by place
    members: the ranks' numbers by place, for messages; (): their places

    Raises ConnectionError if a rank is gone before it has reported, and what `look` raises.
    """
    for other, process in enumerate(processes):
        store_process(store, other, process)
    if place is not None:
        store.set(f"{what} {place}", "1")
    while missing := [other for other in range(len(processes)) if not store.check([f"{what} {other}"])]:
        look()
        lost = [other for other in missing if not is_rank_alive(store, other)]
        late = [other for other in lost if not store.check([f"{what} {other}"])]  # a rank may have reported, then died
        require_alive(store, late, members)
        time.sleep(POLL_SECONDS)


def require_alive(store: Any, places: Iterable[int], members: Sequence[int] = ()) -> None:
    """Raises ConnectionError if a rank at `places` is gone. members: ranks' numbers by place"""
    if lost := [other for other in places if not is_rank_alive(store, other)]:
        rank = members[lost[0]] if members else lost[0]
        raise ConnectionError(f"Connection closed by peer: rank {rank} is gone before it had opened its end")


def report_gone(store: Any, place: int) -> None:
    """This rank has left: ranks need not await its report."""
    store.set(f"gone {place}", "1")


def prepare_vote(store: Any, before: Any, size: int) -> None:
    """Prepares another vote of the same places in `store`, without ranks that the vote `before` did not count."""
    counted = json.loads(before.get("verdict")) if before.check(["verdict"]) else range(size)
    for place in range(size):
        if place not in counted or before.check([f"gone {place}"]):
            report_gone(store, place)
        elif before.check([f"process {place}"]):
            store.set(f"process {place}", before.get(f"process {place}"))


def hold_vote(store: Any, place: int, size: int, mine: RankReport, patience: float, look: Callable[[], None]) -> Quorum:
    """Returns the reports of the ranks that are left. Raises LeftBehind if the other ranks went on without this one.

    look: raises if this rank must leave; patience: seconds. See [Note: A vote].
    """
    store.set(f"said {place}", json.dumps(mine._asdict()))
    until = time.monotonic() + patience
    while not store.check(["verdict"]):
        look()
        silent = [other for other in range(size) if not store.check([f"said {other}"])]
        if time.monotonic() > until or not any(is_rank_alive(store, other) for other in silent):
            present = [other for other in range(size) if store.check([f"said {other}"])]
            store.compare_set("verdict", "", json.dumps(present))
        else:
            time.sleep(POLL_SECONDS)
    counted = json.loads(store.get("verdict"))
    if place not in counted:
        raise LeftBehind(
            f"the other ranks went on without rank {mine.member}, which had not reported for {patience:.0f} s"
        )
    return Quorum({other: RankReport(**json.loads(store.get(f"said {other}"))) for other in counted})


def is_counted(store: Any, place: int) -> bool:
    """Whether a vote counted this place or is still to come."""
    return not store.check(["verdict"]) or place in json.loads(store.get("verdict"))


def has_vote_begun(store: Any, size: int) -> bool:
    """Whether a vote of `size` places has begun."""
    return any(store.check([f"said {place}"]) for place in range(size))


def is_rank_alive(store: Any, place: int) -> bool:
    """Whether this rank's report may still come. A process on another host counts as alive."""
    if store.check([f"gone {place}"]):
        return False
    if not store.check([f"process {place}"]):
        return True
    return is_process_alive(store.get(f"process {place}"))


def is_process_alive(process: str | bytes) -> bool:
    """process: `describe_process` as JSON"""
    host, *known = json.loads(process)
    return host != platform.node() or alive(known)
