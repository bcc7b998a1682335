"""A model of which ranks have slices of each matrix, and compute it together: see across.py for what crosses.

[Note: Whose random numbers] Where all ranks have the same, they draw the same, from torch's own generator, which every
forward seeds alike on all of them, whatever was drawn since the last (noise for each parameter, of which ranks have
unlike ones). Where each has its own part it draws its own, from a seed that follows from what all would
have drawn next. A layer that is computed again for its backward begins where torch's generator stood then, so it draws
again what it drew; and as that may end in the middle, whether a rank is inside or outside is told by the generator's
seed, not remembered.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.host.passes.across import (
    gathered,
    linear_of_all,
    scattered_ahead,
    summed_ahead,
    summed_at_the_end,
    summed_back,
    taken,
)
from workbench.host.passes.coded import Ask, Coded, Others, plainly
from workbench.host.placement.absent import Absent
from workbench.host.placement.sliced import lay
from workbench.host.placement.splitting import Split
from workbench.partitions import PLAIN, Coding
from workbench.rank import Rank
from workbench.tasks import Colwise, Rowwise, Scatter, same_groups

ODD = 0x9E3779B97F4A7C15  # spreads ranks' seeds
SEEDS = 10_000  # so many are remembered: more than passes may be open at a time


class Together:
    """A model of which this rank has slices, computing with the others that have the rest.

    split: which slices; index: of which rank
    draws: are random numbers inside a pair of layers each rank's own?
    seed:  of all random numbers in a forward, the same on all ranks of the group; each forward has its own
    coding: what crosses in place of activations and of their gradients while it trains; else nothing does
    coded:  does a codec's own work
    """

    def __init__(self, model: nn.Module, split: Split, index: int, ask: Ask, draws: bool = True, seed: int = 0,
                 coding: Coding = PLAIN, coded: Coded = plainly) -> None:  # fmt: skip
        self.split, self.index, self.coding, self._coded = split, index, coding, coded
        self._model = model
        self._ask, self._draws = ask, draws
        self._seed, self._passes = seed, 0
        self._modules = [(name, model.get_submodule(name), way) for name, way in split.modules]
        self._outside: tuple[torch.Generator, Tensor] | None = None  # where it stood when it was last left
        self._own: dict[int, None] = {}  # seeds of numbers that are this rank's own, the last ones
        for name, module, way in self._modules:
            if isinstance(way, Colwise):
                run: Any = partial(self._colwise, name, way.gather)
            elif isinstance(way, Scatter):
                run = partial(self._scatter, name)
            elif isinstance(way, Rowwise):
                run = partial(self._looked_up if isinstance(module, nn.Embedding) else self._rowwise, name)
            else:
                continue
            module.__dict__["forward"] = _Forward(module, run)  # found before the class's own
        self.common = common(model, split)
        others = [p for owner, each in enumerate(self.common) for p in each if owner != index]
        self._hooks = [p.register_post_accumulate_grad_hook(_dropped) for p in others if p.requires_grad]
        self._partial = [p for name, p in model.named_parameters()
                         if name in split.partial and not isinstance(p, Absent)]  # fmt: skip
        which = {id(p) for p in self._partial}
        self._read = [(module, kind, id(p)) for module in model.modules()
                      for kind, p in module._parameters.items() if id(p) in which]  # fmt: skip

    @property
    def at(self) -> tuple[int, int]:
        """Its seed, and how many forwards there were: from these follow the random numbers of the next one."""
        return self._seed, self._passes

    @at.setter
    def at(self, stands: tuple[int, int]) -> None:
        self._seed, self._passes = stands

    def undo(self) -> None:
        """Its modules compute as they did before."""
        for _, module, _ in self._modules:
            module.__dict__.pop("forward", None)
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def passing(self, x: Tensor | None, params: Collection[nn.Parameter] | None = None) -> Iterator[None]:
        """Inside, a forward runs. x: what the stage before has made, of this rank's own positions it may be

        params: of the piece of the model that is passed; None: all
        """
        self._passes += 1
        torch.manual_seed((self._seed * ODD + self._passes) % 2**63)
        if x is not None and self.split.sequences:
            self.enter(x)
        try:
            with self.summing(params):
                yield
        finally:
            self.leave()

    @contextmanager
    def summing(self, params: Collection[nn.Parameter] | None = None) -> Iterator[None]:
        """Inside, a forward reads parameters of whose gradient each rank has a part as what its backward adds up.

        Those of other pieces have no part in it: their gradients would seem to come with this one's.
        """
        here = None if params is None else {id(p) for p in params}
        some = [p for p in self._partial if here is None or id(p) in here]
        if not (some and torch.is_grad_enabled()):
            yield
            return
        views = dict(zip(map(id, some), summed_at_the_end(some, self._whole), strict=True))
        read = [(module, kind, views[which]) for module, kind, which in self._read if which in views]
        for module, kind, view in read:
            module.__dict__[kind] = view  # found before the parameter
        try:
            yield
        finally:
            for module, kind, _ in read:
                module.__dict__.pop(kind, None)

    @property
    def _others(self) -> Others:
        return Others(self._ask, self.split.ways, self.coding if self._model.training else PLAIN, self._coded)

    @property
    def _whole(self) -> Others:
        """For what crosses as it is: what an embedding has found, and what the last layer answers."""
        return Others(self._ask, self.split.ways)

    def _scatter(self, name: str, module: Any, x: Tensor, *more: Any, **named: Any) -> Any:
        own = taken(x, self._others, name)
        self.enter(own)
        return type(module).forward(module, own, *more, **named)

    def _colwise(self, name: str, gathers: bool, module: Any, x: Tensor) -> Tensor:
        if self.split.sequences:
            y = linear_of_all(x, module, self._others, name)
        else:
            y = F.linear(summed_back(x, self._others, name), module.weight, module.bias)
            self.enter(x)
        if not gathers:
            return y
        self.leave()
        return gathered(y, self._whole, name)

    def _rowwise(self, name: str, module: Any, x: Tensor) -> Tensor:
        if not self.split.sequences:
            self.leave()
        added = scattered_ahead if self.split.sequences else summed_ahead
        y = added(F.linear(x, module.weight), self._others, name)
        return y if module.bias is None else y + module.bias.to(y.dtype)

    def _looked_up(self, name: str, module: Any, x: Tensor) -> Tensor:
        """Rows that lie here, zeros for those that lie elsewhere; of all ranks together."""
        rows = module.weight.shape[0]
        own = x - self.index * rows
        elsewhere = ((own < 0) | (own >= rows)) & (x >= 0) & (x < rows * self.split.ways)  # others are refused as ever
        pad = module.padding_idx - self.index * rows if module.padding_idx is not None else -1
        found = F.embedding(own.masked_fill(elsewhere, 0), module.weight, pad if 0 <= pad < rows else None)
        return summed_ahead(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._whole, name)

    def enter(self, x: Tensor) -> None:
        """From here on each rank draws numbers of its own: between a layer by columns and one by rows, and where it has
        its own positions. See [Note: Whose random numbers].
        """
        generator = torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator
        if not self._draws or generator.initial_seed() in self._own:
            return
        seed = (int(torch.randint(2**62, ())) + self.index * ODD) % 2**63
        self._outside = generator, generator.get_state()
        self._own[seed] = None
        if len(self._own) > SEEDS:
            del self._own[next(iter(self._own))]
        generator.manual_seed(seed)

    def leave(self) -> None:
        """From here on all draw the same numbers again."""
        if self._outside is not None:
            generator, state = self._outside
            if generator.initial_seed() in self._own:
                generator.set_state(state)
            self._outside = None


class _Forward:
    """What a module computes in place of its class's own forward; its copy computes with the copy's weights."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._module = module
        self._run = run if "torch._dynamo" not in sys.modules else torch.compiler.disable(run)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._run(self._module, *inputs, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(memo.get(id(self._module), self._module), self._run)


def _dropped(param: nn.Parameter) -> None:
    """The gradient of a parameter that another rank looks after, and has the same of."""
    param.grad = None


def common(model: nn.Module, split: Split, names: Collection[str] | None = None) -> list[list[nn.Parameter]]:
    """By owner the parameters that all ranks have, of those that lie here (or of these)."""
    some = [(model.get_parameter(name), k) for name, k in split.owners.items() if names is None or name in names]
    return [[p for p, owner in some if owner == k and not isinstance(p, Absent)] for k in range(split.ways)]


async def refreshed(rank: Rank, by_owner: list[list[nn.Parameter]]) -> None:
    """Every rank of the group gets what the others look after, as it is now."""
    for dtype in dict.fromkeys(p.dtype for each in by_owner for p in each):
        await _told(rank, [[p for p in each if p.dtype == dtype] for each in by_owner])


async def _told(rank: Rank, by_owner: list[list[nn.Parameter]]) -> None:
    """Parameters of one dtype, which all ranks of the group have, take their owners' values: each sends its own."""
    counts = [sum(p.numel() for p in each) for each in by_owner]
    like = next(p for each in by_owner for p in each)
    own = torch.cat([p.detach().reshape(-1) for p in by_owner[rank.index]] or [like.detach().new_empty(0)])
    others = [k for k in range(rank.size) if k != rank.index]
    lengths = tuple(tuple(0 if i == j else n for j in range(rank.size)) for i, n in enumerate(counts))
    rows = [own if k in others else own[:0] for k in range(rank.size)]
    came = await rank.all_to_allv(rows, lengths, "parameters that all have")
    if like.is_meta:
        return
    with torch.no_grad():
        for k in others:
            at = 0
            for p in by_owner[k]:
                p.data.copy_(came[k][at : at + p.numel()].view(p.shape))
                at += p.numel()


def slice_of(model: nn.Module, split: Split, index: int) -> nn.Module:
    """A copy of a whole model that has the slices of rank `index`; what is cut is never copied whole."""
    known: dict[int, Any] = {}
    for name, made in split.sliced.items():
        p = model.get_parameter(name)
        own = p.data.view(made.view).chunk(split.ways, made.dim)[index]
        known[id(p)] = mine = nn.Parameter(own.reshape(made.local(split.ways)).clone(), p.requires_grad)
        lay(mine, mine.data, made.shape)
    return same_groups(copy.deepcopy(model, known), model)


@contextmanager
def computing(model: nn.Module, split: Split, index: int, ask: Ask, draws: bool = True,
              coding: Coding = PLAIN, coded: Coded = plainly) -> Iterator[Together]:  # fmt: skip
    """Inside, `model`, which has the slices of rank `index`, computes so."""
    together = Together(model, split, index, ask, draws, coding=coding, coded=coded)
    try:
        yield together
    finally:
        together.undo()
