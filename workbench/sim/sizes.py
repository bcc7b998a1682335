"""Sizes only: the model without its numbers, one for all ranks, so that thousands of ranks take no memory.

Everything lives on torch's meta device, where tensors have shapes and no data. One pass of the model there shows in
which order its gradients appear; a model that cannot be run there keeps the reverse order of registration.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workbench.experiment import Experiment
from workbench.host import memory
from workbench.host.batches import Batches
from workbench.host.canonical import prime
from workbench.host.handover import Cut as Shards
from workbench.host.handover import kept_bytes
from workbench.host.layout import Layout
from workbench.host.trial import Listening, Trial, assumed
from workbench.optimizers import Optimizer, built
from workbench.rank import Bucket, StrategyError
from workbench.sim.known import Kept, kept_of
from workbench.tasks import Learner


class Cut:
    """One layout of the model in buckets, and when in a pass each of them is ready.

    ready: by bucket, the share of backward after which it is full
    needed: by bucket in the order of forward (the last bucket first), the share of forward before which it is used
    """

    def __init__(self, layout: Layout, arrival: list[str]) -> None:
        self.layout = layout
        self.buckets = layout.buckets
        self.params = layout.params()
        self.ready = ready(layout, arrival)
        self.needed, before = [], 0
        for bucket in reversed(self.params):
            self.needed.append(before / layout.numel)
            before += bucket.data.numel()
        self.nbytes = {b.name: b.nbytes for b in self.params}


def ready(layout: Layout, arrival: list[str]) -> list[float]:
    """By bucket, the share of the elements whose gradients have come once it is full and its turn has come."""
    numel = {p.name: p.numel for p in layout.order}
    share, done = {}, 0
    for name in arrival:
        done += numel[name]
        share[name] = done / layout.numel
    found, last = [], 0.0
    for bucket in layout.buckets:
        last = max([last, *(share.get(part.name, 1.0) for part in bucket.parts)])
        found.append(last)
    return found


class Outline:
    """The model as sizes, shared by all ranks."""

    def __init__(self, experiment: Experiment, learner: Learner) -> None:
        torch.manual_seed(experiment.seed)
        random.seed(experiment.seed)
        self.model = outline(learner)
        first = Layout(self.model, experiment.bucket_mb)
        names = [p.name for p in first.order]
        self.learner, self._made = learner, dict[Optimizer, Any]()
        self.optimizer = self.made(experiment)
        seen = _tried(self.model, learner, experiment)
        _stepped(self.model, self.optimizer)
        self.learned = seen is not None
        self.trial = seen or assumed(reversed(names))
        came = set(arrival := self.trial.arrival)
        self.arrival = arrival + [n for n in names if n not in came]
        self._names = names
        self._cuts: dict[tuple[float, bool], Cut] = {}
        self._ranks, self._seed, self._kept = experiment.ranks, experiment.seed, dict[int, Kept | None]()
        self._standing: dict[Any, dict[str, memory.Storages]] = {}
        self.alike: dict[Any, Any] = {}  # what one rank found out of its memory, for the others

    def kept(self, batch: int) -> Kept | None:
        """What one batch keeps for its backward; None where nobody can tell."""
        if batch not in self._kept:
            self._kept[batch] = kept_of(self.model, self.learner, self._ranks, self._seed, batch)
        return self._kept[batch]

    def standing(self, layout: Layout, optimizer: Any, roomy: bool, cut: Shards | None) -> dict[str, memory.Storages]:
        """What stays from step to step on any rank with this layout; the optimizer is None until it has stepped.

        cut: the buckets in whose shards the optimizer's state lies; as the first rank keeps it, whose are the largest
        """
        key = id(layout), roomy, id(optimizer), len(optimizer.state) if optimizer else 0, cut and len(cut.groups[0])
        if key not in self._standing:
            kept = memory.optimizer_state(optimizer) if optimizer else {}
            if optimizer and cut is not None:
                nbytes = kept_bytes(layout, optimizer, cut, 0, self._ranks)
                kept = memory.storages(torch.empty(nbytes, dtype=torch.uint8, device="meta"))
            self._standing[key] = {
                "parameters": memory.parameters(self.model, layout),
                "gradients": memory.storages(memory.rooms(layout)) if roomy else {},
                "optimizer state": kept,
            }
        return self._standing[key]

    def made(self, experiment: Experiment) -> Any:
        """The optimizer that `experiment` wants, one for all ranks."""
        wanted = experiment.optimizer
        if wanted not in self._made:
            params = [p for p in self.model.parameters() if p.requires_grad]
            self._made[wanted] = built(wanted, self.learner.optimizer, params, experiment.lr)
        return self._made[wanted]

    def cut(self, bucket_mb: float, learned: bool) -> Cut:
        """The buckets of this size, in the learned order of gradients or in the one before that was known."""
        key = bucket_mb, learned
        if key not in self._cuts:
            layout = Layout(self.model, bucket_mb)
            layout.reorder(self.arrival if learned else self._names)
            layout.make_room()
            for place in layout.order:
                layout.keep(place, torch.empty_like(place.param))
            self._cuts[key] = Cut(layout, self.arrival)
        return self._cuts[key]


class Sizes:
    """What one rank computes with, as sizes only."""

    losses: tuple[()] = ()
    ledger: Any = None  # its session's
    reading: Any = None  # its session's
    share = 1.0  # of the model that this rank computes

    def __init__(self, whole: Outline, bucket_mb: float) -> None:
        self._outline, self._bucket_mb, self._learned = whole, bucket_mb, False
        self.model, self.optimizer = whole.model, whole.optimizer
        self.cut = whole.cut(bucket_mb, False)
        self.learning = self.roomy = False
        self.shards: Shards | None = None  # the buckets in whose shards the optimizer's state lies
        self.gradient_shards = 1  # in how many shards summed gradients are kept
        self._begun = True  # has the optimizer made a step?
        self.stepped = False  # the same, on this rank
        self.opened = 0  # forwards whose backward is to come
        self.came: bool | None = None  # the gradients that are there: exchanged or not; None: there are none

    @property
    def layout(self) -> Layout:
        return self.cut.layout

    def rebucket(self, bucket_mb: float) -> None:
        self._bucket_mb, self.roomy = bucket_mb, False
        self.cut = self._outline.cut(bucket_mb, self._learned)

    @property
    def trial(self) -> Trial:
        """What a step reads, and in which order its gradients come."""
        return self._outline.trial

    @property
    def to_learn(self) -> bool:
        """Has a backward shown in which order gradients appear, for the first time?"""
        return self.learning and not self._learned

    def learn(self) -> None:
        """Takes the order of gradients over; the buckets may differ from now on."""
        self._learned, self.roomy = True, False
        self.cut = self._outline.cut(self._bucket_mb, True)

    def restart_data(self, batch: int, seed: int, step: int) -> None:
        pass

    def batch(self) -> Any:
        raise StrategyError("sizes only: there is no batch to look at; simulate with real=True")

    def turn(self, worker: str) -> None:
        pass

    def forward(self, x: Any, micro: int) -> Any:
        self.opened += 1
        self.ledger.forward()
        return x

    def backward(self, grad: Any, micro: int, exchanged: bool) -> Any:
        self.learning, self.roomy = self.learning or exchanged, self.roomy or exchanged
        with self.ledger.backward(exchanged):
            self.opened, self.came = self.opened - 1, exchanged

    def kept(self, batch: int) -> Kept | None:
        """What one batch keeps for its backward."""
        return self._outline.kept(batch)

    @property
    def alike(self) -> dict[Any, Any]:
        """What one rank found out of its memory, for the others."""
        return self._outline.alike

    def standing(self) -> dict[str, memory.Storages]:
        """What stays from step to step."""
        stepped, roomy = self.optimizer if self.stepped else None, self.roomy and self.gradient_shards == 1
        return self._outline.standing(self.layout, stepped, roomy, self.shards)

    def full(self, index: int) -> Bucket:
        return self.cut.buckets[index]

    def made(self, experiment: Experiment) -> Any:
        return self._outline.made(experiment)

    def use(self, optimizer: Any) -> None:
        self.optimizer, self._begun, self.stepped = optimizer, False, False

    def update(self, bucket: Bucket | None, longest: float, by: Callable[[], None] | None) -> None:
        """Nothing moves; an optimizer that took over remembers something from its first step on."""
        self.came = None
        self.stepped = self.stepped or by is None
        if by is None and not self._begun:
            prime(self.layout, self.optimizer)
            self._begun = True

    def grads(self) -> list[Bucket]:
        self.roomy = True
        return self.cut.buckets

    def clear(self) -> None:
        """No bucket keeps room for gradients."""
        self.roomy = False

    def params(self) -> list[Bucket]:
        return self.cut.params


def outline(learner: Learner) -> nn.Module:
    """The model on the meta device: built there, or, if it does not let itself be, built and then emptied."""
    try:
        with torch.device("meta"):
            model = learner.model()
    except Exception:
        model = learner.model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"task.model() must return a torch Module, not a {type(model).__name__}")
    known: dict[int, Any] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:  # one that is tied stays tied
                empty = known.setdefault(id(p), nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad))
                module._parameters[name] = empty
                known[id(empty)] = empty
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else torch.empty_like(b, device="meta")
    return model.train()


def _tried(model: nn.Module, learner: Learner, experiment: Experiment) -> Trial | None:
    """What a forward and a backward read, and in which order gradients appear; None where it cannot be run here."""
    listening = Listening({n: p for n, p in model.named_parameters() if p.requires_grad})
    try:
        batches = Batches(learner.data, 0, experiment.ranks, "meta")
        batches.restart(experiment.batch, experiment.seed, 0)
        with torch.enable_grad():
            with listening.forward():
                loss = learner.loss(model, batches.next())
            with listening.backward():
                loss.backward()
    except Exception:
        return None
    return listening.heard


def _stepped(model: nn.Module, optimizer: Any) -> None:
    """Gives the optimizer its state."""
    for p in model.parameters():
        p.grad = torch.empty_like(p) if p.requires_grad else None
    try:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    except Exception:
        optimizer.state.clear()
