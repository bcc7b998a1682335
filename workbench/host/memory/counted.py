"""The source of a Ledger's numbers: a rank's real tensors, or a host's other knowledge of sizes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, UntypedStorage, nn

from workbench.host.memory import memory
from workbench.host.memory.passing import Hooks, Passing
from workbench.host.memory.views import AccountView
from workbench.rank import Bucket


class Sorted(NamedTuple):
    """What stays from step to step.

    nbytes:  bytes by category, each storage in its first one
    known:   weak references by address to the storages
    buckets: the gradient buckets
    rooms:   weak references by id to the vectors of buckets that stay
    """

    nbytes: dict[str, int]
    known: dict[int, weakref.ref[UntypedStorage]]
    buckets: list[Bucket]
    rooms: dict[int, weakref.ref[Tensor]]


class Counts(Protocol):
    """A host's source of memory figures for one replica.

    alike: results shared by ranks that hold the same tensors; empty if each rank has its own
    """

    @property
    def alike(self) -> dict[tuple[int, int], Sorted]: ...
    @property
    def roomy(self) -> bool: ...  # whether buckets keep memory for gradients
    def standing(self) -> dict[str, memory.Storages]: ...  # "parameters", "gradients" (vectors), "optimizer state"
    def forward(self, inputs: Any) -> int | None: ...  # bytes kept for backwards to come; None: unknown
    def backward(self, exchanged: bool) -> AbstractContextManager[Callable[[], int]]: ...  # yields its peak
    def gradients(self) -> int: ...
    def activations(self) -> int: ...  # bytes kept for backwards to come
    def batch(self) -> int: ...  # bytes of the forward's batch


class FullyShard(Protocol):
    """torch's fully_shard, while it trains."""

    def whole(self) -> list[Tensor]: ...  # parameters that are gathered now
    def gradients(self) -> int: ...  # their bytes
    def looked(self, activations: Callable[[], int]) -> AbstractContextManager[Callable[[], int]]: ...  # as `backward`


class Counted:
    """Numbers from real tensors.

    opened: the losses with a backward to come
    batch:  bytes of the last batch
    fully:  torch's fully_shard, while it trains
    part:   the parameters of a sub-model, while it trains, that are not the whole model's
    """

    def __init__(self, run: AccountView, opened: Callable[[], Iterable[Tensor]], batch: Callable[[], int],
                 fully: Callable[[], FullyShard | None] = lambda: None,
                 part: Callable[[], list[nn.Parameter]] = list) -> None:  # fmt: skip
        self._run, self._opened, self.batch, self._fully, self._part = run, opened, batch, fully, part
        self._alive: memory.Alive = []
        self._hooks = Hooks()

    @property
    def alike(self) -> dict[tuple[int, int], Sorted]:
        return {}

    @property
    def roomy(self) -> bool:
        return bool(self._run.layout.roomy)

    def standing(self) -> dict[str, memory.Storages]:
        layout = self._run.layout
        return {
            "parameters": memory.parameters(self._run.model, layout),
            "gradients": memory.storages(memory.rooms(layout)),
            "optimizer state": memory.optimizer_state(self._run.optimizer),
        }

    def forward(self, inputs: Any) -> int:
        """Returns the bytes that the open losses keep, without parameters and inputs."""
        run, fully = self._run, self._fully()
        others = memory.parameters(run.model, run.layout) | memory.storages([inputs, run.flow.versions.kept])
        others |= memory.storages(fully.whole()) if fully else memory.storages(self._part())
        opened = list(self._opened())
        self._hooks.follow(opened)
        kept = memory.saved(opened)
        self._alive = memory.watched({where: s for where, s in kept.items() if where not in others})
        return self.activations()

    @contextmanager
    def backward(self, exchanged: bool) -> Iterator[Callable[[], int]]:
        layout, before = self._run.layout, self.gradients()
        if fully := self._fully():
            with fully.looked(self.activations) as most:
                yield most
            return
        with self._hooks.heard(Passing(layout, self._alive, memory.coming(layout, exchanged))) as passing:
            yield lambda: before + passing.most

    def gradients(self) -> int:
        fully = self._fully()
        if fully:
            return int(fully.gradients())
        return memory.nbytes(memory.gradients(self._run.layout) | memory.storages([p.grad for p in self._part()]))

    def activations(self) -> int:
        return memory.alive(self._alive)
