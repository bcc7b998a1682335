"""Keeps torch's compiler out of a process until something is compiled: a fifth of what an engine imports.

In a notebook it is some seconds for which the first change that looks at an optimizer would be waited for.

Every optimizer of torch imports `torch._dynamo`, to break the graph of who compiles it around a step: some 300 modules
for two calls that do nothing where nobody compiles. So do fake tensors, by which a model is looked at beforehand, for
its settings. `lighten` puts a module in its place that has the settings, does nothing in these two calls, and becomes
the real one as soon as anything else is asked of it: `torch.compile` and all that builds on it work as ever.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NAME = "torch._dynamo"
_SWAP = threading.Lock()  # two threads may ask for the real module at once


class Light(types.ModuleType):
    """Stands for `torch._dynamo` while nobody compiles."""

    config: types.ModuleType

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Outside of a graph there is nothing to break."""

    def disable(self, fn: Callable[..., Any], *how: Any, **more: Any) -> Callable[..., Any]:
        """`fn` itself, while nobody compiles; as the real one has it from then on."""
        made: list[Callable[..., Any]] = []

        @functools.wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            if sys.modules.get(NAME) is self:
                return fn(*args, **kwargs)
            if not made:
                made.append(importlib.import_module(NAME).disable(fn, *how, **more))
            return made[0](*args, **kwargs)

        return called

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # what looks at modules asks this of all of them
            raise AttributeError(name)
        with _SWAP:
            if sys.modules.get(NAME) is self:
                del sys.modules[NAME]
                vars(torch).pop("_dynamo", None)
        return getattr(importlib.import_module(NAME), name)


def lighten() -> None:
    """From now on; nothing where the compiler is there already."""
    place = Path(torch.__file__).parent / "_dynamo" / "config.py"
    spec = importlib.util.spec_from_file_location(f"{NAME}.config", place) if place.exists() else None
    if NAME in sys.modules or spec is None or spec.loader is None:
        return
    light = sys.modules[NAME] = torch._dynamo = Light(NAME)
    light.config = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(light.config)
