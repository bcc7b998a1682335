"""Gradients on their way from autograd into buckets: copied once each, handed out in the order of the buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from workbench.engine.lane import StrategyError


class Tap:
    """Catches gradients as autograd finishes them, copies each once into its bucket, emits full buckets in order.

    host: what is resumed with each full bucket (`hand_out`); its layout says where gradients go.
    """

    def __init__(self, host: Any) -> None:
        self.host = host
        self.listening = False
        self.arrived: list[str] = []
        self._left: list[int] = []
        self._seen: set[int] = set()
        self._next = 0
        self._ready = 0
        self._removers: list[Any] = []

    def open(self) -> None:
        layout = self.host.layout
        if not self._removers:
            self._attach()
        self._left = [len(b.parts) for b in layout.buckets]
        self._seen, self.arrived = set(), []
        self._next = self._ready = 0
        self.listening = True

    def shut(self) -> None:
        self.listening = False

    def _attach(self) -> None:
        for place in self.host.layout.order:
            take = self._taker(place)
            self._removers.append(place.param.register_post_accumulate_grad_hook(take))

    def detach(self) -> None:
        for remover in self._removers:
            remover.remove()
        self._removers = []

    def _taker(self, place: Any) -> Callable[[nn.Parameter], None]:
        def take(param: nn.Parameter) -> None:
            if self.listening:
                self._take(place, param)

        return take

    def _take(self, place: Any, param: nn.Parameter) -> None:
        if id(place) in self._seen:
            raise StrategyError(
                f"parameter {place.name} received a gradient twice in one backward (re-entrant checkpointing?): "
                f"use_reentrant=False, or a strategy that does not exchange gradients (LocalSGD)"
            )
        self._seen.add(id(place))
        grad = param.grad
        place.grad.copy_(grad.to_dense() if grad.is_sparse else grad)
        param.grad = place.grad
        self.arrived.append(place.name)
        self._ready += place.numel
        self._left[place.bucket] -= 1
        if self._left[place.bucket] == 0 and place.bucket == self._next:
            self._emit()

    def _emit(self) -> None:
        buckets = self.host.layout.buckets
        self.host.pace.reach(self._ready / self.host.layout.numel)
        while self._next < len(buckets) and self._left[self._next] == 0:
            bucket = buckets[self._next]
            self._next += 1
            self.host.hand_out(bucket)

    def flush(self) -> None:
        """After backward: parameters without a gradient count as zero, and their buckets go out, too."""
        for place in self.host.layout.order:
            if id(place) not in self._seen:
                place.grad.zero_()
                place.param.grad = place.grad
                self._left[place.bucket] -= 1
        self._emit()
