"""The memory of a rank's tensors with sizes only, from one pass of the model without values.

The pass uses torch's FakeTensorMode with fake CPU tensors. On the meta device torch chooses other kernels, which keep
other tensors for backward: attention keeps its whole matrix of scores.
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

from workbench.host.core.valueless import make_like, put_on_cpu
from workbench.host.memory import storages as memory
from workbench.host.memory.backward_peak import BackwardMeter, GraphHooks
from workbench.host.passes.checkpointing import checkpoint_units
from workbench.host.passes.coded_exchange import ChoosingCoder
from workbench.host.passes.stage_module import StageModule
from workbench.host.passes.tensor_parallel import compute_together
from workbench.host.passes.tensor_schedule import make_answer_like
from workbench.host.placement.bucket_groups import ParameterPlace
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.stage_cuts import list_parts
from workbench.host.placement.tensor_split import TensorSplit
from workbench.rank import Bucket, Memory
from workbench.tasks import Learner

if TYPE_CHECKING:
    from workbench.compressors import Coder
    from workbench.partitions import Partition


class KeptBytes(NamedTuple):
    """The bytes that autograd keeps of one batch, and how they shrink during its backward.

    looks: (number of gradients so far, bytes left); names: parameters in the order of gradients
    """

    nbytes: int
    looks: list[tuple[int, int]]
    names: list[str]


class KnownMemory:
    """One rank's. See host/memory/memory_account.py."""

    def __init__(self, body: Any, batch: Callable[[], int]) -> None:
        self._body, self._batch = body, batch

    @property
    def shared_counts(self) -> dict[Any, Any]:
        found: dict[Any, Any] = self._body.alike
        return found

    @property
    def has_gradient_memory(self) -> bool:
        return bool(self._body.roomy)

    def list_standing(self) -> dict[str, memory.Storages]:
        found: dict[str, memory.Storages] = self._body.list_standing()
        return found

    def measure_forward(self, inputs: Any) -> int | None:
        kept = self._list_kept_bytes()
        return None if kept is None else self._count_open_bytes(kept)

    @contextmanager
    def measure_backward(self, exchanged: bool) -> Iterator[Callable[[], int]]:
        before, there, layout = self.count_gradients(), self._body.came is not None, self._body.layout
        every: Any = self._list_kept_bytes()
        kept = every and every[self._body.going]
        others = self._count_open_bytes(every) - kept.nbytes if every else 0
        key = "backward", id(layout), exchanged, there, id(kept), self._body.gradient_shards
        if kept is not None and key not in self.shared_counts:
            if exchanged and self._body.gradient_shards > 1:
                self.shared_counts[key] = _sharded_peak(kept, layout, self._body.gradient_shards)
            else:
                part = self._body.submodel.compute_share("update")
                new = {
                    p.name: 0 if there else round(memory.count_gradient_bytes(p, exchanged) * part)
                    for p in layout.order
                }
                self.shared_counts[key] = _backward_peak(kept, new)
        yield lambda: before + (self.shared_counts[key] + max(0, others) if kept is not None else 0)

    def count_gradients(self) -> int:
        layout, came = self._body.layout, self._body.came
        shards = self._body.gradient_shards
        key = "gradients", id(layout), self.has_gradient_memory, came, shards
        if shards > 1 and came is not False:
            return 0 if came is None else _gradient_peak(layout, shards)
        if key not in self.shared_counts:
            beyond = 0 if came is None else sum(memory.count_gradient_bytes(p, came) for p in layout.order)
            self.shared_counts[key] = memory.count_bytes(self.list_standing()["gradients"]) + beyond
        return round(self.shared_counts[key] * self._body.submodel.compute_share("update"))

    def count_activations(self) -> int:
        kept = self._list_kept_bytes()
        return 0 if kept is None else self._count_open_bytes(kept)

    def count_batch(self) -> int:
        return int(self._body.batch_nbytes(self._batch()))

    def _list_kept_bytes(self) -> list[KeptBytes] | None:
        """Returns by piece what a batch keeps, also for a sub-model."""
        with self._body.submodel.use_submodel():
            found: list[KeptBytes] | None = self._body.kept(self._batch(), self._body.submodel.counts)
        return found

    def _count_open_bytes(self, kept: Sequence[KeptBytes]) -> int:
        """All open forwards. kept: of one forward, by piece"""
        return round(sum(count * one.nbytes for count, one in zip(self._body.opened, kept, strict=True)))


def _gradient_peak(layout: ParameterLayout, shards: int) -> int:
    """Returns the gradients' peak bytes if each full bucket is cut to one shard."""
    most = kept = 0
    for bucket in layout.buckets:
        most, kept = max(most, kept + bucket.nbytes), kept + bucket.nbytes // shards
    return most


