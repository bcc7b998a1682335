"""All of many cases in `make test-long` and CI; some of them in `make test`, which people wait for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import pytest


def thinned(cases: Iterable[tuple[Any, ...]], of: int) -> list[Any]:
    """The cases of a parametrization: about one in `of` as it is, the others left to `make test-long`.

    A case's text chooses, so that those that are run stay the same when a family gets another member.
    """
    return [pytest.param(*case, marks=[pytest.mark.long] if crc32(repr(case).encode()) % of else []) for case in cases]
