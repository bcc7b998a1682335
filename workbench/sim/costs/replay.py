"""What chance decided in a run on the engine, read off its record: the simulator follows it instead of its own clock.

Two things are left to chance where ranks keep no common step: whose message comes next, of those taken from anyone,
and in which steps a background comes round. All else follows from them.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from workbench.record.timeline import Timeline


class Asked(NamedTuple):
    """One time that a background asked whether to go on."""

    steps: int  # that its rank had made by then
    again: bool  # the answer


class Replay:
    """The recorded order of arrivals and of rounds; what is asked beyond the record's end is left to the simulator."""

    def __init__(self, timeline: Timeline, ranks: int) -> None:
        rows = timeline.samples.rows()
        self._senders: dict[tuple[int, str], deque[int]] = {}
        self._rounds: list[deque[Asked]] = [deque() for _ in range(ranks)]
        for i in np.argsort(rows.t, kind="stable"):
            name, rank = str(rows.name[i]), int(rows.rank[i])
            if name == "again":
                self._rounds[rank].append(Asked(int(rows.step[i]) + 1, bool(rows.value[i])))
            elif name.split()[0] == "recv":
                self._senders.setdefault((rank, name[5:]), deque()).append(int(rows.value[i]))

    def sender(self, rank: int, kind: str) -> int | None:
        """From whom `rank` took its next message of `kind` that could be anyone's; None beyond the record."""
        senders = self._senders.get((rank, kind))
        return senders.popleft() if senders else None

    def put_back(self, rank: int, kind: str, sender: int) -> None:
        """Nothing came any more: `rank` takes that message when it asks the next time."""
        self._senders[rank, kind].appendleft(sender)

    def round(self, rank: int) -> Asked:
        """The round that a rank's background comes to next."""
        return self._rounds[rank][0] if self._rounds[rank] else Asked(0, False)

    def answer(self, rank: int) -> int:
        """`rank` has come to its next round: the step that it hears, or 0; it goes on to the one after."""
        round = self._rounds[rank].popleft() if self._rounds[rank] else Asked(0, False)
        return round.steps if round.again else 0
