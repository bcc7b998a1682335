"""A live run's collectives and the ranks in them, by the last reports. Includes evaluations, messages and waits."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from workbench.analysis.communication.bandwidth import split_name
from workbench.record.run import Standing

_SOURCE = re.compile(r"^recv .* from (\d+)$")
_RANKS = re.compile(r"\[([\d, ]+)\]$")


class OpenCollective(NamedTuple):
    """A collective with waiting ranks. missing: other ranks and their operations"""

    step: int
    collective: str
    entered: tuple[int, ...]
    seconds: float  # since the last of these ranks entered
    missing: tuple[tuple[int, str], ...]


def list_open(standing: Iterable[Standing]) -> list[OpenCollective]:
    """Returns collectives with waiting ranks, ordered by their number.

    >>> here = [Standing(0, 7, "all_reduce bucket 1", True, 3.0), Standing(1, 7, "backward", False, 4.0)]
    >>> list_open(here)[0].missing
    ((1, 'backward of step 7, for 4 s'),)
    """
    ranks = list(standing)
    waiting: dict[tuple[int, str], list[Standing]] = {}
    for one in ranks:
        if one.waits and one.op:
            waiting.setdefault((one.step, one.op), []).append(one)
    found = []
    for (step, name), inside in waiting.items():
        group = _SOURCE.match(name) or _RANKS.search(split_name(name)[2])
        among = {int(r) for r in group[1].split(",")} if group else {one.rank for one in ranks}
        here = {one.rank for one in inside}
        missing = tuple((one.rank, describe_standing(one)) for one in ranks if one.rank in among - here)
        found.append(OpenCollective(step, name, tuple(sorted(here)), min(one.seconds for one in inside), missing))
    return sorted(found, key=lambda e: -len(e.entered))


def describe_standing(one: Standing) -> str:
    """Describes a rank's operation and its duration."""
    what = one.op or "an unknown operation"
    return f"{what} of step {one.step}, for {one.seconds:.0f} s"
