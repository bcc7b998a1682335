"""Former methods of a Rank, which work until version 0.3. They are functions of a family of strategies now."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

HOMES = {
    "look_up": "embedding_tables",
    "row_grads": "embedding_tables",
    "update_rows": "embedding_tables",
    "collect": "second_order",
    "factors": "second_order",
    "curve": "second_order",
    "value": "second_order",
    "work": "second_order",
    "pieces": "sub_models",
    "rise": "sub_models",
    "fall": "sub_models",
    "units": "sub_models",
    "narrow": "sub_models",
    "offload": "offload",
    "fetch": "offload",
}


def find_former_verb(rank: object, name: str) -> Callable[..., Any]:
    """Returns the former method `name` of `rank`. Raises AttributeError if it was none."""
    if name not in HOMES:
        raise AttributeError(f"{type(rank).__name__!r} object has no attribute {name!r}")
    home = f"workbench.strategies.{HOMES[name]}.verbs"
    text = f"rank.{name}(...) is {name}(rank, ...) of {home} since version 0.2; the old name ends with 0.3"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return partial(getattr(importlib.import_module(home), name), rank)
