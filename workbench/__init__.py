"""The workbench: distributed training that is watched and steered while it runs.

The public names are found when they are first asked for, so that `import workbench` and opening a recorded
run need no torch. A member of a family is public because its file is there; `__init__.pyi` lists them for editors.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "compressors": ("Codec", "Compressor"),
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
    "run": ("Run", "RunError", "balance", "plan", "simulate", "tune"),
    "settings": ("Change", "Knob", "KnobError", "knob"),
    "sim": ("Costs", "Deadlock"),
    "strategies": ("Strategy",),
}
_FAMILIES = (  # packages whose files hold members
    "strategies", "partitions", "partitions.schedules", "compressors", "optimizers", "policies", "fabric",
    "fabric.algorithms", "tasks",
)  # fmt: skip
_FORMERLY = {"Stumble": "TransientStraggler"}  # what notebooks of before import (`formerly_called`)

__version__ = "0.1.0"


def public_names() -> dict[str, str]:
    """Every public name, and the module that it is in. Imports none of them."""
    from workbench.settings import shipped

    own = {name: f"workbench.{home}" for home, names in _HOMES.items() for name in names}
    return {**own, **{name: at for home in _FAMILIES for name, at in shipped(f"workbench.{home}").items()}}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(public_names())
    name = _FORMERLY.get(name, name)
    if not name.startswith("_") and name in (names := public_names()):
        return getattr(importlib.import_module(names[name]), name)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *public_names()})
