"""Replaces parameters by smaller ones, and counts the operations of the forward."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from workbench.experiment import Experiment
from workbench.host.core.valueless import make_outline
from workbench.host.memory.batches import make_example, move_to_device
from workbench.rank import Entries, Units
from workbench.tasks import Learner, stands_for

_SIZED: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], list[SmallerParameter]]] = WeakKeyDictionary()
_COUNTED: WeakKeyDictionary[Learner, dict[Hashable, int | None]] = WeakKeyDictionary()


class SmallerParameter:
    """A parameter of a Module, and its smaller replacement.

    scale: the factor by which `small` exceeds its entries of `whole`
    """

    def __init__(self, module: nn.Module, short: str, name: str, entries: Entries) -> None:
        self.module, self.short, self.name = module, short, name
        self.whole: nn.Parameter = module._parameters[short]  # type: ignore[assignment]
        shape = entries.shape(name, tuple(self.whole.shape))
        self.small = stands_for(nn.Parameter(entries.of(name, self.whole.data).reshape(shape)), self.whole)
        self.scale = 1.0

    def scale_values(self, scale: float) -> None:
        self.small.data.mul_(scale)
        self.scale *= scale


def make_smaller(model: nn.Module, units: list[Units], kept: list[Tensor]) -> list[SmallerParameter]:
    """Returns the replacements that keep these units."""
    entries, found = Entries(units, kept), []
    for name, _ in list(model.named_parameters()):
        if entries.cuts(name):
            path, _, short = name.rpartition(".")
            found.append(SmallerParameter(model.get_submodule(path), short, name, entries))
    return found


def make_sizes_only(model: nn.Module, units: list[Units], counts: tuple[int, ...]) -> list[SmallerParameter]:
    """Returns replacements without values. Ranks that share a model share them."""
    made = _SIZED.setdefault(model, {})
    if counts not in made:
        made[counts] = make_smaller(model, units, [torch.empty(k, dtype=torch.int64, device="meta") for k in counts])
    return made[counts]


def place_smaller(parameters: Iterable[SmallerParameter]) -> None:
    """Puts replacements in."""
    for p in parameters:
        p.module._parameters[p.short] = p.small


def restore_whole(parameters: Iterable[SmallerParameter]) -> None:
    """Undoes `place_smaller`."""
    for p in parameters:
        p.module._parameters[p.short] = p.whole


def compute_share(e: Experiment, learner: Learner, units: list[Units], counts: tuple[int, ...]) -> float | None:
    """Returns a sub-model's share of the whole forward's floating-point operations.

    None if the model does not run on the meta device.
    """
    made = _COUNTED.setdefault(learner, {})
    key = e.batch, counts
    if key not in made:
        made[key] = _count_operations(e, learner, units, counts)
    whole = e.batch, tuple(each.size for each in units)
    if made[key] is not None and whole not in made:
        made[whole] = _count_operations(e, learner, units, whole[1])
    part, all_of_it = made[key], made.get(whole)
    return part / all_of_it if part and all_of_it else None


def _count_operations(e: Experiment, learner: Learner, units: list[Units], counts: tuple[int, ...]) -> int | None:
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model = make_outline(learner)
            place_smaller(make_sizes_only(model, units, counts))
            with FlopCounterMode(display=False) as counter:
                learner.loss(model, move_to_device(make_example(learner, e, "cpu"), "meta"))
            return int(counter.get_total_flops())
    except Exception:
        return None
