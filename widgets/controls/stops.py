"""Stops of a slider: good values of a knob. The entry box takes any value."""

from __future__ import annotations

import math

from workbench.settings import Knob

MAX_STOPS = 100  # stops of a linear slider, at most
DECADES = {True: 7, False: 5}  # decades below its upper end that a scale from 0 covers, by knob.log
MAX_SLIDER_INTEGER = 1e8  # larger integers are names, such as a seed, without a slider


def list_stops(knob: Knob) -> list[float]:
    """Returns the slider stops for `knob` in rising order, or [] if only typing makes sense.

    >>> list_stops(Knob("every", int, 8, 1, 256, log=True))
    [1, 2, 4, 8, 16, 32, 64, 128, 256]
    >>> list_stops(Knob("jitter", float, 0.0, 0.0, 1.0))[:4]
    [0, 0.05, 0.1, 0.15]
    """
    if knob.kind not in (int, float) or knob.low is None or knob.high is None:
        return []
    if knob.kind is int and knob.high - knob.low > MAX_SLIDER_INTEGER:
        return []
    if knob.log or knob.high - knob.low > MAX_STOPS:
        found = _powers_of_two(knob.low, knob.high) if knob.kind is int else _decade_grid(knob.low, knob.high, knob.log)
    else:
        found = _even_grid(knob.low, knob.high, whole=knob.kind is int)
    return [int(v) if v == int(v) else v for v in found]


def _powers_of_two(low: float, high: float) -> list[float]:
    first = [low] if low < 1 else []
    powers = [2.0**e for e in range(int(math.log2(high)) + 1) if 2.0**e >= max(low, 1)]
    return first + powers + ([high] if powers[-1] < high else [])


def _decade_grid(low: float, high: float, log: bool) -> list[float]:
    bottom = low if low > 0 else high * 10.0 ** -DECADES[log]
    exponents = range(math.floor(math.log10(bottom)), math.ceil(math.log10(high)) + 1)
    grid = [float(f"{m}e{e}") for e in exponents for m in (1, 2, 5)]
    inner = [v for v in grid if bottom * 0.999 <= v < high * 0.999]
    return ([low] if low <= 0 else []) + ([low] if 0 < low < inner[0] * 0.999 else []) + inner + [high]


def _even_grid(low: float, high: float, *, whole: bool) -> list[float]:
    step = 1.0 if whole else _round_step((high - low) / 20)
    count = int((high - low) / step + 1e-9)
    found = [float(f"{low + i * step:.10g}") for i in range(count + 1)]
    return found if found[-1] >= high - 1e-9 else [*found, high]


def _round_step(x: float) -> float:
    scale = 10.0 ** math.floor(math.log10(x))
    return min((1, 2, 5, 10), key=lambda m: abs(m * scale - x)) * scale


def nearest_stop(values: list[float], value: float) -> int:
    """Returns the index of the stop nearest to `value`, by ratio if both are positive."""

    def away(v: float) -> float:
        if v > 0 and value > 0:
            return abs(math.log(v / value))
        return abs(v - value) if v <= 0 and value <= 0 else math.inf

    return min(range(len(values)), key=lambda i: away(values[i])) if values else 0


def format_number(value: float) -> str:
    """Formats a number as a person types it.

    >>> format_number(1e6), format_number(0.01), format_number(8)
    ('1000000', '0.01', '8')
    """
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.6g}"
