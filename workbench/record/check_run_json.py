"""Checks run.json field by field, because it may be malicious. An Experiment checks ranges."""

from __future__ import annotations

import builtins
import keyword
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from workbench.settings import short

FAMILIES = ("task", "strategy", "compressor", "fabric", "optimizer")
MAX_LEVELS = 40  # of JSON; settings need 10
NUMBER_LIMIT = 2**63
MAX_RANKS = 4096
COUNTS = ("ranks", "steps", "seed", "batch", "eval_every", "measure_every", "lr_base", "lr_warmup", "save_every",
          "saves")  # fmt: skip


class RunError(ValueError):
    """A record, checkpoint or export that cannot be read or written. The message names the path and the problem.

    What to do: correct the path, or free the disk. A damaged file needs another checkpoint or a copy of the run.
    """


class Rule(NamedTuple):
    """A test of a value, and its condition."""

    good: Callable[[Any], bool]
    words: str


def number(value: Any) -> bool:
    """Whether a float can hold this finite number. Booleans are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < NUMBER_LIMIT if isinstance(value, int) else math.isfinite(value)


def count(value: Any) -> bool:
    """Whether `value` is a whole number in [0, `NUMBER_LIMIT`)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < NUMBER_LIMIT


def shallow(value: Any) -> bool:
    """Whether JSON has at most `MAX_LEVELS` levels, for recursive code."""
    level = [value]
    for _ in range(MAX_LEVELS):
        holders = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [inner for holder in holders for inner in holder]
    return not level


def member(value: Any) -> bool:
    """Whether `value` is a family's member as JSON, such as {"TopK": {"density": 0.1}}."""
    if not isinstance(value, dict) or len(value) != 1:
        return False
    ((name, knobs),) = value.items()
    return name_of_class(name) and isinstance(knobs, dict) and all(map(name_of_code, knobs))


def name_of_code(name: Any) -> bool:
    """Whether `name` is safe as a name in a program."""
    plain = isinstance(name, str) and name.isascii() and name.isidentifier()
    return plain and not keyword.iskeyword(name) and not name.startswith("__")


def name_of_class(name: Any) -> bool:
    """Whether `name` can be a settings class, unlike Python's built-in names."""
    return name_of_code(name) and not hasattr(builtins, name)


NUMBER = Rule(number, "a number of seconds")
TEXT = Rule(lambda v: v is None or isinstance(v, str), "text")
OBJECT = Rule(lambda v: v is None or isinstance(v, Mapping), "an object")
SETTINGS = Rule(lambda v: isinstance(v, Mapping) and all(map(name_of_code, v)), "an object of settings by name")
MEMBER = Rule(member, "one name with its settings, such as {'TopK': {'density': 0.1}}")
COUNT = Rule(count, "a whole number, 0 or more")
RANKS = Rule(lambda v: count(v) and 1 <= v <= MAX_RANKS, f"a whole number from 1 to {MAX_RANKS}")
MISSING = Rule(lambda v: v is None or count(v), "a whole number, 0 or more")
RULES = {
    "epoch": NUMBER, "missing": MISSING, "name": TEXT, "started": TEXT, "environment": OBJECT, "experiment": SETTINGS,
    "parent": OBJECT,
}  # fmt: skip


def find_fault(about: Any) -> str | None:
    """Returns the first fault with field and value, or None."""
    if not isinstance(about, Mapping):
        return f"it holds {short(about)}, which must be an object"
    if not shallow(about):
        return f"it nests more than {MAX_LEVELS} levels deep"
    if missing := [k for k in ("experiment", "epoch") if k not in about]:
        return f"it has no {missing[0]!r}"
    for field, rule in RULES.items():
        if not rule.good(about.get(field)):
            return f"{field} is {short(about.get(field))}, which must be {rule.words}"
    for field, value in about["experiment"].items():
        said = RANKS if field == "ranks" else COUNT if field in COUNTS else MEMBER if field in FAMILIES else None
        if said and not said.good(value):
            return f"experiment.{field} is {short(value)}, which must be {said.words}"
    return None
