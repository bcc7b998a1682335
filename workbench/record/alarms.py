"""Describes the marks "nan" and "diverged"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = ("nan", "diverged")  # of the marks


def describe_value(name: str, detail: Mapping[str, Any]) -> str:
    """Describes the value that a rank found.

    >>> describe_value("nan", {"loss": "nan", "layer": "blocks.1", "why": "the first whose output is not finite"})
    "the loss is nan, in layer 'blocks.1' (the first whose output is not finite)"
    >>> describe_value("diverged", {"loss": "500", "best": "1.55"})
    'the loss is 500, after 1.55 at its best'
    """
    if name == "diverged":
        return f"the loss is {detail.get('loss')}, after {detail.get('best')} at its best"
    what = f"the loss is {detail['loss']}" if detail.get("loss") else "a gradient is not finite"
    return what + describe_layer(detail)


def describe_layer(detail: Mapping[str, Any]) -> str:
    """Names the layer and why it is suspect; "" if unknown."""
    layer, why = detail.get("layer"), detail.get("why")
    if layer:
        return f", in layer {str(layer)!r}" + (f" ({why})" if why else "")
    return f" ({why})" if why else ""
