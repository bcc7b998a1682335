"""The workbench: distributed training that is watched and steered while it runs.

The public names are found when they are first asked for, so that `import workbench` and opening a recorded
run need no torch. A member of a family is public because its file is there; `__init__.pyi` lists them for editors.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

_HOMES = {
    "compressors": ("Codec", "Compressor"),
    "entrypoints.report": ("report",),
    "entrypoints.trackers": ("log_to",),
    "experiment": ("Experiment",),
    "experiment.recipes": ("recipe",),
    "fabric": ("Fabric", "Fault", "Link"),
    "fabric.algorithms": ("Algorithm",),
    "lab": ("Lab",),
    "optimizers": ("Optimizer",),
    "partitions": ("Partition",),
    "partitions.schedules": ("Schedule",),
    "policies": ("Decision", "Policy", "Seen"),
    "rank": ("Bucket", "Memory", "Rank"),
    "record.timeline": ("Mark", "Sample", "Span", "Timeline"),
    "run": ("Checkpoint", "Run", "RunError", "balance", "plan", "simulate", "tune"),
    "settings": ("Change", "Knob", "KnobError", "knob"),
    "sim": ("Costs", "Deadlock"),
    "strategies": ("Strategy",),
    "tasks": ("adopt", "steps", "training"),
}
_FAMILIES = (  # packages whose files hold members
    "strategies", "partitions", "partitions.schedules", "compressors", "optimizers", "policies", "fabric",
    "fabric.algorithms", "tasks",
)  # fmt: skip

__version__ = "0.2.0"


def public_names() -> dict[str, str]:
    """Returns every public name and its module. Imports none of them."""
    from workbench.settings import shipped

    own = {name: f"workbench.{home}" for home, names in _HOMES.items() for name in names}
    return {**own, **{name: at for home in _FAMILIES for name, at in shipped(f"workbench.{home}").items()}}


def _current_name(name: str) -> str:
    """Returns the name that replaced an old public name (`formerly_called`), or the name itself."""
    from workbench.settings import renamed

    return next((found[name] for home in _FAMILIES if name in (found := renamed(f"workbench.{home}"))), name)


def __getattr__(name: str) -> Any:
    names = {} if name.startswith("_") else public_names()
    if name == "__all__":
        return sorted(public_names())
    now = _current_name(name) if names and name not in names else name
    if now in names:
        if now != name:
            text = f"workbench.{name} is called workbench.{now} since version 0.2; the old name ends with 0.3"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(names[now]), now)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *public_names()})
