"""Ranks that become slow by a plan, without a recorded change, to measure detection.

A delay adds X seconds to one phase of one rank, for some steps. Faults stretch passes and updates, where X is the added
time of the phase in a step. Batches come late, and gradients are packed late. A rank sleeps between two steps, or a
fault chokes its port. A delay uses no processor time, so many ranks can share a few cores.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from workbench.compressors import Cast
from workbench.compressors._base import Payload
from workbench.engine.collectives.shaping import ComputePace
from workbench.fabric import Fault
from workbench.settings import knob
from workbench.tasks import Digits
from workbench.tasks._base import Learner

STRETCHED = {"forward": "forward", "backward": "backward", "optimizer": "update"}  # cause -> phase of compute


class Delay(NamedTuple):
    """In steps [first, stop) one rank takes so many seconds longer, in the phase of `cause`."""

    first: int
    stop: int
    rank: int
    cause: str
    seconds: float


class Plan:
    """The delays of this process's rank. It knows the present step, which ports and codecs do not."""

    def __init__(self) -> None:
        self.delays: tuple[Delay, ...] = ()
        self.pace = self.wire = 1.0  # seconds of a step's compute, and of its communication
        self.elements = 1  # of the model
        self.rank = self.step = -1

    def read(self, text: str) -> None:
        told = {"delays": [], "pace": 1.0, "wire": 1.0, **json.loads(text)}
        self.delays = tuple(Delay(*each) for each in told["delays"])
        self.pace, self.wire = told["pace"], told["wire"]

    def seconds(self, cause: str, rank: int | None = None, step: int | None = None) -> float:
        rank, step = self.rank if rank is None else rank, self.step if step is None else step
        mine = (d for d in self.delays if d.rank == rank and d.cause == cause and d.first <= step < d.stop)
        return sum(d.seconds for d in mine)

    def sleep(self, cause: str, share: float = 1.0) -> None:
        if seconds := self.seconds(cause) * share:
            time.sleep(seconds)


PLAN = Plan()


WIDTH, LAYERS = 128, 4


@dataclass(frozen=True, kw_only=True)
class PlannedDigits(Digits):
    """Digits with equal layers, and delays from a plan."""

    plan: str = knob("{}", live=False, doc="delays, and the seconds of a step's compute and on the wire, as JSON")

    def build(self) -> Learner:
        PLAN.read(self.plan)
        PLAN.elements = self.elements
        return replace(super().build(), model=_layers, data=self._late, schedule=_begins)

    @property
    def elements(self) -> int:
        return sum(p.numel() for p in _layers().parameters())

    def _late(self, rank: int, *how: Any) -> Iterator[Any]:
        PLAN.rank = rank
        for batch in self._batches(rank, *how):
            PLAN.sleep("input")
            yield batch


def _layers() -> nn.Module:
    inner = (layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU(), *inner, nn.Linear(WIDTH, 10))


def _begins(step: int) -> float:
    """Runs between two steps."""
    if step != PLAN.step:
        PLAN.step = step
        PLAN.sleep("outside")
        PLAN.sleep("frozen")
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Planned(Fault):
    """The delays that stretch compute and choke ports."""

    def stretch(self, rank: int, step: int, phase: str) -> float:
        causes = (cause for cause, name in STRETCHED.items() if name == phase)
        return 1.0 + sum(PLAN.seconds(c, rank, step) for c in causes) / (PLAN.pace * ComputePace.shares[phase])

    def choke(self, rank: int) -> float:
        return 1.0 + PLAN.seconds("network", rank) / PLAN.wire


@dataclass(frozen=True, kw_only=True)
class PlannedCast(Cast):
    """16 bits, packed late by plan."""

    def encode(self, x: Tensor) -> Payload:
        PLAN.sleep("codec", x.numel() / PLAN.elements)
        return super().encode(x)
