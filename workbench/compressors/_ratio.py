"""How much a compressor sends, as one number: finding the knob that says it, and setting it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from workbench.compressors._base import Compressor
from workbench.settings import Knob, walk, with_value

RATIOS = ("density", "rank", "bits", "levels")  # what such knobs are called


class Way(NamedTuple):
    """A compressor with its ratio at one value."""

    value: float
    of: Compressor


def ratio(of: Compressor, names: tuple[str, ...] = RATIOS) -> tuple[str, Knob] | None:
    """Path and knob of the one ratio in `of`, or in what it wraps; None where there is none, or more than one."""
    found = [(path, k) for path, k in walk(of) if k.name in names]
    return found[0] if len(found) == 1 else None


@lru_cache(maxsize=64)
def ways(of: Compressor, spread: float) -> tuple[Way, ...]:
    """`of` with its ratio at up to five values around the present one, in equal proportions, the largest first.

    They reach from 1 / `spread` to `spread` times the present value, as far as the knob goes; where the knob has
    choices, they are all of these.
    """
    found = ratio(of)
    if found is None:
        return ()
    path, k = found
    values = set(k.choices) or {_within(k, k.default * spread ** (j / 2)) for j in range(-2, 3)} | {k.default}
    return tuple(Way(float(v), with_value(of, path, v)) for v in sorted(values, reverse=True))


def _within(k: Knob, value: float) -> float:
    """The nearest value that the knob allows."""
    value = round(value) if k.kind is int else value
    return min(max(value, k.low), k.high) if k.low is not None and k.high is not None else value


def at_density(of: Compressor, density: float) -> Compressor:
    """`of`, or what it wraps, with its `density` at this value; for one that has it."""
    found = ratio(of, ("density",))
    assert found is not None, "refused before it starts"
    path, k = found
    return with_value(of, path, _within(k, density))
