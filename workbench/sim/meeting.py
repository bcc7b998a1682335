"""Collectives: ranks come one by one, the last one sets it going, and all leave together.

The n-th collective that a rank asks for on a lane meets the n-th of every other rank on that lane; that they ask
for the same thing is checked. With real tensors the result is computed in rank order, so it is always the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from workbench.fabric import traffic
from workbench.ops import Op, StrategyError

if TYPE_CHECKING:
    from workbench.sim.fiber import Fiber
    from workbench.sim.world import World


class Mismatch(StrategyError):
    """Two ranks met on a lane and asked for different things."""


class Meeting:
    """One collective of all ranks under way."""

    __slots__ = ("asked", "fibers", "lane", "left", "name", "nbytes", "number", "op", "steps", "t0", "world", "x", "xs")

    def __init__(self, world: World, lane: str, number: int, fiber: Fiber, op: Op) -> None:
        p = world.size
        self.world, self.lane, self.number, self.op, self.left = world, lane, number, op, p
        self.name = f"{op.verb} {op.args[-1] or fiber.name}".rstrip()
        self.x: Tensor = op.args[0]
        self.nbytes = self.x.numel() * self.x.element_size()
        self.fibers: list[Any] = [None] * p
        self.xs: list[Any] = [None] * p
        self.asked, self.t0, self.steps = [0.0] * p, [0.0] * p, [0] * p

    def join(self, fiber: Fiber, op: Op) -> None:
        """A rank has come."""
        x = op.args[0]
        if op.verb != self.op.verb or (x is not self.x and x.numel() * x.element_size() != self.nbytes):
            raise self._mismatch(fiber, op)
        r = fiber.host.index
        self.fibers[r], self.xs[r] = fiber, x
        self.asked[r], self.t0[r], self.steps[r] = fiber.resumed, self.world.clock.now, fiber.step
        self.left -= 1
        if not self.left:
            self._go()

    def _go(self) -> None:
        world, verb = self.world, self.op.verb
        fabric = world.hosts[0].experiment.fabric
        now = world.clock.now
        began, own, end = world.ports.meet(now, fabric, verb, self.nbytes, self.number + 1)
        t0 = np.array(self.t0)
        if fabric.link.shaped:
            world.record.block("port", self.name, self.steps, np.full(len(t0), began), np.full(len(t0), began), own, 0)
        sent, _ = traffic(verb, self.nbytes, world.size)
        world.record.block("comm", self.name, self.steps, np.array(self.asked), t0, end, sent)
        for host in world.hosts:
            host.sent += sent
        world.clock.at(end, self)

    def resume(self, _: Any) -> None:
        """The collective is over: everybody goes on."""
        results = self._results()
        now = self.world.clock.now
        for fiber, value in zip(self.fibers, results, strict=True):
            fiber.resumed = now
            fiber.resume(value)

    def _results(self) -> list[Any]:
        """What each rank is answered; real tensors are added up in rank order."""
        verb, x, p = self.op.verb, self.x, self.world.size
        if x.is_meta:
            return [_shape_of(verb, x, p)] * p if verb not in ("all_reduce", "broadcast") else self.xs
        xs: list[Tensor] = self.xs
        match verb:
            case "all_reduce":
                total = xs[0].clone()
                for other in xs[1:]:
                    _merge(total, other, self.op.args[1])
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
                return [rows[r].sum(0) for r in range(p)]
        raise AssertionError(verb)

    def _mismatch(self, fiber: Fiber, op: Op) -> Mismatch:
        first = next(f for f in self.fibers if f is not None)
        mine = f"{op.verb} {op.args[-1] or fiber.name}".rstrip()
        nbytes = op.args[0].numel() * op.args[0].element_size()
        return Mismatch(
            f"rank {first.host.index} asked for {self.name} of {self.nbytes} bytes in step {first.step}, but rank "
            f"{fiber.host.index} for {mine} of {nbytes} bytes in step {fiber.step} on lane {self.lane!r}: on one lane "
            f"all ranks must ask for the same collectives in the same order"
        )


def _merge(total: Tensor, other: Tensor, how: str) -> None:
    match how:
        case "sum":
            total += other
        case "max":
            torch.maximum(total, other, out=total)
        case "min":
            torch.minimum(total, other, out=total)


def _shape_of(verb: str, x: Tensor, p: int) -> Tensor:
    """The answer's shape, without data."""
    match verb:
        case "all_gather":
            return x.new_empty((p, *x.shape))
        case "reduce_scatter":
            return x.new_empty(x.numel() // p)
    return x.new_empty(x.shape)
