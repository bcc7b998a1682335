"""The memory of a rank's tensors with sizes only, from one pass of the model without values.

The pass runs under torch's FakeTensorMode with fake CPU tensors. On the meta device torch chooses other kernels, which
keep other tensors for backward: attention keeps its whole matrix of scores.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.host.core.meta import like, put_on_cpu
from workbench.host.memory import memory
from workbench.host.memory.passing import Hooks, Passing
from workbench.host.passes.checkpointing import checkpointing
from workbench.host.passes.coded import Chooses
from workbench.host.passes.meetings import answer_like
from workbench.host.passes.piece import Piece
from workbench.host.passes.together import computing
from workbench.host.placement.cutting import parts_of
from workbench.host.placement.layout import Layout, Place
from workbench.host.placement.splitting import Split
from workbench.rank import Bucket, Memory
from workbench.tasks import Learner

if TYPE_CHECKING:
    from workbench.compressors import Coder
    from workbench.partitions import Partition


class Kept(NamedTuple):
    """The bytes that autograd keeps of one batch, and how they shrink during its backward.

    looks: (number of gradients that have come, bytes left); names: the parameters in the order of their gradients
    """

    nbytes: int
    looks: list[tuple[int, int]]
    names: list[str]


class Known:
    """The memory of one rank with sizes only. Numbers that ranks share are computed once. See host/memory/ledger.py."""

    def __init__(self, body: Any, batch: Callable[[], int]) -> None:
        self._body, self._batch = body, batch

    @property
    def alike(self) -> dict[Any, Any]:
        found: dict[Any, Any] = self._body.alike
        return found

    @property
    def roomy(self) -> bool:
        return bool(self._body.roomy)

    def standing(self) -> dict[str, memory.Storages]:
        found: dict[str, memory.Storages] = self._body.standing()
        return found

    def forward(self, inputs: Any) -> int | None:
        kept = self._kept()
        return None if kept is None else self._open(kept)

    @contextmanager
    def backward(self, exchanged: bool) -> Iterator[Callable[[], int]]:
        before, there, layout = self.gradients(), self._body.came is not None, self._body.layout
        every: Any = self._kept()
        kept = every and every[self._body.going]
        others = self._open(every) - kept.nbytes if every else 0
        key = "backward", id(layout), exchanged, there, id(kept), self._body.gradient_shards
        if kept is not None and key not in self.alike:
            if exchanged and self._body.gradient_shards > 1:
                self.alike[key] = _most_shared(kept, layout, self._body.gradient_shards)
            else:
                part = self._body.narrowing.share("update")
                new = {p.name: 0 if there else round(memory.came(p, exchanged) * part) for p in layout.order}
                self.alike[key] = _most(kept, new)
        yield lambda: before + (self.alike[key] + max(0, others) if kept is not None else 0)

    def gradients(self) -> int:
        """Returns the bytes of the gradients. Equal ranks compute them once."""
        layout, came = self._body.layout, self._body.came
        shards = self._body.gradient_shards
        key = "gradients", id(layout), self.roomy, came, shards
        if shards > 1 and came is not False:
            return 0 if came is None else _in_shards(layout, shards)
        if key not in self.alike:
            beyond = 0 if came is None else sum(memory.came(p, came) for p in layout.order)
            self.alike[key] = memory.nbytes(self.standing()["gradients"]) + beyond
        return round(self.alike[key] * self._body.narrowing.share("update"))

    def activations(self) -> int:
        kept = self._kept()
        return 0 if kept is None else self._open(kept)

    def batch(self) -> int:
        return int(self._body.batch_nbytes(self._batch()))

    def _kept(self) -> list[Kept] | None:
        """Returns by piece what a batch keeps, of the sub-model if one is trained."""
        with self._body.narrowing.within():
            found: list[Kept] | None = self._body.kept(self._batch(), self._body.narrowing.counts)
        return found

    def _open(self, kept: Sequence[Kept]) -> int:
        """Returns the bytes that all open forwards keep, from those of one forward through each piece."""
        return round(sum(count * one.nbytes for count, one in zip(self._body.opened, kept, strict=True)))


def _in_shards(layout: Layout, shards: int) -> int:
    """Returns the most bytes of gradients if each full bucket is cut to one of `shards` shards."""
    most = kept = 0
    for bucket in layout.buckets:
        most, kept = max(most, kept + bucket.nbytes), kept + bucket.nbytes // shards
    return most


def _most_shared(kept: Kept, layout: Layout, shards: int) -> int:
    """Returns the most bytes of gradients and activations with sharded gradients.

    A bucket has its full size from its first gradient on, and is cut to a shard when the next bucket is full. Gradients
    are counted as often as `Passing` counts them.
    """
    left, of = [len(bucket.parts) for bucket in layout.buckets], {place.name: place.bucket for place in layout.order}
    came, seen, at, most, full = 0, 0, 0, 0, -1
    for count, activations in kept.looks:
        for number, name in enumerate(kept.names[at:count], at + 1):
            index = of[name]
            bucket = layout.buckets[index]
            came += bucket.nbytes if left[index] == len(bucket.parts) else 0
            left[index] -= 1
            if not left[index]:
                came -= layout.buckets[full].nbytes * (shards - 1) // shards if full >= 0 else 0
                full = index
            seen = came if number % memory.every(layout) == 0 else seen
        at, most = count, max(most, seen + activations)
    return most


def _most(kept: Kept, new: dict[str, int]) -> int:
    """Returns the most bytes of gradients and remaining activations, over all looks."""
    came, at, most = 0, 0, 0
    for count, left in kept.looks:
        came += sum(new.get(name, 0) for name in kept.names[at:count])
        at, most = count, max(most, came + left)
    return most


def kept_of(model: nn.Module, learner: Learner, inputs: Any, layers: Partition, split: Split | None) -> Kept:
    """Returns what one batch keeps. Raises if the model does not run without values. model: on the meta device

    layers: how the ranks of a stage compute them
    split:  how the model's matrices are split; this rank has one slice
    """
    with _faked(model, learner, inputs, layers, split) as (fake, x):
        return _looked_at(_Bare(_trained(fake)), fake, x, lambda: learner.loss(fake, x))


def kept_in(model: nn.Module, learner: Learner, inputs: Any, layers: Partition, split: Split | None,
            counts: list[int]) -> list[Kept | None]:  # fmt: skip
    """Returns what one micro-batch keeps in each piece of the model. counts: parts per piece; the rest as in `kept_of`

    Each piece runs on the output of the one before, so one pass serves all. From the first piece that fails, results
    are None.
    """
    found: list[Kept | None] = []
    with _faked(model, learner, inputs, layers, split) as (fake, x), suppress(Exception):
        parts, trained, came = parts_of(fake, learner), _trained(fake), None
        for number, end in enumerate(accumulate(counts)):
            own = tuple(parts[end - counts[number] : end])
            piece, here = Piece(fake, [own], number, len(counts)), {id(p) for part in own for p in part.parameters()}
            layout = _Bare([place for place in trained if id(place.param) in here])
            found.append(_looked_at(layout, fake, x, partial(_through, piece, learner, x, came)))
            came = piece.opened[0, 0].detach().requires_grad_()
    return found + [None] * (len(counts) - len(found))


def _through(piece: Piece, learner: Learner, inputs: Any, came: Tensor | None) -> Tensor:
    piece.forward(learner.loss, inputs, came, 0)
    return piece.opened[0, 0]


@contextmanager
def _faked(model: nn.Module, learner: Learner, inputs: Any, layers: Partition,
           split: Split | None) -> Iterator[tuple[nn.Module, Any]]:  # fmt: skip
    """Provides a copy of the model and its inputs as fake CPU tensors, which compute sizes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from workbench.sim.fake.faked import Faked

    fake = copy.deepcopy(model)
    with FakeTensorMode(allow_non_fake_inputs=True), Faked(), torch.enable_grad(), ExitStack() as also:
        put_on_cpu(fake)
        if split is not None:
            coding = layers.inside(Memory())
            coding = coding._replace(there=_sized(coding.there), back=_sized(coding.back))
            answer = partial(answer_like, ways=split.ways)
            also.enter_context(computing(fake, split, 0, answer, draws=False, coding=coding))
        also.enter_context(checkpointing(fake, learner, layers))
        yield fake, like(inputs)


