"""Hooks that catch gradients as autograd finishes them, and hand out full buckets in strict order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from workbench.engine.compute.compute_parts import ComputeParts
from workbench.engine.compute.pass_timer import PassTimer
from workbench.engine.compute.tensor import TensorPerformer
from workbench.host.core.gradient_hooks import require_gradient
from workbench.host.passes.checkpointing import explain_second_gradient
from workbench.rank import Bucket

_ROUNDS = itertools.count(1)  # numbers every exchanged backward of this process


class GradientHooks:
    """Hooks on the gradients of one rank's model, active while a backward is exchanged.

    A hook runs among megabytes of arithmetic that push it out of the caches, so it does little. Small gradients are
    only counted, and copied together once their bucket is full.

    hand_out: gives a full bucket to the strategy
    """

    def __init__(self, parts: ComputeParts, timing: PassTimer, tensor: TensorPerformer,
                 hand_out: Callable[[Bucket], None]) -> None:  # fmt: skip
        self._rank, self._layout, self._pace, self._usage = parts.rank, parts.layout, parts.pace, parts.usage
        self._timing, self._tensor, self._hand_out = timing, tensor, hand_out
        self._order: list[str] | None = []  # the order in which gradients appear, until `take_order` was called
        self._arrived: list[str] = []  # names in the order in which gradients appeared, while it is learned
        self._learn = False
        self._round = 0  # the number of this backward, 0 between backwards
        self._left: list[int] = []  # gradients that each bucket still waits for
        self._next = 0
        self._had = 0  # elements with a gradient from before this backward
        self._removers: list[Any] = []
        self._frozen: list[Any] = []  # places whose parameters are frozen and have no hook

    def begin_exchange(self, there: Iterable[nn.Parameter] = ()) -> None:
        """there: parameters that have gradients already"""
        learn = self._order is not None
        if learn != self._learn:
            self.detach_hooks()
            self._learn = learn
        self.attach_hooks()
        if self._frozen:
            self._attach_trained()
        self._layout.allocate_gradients()
        self._arrived, self._next, self._had = [], 0, 0
        self._left = [len(b.parts) for b in self._layout.buckets]
        self._round = next(_ROUNDS)
        if there:
            self._count_present({id(param) for param in there})

    @property
    def is_exchanging(self) -> bool:
        return self._round > 0

    def end_exchange(self) -> None:
        """Ends the exchange: gradients stay where autograd puts them."""
        self._round = 0

    def learn_order(self) -> None:
        if self._order is not None:  # a rank that used no parameter keeps its layout's order
            self._order = self._arrived or [place.name for place in self._layout.order]

    def relearn_order(self) -> None:
        """Learns the order of gradients again, because this rank holds other parameters."""
        self._order = []

    @property
    def knows_order(self) -> bool:
        """Whether the first exchanged backward has ended, and its order is not taken yet."""
        return bool(self._order)

    def take_order(self) -> list[str]:
        """Returns the order in which gradients appeared in the first exchanged backward. Can be called once."""
        assert self._order
        names, self._order = self._order, None
        known = set(names)
        return names + [place.name for place in self._layout.order if place.name not in known]

    def attach_hooks(self) -> None:
        """Puts hooks on the gradients, if there are none; they note which parameters a backward uses."""
        if not self._removers:
            self._frozen = list(self._layout.order)
            self._attach_trained()

    def _attach_trained(self) -> None:
        """Puts hooks on parameters that have none; torch refuses one on a frozen parameter."""
        for place in self._frozen:
            if place.param.requires_grad:
                self._removers.append(place.param.register_post_accumulate_grad_hook(self._make_hook(place)))
        self._frozen = [place for place in self._frozen if not place.param.requires_grad]

    def detach_hooks(self) -> None:
        """Takes the hooks off, until a backward is exchanged again."""
        for remover in self._removers:
            remover.remove()
        self._removers, self._frozen = [], []

    def _make_hook(self, place: Any) -> Callable[[nn.Parameter], None]:
        keep: Callable[..., None] = self._layout.store_gradient
        learn = self._learn

        def take(param: nn.Parameter) -> None:
            now, place.filled = self._round, False
            if not now:
                return
            if place.round == now:
                raise explain_second_gradient(place.name)
            if not require_gradient(place.name, param):
                return
            place.round = now
            if learn:
                self._arrived.append(place.name)
            if not place.small:
                keep(place, param.grad)
            left, bucket = self._left, place.bucket
            left[bucket] -= 1
            if not left[bucket] and bucket == self._next:
                self._hand_out_full()

        return take

    def _hand_out_full(self, computing: bool = True) -> None:
        layout = self._layout
        if self._pace.is_active and computing and self._tensor.group is None:  # a joint pass is paced at its meetings
            came = sum(p.numel for p in layout.order if p.round == self._round) - self._had
            self._timing.reach_fraction(came / max(1, layout.element_count - self._had))
        while self._next < len(self._left) and not self._left[self._next]:
            self._next += 1
            self._hand_out(layout.fill_bucket(self._next - 1))

    def _count_present(self, params: set[int]) -> None:
        """Counts gradients that exist already, by the parameters' ids, and hands out buckets that are full."""
        for place in self._layout.order:
            if id(place.param) in params and place.param.grad is not None and not place.filled:
                place.round = self._round
                self._had += place.numel
                if self._learn:
                    self._arrived.append(place.name)
                if not place.small:
                    self._layout.store_gradient(place, place.param.grad)
                self._left[place.bucket] -= 1
        self._hand_out_full(computing=False)

    def hand_out_rest(self) -> None:
        """After backward: hands out gradients that it did not compute, as earlier backwards added them up.

        A parameter that no backward used counts as zero. The rank raises a hand before it hands out its bucket.
        """
        layout = self._layout
        left = [place for place in layout.order if place.round != self._round]
        layout.note_unused({place.name for place in left if place.param.grad is None or place.filled})
        if layout.unused:
            self._usage.raise_hand(self._rank.step, min(p.bucket for p in left if p.name in layout.unused))
        for place in left:
            place.round, place.filled = self._round, False
            grad = torch.zeros_like(place.param) if place.param.grad is None else place.param.grad
            if place.small:
                place.param.grad = grad
            else:
                layout.store_gradient(place, grad)
            self._left[place.bucket] -= 1
        self._hand_out_full()
