"""Which parameters no rank used in a step, agreed among the ranks only in a step in which some rank left one out.

[Note: The raised hand] Every parameter of a bucket is exchanged, and one without a gradient counts as zero. If no rank
has a gradient, torch's DDP leaves `grad` at None, and the optimizer does not move the parameter. To know that, ranks
have to compare notes, and a comparison in every step would cost each step a round trip. So a rank that left a parameter
out raises a hand first: it writes the step's number into memory that all ranks of the host share, and hands out the
bucket afterwards. A rank whose last exchange of that step is over has data of all ranks, so it sees every hand. All
ranks then decide alike, without a word. Ranks of several hosts share no memory and compare notes in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.engine.mapped import mapped
from workbench.host.layout import Layout
from workbench.rank import Rank


class Hands:
    """By rank, the last step in which it raised a hand: one int64 each in a file that the ranks of a host share."""

    def __init__(self, path: Path, place: int, size: int) -> None:
        self._map = mapped(path, 8 * size)
        self._steps = np.frombuffer(self._map, dtype=np.int64)
        self._place = place

    def raise_in(self, step: int) -> None:
        """This rank left a parameter out in `step`."""
        self._steps[self._place] = step + 1  # a new file holds zeros

    def raised_in(self, step: int, ranks: Iterable[int]) -> bool:
        """Whether one of `ranks` left a parameter out in `step`."""
        return any(self._steps[rank] == step + 1 for rank in ranks)

    def close(self) -> None:
        """Gives the memory back."""
        self._steps = np.zeros(self._steps.size, np.int64)
        self._map.close()


class Usage:
    """One rank's part of it; also which frozen parameters the model has unfrozen since the layout was made.

    hands:    None if ranks share no memory: they compare notes in every step
    step:     of an exchanged backward that is over, while the ranks have not agreed on its parameters; else None
    last:     the child that was started last in that backward; once it is over the ranks can agree
    unfrozen: parameters that train on some rank and are not in the layout, by name, the same on all ranks
    """

    def __init__(self, hands: Hands | None = None) -> None:
        self.hands = hands
        self.step: int | None = None
        self.last: Any = None
        self.unfrozen: dict[str, nn.Parameter] = {}
        self._frozen: dict[str, nn.Parameter] = {}

    def lie(self, model: nn.Module, layout: Layout) -> None:
        """The layout is a new one."""
        here = {id(place.param) for place in layout.order}
        named = model.named_parameters()
        self._frozen = {name: p for name, p in named if id(p) not in here and not p.requires_grad}
        self.unfrozen = {}

    def begin(self, step: int) -> None:
        """Before a backward: raises a hand if the model has unfrozen a parameter."""
        found = {name: p for name, p in self._frozen.items() if p.requires_grad}
        if found:
            self.unfrozen = found
            self.raise_hand(step)

    def raise_hand(self, step: int) -> None:
        """Before a bucket is handed out that has a parameter without a gradient."""
        if self.hands is not None:
            self.hands.raise_in(step)

    def agree(self, host: Any) -> None:
        """After the last exchange of a backward: `layout.unused` names the parameters that no rank used.

        Gradients of unfrozen parameters become the sum over ranks, as if they had been in a bucket.
        """
        step, self.step, self.last = self.step, None, None
        rank, layout = host.rank.replicas, host.layout
        if step is not None and rank.size > 1:
            ranks = rank.within.ranks if rank.within is not None else range(rank.size)
            if self.hands is None or self.hands.raised_in(step, ranks):
                self._compare(host, rank, layout)
        if self.unfrozen and not host.follows():
            self._update_unfrozen(host)

    def _compare(self, host: Any, rank: Rank, layout: Layout) -> None:
        """0: frozen or without a gradient; 1: unfrozen, and not used in this step; 2: used."""
        mine = [0 if place.name in layout.unused else 2 for place in layout.order]
        mine += [p.requires_grad + (p.requires_grad and p.grad is not None) for p in self._frozen.values()]
        noted = torch.tensor(mine, dtype=torch.int32, device=layout.order[0].param.device)
        host.perform(rank.all_reduce(noted, "max", "used"))
        of_layout, others = noted.tolist()[: len(layout.order)], noted.tolist()[len(layout.order) :]
        layout.unused = {place.name for place, use in zip(layout.order, of_layout, strict=True) if not use}
        uses = dict(zip(self._frozen, others, strict=True))
        self.unfrozen = {name: p for name, p in self._frozen.items() if uses[name]}
        how = "sum" if host.module is host.model else "mean"  # torch's own has not scaled the loss
        for name, p in self.unfrozen.items():
            if uses[name] == 2:
                grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense().contiguous()
                p.grad = host.perform(rank.all_reduce(grad.view(-1), how, f"unfrozen {name}")).view(p.shape)

    def _update_unfrozen(self, host: Any) -> None:
        """One step of the optimizer on these alone, if the strategy updates bucket by bucket and so misses them."""
        with host.alone, only(host.optimizer, self.unfrozen.values()):
            host.optimizer.step()
        for p in self.unfrozen.values():
            p.grad = None

    def close(self) -> None:
        """Gives the shared memory back."""
        if self.hands is not None:
            self.hands.close()


@contextmanager
def only(optimizer: Any, params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, the optimizer has no parameters but these."""
    wanted, before = {id(p) for p in params}, [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in wanted]
        yield
    finally:
        for group, every in zip(optimizer.param_groups, before, strict=True):
            group["params"] = every
