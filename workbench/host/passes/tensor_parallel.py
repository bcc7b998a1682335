"""Tensor parallelism: ranks with slices of each matrix compute one model together.

[Note: Random numbers] Ranks that compute the same tensor draw the same numbers from torch's own generator. Every
forward seeds it alike, because ranks may have drawn different amounts. A rank that computes its own part of a tensor
derives its seed from the next common number. A recomputed layer begins with the generator's old state. Recomputation
may end while a rank draws its own numbers. So the generator's seed, not a flag, shows whether it does.
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

from workbench.host.passes.coded_exchange import Ask, Coded, GroupPeers, run_unrecorded
from workbench.host.passes.tensor_autograd import (
    apply_gathered_linear,
    gather_features,
    scatter_sum,
    sum_backward,
    sum_forward,
    sum_gradients_at_end,
    take_positions,
)
from workbench.host.placement.sliced_parameter import set_slice
from workbench.host.placement.tensor_split import TensorSplit
from workbench.host.placement.unmaterialized import UnmaterializedParameter
from workbench.partitions import PLAIN, Coding
from workbench.rank import Rank
from workbench.tasks import Colwise, Rowwise, Scatter, same_groups

SEED_FACTOR = 0x9E3779B97F4A7C15  # spreads seeds
MAX_SEEDS = 10_000  # more than open passes


class TensorParallelGroup:
    """One rank's model with matrices sliced over a group.

    index:  this rank's number in the group
    draws:  whether each rank draws its own random numbers between a pair of layers
    seed:   the same in the group; each forward derives its own from it
    coding: codecs of activations and of their gradients while the model trains
    """

    def __init__(self, model: nn.Module, split: TensorSplit, index: int, ask: Ask, draws: bool = True, seed: int = 0,
                 coding: Coding = PLAIN, coded: Coded = run_unrecorded) -> None:  # fmt: skip
        self.split, self.index, self.coding, self._coded = split, index, coding, coded
        self._model = model
        self._ask, self._draws = ask, draws
        self._seed, self._passes = seed, 0
        self._modules = [(name, model.get_submodule(name), way) for name, way in split.modules]
        self._outside: tuple[torch.Generator, Tensor] | None = None  # generator, and its former state
        self._own: dict[int, None] = {}  # latest own seeds
        for name, module, way in self._modules:
            if isinstance(way, Colwise):
                run: Callable[..., Any] = partial(self._run_colwise, name, way.gather)
            elif isinstance(way, Scatter):
                run = partial(self._run_scatter, name)
            elif isinstance(way, Rowwise):
                run = partial(self._look_up_rows if isinstance(module, nn.Embedding) else self._run_rowwise, name)
            else:
                continue
            module.__dict__["forward"] = _ReplacedForward(module, run)  # precedes the class's
        self.common = list_common(model, split)
        others = [p for owner, each in enumerate(self.common) for p in each if owner != index]
        self._hooks = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in others if p.requires_grad]
        self._partial = [p for name, p in model.named_parameters()
                         if name in split.partial and not isinstance(p, UnmaterializedParameter)]  # fmt: skip
        which = {id(p) for p in self._partial}
        self._read = [(module, kind, id(p)) for module in model.modules()
                      for kind, p in module._parameters.items() if id(p) in which]  # fmt: skip

    @property
    def random_position(self) -> tuple[int, int]:
        """The seed and the number of forwards, which determine the next forward's numbers."""
        return self._seed, self._passes

    @random_position.setter
    def random_position(self, stands: tuple[int, int]) -> None:
        self._seed, self._passes = stands

    def restore_modules(self) -> None:
        for _, module, _ in self._modules:
            module.__dict__.pop("forward", None)
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def run_pass(self, x: Tensor | None, params: Collection[nn.Parameter] | None = None) -> Iterator[None]:
        """Encloses one forward.

        x:      the previous stage's output; with sequence parallelism only this rank's positions
        params: the running piece's parameters; None: all
        """
        self._passes += 1
        torch.manual_seed((self._seed * SEED_FACTOR + self._passes) % 2**63)
        if x is not None and self.split.splits_sequences:
            self.use_own_randomness(x)
        try:
            with self.sum_partials(params):
                yield
        finally:
            self.use_common_randomness()

    @contextmanager
    def sum_partials(self, params: Collection[nn.Parameter] | None = None) -> Iterator[None]:
        """Encloses a forward whose backward sums partial gradients over ranks.

        Leave out parameters of other pieces: their gradients would seem to arrive with this piece's.
        """
        here = None if params is None else {id(p) for p in params}
        some = [p for p in self._partial if here is None or id(p) in here]
        if not (some and torch.is_grad_enabled()):
            yield
            return
        views = dict(zip(map(id, some), sum_gradients_at_end(some, self._plain_peers), strict=True))
        read = [(module, kind, views[which]) for module, kind, which in self._read if which in views]
        for module, kind, view in read:
            module.__dict__[kind] = view  # precedes the parameter
        try:
            yield
        finally:
            for module, kind, _ in read:
                module.__dict__.pop(kind, None)

    @property
    def _coded_peers(self) -> GroupPeers:
        return GroupPeers(self._ask, self.split.ways, self.coding if self._model.training else PLAIN, self._coded)

    @property
    def _plain_peers(self) -> GroupPeers:
        return GroupPeers(self._ask, self.split.ways)

    def _run_scatter(self, name: str, module: Any, x: Tensor, *more: Any, **named: object) -> Any:
        own = take_positions(x, self._coded_peers, name)
        self.use_own_randomness(own)
        return type(module).forward(module, own, *more, **named)

    def _run_colwise(self, name: str, gathers: bool, module: Any, x: Tensor) -> Tensor:
        if self.split.splits_sequences:
            y = apply_gathered_linear(x, module, self._coded_peers, name)
        else:
            y = F.linear(sum_backward(x, self._coded_peers, name), module.weight, module.bias)
            self.use_own_randomness(x)
        if not gathers:
            return y
        self.use_common_randomness()
        return gather_features(y, self._plain_peers, name)

    def _run_rowwise(self, name: str, module: Any, x: Tensor) -> Tensor:
        if not self.split.splits_sequences:
            self.use_common_randomness()
        added = scatter_sum if self.split.splits_sequences else sum_forward
        y = added(F.linear(x, module.weight), self._coded_peers, name)
        return y if module.bias is None else y + module.bias.to(y.dtype)

    def _look_up_rows(self, name: str, module: Any, x: Tensor) -> Tensor:
        rows = module.weight.shape[0]
        own = x - self.index * rows
        elsewhere = ((own < 0) | (own >= rows)) & (x >= 0) & (x < rows * self.split.ways)  # torch refuses others
        pad = module.padding_idx - self.index * rows if module.padding_idx is not None else -1
        found = F.embedding(own.masked_fill(elsewhere, 0), module.weight, pad if 0 <= pad < rows else None)
        return sum_forward(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._plain_peers, name)

    def use_own_randomness(self, x: Tensor) -> None:
        """Lets each rank draw its own numbers; see [Note: Random numbers]."""
        generator = torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator
        if not self._draws or generator.initial_seed() in self._own:
            return
        seed = (int(torch.randint(2**62, ())) + self.index * SEED_FACTOR) % 2**63
        self._outside = generator, generator.get_state()
        self._own[seed] = None
        if len(self._own) > MAX_SEEDS:
            del self._own[next(iter(self._own))]
        generator.manual_seed(seed)

    def use_common_randomness(self) -> None:
        if self._outside is not None:
            generator, state = self._outside
            if generator.initial_seed() in self._own:
                generator.set_state(state)
            self._outside = None


