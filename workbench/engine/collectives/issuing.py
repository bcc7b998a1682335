"""The collectives of a wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.engine.collectives.wire import Wire
from workbench.engine.device import Chip
from workbench.fabric import Algorithm, Load, even, uneven
from workbench.host.core import all_reduce
from workbench.host.core.drive import drive_coroutine
from workbench.host.placement.canonical_state import sum_rows
from workbench.rank import Op, Rank, collective


class CollectiveIssuer:
    """Issues a lane's collectives and reads their results.

    ISSUERS: the method of each verb, which returns (work, its result's tensor)
    """

    chip: Chip
    name: str
    rank: int
    size: int
    sent: int
    perform_hop: Callable[[Op, int], Any]
    on_collective: Callable[[Any, Op], None]

    def _sum_in_messages(self, by: Algorithm, op: Op, job: Any) -> Any:
        """Each message has its own span."""
        aside = "" if self.name == "comm" else f" on {self.name}"
        self._busy = name = f"{collective(op, job.name)}{aside}"
        self.on_collective(job, op)

        def perform(message: Op) -> Any:
            if message.verb == "send":
                self.sent += message.args[0].numel() * message.args[0].element_size()
            return self.perform_hop(message, job.step)

        value = drive_coroutine(all_reduce.run_all_reduce(by, Rank(self.rank, self.size), op, name), perform)
        self._busy = ""
        return value

    def _measure_load(self, wire: Wire, op: Op) -> Load:
        x = op.args[0]
        if op.verb == "all_to_allv":
            return uneven(op.args[1], x[0].element_size(), wire.rank)
        return even(op.verb, x.numel() * x.element_size(), wire.size)

    def _all_reduce(self, wire: Wire, op: Op) -> tuple[Any, Any]:
        x, how, _ = op.args
        if all_reduce.divides_first(op):
            x.div_(wire.size)
        return wire.all_reduce(x, how), x

    def _broadcast(self, wire: Wire, op: Op) -> tuple[Any, Any]:
        x, source, _ = op.args
        return wire.broadcast(x, source), x

    def _all_gather(self, wire: Wire, op: Op) -> tuple[Any, Any]:
        x = wire.to_carriable(_wire_view(op.args[0]))
        out = self.chip.make_empty(x, wire.size * x.numel())
        return wire.all_gather(out, x), out

    def _all_to_all(self, wire: Wire, op: Op) -> tuple[Any, Any]:
        x = wire.to_carriable(_wire_view(op.args[0]))
        out = torch.empty_like(x)
        return wire.all_to_all(out, x), out

    def _all_to_allv(self, wire: Wire, op: Op) -> tuple[Any, Any]:
        rows, lengths, _ = op.args
        width = rows[0].element_size()
        gives = [width * n for n in lengths[wire.rank]]
        takes = [width * row[wire.rank] for row in lengths]
        x = torch.cat([row.reshape(-1) for row in rows]).view(torch.uint8)
        out = self.chip.make_empty(x, sum(takes))
        return wire.all_to_all(out, x, takes, gives), out.split(takes)

    def _reduce_scatter(self, wire: Wire, op: Op) -> tuple[Any, Any]:
        """Uses an all-to-all and a local sum: gloo's own moves the bytes of a whole all-reduce."""
        x = wire.to_carriable(_wire_view(op.args[0]))
        out = torch.empty_like(x)
        return wire.all_to_all(out, x), out

    ISSUERS: ClassVar[dict[str, Callable[..., tuple[Any, Any]]]] = {
        "all_reduce": _all_reduce, "broadcast": _broadcast, "all_gather": _all_gather, "all_to_all": _all_to_all,
        "all_to_allv": _all_to_allv, "reduce_scatter": _reduce_scatter,
    }  # fmt: skip

    def _read_result(self, wire: Wire, op: Op, hold: Any) -> Any:
        like: Any = op.args[0]
        match op.verb:
            case "all_to_allv":
                return [row.view(like[0].dtype) for row in hold]
            case "all_gather":
                return hold.view(like.dtype).view(wire.size, *like.shape)
            case "all_to_all":
                return hold.view(like.dtype).view(like.shape)
            case "reduce_scatter":
                return sum_rows(hold.view(like.dtype).view(wire.size, -1))
            case "all_reduce" if op.args[1] == "mean" and not all_reduce.divides_first(op):
                return hold.div_(wire.size)
        return hold


def _wire_view(x: Tensor) -> Tensor:
    """Returns `x` as contiguous memory, and as bytes if gloo cannot carry its dtype."""
    x = x.contiguous()
    odd = x.is_complex() or x.dtype in (torch.int16, torch.uint16) or "float8" in str(x.dtype)
    return x.view(torch.uint8) if odd else x


def make_lone_result(op: Op) -> Any:
    """A collective on one rank returns its input. A Sample has no result."""
    if op.verb == "sample":
        return None
    x = op.args[0]
    return x.unsqueeze(0) if op.verb == "all_gather" else x
