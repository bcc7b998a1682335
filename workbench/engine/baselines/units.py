"""The units of torch's `fully_shard`, and a check that all ranks use the same one at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from workbench.engine.control.canonical import all_equal
from workbench.rank import StrategyError

if TYPE_CHECKING:
    from workbench.engine.rank.changes import Turnable

HALF = 0.5  # of a bucket's size: a module at least as large is gathered and freed by itself


def units(model: nn.Module, bucket_mb: float) -> list[nn.Module]:
    """Returns the modules that are sharded as units.

    These are the blocks, and each module of half a bucket or more that has no child as large. Our strategies give the
    same modules a bucket of their own. A module that shares a parameter with another one stays with the rest of the
    model. So do the small children of a ModuleList: a list has no forward, so torch could not gather before it.
    """
    found: list[nn.Module] = list(getattr(model, "blocks", []))
    inside = {id(m) for unit in found for m in unit.modules()}
    for module in model.modules():
        if module is not model and id(module) not in inside and _mb(module.parameters()) >= HALF * bucket_mb:
            if not any(_mb(child.parameters()) >= HALF * bucket_mb for child in module.children()):
                found.append(module)
    return [unit for unit in found if type(unit).forward is not nn.Module.forward and _alone(unit, model)]


def _alone(unit: nn.Module, model: nn.Module) -> bool:
    """Whether no module outside of `unit` uses one of its parameters."""
    own, inside = {id(p) for p in unit.parameters()}, {id(m) for m in unit.modules()}
    others = [m for m in model.modules() if id(m) not in inside]
    return not any(id(p) in own for m in others for p in m._parameters.values())


def _mb(params: Iterable[nn.Parameter]) -> float:
    return sum(p.numel() * p.element_size() for p in params) / 1e6


class SameUnit:
    """Checks, before torch gathers or sums a unit, that all ranks are at the same unit.

    If a model's control flow depends on its examples, a rank may skip a unit that another rank computes. Their
    collectives then differ in length, and gloo ends the process or waits for ever. If every rank can foresee the
    parameters that the model reads, there is no check, so that the baseline is as fast as torch.
    """

    def __init__(self, run: Turnable, model: nn.Module) -> None:
        self._control, self._rank = run.control, run.rank
        self._looks = any(all_equal(run.control, int(run.foreseen(cheaply=True) is None)))
        self._names = {id(module): name or "the rest of the model" for name, module in model.named_modules()}
        self._units: list[str] = []
        self._nbytes: list[float] = []  # in MB

    def number(self, unit: nn.Module) -> int:
        """Adds a unit. Returns its number, which is the same on all ranks."""
        self._units.append(self._names[id(unit)])
        self._nbytes.append(_mb(unit.parameters()))
        return len(self._units) - 1

    def __call__(self, unit: int, what: str) -> None:
        """Raises StrategyError if another rank gathers or sums something else. All ranks call it together."""
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