class _ReplacedForward:
    """Computes with the copy's weights in a deep copy."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._module = module
        self._run = run if "torch._dynamo" not in sys.modules else torch.compiler.disable(run)

    def __call__(self, *inputs: object, **named: object) -> Any:
        return self._run(self._module, *inputs, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ReplacedForward:
        return _ReplacedForward(memo.get(id(self._module), self._module), self._run)


def _drop_gradient(param: nn.Parameter) -> None:
    """The owner has the same gradient."""
    param.grad = None


def list_common(model: nn.Module, split: TensorSplit, names: Collection[str] | None = None) -> list[list[nn.Parameter]]:
    """Lists, by owner, the parameters that every rank has whole, among `names` if given."""
    some = [(model.get_parameter(name), k) for name, k in split.owners.items() if names is None or name in names]
    return [
        [p for p, owner in some if owner == k and not isinstance(p, UnmaterializedParameter)] for k in range(split.ways)
    ]


async def refresh_common(rank: Rank, by_owner: list[list[nn.Parameter]]) -> None:
    """Copies the owners' values of common parameters to all ranks."""
    for dtype in dict.fromkeys(p.dtype for each in by_owner for p in each):
        await _copy_owner_values(rank, [[p for p in each if p.dtype == dtype] for each in by_owner])


async def _copy_owner_values(rank: Rank, by_owner: list[list[nn.Parameter]]) -> None:
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


def copy_slice(model: nn.Module, split: TensorSplit, index: int) -> nn.Module:
    """Copies a whole model with rank `index`'s slices. Copies no sliced parameter whole."""
    known: dict[int, nn.Parameter] = {}
    for name, made in split.sliced.items():
        p = model.get_parameter(name)
        own = p.data.view(made.view).chunk(split.ways, made.dim)[index]
        known[id(p)] = mine = nn.Parameter(own.reshape(made.shape_of_slice(split.ways)).clone(), p.requires_grad)
        set_slice(mine, mine.data, made.shape)
    sliced: nn.Module = same_groups(copy.deepcopy(model, known), model)
    return sliced


@contextmanager
def compute_together(model: nn.Module, split: TensorSplit, index: int, ask: Ask, draws: bool = True,
              coding: Coding = PLAIN, coded: Coded = run_unrecorded) -> Iterator[TensorParallelGroup]:  # fmt: skip
    """Inside, `model` computes in a TensorParallelGroup."""
    together = TensorParallelGroup(model, split, index, ask, draws, coding=coding, coded=coded)
    try:
        yield together
    finally:
        together.restore_modules()
