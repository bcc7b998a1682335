"""Collectives: ranks arrive one by one, the last one starts the transfer, and all ranks leave together.

On each lane, the n-th collectives of all ranks in a group meet. Real tensors are reduced in rank order, so results are
deterministic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.fabric import Load, even, uneven
from workbench.host.core.all_reduce import divides_first
from workbench.host.placement.canonical_state import sum_rows
from workbench.rank import Op, StrategyError, collective
from workbench.sim.clock.fiber import ChildFiber, Fiber
from workbench.sim.clock.record import iterate_numbers
from workbench.sim.clock.world_state import WorldState


class Mismatch(StrategyError):
    """Two ranks met on a lane with different requests."""


class Collective:
    """A collective under way."""

    __slots__ = (
        "asked",
        "fibers",
        "group",
        "here",
        "lane",
        "left",
        "name",
        "number",
        "op",
        "p",
        "size",
        "steps",
        "t0",
        "world",
        "x",
        "xs",
    )

    def __init__(self, world: WorldState, lane: str, number: int, fiber: Fiber, op: Op) -> None:
        self.group = op.group
        self.p = world.size if op.group is None else len(op.group)
        self.here = world.list_simulated_ranks(op.group)
        self.world, self.lane, self.number, self.op, self.left = world, lane, number, op, len(self.here)
        self.name = collective(op, fiber.name)
        self.x: Any = op.args[0]
        self.size = _measure_op_size(op)
        here = len(self.here)
        self.fibers: list[Any] = [None] * here
        self.xs: list[Any] = [None] * here
        self.asked, self.t0, self.steps = [0.0] * here, [0.0] * here, [0] * here

    def add_rank(self, fiber: Fiber, op: Op) -> None:
        """Raises Mismatch if the rank's request differs from the first rank's."""
        x = op.args[0]
        fiber.host.memory_account.buffers.note_request(fiber, op)
        if op.verb != self.op.verb or (x is not self.x and _measure_op_size(op) != self.size):
            raise self._make_mismatch(fiber, op)
        r = fiber.host.index if self.group is None else self.world.find_position(self.group, fiber.host.index)
        self.fibers[r], self.xs[r] = fiber, x
        self.asked[r], self.t0[r], self.steps[r] = fiber.resumed, self.world.clock.now, fiber.step
        self.left -= 1
        if not self.left:
            self._start_transfer()

    def _start_transfer(self) -> None:
        world = self.world
        load = _make_load(self.op, self.size, self.p, 0)
        fabric = world.hosts[0].experiment.fabric
        now = world.clock.now
        began, own, end = world.ports.price_collective(now, fabric, load, self.number + 1, self.group, self.here)
        ranks = None if self.group is None else self.here
        whole = ranks is None  # one block records all ranks
        asked, t0 = (np.array(self.asked), np.array(self.t0)) if whole else (self.asked, self.t0)
        lane = "measuring" if self.op.measures else "comm"
        if world.ports.find_link(fabric, self.group).shaped and lane == "comm":
            begins = np.full(len(t0), began) if whole else [began] * len(t0)
            world.record.add_block("port", self.name, self.steps, begins, begins, own, 0, ranks)
        sent: Any = load.sent
        if self.op.verb == "all_to_allv":
            lengths = np.array(self.size)  # all ranks at once: rank by rank costs p^3
            sent = (lengths.sum(1) - lengths.diagonal())[self._list_positions()] * self.x[0].element_size()
        world.record.add_block(lane, self.name, self.steps, asked, t0, end, sent, ranks)
        for r, nbytes in zip(self.here, iterate_numbers(sent), strict=False):
            world.hosts[r].count_sent(nbytes)
        world.clock.resume_at(end, self)

    def resume(self, _: Any) -> None:
        """Resumes every rank, unless a rank was missed in between."""
        if self.world.missed:
            return
        results = self._compute_results()
        now = self.world.clock.now
        for fiber, value in zip(self.fibers, results, strict=True):
            if not isinstance(fiber, ChildFiber):  # a background's buffers; a child returns its own when it ends
                fiber.host.memory_account.buffers.note_end(fiber)
            fiber.answer(value, now)

    def _compute_results(self) -> list[Any]:
        verb, x, p = self.op.verb, self.x, self.p
        if verb == "all_to_allv":
            return self._exchange_parts()
        if x.is_meta:
            return (
                [_make_empty_result(verb, x, p)] * len(self.xs) if verb not in ("all_reduce", "broadcast") else self.xs
            )
        xs: list[Tensor] = self.xs
        match verb:
            case "all_reduce":
                if divides_first(self.op):
                    torch._foreach_div_(xs, p)
                total = xs[0].clone()
                for other in xs[1:]:
                    _merge_values(total, other, self.op.args[1])
                if self.op.args[1] == "mean" and not divides_first(self.op):
                    total /= p
                torch._foreach_copy_(xs, [total] * p)
                return xs
            case "broadcast":
                first = xs[self.op.args[1]].clone()
                torch._foreach_copy_(xs, [first] * p)
                return xs
            case "all_gather":
                rows = torch.stack(xs)
                return [rows.clone() for _ in xs]
            case "all_to_all":
                rows = torch.stack([x.reshape(p, -1) for x in xs], 1)
                return [rows[r].reshape(x.shape).clone() for r in range(p)]
            case "reduce_scatter":
                rows = torch.stack([x.reshape(p, -1) for x in xs], 1)
                return [sum_rows(rows[r]) for r in range(p)]
        raise AssertionError(verb)

    def _exchange_parts(self) -> list[Any]:
        if len(self.here) == self.p:
            return [[x[r].clone() for x in self.xs] for r in range(self.p)]
        return [[self.x[0].new_empty(sizes[r]) for sizes in self.size] for r in self._list_positions()]

    def _list_positions(self) -> list[int]:
        return list(self.here) if self.group is None else [self.group.index(r) for r in self.here]

    def _make_mismatch(self, fiber: Fiber, op: Op) -> Mismatch:
        first = next(f for f in self.fibers if f is not None)
        mine = collective(op, fiber.name)
        return Mismatch(
            f"rank {first.host.index} requested {self.name} of {self.size} bytes in step {first.step}, but rank "
            f"{fiber.host.index} requested {mine} of {_measure_op_size(op)} bytes in step {fiber.step} on lane "
            f"{self.lane!r}: all ranks of a lane must request the same collectives in the same order"
        )


def _measure_op_size(op: Op) -> Any:
    """Returns the size that ranks must agree on: bytes per rank, or the matrix of lengths."""
    if op.verb == "all_to_allv":
        return op.args[1]
    return op.args[0].numel() * op.args[0].element_size()


def _make_load(op: Op, size: Any, ranks: int, rank: int) -> Load:
    if op.verb == "all_to_allv":
        return uneven(op.args[1], op.args[0][0].element_size(), rank)
    return even(op.verb, size, ranks)


def _merge_values(total: Tensor, other: Tensor, how: str) -> None:
    match how:
        case "sum" | "mean":
            total += other
        case "max":
            torch.maximum(total, other, out=total)
        case "min":
            torch.minimum(total, other, out=total)


def _make_empty_result(verb: str, x: Tensor, p: int) -> Tensor:
    match verb:
        case "all_gather":
            return x.new_empty((p, *x.shape))
        case "reduce_scatter":
            return x.new_empty(x.numel() // p)
    return x.new_empty(x.shape)
