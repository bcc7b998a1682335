"""Keeps torch's compiler out of a process until it compiles. It is 20 % of an engine's imports.

In a notebook importing it would delay the first change that inspects an optimizer by seconds.

Every optimizer of torch imports the 300 modules of `torch._dynamo` for 2 calls that do nothing without a compiler.
Fake tensors inspect a model and import it for its settings. `put_off_compiler` puts in its place a module with the
settings and these calls. Any other use loads the real module. So `torch.compile` works as usual.
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
_SWAP = threading.Lock()  # 2 threads may need the real module at once


class CompilerStandIn(types.ModuleType):
    """Stands in for `torch._dynamo` until something compiles."""

    config: types.ModuleType

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Outside of a graph there is nothing to break."""

    def disable(self, fn: Callable[..., Any], *how: Any, **more: Any) -> Callable[..., Any]:
        """Returns `fn` wrapped: called unchanged until something compiles, then by the real `disable`."""
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
        if name.startswith("__") and name != "__path__":  # tools that scan modules read these
            raise AttributeError(name)
        with _SWAP:
            if sys.modules.get(NAME) is self:
                del sys.modules[NAME]
                vars(torch).pop("_dynamo", None)
        return getattr(importlib.import_module(NAME), name)


def put_off_compiler() -> None:
    """Installs the stand-in, unless the real module is loaded."""
    place = Path(torch.__file__).parent / "_dynamo" / "config.py"
    spec = importlib.util.spec_from_file_location(f"{NAME}.config", place) if place.exists() else None
    if NAME in sys.modules or spec is None or spec.loader is None:
        return
    light = sys.modules[NAME] = torch._dynamo = CompilerStandIn(NAME)
    light.config = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(light.config)
