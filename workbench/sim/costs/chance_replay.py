"""Replays the random choices of a run that the engine has recorded.

If ranks keep no common step, chance decides two things: which message a receive from any rank gets, and in which steps
a background runs.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from workbench.record.timeline import Timeline


class RecordedRound(NamedTuple):
    """A background's request to continue."""

    steps: int  # of the rank before it
    again: bool  # the answer


class ChanceReplay:
    """The recorded order of arrivals and rounds. After the record, the simulator decides."""

    def __init__(self, timeline: Timeline, ranks: int, steps: int) -> None:
        """steps: of each rank now; the record may have fewer"""
        spans, rows = timeline.spans.rows(), timeline.samples.rows()
        self._goes_on = steps > spans.step[spans.lane == "step"].max(initial=-1) + 1
        self._senders: dict[tuple[int, str], deque[int]] = {}
        self._rounds: list[deque[RecordedRound]] = [deque() for _ in range(ranks)]
        for i in np.argsort(rows.t, kind="stable"):
            name, rank = str(rows.name[i]), int(rows.rank[i])
            if name == "again":
                self._rounds[rank].append(RecordedRound(int(rows.step[i]) + 1, bool(rows.value[i])))
            elif name.split()[0] == "recv":
                self._senders.setdefault((rank, name[5:]), deque()).append(int(rows.value[i]))

    def next_sender(self, rank: int, kind: str) -> int | None:
        """Returns the sender of the next message of `kind` to `rank`; None after the record."""
        senders = self._senders.get((rank, kind))
        return senders.popleft() if senders else None

    def return_sender(self, rank: int, kind: str, sender: int) -> None:
        """Puts an unused sender back for the next request of `rank`."""
        self._senders[rank, kind].appendleft(sender)

    def peek_round(self, rank: int) -> RecordedRound | None:
        """None after the record."""
        return self._rounds[rank][0] if self._rounds[rank] else None

    def next_answer(self, rank: int) -> int | None:
        """Returns the next round's answer (a step, or 0), and advances; None after the record.

        The last round only shows that the recorded run ended, so a longer run ignores it.
        """
        if not self._rounds[rank]:
            return None
        round = self._rounds[rank].popleft()
        if round.again:
            return round.steps
        return None if self._goes_on and not self._rounds[rank] else 0
