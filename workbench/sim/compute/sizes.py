"""Sizes only: what one rank computes with, where thousands of ranks have one model without its numbers.

Everything lives on torch's meta device, where tensors have shapes and no data. One pass of the model there shows in
which order its gradients appear; a model that cannot be run there keeps the reverse order of registration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from workbench.experiment import Experiment
from workbench.host.memory import memory
from workbench.host.observe.curvature import outlined_factors
from workbench.host.passes.recomputing import recomputed
from workbench.host.placement.canonical import prime
from workbench.host.placement.layout import Layout
from workbench.host.placement.splitting import Split
from workbench.host.placement.spread import Spread
from workbench.host.sharding.trial import Trial
from workbench.host.transfer.handover import Cut as Shards
from workbench.rank import Bucket, Factors
from workbench.sim.clock.drawing import Drawn
from workbench.sim.compute.away import Outlined
from workbench.sim.fake.shaped import shaped, stands_in
from workbench.sim.model.anew import SizesAnew
from workbench.sim.model.known import Kept
from workbench.sim.model.outline import Outline, StageOutline, ready
from workbench.tasks import Learner

if TYPE_CHECKING:
    from workbench.partitions import Partition


class Way(NamedTuple):
    """Which stage a rank is, where there are sizes only."""

    stage: int
    stages: int


class Sizes(SizesAnew, Drawn):
    """What one rank computes with, as sizes only.

    piece: which stage of its replica it is, if that lies in stages
    """

    losses: tuple[()] = ()
    ledger: Any = None  # its session's
    share = 1.0  # of the model that this rank computes
    again: tuple[float, ...] = (0.0,)  # by piece, of its forward what its backward computes again
    fresh = False  # is the next batch the first after a cut?
    split: Split | None = None  # how matrices are dealt out
    stage = (0, 1)  # which stage this rank is, of how many
    common: Any = None  # parameters that all ranks of a group have, by owner
    flow: Any = None  # its host's
    spread: Spread | None = None  # how a replica lies on several ranks
    layers: Partition  # how the ranks of a stage compute its layers

    def __init__(self, whole: Outline, bucket_mb: float) -> None:
        self._outline = self.whole = whole
        self._stage: StageOutline
        self.piece: Way | None = None
        self._count = 1  # micro-batches of a batch
        self.shares: tuple[float, ...] = (1.0,)  # of what this rank computes, by piece
        self._asked: dict[tuple[int, int], torch.Tensor | None] = {}  # what came, by micro-batch under way and piece
        self._bucket_mb, self.model, self.optimizer = bucket_mb, whole.model, whole.optimizer
        self.cut = whole.cut(bucket_mb, False)
        self._learned = self._told = self.learning = self.roomy = False
        self.shards: Shards | None = None  # the buckets in whose shards the optimizer's state lies
        self.gradient_shards = 1  # in how many shards summed gradients are kept
        self._begun = True  # has the optimizer made a step?
        self.stepped = False  # the same, on this rank
        self.opened = [0.0]  # by piece, forwards whose backward is to come
        self.going = 0  # the piece whose backward runs
        self.away = Outlined(lambda: self.stepped)
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
        return self.whole.trial_of(self.layers)

    @property
    def cheap(self) -> bool:
        """Would an engine know that before the first step, without building the model once more?"""
        return self.whole.cheap

    @property
    def to_learn(self) -> bool:
        """Whether a backward has shown in which order gradients appear, for the first time in this generation."""
        return self.learning and not self._told

    def learned(self) -> list[str]:
        """The order in which gradients appear; asked for once."""
        self._learned = self._told = True
        return self._outline.arrival

    def learn(self, names: list[str]) -> None:
        """Lays parameters out in the order of gradients; the buckets may differ from now on."""
        self._learned, self.roomy = True, False
        self.cut = self._outline.cut(self._bucket_mb, True)

    def restart_data(self, batch: int, seed: int, step: int, used: int = 0) -> None:
        pass

    def deal(self, rank: int, size: int, seed: int | None) -> None:
        pass

    @property
    def learner(self) -> Learner:
        return self.whole.learner

    # -- where this rank is one stage --

    def relaid(self, names: set[str], spread: Spread | None, rank: int, e: Experiment, seed: int,
               held: bool = True) -> None:  # fmt: skip
        """These parameters lie here from now on, and this rank computes the part that they are; or the whole model."""
        self.spread = spread
        stage, index = spread.place(rank) if spread else (0, 0)
        stages, self.split = (spread.stages, spread.split) if spread else (None, None)
        self.share, self.piece = (stages.share(stage), Way(stage, len(stages))) if stages else (1.0, None)
        self.shares = tuple(share / self.share for share in stages.shares[stage :: len(stages)]) if stages else (1.0,)
        self.opened = [0.0] * len(self.shares)
        self._outline = self.whole
        if spread and self.split:
            self._outline = slices = self.whole.slice(names, spread, (stage, index), e)
            self.common, stages = slices.common, slices.stages
            self.stage, self.share = (stage, len(stages) if stages else 1), self.share * self.split.share
        if stages:
            self._outline = self._stage = self._outline.stage(names, stages, stage)
        self._learned = self._told = self.learning = self.roomy = False
        self.fresh = True
        self.cut = self._outline.cut(self._bucket_mb, False)
        self.tune(e)

    def tune(self, e: Experiment) -> None:
        """The partition may have other knobs now."""
        (stage, stages), self.layers = self.piece or (0, 1), e.partition.layers
        self.again = recomputed(e, self.learner, self.split)[stage::stages]

    def go_on_with(self, optimizer: Any) -> None:
        """What this optimizer would remember has been handed over to it."""
        self.optimizer, self._begun = optimizer, self.stepped
        if self.stepped:
            prime(self.layout, optimizer)

    def open(self, x: Any, micro: int) -> None:
        """A batch is there, which goes through the stages when its backward is asked for."""
        self.taken += 1

    def begin(self, micro: int, partition: Partition) -> Any:
        """A batch goes through the stages; nobody knows its examples."""
        self._count = partition.micro_batches
        return ()

    def coming(self, after: int) -> Any:
        """Nobody knows the examples of a batch."""

    def buffers(self) -> list[torch.Tensor]:
        """Nothing is changed by a forward."""
        return []

    def forget(self, micros: list[int]) -> None:
        """These micro-batches do not go back."""
        for entry in [entry for entry in self._asked if entry[0] in micros]:
            del self._asked[entry]
            self.opened[entry[1]] -= 1

    def drawn(self, x: Any) -> Any:
        """Nobody knows the examples of a batch."""
        self.taken += 1
        return ()

    def reseed(self, number: int) -> None:
        """Nobody draws random numbers."""

    def squares(self) -> float:
        """Nobody knows gradients here."""
        return 0.0

    def ready(self, chunk: int) -> list[float]:
        """By bucket, the share of the backward of this piece, the last of a batch, after which it is full."""
        there = self._stage.there
        return ready(self.layout, self._stage.arrival, there) if there else self.cut.ready

    def stage_forward(self, x: torch.Tensor | None, micro: int, chunk: int) -> torch.Tensor:
        self._asked[self.flow.number(micro), chunk] = x
        self.opened[chunk] += 1
        self.ledger.forward()
        return self._stage.hands_on(self.examples(), self._count, chunk)

    def stage_backward(self, grad: Any, micro: int, chunk: int, exchanged: bool, first: bool) -> torch.Tensor | None:
        self.backward(grad, micro, exchanged, first or bool(self.came), chunk)
        x = self._asked.pop((self.flow.number(micro), chunk))
        return None if x is None else torch.empty_like(x)

    def stage_inputs(self, grad: Any, micro: int, chunk: int) -> torch.Tensor | None:
        x = self._asked[micro, chunk]
        return None if x is None else torch.empty_like(x)

    def stage_weights(self, micro: int, chunk: int, exchanged: bool, first: bool) -> None:
        self.backward(None, micro, exchanged, first or bool(self.came), chunk)
        del self._asked[micro, chunk]

    def told(self, loss: torch.Tensor) -> None:
        """Nobody knows a loss here."""

    def turn(self, worker: str) -> None:
        pass

    def forward(self, x: Any, micro: int) -> Any:
        self.opened[0] += 1
        self.taken += 0 if self.split else 1  # which has `drawn` it
        self.ledger.forward()
        return x

    def backward(self, grad: Any, micro: int, exchanged: bool, kept: bool = False, chunk: int = 0) -> Any:
        """kept: gradients lie in the buckets after it, whether this backward's are exchanged or not"""
        self.learning, self.roomy = self.learning or exchanged, self.roomy or exchanged
        self.going = chunk
        with self.ledger.backward(exchanged):
            self.opened[chunk] -= 1
            self.came, self.roomy = exchanged or kept, self.roomy or kept

    def kept(self, batch: int, counts: tuple[int, ...] = ()) -> list[Kept] | None:
        """By piece what one batch, or a micro-batch of it, keeps for its backward."""
        return self._outline.kept(batch, self._count if self.piece else 1, self.layers, counts)

    def evaluated(self) -> int | None:
        return self._outline.evaluated()

    @property
    def alike(self) -> dict[Any, Any]:
        """What one rank found out of its memory, for the others."""
        return self._outline.alike

    def standing(self) -> dict[str, memory.Storages]:
        """What stays from step to step."""
        stepped = self.optimizer if self.stepped and not self.away.has("optimizer state") else None
        return self._outline.standing(self.layout, stepped, self.roomy and self.gradient_shards == 1, self.shards)

    def full(self, index: int) -> Bucket:
        return stands_in(self.cut.buckets[index])  # whose memory another rank may have given back

    def made(self, experiment: Experiment, params: list[Any] | None = None) -> Any:
        """The optimizer that `experiment` wants for what lies here, or for all of the model."""
        return (self._outline if params is None else self.whole).made(experiment)

    def use(self, optimizer: Any) -> None:
        self.optimizer, self._begun, self.stepped = optimizer, False, False

    def update(self, bucket: Bucket | None, longest: float, by: Callable[[], None] | None,
               squares: float | None = None) -> None:  # fmt: skip
        """Nothing moves; an optimizer that took over remembers something from its first step on."""
        self.came = None
        self.stepped = self.stepped or by is None
        if by is None and not self._begun:
            prime(self.layout, self.optimizer)
            self._begun = True

    def stepped_apart(self) -> None:
        """Some of what lies apart from the model was stepped; in the end all of it is."""
        self.came, self.stepped = None, True
        if not self._begun:
            prime(self.layout, self.optimizer)
            self._begun = True

    def grads(self) -> list[Bucket]:
        self.roomy = True
        return self.cut.buckets

    def collect(self) -> None:
        """Nothing is to be seen."""

    def factors(self) -> list[Factors]:
        return outlined_factors(self.model, self.layout)

    def curve(self, vector: list[torch.Tensor], step: int) -> list[torch.Tensor]:
        return [torch.empty_like(x) for x in vector]

    def value(self, step: int) -> torch.Tensor:
        return shaped(torch.empty((), device="meta"))

    def clear(self) -> None:
        """No bucket keeps room for gradients."""
        self.roomy = False

    def params(self) -> list[Bucket]:
        return self.cut.params
