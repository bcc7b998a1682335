"""The quality of the record: clock offsets between ranks and the cost of recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.analysis.steps.window import ranks_of
from workbench.analysis.steps.words import format_seconds

if TYPE_CHECKING:
    from workbench.record.run import Run
    from workbench.record.timeline import Timeline


class RankClock(NamedTuple):
    """One rank's clock when the run began, in seconds.

    offset: its host's clock minus rank 0's; recorded times are corrected by it. NaN: not recorded
    error:  the offset's largest error: half the shortest of 16 round trips; 0 on rank 0's host
    """

    rank: int
    host: str
    offset: float
    error: float


class RankCost(NamedTuple):
    """CPU seconds of one rank's training process, and the recorder's part."""

    rank: int
    process: float
    recording: float


def list_clocks(run: Run) -> list[RankClock]:
    """Returns the clocks of ranks that have begun."""
    ranks = run.environment.get("ranks", {})
    apart = {
        r: (_to_number(said.get("clock_offset")), _to_number(said.get("clock_error"))) for r, said in ranks.items()
    }
    return [RankClock(r, str(said.get("host", "")), *apart[r]) for r, said in ranks.items()]


def recording_costs(tl: Timeline) -> list[RankCost]:
    """Returns the costs by rank, recorded every few seconds and at the end."""
    rows = tl.samples.rows()
    found = []
    for rank in ranks_of(rows) if len(rows) else ():
        spent = [float(rows.value[rows.equal("name", name) & (rows.rank == rank)].sum())
                 for name in ("cpu_process", "cpu_recording")]  # fmt: skip
        if spent[0] > 0:
            found.append(RankCost(int(rank), *spent))
    return found


def describe_upkeep(found: list[RankClock], costs: list[RankCost]) -> str:
    """Describes clocks and costs; "" if both are unknown.

    >>> describe_upkeep([RankClock(0, "a", 0.0, 0.0), RankClock(1, "b", 0.0031, 4e-5)], [])
    "Clock errors are at most 0.04 ms; rank 1's clock was 3.1 ms ahead of rank 0's."
    """
    texts = []
    apart = [c for c in found if c.error > 0]
    if apart:
        error = format_seconds(max(c.error for c in apart))
        far = max((c for c in apart if not np.isnan(c.offset)), key=lambda c: abs(c.offset), default=None)
        way = (
            f"; rank {far.rank}'s clock was {format_seconds(abs(far.offset))} {_name_direction(far.offset)} rank 0's"
            if far
            else ""
        )
        texts.append(f"Clock errors are at most {error}{way}.")
    elif len(found) > 1:
        texts.append("All ranks use the clock of one host, so their times agree exactly.")
    if costs:
        share = sum(c.recording for c in costs) / sum(c.process for c in costs)
        texts.append(f"Recording took {share * 100:.2g} % of the ranks' CPU time.")
    return " ".join(texts)


def _name_direction(offset: float) -> str:
    return "ahead of" if offset >= 0 else "behind"


def _to_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
