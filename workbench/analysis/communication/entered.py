"""Who has entered which collective of a live run and who has not: of what ranks last said of themselves.

A rank may also wait for others at the end of an evaluation, between two steps or for a message; that counts, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from workbench.analysis.communication.bandwidth import parted
from workbench.record.run import Standing

_SOURCE = re.compile(r"^recv .* from (\d+)$")
_RANKS = re.compile(r"\[([\d, ]+)\]$")


class Entered(NamedTuple):
    """One collective that some ranks wait in. missing: those who are to come, each with where it is instead."""

    step: int
    collective: str
    entered: tuple[int, ...]
    seconds: float  # since the last of them moved
    missing: tuple[tuple[int, str], ...]


def entered(standing: Iterable[Standing]) -> list[Entered]:
    """The collectives that ranks stand in, that for which most wait first.

    >>> here = [Standing(0, 7, "all_reduce bucket 1", True, 3.0), Standing(1, 7, "backward", False, 4.0)]
    >>> entered(here)[0].missing
    ((1, 'backward of step 7, for 4 s'),)
    """
    ranks = list(standing)
    waiting: dict[tuple[int, str], list[Standing]] = {}
    for one in ranks:
        if one.waits and one.op:
            waiting.setdefault((one.step, one.op), []).append(one)
    found = []
    for (step, name), inside in waiting.items():
        group = _SOURCE.match(name) or _RANKS.search(parted(name)[2])
        among = {int(r) for r in group[1].split(",")} if group else {one.rank for one in ranks}
        here = {one.rank for one in inside}
        missing = tuple((one.rank, where(one)) for one in ranks if one.rank in among - here)
        found.append(Entered(step, name, tuple(sorted(here)), min(one.seconds for one in inside), missing))
    return sorted(found, key=lambda e: -len(e.entered))


def where(one: Standing) -> str:
    """Where a rank is, in words."""
    what = one.op or "nothing that it told"
    return f"{what} of step {one.step}, for {one.seconds:.0f} s"
