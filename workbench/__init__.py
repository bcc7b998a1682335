"""The workbench: distributed training that is watched and steered while it runs.

The public names are found when they are first asked for, so that `import workbench` and opening a recorded
run need no torch. A member of a family is public because its file is there; `__init__.pyi` lists them for editors.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "compressors": ("Codec", "Compressor"),
    "doors.report": ("report",),
    "doors.sinks": ("log_to",),
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

__version__ = "0.1.0"


def public_names() -> dict[str, str]:
    """Every public name, and the module that it is in. Imports none of them."""
    from workbench.settings import shipped

    own = {name: f"workbench.{home}" for home, names in _HOMES.items() for name in names}
    return {**own, **{name: at for home in _FAMILIES for name, at in shipped(f"workbench.{home}").items()}}


def _now(name: str) -> str:
    """What a member that notebooks of before import by another name (`formerly_called`) is called now."""
    from workbench.settings import renamed

    return next((found[name] for home in _FAMILIES if name in (found := renamed(f"workbench.{home}"))), name)


def __getattr__(name: str) -> Any:
    names = {} if name.startswith("_") else public_names()
    if name == "__all__":
        return sorted(public_names())
    if name in names or (names and (name := _now(name)) in names):
        return getattr(importlib.import_module(names[name]), name)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *public_names()})
