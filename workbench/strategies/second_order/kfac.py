"""K-FAC: second-order steps with Kronecker factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.rank import FLOATS, Bucket, Memory, Rank, outlined
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies.second_order._kronecker import (
    Gradients,
    Layer,
    assign_layers,
    cubes,
    fold,
    invert,
    keep,
    packed,
    preconditioned,
    seen,
    unpacked,
)  # fmt: skip
from workbench.strategies.second_order.factors import Factors
from workbench.strategies.second_order.verbs import collect, factors, work


class _State:
    """State of one rank: factors and inverses by layer, and the settings of the last inversion."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.steps = 0
        self.folded = 0  # how often factors were averaged
        self.layers: list[Layer] = []
        self.inverted: tuple[int, float, tuple[tuple[str, int], ...]] | None = None  # its step, damping and mesh


@dataclass(frozen=True, kw_only=True)
class KFAC(Strategy):
    """Second-order steps: a layer's gradient is multiplied by the inverses of its Kronecker factors.

        A <- mean of a a^T over all ranks' rows,   G <- mean of g g^T           every `factors_every`, running averages
        A^-1, G^-1 of (A + pi sqrt(damping) I), (G + sqrt(damping) / pi I)      every `inverses_every`, by one rank
        D = G^-1 grad A^-1,   grad = (1/p) sum_i grad_i
        params <- optimizer(params, nu D),   nu = min(1, sqrt(kl_clip / (lr^2 sum D . grad)))

    a is a layer's input, plus a 1 if it has a bias, and g is the gradient of one row's loss in the layer's output. The
    ratio of the mean eigenvalues of A and G is pi^2. A (x) G approximates the layer's block of the Fisher matrix. As in
    KAISA, g uses the data's labels (the empirical Fisher). The rows of a sequence count as examples. A convolution is a
    Linear layer of patches (KFC). A patch of c channels has i = c k^2 elements. A is the sum of a a^T over an image's T
    places, and G is the mean of g g^T over these places. This assumes that gradients at different places are
    independent of each other and of the inputs. Other parameters use the plain gradient: embeddings, norms, grouped
    convolutions, and layers that share parameters with another module. The Sample "preconditioned" is the share of the
    preconditioned parameters. Ranks compute the same and are equal after every step.

    Layers are assigned by cost (i^3 + o^3). The most expensive is first, and each goes to the rank with the least work.
    Of p ranks g = `fraction` p keep a layer's inverses and compute D of its gradient. If g < p they send D to the other
    ranks in every step. A fraction of 1 is COMM-OPT and 1/p is MEM-OPT. The number g is rounded down to a divisor of p.
    In addition to DDP's bytes ranks all-reduce half of A and G. They then broadcast half of the inverses among g ranks
    and D to p/g ranks. A rank keeps i^2 + o^2 elements per layer for the factors and g/p of that for the inverses.

    When to use it: few and long steps, small layers, large batches. Use SGD with momentum and a learning rate of about
    0.01 to 1, because Adam rescales each element. After the strategy is entered, the first `warmup` steps use the plain
    gradient at that learning rate. Inverses of layers with thousands of features take seconds.

    Reference: Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", ICML
    2015, https://arxiv.org/abs/1503.05671; Grosse and Martens, "A Kronecker-factored Approximate Fisher Matrix for
    Convolution Layers", ICML 2016, https://arxiv.org/abs/1602.01407; Pauloski et al., "KAISA: An Adaptive Second-Order
    Optimizer Framework for Deep Neural Networks", SC 2021, https://arxiv.org/abs/2107.01739; for sequences Eschenhagen
    et al., NeurIPS 2023, https://arxiv.org/abs/2311.00636
    """

    factors_every: int = knob(5, 1, 1000, unit="steps", log=True, doc="period of computing and averaging A and G")
    inverses_every: int = knob(10, 1, 10_000, unit="steps", log=True, doc="period of inverting A and G")
    decay: float = knob(0.95, 0.0, 0.9999, doc="largest weight of the old A and G in their running mean")
    damping: float = knob(1e-2, 1e-10, 1e4, log=True, doc="added to the curvature; smaller values take larger steps")
    kl_clip: float = knob(1e-2, 0.0, 1e6, log=True, doc="bound on lr^2 times the curvature along the step; 0: none")
    fraction: float = knob(1.0, 0.001, 1.0, log=True, doc="share of the ranks that keep a layer's inverses")
    warmup: int = knob(
        3, 1, 10**6, unit="steps", log=True, doc="first steps by the plain gradient, while A and G build up"
    )
    accumulate: int = knob(1, 1, 64, unit="batches", doc="batches whose gradients are added before each exchange")

    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    plain: ClassVar[bool] = False
    sees_all: ClassVar[bool] = True
    skips: ClassVar[bool] = False  # the factors include a batch before its update
    own: ClassVar[dict[str, str]] = {
        "inputs*": "drop", "outputs*": "drop", "folded": "drop", "inverted": "drop", "layers": "drop",
        "steps": "drop",
    }  # fmt: skip

    def dims(self, size: int) -> tuple[tuple[str, int], ...]:
        keepers = max(g for g in range(1, size + 1) if size % g == 0 and g <= max(1.0, self.fraction * size + 1e-9))
        return (("receivers", size // keepers), ("keepers", keepers))

    def batches(self, size: int) -> int:
        return self.accumulate * size

    def refuses(self, compressor: Any) -> str | None:
        if compressor.carries:
            return (
                f"compressor={type(compressor).__name__}: it keeps a momentum of gradients before they are "
                f"preconditioned; use DDP with it, or another compressor under ErrorFeedback"
            )
        return super().refuses(compressor)

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State()

    async def step(self, rank: Rank, state: _State) -> None:
        listens = state.steps % self.factors_every == 0 or state.steps < self.warmup
        if listens:
            await collect(rank)
        pending = await self._backward(rank)
        if listens:
            agree = self._agree(rank, state, await factors(rank))
            pending.append(await rank.start(agree, name="factors"))
        for handle in pending:
            await rank.wait(handle)
        state.steps += 1
        if state.steps > self.warmup:
            if self._due(rank, state):
                await rank.wait(await rank.start(self._invert(rank, state), name="inverses"))
                await self._say(rank, state)
            await self._precondition(rank, state)
        await rank.update()

    async def _backward(self, rank: Rank) -> list[Any]:
        """Computes the gradient and returns the exchanges of its buckets under way, as DDP does."""
        share = 1.0 / (self.accumulate * rank.size)
        for micro in range(self.accumulate - 1):
            await rank.forward(micro=micro)
            await rank.backward(share, micro=micro)
        await rank.forward(micro=self.accumulate - 1)
        pending = []
        async for bucket in rank.backward(share, micro=self.accumulate - 1):
            pending.append(await rank.start(rank.compressor.reduce(rank, bucket, rank.memory), name=bucket.name))
        return pending

    async def _agree(self, rank: Rank, state: _State, own: list[Factors]) -> None:
        """Averages the factors over ranks into the running averages; the k-th average has weight 1/k or more."""
        if not own:
            return
        state.layers = seen(own)
        flat = packed([(f.inputs, f.outputs) for f in own])
        await rank.all_reduce(flat, "mean", "factors")
        state.folded += 1
        fold(state.memory, state.layers, unpacked(flat, state.layers), max(1 / state.folded, 1 - self.decay))

    def _due(self, rank: Rank, state: _State) -> bool:
        """Whether the inverses are too old, or belong to other settings."""
        if state.inverted is None:
            return True
        step, *settings = state.inverted
        return state.steps - step >= self.inverses_every or settings != [self.damping, rank.mesh.dims]

    async def _invert(self, rank: Rank, state: _State) -> None:
        """Inverts this rank's layers; then the ranks that keep inverses exchange them."""
        keepers, owner = _along(rank, "keepers"), assign_layers(state.layers, rank.size)
        mine = [layer for layer in state.layers if owner[layer.weight] == rank.index]
        inverted = partial(invert, state.memory, damping=self.damping)
        own = await work(rank, lambda: list(map(inverted, mine)), cubes(mine), "inverses")
        for name in ("inputs inverse", "outputs inverse"):
            state.memory.drop(name)
        first = rank.index - keepers.index
        for source, theirs in _by(lambda layer: owner[layer.weight] - first, state.layers, keepers.size):
            flat = packed(own) if source == keepers.index else _room(state, theirs, sum(x.packed for x in theirs))
            await keepers.broadcast(flat, source, "inverses")
            for layer, pair in zip(theirs, unpacked(flat, theirs), strict=True):
                keep(state.memory, layer, pair)
        state.inverted = state.steps, self.damping, rank.mesh.dims

    async def _precondition(self, rank: Rank, state: _State) -> None:
        """Replaces each layer's gradient by nu D, which the keepers of its inverses compute and send."""
        if not state.layers:
            return
        keepers, receivers = _along(rank, "keepers"), _along(rank, "receivers")
        owner, gradients = assign_layers(state.layers, rank.size), Gradients(await rank.grads())
        made: dict[Layer, Tensor] = {}
        for source, theirs in _by(lambda x: owner[x.weight] // keepers.size, state.layers, receivers.size):
            if source == receivers.index:
                made |= await work(rank, partial(_through, state.memory, theirs, gradients),
                                        sum(x.products for x in theirs), "preconditioning")  # fmt: skip
            if receivers.size > 1:
                flat = _joined([made[x] for x in theirs]) if source == receivers.index else _room(
                    state, theirs, sum(x.inputs * x.outputs for x in theirs))  # fmt: skip
                await receivers.broadcast(flat, source, "preconditioned")
                pieces = flat.split([x.inputs * x.outputs for x in theirs])
                made |= {x: piece.view(x.outputs, x.inputs) for x, piece in zip(theirs, pieces, strict=True)}
        _put([made[x] for x in state.layers], state.layers, gradients, rank.lr, self.kl_clip)

    async def _say(self, rank: Rank, state: _State) -> None:
        """Records the share of the parameters that is preconditioned."""
        whole = sum(bucket.data.numel() for bucket in await rank.params())
        await rank.sample("preconditioned", sum(x.inputs * x.outputs for x in state.layers) / whole)


def _along(rank: Rank, dim: str) -> Rank:
    """Returns this rank's group along `dim`, or `rank` itself if the group has all ranks."""
    group = rank.group(dim)
    return rank if group.size == rank.size else group


def _by(who: Callable[[Layer], int], layers: list[Layer], size: int) -> Iterator[tuple[int, list[Layer]]]:
    """Groups the layers by rank and yields (rank, layers) in rank order, for ranks below `size` that have layers."""
    found: dict[int, list[Layer]] = {}
    for layer in layers:
        found.setdefault(who(layer), []).append(layer)
    return ((source, found[source]) for source in sorted(found) if 0 <= source < size)


def _room(state: _State, layers: list[Layer], n: int) -> Tensor:
    """Returns an empty (n,) tensor to receive another rank's data for these layers."""
    return state.memory.parts["inputs"][layers[0].weight].new_empty(n)


def _through(memory: Memory, layers: list[Layer], gradients: Gradients) -> dict[Layer, Tensor]:
    return {layer: preconditioned(memory, layer, gradients.of(layer)) for layer in layers}


def _joined(matrices: list[Tensor]) -> Tensor:
    return torch.cat([m.reshape(-1) for m in matrices])


@outlined(lambda made, layers, gradients, lr, kl_clip: None)
def _put(made: list[Tensor], layers: list[Layer], gradients: Gradients, lr: float, kl_clip: float) -> None:
    """Writes nu D in place of the gradients."""
    if kl_clip:
        bends = torch.stack([(d * gradients.of(x)).sum(dtype=torch.float64) for d, x in zip(made, layers, strict=True)])
        nu = (kl_clip / (lr**2 * bends.sum().abs()).clamp_min(1e-300)).sqrt().clamp_max(1.0)
        made = [d * nu.to(d.dtype) for d in made]
    for layer, d in zip(layers, made, strict=True):
        gradients.put(layer, d)
