"""Deals many test cases to `make test`, to `make test-long` and CI, and to runs of every case."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import pytest


def thinned(cases: Iterable[tuple[Any, ...]], of: int, long: int = 1) -> list[Any]:
    """Marks the cases of a parametrization: about one in `of` runs always, one in `long` of the rest is long.

    The remaining cases run only by `make test-long EVERY=1`. With of=0 no case runs always; with long=0 no case is
    long. A case's text decides, so the choice is stable when a family gets another member.
    """
    found = []
    for case in cases:
        number = crc32(repr(case).encode())
        rest, drawn = divmod(number, of) if of else (number, 1)
        marks = [] if drawn == 0 else [pytest.mark.every if not long or rest % long else pytest.mark.long]
        found.append(pytest.param(*case, marks=marks))
    return found
