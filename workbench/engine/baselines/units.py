"""What torch's `fully_shard` gathers and sums together, and whether all ranks ask it for the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from workbench.engine.control.canonical import all_equal
from workbench.rank import StrategyError

if TYPE_CHECKING:
    from workbench.engine.rank.changes import Turnable

HALF = 0.5  # of a bucket's size: a module from there on is gathered and freed by itself


def units(model: nn.Module, bucket_mb: float) -> list[nn.Module]:
    """What is sharded together: the blocks, and modules of half a bucket or more none of whose children is as large.

    That is what is a bucket of its own with us. A module that shares a parameter with another stays with the rest, and
    so do the children of a list of modules that are small: a list computes nothing, so torch could not tell when.
    """
    found: list[nn.Module] = list(getattr(model, "blocks", []))
    inside = {id(m) for unit in found for m in unit.modules()}
    for module in model.modules():
        if module is not model and id(module) not in inside and _mb(module.parameters()) >= HALF * bucket_mb:
            if not any(_mb(child.parameters()) >= HALF * bucket_mb for child in module.children()):
                found.append(module)
    return [unit for unit in found if type(unit).forward is not nn.Module.forward and _alone(unit, model)]


def _alone(unit: nn.Module, model: nn.Module) -> bool:
    """Is no parameter of `unit` used outside of it, too?"""
    own, inside = {id(p) for p in unit.parameters()}, {id(m) for m in unit.modules()}
    others = [m for m in model.modules() if id(m) not in inside]
    return not any(id(p) in own for m in others for p in m._parameters.values())


def _mb(params: Iterable[nn.Parameter]) -> float:
    return sum(p.numel() * p.element_size() for p in params) / 1e6


class SameUnit:
    """Compares, before torch gathers or sums a unit, that all ranks have come to the same one.

    Where a model looks at values a rank may skip a unit that others compute. Then gloo would be asked for collectives
    of unlike lengths, and end the process or wait for ever. A model that is known to read the same whatever its
    examples are needs no such look, so the yardstick stays what torch makes it.
    """

    def __init__(self, run: Turnable, model: nn.Module) -> None:
        self._control, self._rank = run.control, run.rank
        self._looks = any(all_equal(run.control, int(run.foreseen(cheaply=True) is None)))
        self._names = {id(module): name or "the rest of the model" for name, module in model.named_modules()}
        self._units: list[str] = []
        self._nbytes: list[float] = []  # in MB

    def number(self, unit: nn.Module) -> int:
        """Of a unit, the same on all ranks."""
        self._units.append(self._names[id(unit)])
        self._nbytes.append(_mb(unit.parameters()))
        return len(self._units) - 1

    def __call__(self, unit: int, what: str) -> None:
        """All ranks together: raises StrategyError where another rank gathers or sums something else."""
        if not self._looks:
            return
        every = all_equal(self._control, 2 * unit + (what == "sums"))
        other = next((rank for rank, said in enumerate(every) if said != every[0]), None)
        if other is None:
            return
        at = {rank: divmod(every[rank], 2) for rank in (0, other)}
        first, second = (f"rank {self._rank.number(r)} {'sums' if sums else 'gathers'} {self._units[k]}"
                         for r, (k, sums) in at.items())  # fmt: skip
        largest = max(self._nbytes[k] for k in range(len(self._units) - 1))  # the last is the rest of the model
        raise StrategyError(
            f"TorchFSDP: {first} where {second}: a model whose examples choose what it computes skips units of its "
            f"own on some ranks, and torch's fully_shard has every rank compute all of them; take ZeRO2, or a "
            f"bucket_mb above {largest / HALF:.2g}, with which they are no units of their own"
        )
