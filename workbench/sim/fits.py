"""Whether ranks have the memory that an experiment needs, or would need after a change: a few steps of sizes only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workbench.experiment import Experiment
from workbench.host.budget import OutOfMemory
from workbench.settings import Change, KnobError, resolve
from workbench.sim.simulate import simulate

FILLS = ("strategy", "partition", "compressor", "optimizer", "batch", "bucket_mb", "memory_mb", "clip")  # memory
STEPS = 3  # before a change, and after it: what is remembered is there from the second on


def require_memory(e: Experiment, path: str = "", value: Any = None) -> None:
    """Raises KnobError, which says what is needed for what, if a rank of `e` needs more than its `memory_mb`.

    path, value: a knob to set, after which it must fit, and on the way there

    Says nothing where nobody can tell: of what cannot be simulated the ranks find out for themselves.
    """
    wanted = e.set(path, value) if path else e.checked()
    if not wanted.memory_mb or (path and resolve(e, path)[0].partition(".")[0] not in FILLS):
        return
    steps, healthy = 2 * STEPS if path else STEPS, replace(e.fabric, faults=())
    short = replace(e, steps=steps, eval_every=0, pace=e.pace or 1.0, fabric=healthy)
    changes = [Change(STEPS, path, value)] if path else []
    try:
        simulate(short, changes=changes, real=False)
    except OutOfMemory as error:
        raise KnobError(str(error)) from None
    except Exception:
        return
