"""Compares what ranks hold before and after a switch of partition, element by element.

It reads the parameters and the optimizer that train, as a checkpoint does, not the moving data.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from workbench.engine.rank.training import RankTraining
from workbench.host.checkpoint import rank_image as image
from workbench.host.loop.rank_loop import RankLoop
from workbench.host.placement.strided_slices import StridedSlice
from workbench.host.reconfigure import changes
from workbench.host.transfer import repartition
from workbench.sim.rank import changes as sim

Pieces = dict[str, tuple[tuple[int, ...], Any, torch.Tensor]]  # by name: shape, slices of these elements, values


def held(run: Any) -> Pieces:
    """Returns a rank's parameters and optimizer state."""
    found: Pieces = {}
    for name, x, place in [*image.locate_parameters(run), *image._locate_slots(run)]:
        shape, slices = (*place, None)[:2]  # a number belongs to the whole parameter, so it has no slices
        found[f"{name} of {tuple(shape)}"] = tuple(shape), slices, x.detach().reshape(-1).clone()
    return found


class Watch:
    """Notes each switch inside its block: by number, each rank's state before it and when it next trains."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.before: dict[int, dict[int, Pieces]] = {}
        self.after: dict[int, dict[int, Pieces]] = {}
        self._count: dict[int, int] = {}
        self._due: set[int] = set()
        self._lock = threading.Lock()
        plain, step = repartition.repartition_state, RankLoop.make_step

        async def moved(run: Any, *rest: Any) -> Any:
            self._note(run, True)
            return await plain(run, *rest)

        async def stepped(run: Any) -> None:
            if run.rank.id in self._due:
                self._note(run, False)
            await step(run)

        patch.setattr(changes, "repartition_state", moved)
        patch.setattr(RankLoop, "make_step", stepped)
        for host in (RankTraining, sim.Reconfigurable):
            patch.setattr(host, "enter_strategy", self._entering(host.enter_strategy))

    def _entering(self, plain: Any) -> Any:
        def enter(run: Any, was: Any, wanted: Any) -> None:
            # from here on the background changes the parameters
            if run.rank.id in self._due and wanted.strategy.has_background:
                self._note(run, False)
            plain(run, was, wanted)

        return enter

    def _note(self, run: Any, begins: bool) -> None:
        rank, pieces = run.rank.id, held(run)
        with self._lock:
            number = self._count.get(rank, 0)
            if rank in self._due:
                self.after.setdefault(number, {})[rank] = pieces
                self._due.discard(rank)
            if begins:
                self._count[rank] = number + 1
                self._due.add(rank)
                self.before.setdefault(number + 1, {})[rank] = pieces

    def check(self) -> int:
        """Raises AssertionError if a switch changed an element. Returns how many elements were compared."""
        compared = 0
        for number, ranks in self.after.items():
            was, now = whole(self.before[number]), whole(ranks)
            for name in was.keys() & now.keys():
                (old, had), (new, has) = was[name], now[name]
                there = had & has
                assert torch.equal(_bits(old)[there], _bits(new)[there]), f"switch {number}: {name}"
                compared += int(there.sum())
        return compared


def whole(ranks: dict[int, Pieces]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns by name the elements that any rank holds, and a mask of them. All holders must have the same bits."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for pieces in ranks.values():
        for name, (shape, slices, x) in pieces.items():
            n = torch.Size(shape).numel() if slices else x.numel()
            values, there = found.setdefault(name, (torch.zeros(n, dtype=x.dtype), torch.zeros(n, dtype=torch.bool)))
            at = torch.cat([places(s) for s in slices]) if slices else torch.arange(x.numel())
            both = there[at]
            assert torch.equal(_bits(values[at][both]), _bits(x[both])), f"{name}: ranks hold it otherwise"
            values[at], there[at] = x, True
    return found


def places(s: StridedSlice) -> torch.Tensor:
    rows, columns = torch.arange(s.times), torch.arange(s.length)
    return (s.start + rows[:, None] * s.stride + columns).reshape(-1)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({4: torch.int32, 8: torch.int64}[x.element_size()]) if x.is_floating_point() else x
