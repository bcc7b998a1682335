"""Counts the bytes that torch's calls make while they exist: the memory of an evaluation.

It does not see temporaries inside one call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter

from workbench.host.core.operators import make_operators_once
from workbench.host.memory.storages import get_storage

make_operators_once()
_READ = torch.ops.aten._local_scalar_dense.default  # reads a number


class StorageTracker(TorchDispatchMode):
    """Counts each storage that a torch call on this thread makes, until it is freed.

    ranks: how many ranks share one model, if one process computes all stages
    sizes: whether tensors may have no values; a number read out of one is then zero
    at:    the rank that makes the calls; None: every rank makes them and has the result
    aside: whether new storages are ignored
    read:  without values: whether the values would have decided a call's result or its size, since `measure_apart`
    most:  peak bytes by rank
    rises: called whenever a peak grows
    """

    def __init__(self, ranks: int = 1, sizes: bool = False, rises: Callable[[], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rises = rises
        self.at: int | None = None
        self.aside = self.read = False
        self.most, self._now = [0] * ranks, [0] * ranks
        self._sizes = sizes
        self._counted_storages: dict[tuple[int, int], weakref.ref[UntypedStorage]] = {}  # by (rank, storage)
        self._freed: list[tuple[int, int]] = []  # freed (rank, bytes)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would load its compiler for seconds, only to exclude it."""
        return False

    def __torch_dispatch__(self, func: OpOverload, types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        self.read = self.read or (self._sizes and _reads_values(func))
        if func is _READ and self._sizes and isinstance(args[0], _import_fake_class()):
            return 0.0 if args[0].is_floating_point() else 0
        made = func(*args, **kwargs)
        if not self.aside and _makes_storage(func):
            given = {where for x in _find_tensors((args, kwargs)) if (where := _identify_storage(x))}
            for x in _find_tensors(made):
                if _identify_storage(x) not in given:
                    self.count_tensor(x)
        return made

    @contextmanager
    def pause_counting(self) -> Iterator[None]:
        was, self.aside = self.aside, True
        try:
            yield
        finally:
            self.aside = was

    @contextmanager
    def count_for(self, rank: int) -> Iterator[None]:
        """Inside, `rank` makes the calls."""
        self.at = rank
        try:
            yield
        finally:
            self.at = None

    def count_tensor(self, x: Tensor, rank: int | None = None) -> None:
        """Counts a tensor until it is freed. rank: None: the ranks that compute now"""
        storage, rank = get_storage(x), self.at if rank is None else rank
        if storage is None:
            return
        self._subtract_freed()
        for who in range(len(self._now)) if rank is None else (rank,):
            key, nbytes = (who, storage._cdata), storage.nbytes()
            if key not in self._counted_storages:
                self._counted_storages[key] = weakref.ref(storage, partial(self._note_freed, key, nbytes))
                self._now[who] += nbytes
                if self._now[who] > self.most[who]:
                    self.most[who] = self._now[who]
                    if self._rises is not None:
                        self._rises()

    def _subtract_freed(self) -> None:
        while self._freed:
            who, nbytes = self._freed.pop()
            self._now[who] -= nbytes

    @contextmanager
    def measure_apart(self) -> Iterator[list[int]]:
        """Yields a list; on exit it receives the peak bytes beyond those before, by rank."""
        self._subtract_freed()
        self.read = False
        before, most, beyond = list(self._now), self.most, list[int]()
        self.most = list(before)
        yield beyond
        beyond += [now - then for now, then in zip(self.most, before, strict=True)]
        self.most = [max(both) for both in zip(most, self.most, strict=True)]

    def count_repetition(self, beyond: list[int]) -> None:
        """The repetition leaves nothing behind."""
        self._subtract_freed()
        self.most = [max(n, now + more) for n, now, more in zip(self.most, self._now, beyond, strict=True)]

    def has_counted(self, x: Tensor) -> bool:
        where = _identify_storage(x)
        return any(key[1] == where for key in self._counted_storages)

    def _note_freed(self, key: tuple[int, int], nbytes: int, _: object = None) -> None:
        if self._counted_storages.pop(key, None) is not None:
            self._freed.append((key[0], nbytes))


def count_arrived(x: object) -> None:
    """Counts another rank's tensors."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, StorageTracker):
            for one in _find_tensors(x):
                mode.count_tensor(one)


def _makes_storage(func: OpOverload) -> bool:
    return any(made.alias_info is None for made in func._schema.returns)


def _reads_values(func: OpOverload) -> bool:
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _find_tensors(thing: object) -> Iterator[Tensor]:
    return (x for x in tree_iter(thing) if isinstance(x, Tensor))


def _identify_storage(x: Tensor) -> int:
    storage = get_storage(x)
    return 0 if storage is None else int(storage._cdata)


@cache
def _import_fake_class() -> type[Tensor]:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor
