"""Alternative knob values, most effective first. The law that every knob has an effect uses them."""

from __future__ import annotations

from typing import Any

from workbench.experiment import Experiment
from workbench.settings import Knob, KnobError


def others(chosen: Experiment, path: str, k: Knob) -> list[Any]:
    """Returns allowed values of `k` at `path` that differ from the chosen value and from the default."""
    special = ["TopK"] if k.family else [not k.default] if k.kind is bool else []
    ends = (*k.choices, *special, k.low, 3, 2, k.high)
    return [value for value in ends if value is not None and value != k.default and _can_be(chosen, path, value)]


def _can_be(chosen: Experiment, path: str, value: Any) -> bool:
    try:
        chosen.set(path, value)
    except KnobError:
        return False
    return True
