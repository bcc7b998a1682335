"""Many cases: some in `make test`, which people wait for, more in `make test-long` and CI, all where that is asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import pytest


def thinned(cases: Iterable[tuple[Any, ...]], of: int, long: int = 1) -> list[Any]:
    """The cases of a parametrization: about one in `of` as it is, one in `long` of the others left to `make test-long`.

    What is left then is run by `make test-long EVERY=1` only; of 0 none is as it is, long 0 leaves none to the others.
    A case's text chooses, so that those that are run stay the same when a family gets another member.
    """
    found = []
    for case in cases:
        number = crc32(repr(case).encode())
        rest, drawn = divmod(number, of) if of else (number, 1)
        marks = [] if drawn == 0 else [pytest.mark.every if not long or rest % long else pytest.mark.long]
        found.append(pytest.param(*case, marks=marks))
    return found
