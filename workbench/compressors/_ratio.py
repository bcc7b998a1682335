"""Finds and sets the one knob of a compressor that decides how much it sends."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from workbench.compressors._base import Compressor
from workbench.settings import Knob, walk, with_value

RATIO_KNOBS = ("density", "rank", "bits", "levels")  # names of such knobs


class Way(NamedTuple):
    """A compressor with its ratio at one value."""

    value: float
    of: Compressor


def ratio(of: Compressor, names: tuple[str, ...] = RATIO_KNOBS) -> tuple[str, Knob] | None:
    """Returns path and knob of the one ratio in `of` or in a compressor in it; None unless it has exactly one."""
    found = [(path, k) for path, k in walk(of) if k.name in names]
    return found[0] if len(found) == 1 else None


@lru_cache(maxsize=64)
def ways(of: Compressor, spread: float) -> tuple[Way, ...]:
    """Returns `of` with its ratio at up to 5 values around the present one. They are in equal proportions, largest
    first.

    They range from 1 / `spread` to `spread` times the present value, within the knob's limits. If the knob has choices,
    they are the values.
    """
    found = ratio(of)
    if found is None:
        return ()
    path, k = found
    values = set(k.choices) or {_within(k, k.default * spread ** (j / 2)) for j in range(-2, 3)} | {k.default}
    return tuple(Way(float(v), with_value(of, path, v)) for v in sorted(values, reverse=True))


def _within(k: Knob, value: float) -> float:
    """Returns the nearest value that the knob allows."""
    value = round(value) if k.kind is int else value
    return min(max(value, k.low), k.high) if k.low is not None and k.high is not None else value


def at_density(of: Compressor, density: float) -> Compressor:
    """Returns `of` with the one `density` in it at this value. Requires that it has one."""
    found = ratio(of, ("density",))
    assert found is not None, "refused before it starts"
    path, k = found
    return with_value(of, path, _within(k, density))
