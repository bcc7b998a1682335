"""What each rank's memory held: the most of each category, of all together, and what an allocator says of itself."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.window import generations, there
from workbench.record.timeline import Timeline

PREFIX = "memory "  # of the Samples' names; what follows is a category, or one of these
PEAK, ALLOCATED, ALLOCATED_PEAK = "peak", "allocated", "allocated peak"
PASSING = "in passing"  # what the peak has beyond the most of all categories: at least so much was there for a moment
AWAY = ("on host", "on disk")


class RankMemory(NamedTuple):
    """One rank's memory in some steps, in bytes.

    most:           by category, the most that it held in a step; not all of them need be at their most at once. What no
                    category counts, as gradients between two layers or what a hand-over moves, is "in passing"
    peak:           the most of all categories together at a time; at least that of the largest, at most their sum
    allocated:      what the allocator of a GPU had given out at the end of a step, and at most since its process began;
                    None where there is no GPU. It also counts what no category does: temporaries
    """

    rank: int
    most: dict[str, int]
    peak: int
    allocated: int | None = None
    allocated_peak: int | None = None

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {readable(nbytes)}" for name, nbytes in self.most.items() if nbytes)
        beside = f"; allocator {readable(self.allocated_peak)}" if self.allocated_peak else ""
        return f"rank {self.rank}: peak {readable(self.peak)} ({parts}){beside}"


def memory(tl: Timeline, first: int = 0, stop: int | None = None) -> list[RankMemory]:
    """By rank, what its memory held in steps [first, stop); empty where the record does not say.

    A Sample holds from its step on until the next of its name. Ranks that were lost before hold nothing.
    """
    found = _most(tl, first, stop)
    categories = [name for name in found if name not in (PEAK, ALLOCATED, ALLOCATED_PEAK)]
    ranks = sorted({rank for by_rank in found.values() for rank in by_rank})
    here = there(generations(tl), first, stop if stop is not None else np.iinfo(np.int64).max)
    ranks = ranks if here is None else [rank for rank in ranks if rank in here]
    beside = (found.get(ALLOCATED, {}), found.get(ALLOCATED_PEAK, {}))
    made = []
    for rank in ranks:
        most = {name: found[name][rank] for name in categories if rank in found[name]}
        peak = found.get(PEAK, {}).get(rank, 0)
        if beyond := _beyond(most, peak):
            most[PASSING] = beyond
        made.append(RankMemory(rank, most, peak, *(by_rank.get(rank) for by_rank in beside)))
    return made


def _beyond(most: dict[str, int], peak: int) -> int:
    """Bytes of the peak that no category counts; 0 where it may be that of an evaluation, which is beside no step."""
    every = sum(nbytes for name, nbytes in most.items() if name not in AWAY)
    step = every - most.get("evaluation", 0)
    return peak - step if peak > max(step, every - most.get("activations", 0)) else 0


def _most(tl: Timeline, first: int, stop: int | None) -> dict[str, dict[int, int]]:
    """By what follows the prefix in a Sample's name, in the order of the record, and by rank: the greatest value."""
    rows = tl.samples.rows()
    found: dict[str, dict[int, int]] = {}
    if not len(rows):
        return found
    names = rows.coded("name")
    for code, text in enumerate(names.words.texts):
        if not text.startswith(PREFIX):
            continue
        mine = rows[(names.codes == code) & (rows.step < (stop if stop is not None else np.iinfo(np.int64).max))]
        most: dict[int, int] = {}
        for rank, step, value in zip(mine.rank.tolist(), mine.step.tolist(), mine.value.tolist(), strict=True):
            most[rank] = int(value) if step <= first else max(most.get(rank, 0), int(value))
        found[text.removeprefix(PREFIX)] = most
    return found


def readable(nbytes: float) -> str:
    """Bytes in the unit that reads best, of powers of ten.

    >>> readable(512), readable(23_087_224), readable(1.5e9)
    ('512 B', '23.1 MB', '1.5 GB')
    """
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    power = min(int(np.log10(nbytes)) // 3, 4)
    return f"{nbytes / 1000**power:.3g} {' kMGT'[power]}B"