class _Bare:
    """The parts of a Layout that a backward reads: the trained parameters."""

    roomy = gives_back = False
    buckets: tuple[Bucket, ...] = ()

    def __init__(self, order: list[Place]) -> None:
        self.order = order


def _trained(model: nn.Module) -> list[Place]:
    """Returns the trained parameters in reverse order of registration, as in a Layout."""
    return [Place(name, p) for name, p in reversed([*model.named_parameters()]) if p.requires_grad]


def _looked_at(layout: Any, fake: nn.Module, x: Any, forward: Callable[[], Tensor]) -> Kept:
    """Runs `forward` and its backward, and returns what was kept."""
    others = memory.storages([*fake.parameters(), *fake.buffers(), x])
    loss = forward()
    found = memory.saved([loss])
    alive = memory.watched({where: s for where, s in found.items() if where not in others})
    nbytes = memory.alive(alive)
    del found
    hooks = Hooks()
    hooks.follow([loss])
    with hooks.heard(Passing(layout, alive, lambda place: 0)) as passing:
        loss.backward(torch.ones_like(loss))
    return Kept(nbytes, passing.looks, passing.names)


class _Sized:
    """A coder for fake tensors: runs the real coder on sizes, and returns fake tensors."""

    def __init__(self, of: Coder) -> None:
        self.of = of

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
            made = self.of.encode(torch.empty(x.shape, dtype=x.dtype, device="meta"))
        return tuple(x.new_empty(part.shape, dtype=part.dtype) for part in made)

    def decode(self, payload: tuple[Tensor, ...], like: Tensor) -> Tensor:
        return like.new_empty(like.shape)


class _SizedCodec(_Sized):
    """A coder for fake tensors that may choose a part of a tensor."""

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.linear, self.through, self._chosen = of.linear, of.through, of.chosen

    def chosen(self, payload: tuple[Tensor, ...]) -> Tensor | None:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
            found = self._chosen(tuple(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in payload))
        return None if found is None else payload[0].new_empty(found.shape, dtype=found.dtype)


def _sized(coder: Coder | None) -> Coder | None:
    if coder is None:
        return None
    return _SizedCodec(coder) if isinstance(coder, Chooses) else _Sized(coder)
