"""What ranks compute together that have slices of each matrix: where a pass asks them for each other's part.

Megatron-LM's f and g. Before a layer by columns nothing happens forward and gradients are added up backward; after one
by rows outputs are added up forward and nothing happens backward. Whoever runs the pass says, as `ask`, how ranks meet:
over a wire, on a virtual clock, or all in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.host.absent import Absent
from workbench.host.sliced import lay
from workbench.host.splitting import Split
from workbench.rank import Rank
from workbench.tasks import Colwise


class Meeting(NamedTuple):
    """How the ranks' tensors become one answer for each.

    what: "sum", over all of them; "gather", one after the other along the last dimension; "own", of a tensor that all
          have, this rank's part along the last dimension; "" nothing
    name: of the module and of what meets: "activation blocks.0.mlp_out"
    """

    what: str
    name: str


Ask = Callable[[Meeting, Tensor], Tensor]
ODD = 0x9E3779B97F4A7C15  # spreads ranks' seeds


class _Across(torch.autograd.Function):
    """A tensor on its way from one module to another, where ranks meet: forward so, and backward so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ask: Ask, ahead: Meeting, back: Meeting) -> Tensor:
        ctx.ask, ctx.back = ask, back
        return ask(ahead, x) if ahead.what else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (ctx.ask(ctx.back, grad) if ctx.back.what else grad), None, None, None


def summed_ahead(x: Tensor, ask: Ask, name: str) -> Tensor:
    """g: what all ranks have added up, of which each gets the same gradient."""
    made: Tensor = _Across.apply(x, ask, Meeting("sum", f"activation {name}"), Meeting("", ""))
    return made


def summed_back(x: Tensor, ask: Ask, name: str) -> Tensor:
    """f: the same `x` on all ranks, whose gradients are added up."""
    made: Tensor = _Across.apply(x, ask, Meeting("", ""), Meeting("sum", f"gradient {name}"))
    return made


def gathered(x: Tensor, ask: Ask, name: str) -> Tensor:
    """The features of all ranks one after the other, on each; of the gradient every rank takes its own part."""
    made: Tensor = _Across.apply(x, ask, Meeting("gather", f"activation {name}"), Meeting("own", f"gradient {name}"))
    return made


async def met(rank: Rank, meeting: Meeting, x: Tensor) -> Tensor:
    """What a meeting of the ranks of a group answers this one."""
    if meeting.what == "own":
        return x.chunk(rank.size, -1)[rank.index]
    flat = x.detach().clone(memory_format=torch.contiguous_format).view(-1)
    if meeting.what == "sum":
        await rank.all_reduce(flat, "sum", meeting.name)
        return flat.view(x.shape)
    return beside(list((await rank.all_gather(flat, meeting.name)).view(rank.size, *x.shape)))


def beside(parts: Sequence[Tensor]) -> Tensor:
    """Parts one after the other along their last dimension."""
    return torch.cat(list(parts), -1)


class Together:
    """A model of which this rank has slices, computing with the others that have the rest.

    split: which slices; index: of which rank
    draws: are random numbers inside a pair of layers each rank's own?
    """

    def __init__(self, model: nn.Module, split: Split, index: int, ask: Ask, draws: bool = True) -> None:
        self.split, self.index = split, index
        self._ask, self._draws = ask, draws
        self._modules = [(name, model.get_submodule(name), way) for name, way in split.modules]
        self._outside: tuple[Any, Tensor] | None = None  # whose random numbers stand where, outside of a pair of layers
        for name, module, way in self._modules:
            module.__dict__["forward"] = (  # found before the class's own
                self._colwise(name, module, way.gather) if isinstance(way, Colwise) else self._rowwise(name, module)
            )
        self.common = common(model, split)
        others = [p for owner, each in enumerate(self.common) for p in each if owner != index]
        self._hooks = [p.register_post_accumulate_grad_hook(_dropped) for p in others]

    def undo(self) -> None:
        """Its modules compute as they did before."""
        for _, module, _ in self._modules:
            module.__dict__.pop("forward", None)
        for hook in self._hooks:
            hook.remove()

    def _colwise(self, name: str, module: Any, gathers: bool) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            y = F.linear(summed_back(x, self._ask, name), module.weight, module.bias)
            if gathers:
                return gathered(y, self._ask, name)
            self._enter(y)
            return y

        return forward

    def _rowwise(self, name: str, module: Any) -> Callable[[Tensor], Tensor]:
        def looked_up(x: Tensor) -> Tensor:
            return summed_ahead(self._looked_up(module, x), self._ask, name)

        def forward(x: Tensor) -> Tensor:
            self._leave()
            y = summed_ahead(F.linear(x, module.weight), self._ask, name)
            return y if module.bias is None else y + module.bias

        return looked_up if isinstance(module, nn.Embedding) else forward

    def _looked_up(self, module: nn.Embedding, x: Tensor) -> Tensor:
        """Rows that lie here; zeros for those that lie elsewhere."""
        rows = module.weight.shape[0]
        own = x - self.index * rows
        outside = (own < 0) | (own >= rows)
        return F.embedding(own.masked_fill(outside, 0), module.weight).masked_fill(outside.unsqueeze(-1), 0.0)

    def _enter(self, y: Tensor) -> None:
        """Between a layer by columns and one by rows each rank draws numbers of its own, which all the same follow from
        those that all draw: a pass that is made again draws them again.
        """
        if self._draws and self._outside is None:
            numbers = torch.cuda if y.is_cuda else torch.random
            seed = int(torch.randint(2**62, ()))
            self._outside = numbers, numbers.get_rng_state()
            generator = torch.cuda.default_generators[y.device.index] if y.is_cuda else torch.default_generator
            generator.manual_seed((seed + self.index * ODD) % 2**63)

    def _leave(self) -> None:
        if self._outside is not None:
            numbers, state = self._outside
            numbers.set_rng_state(state)
            self._outside = None


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
    """Parameters of one dtype, which all ranks of the group have, take their owners' values."""
    n = max(sum(p.numel() for p in each) for each in by_owner)
    like = next(p for each in by_owner for p in each)
    own = [p.detach().reshape(-1) for p in by_owner[rank.index]]
    chunk = torch.cat([*own, like.new_zeros(n - sum(x.numel() for x in own))])
    rows = await rank.all_gather(chunk.detach(), "parameters that all have")
    if rows.is_meta:
        return
    with torch.no_grad():
        for row, each in zip(rows, by_owner, strict=True):
            at = 0
            for p in each:
                p.data.copy_(row[at : at + p.numel()].view(p.shape))
                at += p.numel()


def slice_of(model: nn.Module, split: Split, index: int) -> nn.Module:
    """A copy of a whole model that has the slices of rank `index`."""
    part = copy.deepcopy(model)
    for name, made in split.sliced.items():
        p = part.get_parameter(name)
        own = p.data.view(made.view).chunk(split.ways, made.dim)[index]
        lay(p, own.reshape(made.local(split.ways)).clone(), made.shape)
    return part


@contextmanager
def computing(model: nn.Module, split: Split, index: int, ask: Ask, draws: bool = True) -> Iterator[Together]:
    """Inside, `model`, which has the slices of rank `index`, computes so."""
    together = Together(model, split, index, ask, draws)
    try:
        yield together
    finally:
        together.undo()
