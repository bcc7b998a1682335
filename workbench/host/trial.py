"""Which parameters a model reads in a forward and a backward, in which order, and how the gradients come between.

Learned by listening to one pass. A strategy whose ranks hold only shards then knows what is read next, and what is read
no more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.host import absent

Names = tuple[str, ...]


class Trial(NamedTuple):
    """What a forward and a backward did with parameters, by their names.

    forward:  the parameters that each call read, one call after the other
    backward: ("read", names) before they were read, ("grad", (name,)) once its gradient was there, in their order
    """

    forward: tuple[Names, ...]
    backward: tuple[tuple[str, Names], ...]

    @property
    def arrival(self) -> list[str]:
        """Names in the order in which gradients came."""
        return [name for kind, names in self.backward for name in names if kind == "grad"]


def assumed(names: Iterable[str]) -> Trial:
    """What a stack of layers does whose parameters are registered as `names`."""
    forward = tuple((name,) for name in names)
    return Trial(forward, tuple((kind, one) for one in reversed(forward) for kind in ("read", "grad")))


class Listening:
    """Listens to one forward and one backward of a model whose parameters are all here."""

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        self._named = named
        self._names = {id(p): name for name, p in named.items()}
        lies: dict[int, list[tuple[int, str]]] = defaultdict(list)  # by storage, where in it each parameter begins
        for name, p in named.items():
            lies[p.untyped_storage()._cdata].append((int(p.storage_offset()), name))
        self._lies = {where: sorted(begins) for where, begins in lies.items()}
        self._forward: list[Names] = []
        self._backward: list[tuple[str, Names]] = []
        self._turned = False  # does backward run?

    @property
    def heard(self) -> Trial | None:
        """What was heard, once a backward has run."""
        return Trial(tuple(self._forward), tuple(self._backward)) if self._turned else None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, a forward runs."""
        with self._asking(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, its backward runs."""
        self._turned = True
        hooks = [p.register_post_accumulate_grad_hook(partial(self._came, name)) for name, p in self._named.items()]
        try:
            with self._asking():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        for p in self._named.values():
            absent.leave(p, self._asked)
        try:
            yield
        finally:
            for p in self._named.values():
                absent.come(p)

    def _came(self, name: str, _: Any) -> None:
        self._backward.append(("grad", (name,)))

    def _asked(self, params: list[nn.Parameter]) -> None:
        self._read(tuple(self._names[id(p)] for p in params))

    def _read(self, names: Names) -> None:
        if self._turned:
            self._backward.append(("read", names))
        elif not self._forward or self._forward[-1] != names:
            self._forward.append(names)

    def _pack(self, x: Tensor) -> Any:
        begins = self._lies.get(x.untyped_storage()._cdata)
        if begins is None:
            return x
        return x, begins[max(0, bisect_right(begins, (x.storage_offset(), "\uffff")) - 1)][1]

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        x, name = packed
        self._read((name,))
        return x
