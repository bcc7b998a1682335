"""The room for what differs between machines: streams, events, pinned copies, process groups.

Nothing else in the engine names torch.cuda or NCCL. `chip(name)` is what a rank computes on, `group(kind)` how its
collectives cross the wire. Tests put stand-ins into CHIPS and KINDS, so that what is written for GPUs runs on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.engine.device.chip import Chip as Chip
from workbench.engine.device.cuda import Cuda
from workbench.engine.device.gloo import Gloo
from workbench.engine.device.nccl import Nccl

CHIPS: dict[str, Callable[[str], Chip]] = {"cpu": Chip, "cuda": Cuda}
KINDS: dict[str, Callable[..., Any]] = {"gloo": Gloo, "nccl": Nccl}


def chip(name: str) -> Chip:
    """What "cpu" or "cuda:0" computes on, as the engine uses it."""
    return CHIPS[name.partition(":")[0]](name)
