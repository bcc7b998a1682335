"""The parts that differ between machines: streams, events, pinned copies, process groups.

Only this package names torch.cuda and NCCL. Tests put stand-ins into CHIPS and KINDS, so that GPU code runs on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.engine.device.chip import Chip as Chip
from workbench.engine.device.cuda import CudaChip
from workbench.engine.device.gloo import GlooGroup
from workbench.engine.device.nccl import NcclGroup

CHIPS: dict[str, Callable[[str], Chip]] = {"cpu": Chip, "cuda": CudaChip}
KINDS: dict[str, Callable[..., Any]] = {"gloo": GlooGroup, "nccl": NcclGroup}


def make_chip(name: str) -> Chip:
    """name: as torch's, "cpu" or "cuda:0" """
    return CHIPS[name.partition(":")[0]](name)
