"""The units of torch's `fully_shard`, and collectives of ranks with different units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from workbench.engine.baselines.baseline_view import BaselineView
from workbench.engine.control.canonical import gather_lists, gather_numbers
from workbench.rank import StrategyError

OWN_UNIT_SHARE = 0.5  # of a bucket's size: a module as large is gathered and freed by itself
BACKWARD_OVER = -1  # a rank announces it


def find_units(model: nn.Module, bucket_mb: float) -> list[nn.Module]:
    """Returns the modules that are sharded as units.

    These are the blocks, and each module of half a bucket or more that has no child as large. Our strategies give the
    same modules a bucket of their own. A module that shares a parameter stays with the rest of the model. So do a
    ModuleList's small children: a list has no forward before which torch could gather.
    """
    found: list[nn.Module] = list(getattr(model, "blocks", []))
    inside = {id(m) for unit in found for m in unit.modules()}
    for module in model.modules():
        if (
            module is not model
            and id(module) not in inside
            and _count_mb(module.parameters()) >= OWN_UNIT_SHARE * bucket_mb
        ):
            if not any(_count_mb(child.parameters()) >= OWN_UNIT_SHARE * bucket_mb for child in module.children()):
                found.append(module)
    return [unit for unit in found if type(unit).forward is not nn.Module.forward and _owns_parameters(unit, model)]


def _owns_parameters(unit: nn.Module, model: nn.Module) -> bool:
    own, inside = {id(p) for p in unit.parameters()}, {id(m) for m in unit.modules()}
    others = [m for m in model.modules() if id(m) not in inside]
    return not any(id(p) in own for m in others for p in m._parameters.values())


def _count_mb(params: Iterable[nn.Parameter]) -> float:
    return sum(p.numel() * p.element_size() for p in params) / 1e6


def list_packed(unit: nn.Module) -> Iterator[nn.Parameter]:
    """Yields a unit's parameters as torch packs them: a child's before its parent's.

    Call it before `fully_shard` of the unit, and after `fully_shard` of the units inside.
    """
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Parameter]:
        seen.add(id(module))
        for child in module.children():
            if id(child) not in seen and not isinstance(child, FSDPModule):
                yield from walk(child)
        for p in module.parameters(recurse=False):
            if id(p) not in seen:
                seen.add(id(p))
                yield p

    return walk(unit)


def find_unshardable(params: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """Returns a unit's parameters without dimension, without elements, or of another type than most of its bytes."""
    own = list(params)
    nbytes: Counter[torch.dtype] = Counter()
    for p in own:
        nbytes[p.dtype] += p.numel() * p.element_size()
    most = max(nbytes, key=lambda dtype: nbytes[dtype], default=None)
    return {p for p in own if not p.dim() or not p.numel() or p.dtype != most}


class UnitRounds:
    """Lets all ranks take part in each gather and sum of a unit, if ranks may use different units.

    If a model's control flow depends on its examples, a rank may skip a unit that another rank computes. Then torch's
    collectives differ, and gloo ends the process or waits for ever. So each rank announces its next gather or sum. All
    ranks take part in every announced one, in the same order, until every backward is over. If every rank can foresee
    the parameters that the model reads, there are no rounds and the baseline is as fast as torch.

    names: of the units, for errors
    serve: gets (unit, whether it is a sum, elements of this rank's input), and takes part without a pass of its own
    count: returns the elements of a rank's input to the sum of a whole unit
    """

    def __init__(self, run: BaselineView, names: list[str], serve: Callable[[int, bool, int], None],
                 count: Callable[[int], int]) -> None:  # fmt: skip
        self._control, self._names, self._serve, self._count = run.control, names, serve, count
        self.needed = any(gather_numbers(run.control, int(run.foresee_reads(cheaply=True) is None)))

    def run_round(self, unit: int, is_sum: bool, numel: int, perform: Callable[[], None]) -> None:
        """Performs this rank's gather or sum, and takes part in those of other ranks."""
        if not self.needed:
            return perform()
        mine = 2 * unit + is_sum
        for code, n in self._announce_unit(mine, numel).items():
            perform() if code == mine else self._serve(code // 2, code % 2 == 1, n)

    def end(self) -> None:
        """Takes part until every rank's backward is over."""
        while self.needed and (asked := self._announce_unit(BACKWARD_OVER, 0)):
            for code, n in asked.items():
                self._serve(code // 2, code % 2 == 1, n)

    def _announce_unit(self, code: int, numel: int) -> dict[int, int]:
        """Returns this round's requests in one order: the input's elements, by unit and kind."""
        asked: dict[int, int] = {}
        every = gather_lists(self._control, [code, numel])
        for other, n in sorted(every):
            # a rank that only takes part sends the whole unit
            is_served = other != BACKWARD_OVER and other % 2 == 1 and any(one != other for one, _ in every)
            if asked.setdefault(other, n) != n or (is_served and n != self._count(other // 2)):
                raise StrategyError(
                    f"TorchFSDP: ranks have gradients of different parameters of {self._names[other // 2]}, which "
                    f"this version of torch cannot sum; take ZeRO3, or torch 2.13"
                )
        asked.pop(BACKWARD_OVER, None)
        return asked
