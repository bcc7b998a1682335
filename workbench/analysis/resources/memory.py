"""Each rank's memory: maxima by category and of the sum, and the allocator's figures."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.window import list_generations, ranks_during
from workbench.record.timeline import Timeline

PREFIX = "memory "  # of Samples' names, before a category or a name below
PEAK, ALLOCATED, ALLOCATED_PEAK = "peak", "allocated", "allocated peak"
PASSING = "in passing"  # peak minus all categories: brief uses
AWAY = ("on host", "on disk")


class RankMemory(NamedTuple):
    """One rank's memory in some steps, in bytes.

    rank:           its number
    most:           maxima by category, at different times. Memory of no category, such as gradients between 2 layers or
                    data of a hand-over, is "in passing"
    peak:           maximum of the sum: between the largest category and the total of `most`
    allocated:      bytes in use in the GPU's allocator at a step's end, with temporaries; None without a GPU
    allocated_peak: their maximum since the process began
    """

    rank: int
    most: dict[str, int]
    peak: int
    allocated: int | None = None
    allocated_peak: int | None = None

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.most.items() if nbytes)
        beside = f"; allocator {format_bytes(self.allocated_peak)}" if self.allocated_peak else ""
        return f"rank {self.rank}: peak {format_bytes(self.peak)} ({parts}){beside}"


def measure_memory(tl: Timeline, first: int = 0, stop: int | None = None) -> list[RankMemory]:
    """Returns each rank's memory in steps `[first, stop)`. Empty if unrecorded.

    A Sample holds until the next of its name. Ranks lost earlier hold nothing.
    """
    found = _find_maxima(tl, first, stop)
    categories = [name for name in found if name not in (PEAK, ALLOCATED, ALLOCATED_PEAK)]
    ranks = sorted({rank for by_rank in found.values() for rank in by_rank})
    here = ranks_during(list_generations(tl), first, stop if stop is not None else np.iinfo(np.int64).max)
    ranks = ranks if here is None else [rank for rank in ranks if rank in here]
    beside = (found.get(ALLOCATED, {}), found.get(ALLOCATED_PEAK, {}))
    made = []
    for rank in ranks:
        most = {name: found[name][rank] for name in categories if rank in found[name]}
        peak = found.get(PEAK, {}).get(rank, 0)
        if beyond := _beyond_categories(most, peak):
            most[PASSING] = beyond
        made.append(RankMemory(rank, most, peak, *(by_rank.get(rank) for by_rank in beside)))
    return made


def _beyond_categories(most: dict[str, int], peak: int) -> int:
    """Returns the peak's bytes beyond all categories; 0 if an evaluation may be the cause."""
    every = sum(nbytes for name, nbytes in most.items() if name not in AWAY)
    step = every - most.get("evaluation", 0)
    return peak - step if peak > max(step, every - most.get("activations", 0)) else 0


def _find_maxima(tl: Timeline, first: int, stop: int | None) -> dict[str, dict[int, int]]:
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


def format_bytes(nbytes: float) -> str:
    """Formats bytes in the best unit, a power of 1000.

    >>> format_bytes(512), format_bytes(23_087_224), format_bytes(1.5e9)
    ('512 B', '23.1 MB', '1.5 GB')
    """
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    power = min(int(np.log10(nbytes)) // 3, 4)
    return f"{nbytes / 1000**power:.3g} {' kMGT'[power]}B"
