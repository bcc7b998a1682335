"""A MemoryAccount's numbers: from real tensors, or a host's other knowledge of sizes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor, UntypedStorage, nn

from workbench.host.memory import storages as memory
from workbench.host.memory.account_view import AccountView
from workbench.host.memory.backward_peak import BackwardMeter, GraphHooks
from workbench.rank import Bucket


class SortedBytes(NamedTuple):
    """Bytes that stay.

    nbytes:  by category, each storage in its first one
    known:   the storages by address
    buckets: gradient buckets
    rooms:   by id, the vectors of buckets that stay
    """

    nbytes: dict[str, int]
    known: dict[int, weakref.ref[UntypedStorage]]
    buckets: list[Bucket]
    rooms: dict[int, weakref.ref[Tensor]]


class MemoryCounts(Protocol):
    """A host's memory figures for one replica.

    shared_counts: results shared by ranks with the same tensors; empty without such ranks
    """

    @property
    def shared_counts(self) -> dict[tuple[int, int], SortedBytes]: ...
    @property
    def has_gradient_memory(self) -> bool: ...
    def list_standing(self) -> dict[str, memory.Storages]: ...  # "parameters", "gradients" (vectors), "optimizer state"
    def measure_forward(self, inputs: object) -> int | None: ...  # bytes for backwards; None: unknown
    def measure_backward(self, exchanged: bool) -> AbstractContextManager[Callable[[], int]]: ...  # yields its peak
    def count_gradients(self) -> int: ...
    def count_activations(self) -> int: ...  # bytes for backwards
    def count_batch(self) -> int: ...  # its bytes


class FullyShardedView(Protocol):
    """torch's fully_shard."""

    def list_whole(self) -> list[Tensor]: ...  # gathered parameters
    def gradients(self) -> int: ...  # their bytes
    def measure_backward(self, activations: Callable[[], int]) -> AbstractContextManager[Callable[[], int]]: ...


class RealMemoryCounts:
    """Numbers from real tensors.

    opened: the losses with a backward to come
    batch:  bytes of the last batch
    fully:  torch's fully_shard, while it trains
    part:   a sub-model's own parameters, while it trains
    """

    def __init__(self, run: AccountView, opened: Callable[[], Iterable[Tensor]], batch: Callable[[], int],
                 fully: Callable[[], FullyShardedView | None] = lambda: None,
                 part: Callable[[], list[nn.Parameter]] = list) -> None:  # fmt: skip
        self._run, self._opened, self.count_batch, self._fully, self._part = run, opened, batch, fully, part
        self._alive: memory.Alive = []
        self._hooks = GraphHooks()

    @property
    def shared_counts(self) -> dict[tuple[int, int], SortedBytes]:
        return {}

    @property
    def has_gradient_memory(self) -> bool:
        return bool(self._run.layout.roomy)

    def list_standing(self) -> dict[str, memory.Storages]:
        layout = self._run.layout
        return {
            "parameters": memory.find_parameters(self._run.model, layout),
            "gradients": memory.find_storages(memory.list_bucket_vectors(layout)),
            "optimizer state": memory.find_optimizer_state(self._run.optimizer),
        }

    def measure_forward(self, inputs: object) -> int:
        """Counts what open losses keep, without parameters and inputs."""
        run, fully = self._run, self._fully()
        others = memory.find_parameters(run.model, run.layout) | memory.find_storages(
            [inputs, run.micros_in_flight.versions.kept]
        )
        others |= memory.find_storages(fully.list_whole()) if fully else memory.find_storages(self._part())
        opened = list(self._opened())
        self._hooks.hook_graphs(opened)
        kept = memory.find_saved(opened)
        self._alive = memory.watch_storages({where: s for where, s in kept.items() if where not in others})
        return self.count_activations()

    @contextmanager
    def measure_backward(self, exchanged: bool) -> Iterator[Callable[[], int]]:
        layout, before = self._run.layout, self.count_gradients()
        if fully := self._fully():
            with fully.measure_backward(self.count_activations) as most:
                yield most
            return
        with self._hooks.listen_to_backward(
            BackwardMeter(layout, self._alive, memory.make_gradient_counter(layout, exchanged))
        ) as passing:
            yield lambda: before + passing.most

    def count_gradients(self) -> int:
        fully = self._fully()
        if fully:
            return int(fully.gradients())
        return memory.count_bytes(
            memory.find_gradients(self._run.layout) | memory.find_storages([p.grad for p in self._part()])
        )

    def count_activations(self) -> int:
        return memory.count_alive_bytes(self._alive)