def _sharded_peak(kept: KeptBytes, layout: ParameterLayout, shards: int) -> int:
    """Returns the peak bytes of gradients and activations with sharded gradients.

    A bucket has its full size from its first gradient on, and is cut to a shard when the next bucket is full. Counts
    gradients as often as `BackwardMeter`.
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
            seen = came if number % memory.count_look_interval(layout) == 0 else seen
        at, most = count, max(most, seen + activations)
    return most


def _backward_peak(kept: KeptBytes, new: dict[str, int]) -> int:
    """Returns the peak bytes of gradients and remaining activations over `kept.looks`."""
    came, at, most = 0, 0, 0
    for count, left in kept.looks:
        came += sum(new.get(name, 0) for name in kept.names[at:count])
        at, most = count, max(most, came + left)
    return most


def measure_kept(
    model: nn.Module, learner: Learner, inputs: Any, layers: Partition, split: TensorSplit | None
) -> KeptBytes:
    """Returns what one batch keeps. Raises if the model does not run without values. model: on the meta device

    layers: how a stage's ranks compute its layers
    split:  how the model's matrices are split; this rank has one slice
    """
    with _fake_model(model, learner, inputs, layers, split) as (fake, x):
        return _run_and_measure(_BareLayout(_list_trained_places(fake)), fake, x, lambda: learner.loss(fake, x))


def measure_kept_pieces(model: nn.Module, learner: Learner, inputs: Any, layers: Partition, split: TensorSplit | None,
            counts: list[int]) -> list[KeptBytes | None]:  # fmt: skip
    """Returns by piece what one micro-batch keeps; None from the first piece that fails. One pass serves all pieces.

    counts: parts per piece; for other arguments see `measure_kept`
    """
    found: list[KeptBytes | None] = []
    with _fake_model(model, learner, inputs, layers, split) as (fake, x), suppress(Exception):
        parts, trained, came = list_parts(fake, learner), _list_trained_places(fake), None
        for number, end in enumerate(accumulate(counts)):
            own = tuple(parts[end - counts[number] : end])
            piece, here = (
                StageModule(fake, [own], number, len(counts)),
                {id(p) for part in own for p in part.parameters()},
            )
            layout = _BareLayout([place for place in trained if id(place.param) in here])
            found.append(_run_and_measure(layout, fake, x, partial(_forward_piece, piece, learner, x, came)))
            came = piece.opened[0, 0].detach().requires_grad_()
    return found + [None] * (len(counts) - len(found))


def _forward_piece(piece: StageModule, learner: Learner, inputs: Any, came: Tensor | None) -> Tensor:
    piece.run_forward(learner.loss, inputs, came, 0)
    return piece.opened[0, 0]


@contextmanager
def _fake_model(model: nn.Module, learner: Learner, inputs: Any, layers: Partition,
           split: TensorSplit | None) -> Iterator[tuple[nn.Module, Any]]:  # fmt: skip
    """Provides the model and its inputs as fake CPU tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from workbench.sim.fake.fake_cache import FakeCacheMode

    fake = copy.deepcopy(model)
    with FakeTensorMode(allow_non_fake_inputs=True), FakeCacheMode(), torch.enable_grad(), ExitStack() as also:
        put_on_cpu(fake)
        if split is not None:
            coding = layers.inside(Memory())
            coding = coding._replace(there=_size_coder(coding.there), back=_size_coder(coding.back))
            answer = partial(make_answer_like, ways=split.ways)
            also.enter_context(compute_together(fake, split, 0, answer, draws=False, coding=coding))
        also.enter_context(checkpoint_units(fake, learner, layers))
        yield fake, make_like(inputs)


class _BareLayout:
    """A ParameterLayout with trained parameters, and no buckets."""

    roomy = gives_back = False
    buckets: tuple[Bucket, ...] = ()

    def __init__(self, order: list[ParameterPlace]) -> None:
        self.order = order


def _list_trained_places(model: nn.Module) -> list[ParameterPlace]:
    """Returns trained parameters in reverse order of registration, as a ParameterLayout does."""
    return [ParameterPlace(name, p) for name, p in reversed([*model.named_parameters()]) if p.requires_grad]


def _run_and_measure(layout: Any, fake: nn.Module, x: Any, forward: Callable[[], Tensor]) -> KeptBytes:
    others = memory.find_storages([*fake.parameters(), *fake.buffers(), x])
    loss = forward()
    found = memory.find_saved([loss])
    alive = memory.watch_storages({where: s for where, s in found.items() if where not in others})
    nbytes = memory.count_alive_bytes(alive)
    del found
    hooks = GraphHooks()
    hooks.hook_graphs([loss])
    with hooks.listen_to_backward(BackwardMeter(layout, alive, lambda place: 0)) as passing:
        loss.backward(torch.ones_like(loss))
    return KeptBytes(nbytes, passing.looks, passing.names)


class _SizedCoder:
    """A coder for fake tensors, which runs the real coder on sizes."""

    def __init__(self, of: Coder) -> None:
        self.of = of

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
            made = self.of.encode(torch.empty(x.shape, dtype=x.dtype, device="meta"))
        return tuple(x.new_empty(part.shape, dtype=part.dtype) for part in made)

    def decode(self, payload: tuple[Tensor, ...], like: Tensor) -> Tensor:
        return like.new_empty(like.shape)


class _SizedChooser(_SizedCoder):
    """May choose elements."""

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.linear, self.through, self._chosen = of.linear, of.through, of.chosen

    def chosen(self, payload: tuple[Tensor, ...]) -> Tensor | None:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
            found = self._chosen(tuple(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in payload))
        return None if found is None else payload[0].new_empty(found.shape, dtype=found.dtype)


def _size_coder(coder: Coder | None) -> Coder | None:
    if coder is None:
        return None
    return _SizedChooser(coder) if isinstance(coder, ChoosingCoder) else _SizedCoder(coder)
