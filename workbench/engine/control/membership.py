"""Who is there now: how those whom a rank has left come to know of each other, and of what each has done.

[Note: A vote] Whoever meets a peer's end says in the store what it has: its step, how many changes it has made, what
it was asked and has not done. It hears of the others until each has said so, has left or is dead. Then it writes down
who is there, but the first who does so is right (compare and set), and all go by what that one wrote. So nobody needs
a leader, and one who comes late finds that the others went on. The furthest of those who are there decides what counts.
What was settled holds once all who are to go on have met for it. If one of them is lost before, all who voted, also who
is not needed, vote again with what they had: nothing of it has been changed until then.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from workbench.host.elastic.voting import Heard, Said
from workbench.record.process import alive, this_process

LOOK = 0.01  # seconds between two looks into the store
PATIENCE = 10.0  # seconds in which one who lives has to say something; or five of its steps


class Late(RuntimeError):
    """The others went on without this rank."""


class Spare(RuntimeError):
    """There are fewer ranks than before, and this one is not needed among them."""


def here() -> list[Any]:
    """This process, as others can see it: its host, its pid and when it began."""
    return [platform.node(), *this_process()]


def come(store: Any, place: int, process: list[Any] | None = None) -> None:
    """Says which process a rank is (none: this one), so that others can see whether it is there."""
    store.set(f"process {place}", json.dumps(process or here()))


def gather(store: Any, what: str, place: int | None, processes: list[list[Any]], look: Callable[[], None],
           members: Sequence[int] = ()) -> None:  # fmt: skip
    """Waits until all ranks have said `what` in the store: before they open wires, for example.

    place: of this rank; None if it only looks on; processes: of the ranks, by place
    members: the ranks' numbers in the run, by place, for messages; (): their places
    Raises ConnectionError if a rank is gone before it has said so, and what `look` raises.
    """
    for other, process in enumerate(processes):
        come(store, other, process)
    if place is not None:
        store.set(f"{what} {place}", "1")
    while missing := [other for other in range(len(processes)) if not store.check([f"{what} {other}"])]:
        look()
        lost = [other for other in missing if not lives(store, other)]
        late = [other for other in lost if not store.check([f"{what} {other}"])]  # one may have said it, then died
        require(store, late, members)
        time.sleep(LOOK)


def require(store: Any, places: Iterable[int], members: Sequence[int] = ()) -> None:
    """Raises ConnectionError if a rank at one of these places is gone; names it by its number in `members`."""
    if lost := [other for other in places if not lives(store, other)]:
        rank = members[lost[0]] if members else lost[0]
        raise ConnectionError(f"Connection closed by peer: rank {rank} is gone before it had opened its end")


def gone(store: Any, place: int) -> None:
    """Says that this rank has left, for whoever waits for a word of it."""
    store.set(f"gone {place}", "1")


def hand_down(store: Any, before: Any, size: int) -> None:
    """Another vote of the same places begins, in `store`. Who was not counted in the one `before` is not waited for."""
    counted = json.loads(before.get("verdict")) if before.check(["verdict"]) else range(size)
    for place in range(size):
        if place not in counted or before.check([f"gone {place}"]):
            gone(store, place)
        elif before.check([f"process {place}"]):
            store.set(f"process {place}", before.get(f"process {place}"))


def vote(store: Any, place: int, size: int, mine: Said, patience: float, look: Callable[[], None]) -> Heard:
    """What those who are left of `size` places have. Raises Late where the others went on without this one.

    look: raises when this rank must leave. See [Note: A vote].
    """
    store.set(f"said {place}", json.dumps(mine._asdict()))
    until = time.monotonic() + patience
    while not store.check(["verdict"]):
        look()
        silent = [other for other in range(size) if not store.check([f"said {other}"])]
        if time.monotonic() > until or not any(lives(store, other) for other in silent):
            present = [other for other in range(size) if store.check([f"said {other}"])]
            store.compare_set("verdict", "", json.dumps(present))
        else:
            time.sleep(LOOK)
    counted = json.loads(store.get("verdict"))
    if place not in counted:
        raise Late(f"the others went on without rank {mine.member}, which had said nothing for {patience:.0f} s")
    return Heard({other: Said(**json.loads(store.get(f"said {other}"))) for other in counted})


def counted(store: Any, place: int) -> bool:
    """Would a vote hear this place: none has been held, or it was counted?"""
    return not store.check(["verdict"]) or place in json.loads(store.get("verdict"))


def voting(store: Any, size: int) -> bool:
    """Has one of `size` places begun to vote on who is left?"""
    return any(store.check([f"said {place}"]) for place in range(size))


def lives(store: Any, place: int) -> bool:
    """May a word of it still come? On another host nobody sees its process."""
    if store.check([f"gone {place}"]):
        return False
    if not store.check([f"process {place}"]):
        return True
    return runs(store.get(f"process {place}"))


def runs(process: str | bytes) -> bool:
    """May a process still run that said what it is, as JSON of `here`?"""
    host, *known = json.loads(process)
    return host != platform.node() or alive(known)
