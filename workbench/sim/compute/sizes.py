"""Sizes only: the state of one rank without values.

All tensors are on torch's meta device. One pass of the model shows the order of its gradients. A model that cannot run
there keeps the reverse order of registration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from workbench.experiment import Experiment
from workbench.host.memory import storages as memory
from workbench.host.memory.memory_account import MemoryAccount
from workbench.host.passes.in_flight import InFlight
from workbench.host.passes.recomputing import find_recomputed
from workbench.host.passes.submodel_training import SubModelTraining
from workbench.host.placement.canonical_state import create_optimizer_state
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.replica_spread import ReplicaSpread
from workbench.host.placement.tensor_split import TensorSplit
from workbench.host.sharding.access_trace import AccessTrace
from workbench.host.transfer.shard_layout import ShardLayout as Shards
from workbench.rank import Bucket
from workbench.sim.clock.batches import BatchOutline
from workbench.sim.compute.offload import SizedOffload
from workbench.sim.fake.shaped import make_shaped, shape_bucket
from workbench.sim.model.known_memory import KeptBytes
from workbench.sim.model.outline import Outline, StageOutline, compute_ready_shares
from workbench.sim.model.session_parts import SessionParts
from workbench.strategies.second_order.curvature import CurvatureOutline
from workbench.tasks import Learner

if TYPE_CHECKING:
    from workbench.partitions import Partition


class StagePlace(NamedTuple):
    """A rank's stage."""

    stage: int
    stages: int


class RankSizes(BatchOutline):
    """The state of one rank. See `ModelPortion` for common fields."""

    losses: tuple[()] = ()
    memory_account: MemoryAccount  # these three belong to the session
    micros_in_flight: InFlight
    submodel: SubModelTraining
    share = 1.0
    again: tuple[float, ...] = (0.0,)
    fresh = False
    split: TensorSplit | None = None
    stage = (0, 1)
    common_params: Any = None
    spread: ReplicaSpread | None = None
    layers: Partition  # how the ranks of a stage compute its layers

    def __init__(self, whole: Outline, bucket_mb: float) -> None:
        self._outline = self.whole = whole
        self._stage: StageOutline
        self.piece: StagePlace | None = None
        self._count = 1  # micro-batches per batch
        self.shares: tuple[float, ...] = (1.0,)
        self._asked: dict[tuple[int, int], torch.Tensor | None] = {}  # received inputs, by open micro-batch and piece
        self._bucket_mb, self.model, self.optimizer = bucket_mb, whole.model, whole.optimizer
        self.cut = whole.cut_buckets(bucket_mb, False)
        self._learned = self._told = self.learning = self.roomy = False
        self.shards: Shards | None = None  # buckets with sharded optimizer state
        self.gradient_shards = 1  # shards of the summed gradients
        self._begun = True  # whether the optimizer has made a step
        self.stepped = False  # the same, on this rank
        self.opened = [0.0]  # by piece, forwards without a backward
        self.going = 0  # the piece of the present backward
        self.away = SizedOffload(lambda: self.stepped)
        self.came: bool | None = None  # whether the present gradients are exchanged; None: no gradients

    def begin_generation(self, parts: SessionParts) -> None:
        """Uses the parts of a new session."""
        self.memory_account, self.micros_in_flight = parts.memory_account, parts.micros_in_flight
        self.submodel, self.examples = parts.submodel, lambda: parts.get_experiment().batch

    @property
    def layout(self) -> ParameterLayout:
        return self.cut.layout

    def resize_buckets(self, bucket_mb: float) -> None:
        self._bucket_mb, self.roomy = bucket_mb, False
        self.cut = self._outline.cut_buckets(bucket_mb, self._learned)

    @property
    def access_trace(self) -> AccessTrace:
        return self.whole.trace_reads(self.layers)

    @property
    def is_cheap(self) -> bool:
        """Whether an engine knows the trial before the first step without a second build of the model."""
        return self.whole.cheap

    @property
    def has_new_order(self) -> bool:
        """Whether a backward has shown the order of gradients for the first time in this generation."""
        return self.learning and not self._told

    def learn_order(self) -> list[str]:
        """Returns the order of gradients. Call it once."""
        self._learned = self._told = True
        return self._outline.arrival

    def reorder_parameters(self, names: list[str]) -> None:
        self._learned, self.roomy = True, False
        self.cut = self._outline.cut_buckets(self._bucket_mb, True)

    def restart_data(self, batch: int, seed: int, step: int, used: int = 0) -> None:
        pass

    def shard_data(self, rank: int, size: int, seed: int | None) -> None:
        pass

    @property
    def learner(self) -> Learner:
        return self.whole.learner

    # -- a rank that is one stage --

    def lay_out_parameters(self, names: set[str], spread: ReplicaSpread | None, rank: int, e: Experiment, seed: int,
               held: bool = True) -> None:  # fmt: skip
        self.spread = spread
        stage, index = spread.locate_rank(rank) if spread else (0, 0)
        stages, self.split = (spread.stages, spread.split) if spread else (None, None)
        self.share, self.piece = (
            (stages.compute_share(stage), StagePlace(stage, len(stages))) if stages else (1.0, None)
        )
        self.shares = tuple(share / self.share for share in stages.shares[stage :: len(stages)]) if stages else (1.0,)
        self.opened = [0.0] * len(self.shares)
        self._outline = self.whole
        if spread and self.split:
            self._outline = slices = self.whole.get_slice(names, spread, (stage, index), e)
            self.common_params, stages = slices.common, slices.stages
            self.stage, self.share = (stage, len(stages) if stages else 1), self.share * self.split.share
        if stages:
            self._outline = self._stage = self._outline.get_stage(names, stages, stage)
        self._learned = self._told = self.learning = self.roomy = False
        self.fresh = True
        self.cut = self._outline.cut_buckets(self._bucket_mb, False)
        self.tune_partition(e)

    def tune_partition(self, e: Experiment) -> None:
        (stage, stages), self.layers = self.piece or (0, 1), e.partition.layers
        self.again = find_recomputed(e, self.learner, self.split)[stage::stages]

    def take_optimizer(self, optimizer: Any) -> None:
        """Takes an optimizer with transferred state."""
        self.optimizer, self._begun = optimizer, self.stepped
        if self.stepped:
            create_optimizer_state(self.layout, optimizer)

    def store_batch(self, x: Any, micro: int) -> None:
        self.taken_batches += 1

    def begin_batch(self, micro: int, partition: Partition) -> Any:
        self._count = partition.micro_batches
        return ()

    def peek_batch(self, after: int) -> Any:
        """Returns None: a batch has no contents."""

    def list_buffers(self) -> list[torch.Tensor]:
        """A forward changes no tensors."""
        return []

    def forget_micros(self, micros: list[int]) -> None:
        for entry in [entry for entry in self._asked if entry[0] in micros]:
            del self._asked[entry]
            self.opened[entry[1]] -= 1

    def take_fresh(self) -> bool:
        """Returns whether a batch is the first with this spread. Call it once a batch."""
        fresh, self.fresh = self.fresh, False
        return fresh

    def draw_batch(self, x: Any) -> Any:
        self.taken_batches += 1
        return ()

    def reseed_rng(self, number: int) -> None:
        """Does nothing: simulations of sizes draw no random numbers."""

    def sum_squares(self) -> float:
        return 0.0

    def list_ready_shares(self, chunk: int) -> list[float]:
        """Returns by bucket the share of this piece's backward (the batch's last) after which it is full."""
        there = self._stage.there
        return compute_ready_shares(self.layout, self._stage.arrival, there) if there else self.cut.ready

    def stage_forward(self, x: torch.Tensor | None, micro: int, chunk: int) -> torch.Tensor:
        self._asked[self.micros_in_flight.number_micro(micro), chunk] = x
        self.opened[chunk] += 1
        self.memory_account.note_forward()
        return self._stage.hands_on(self.examples(), self._count, chunk)

    def stage_backward(self, grad: Any, micro: int, chunk: int, exchanged: bool, first: bool) -> torch.Tensor | None:
        self.run_backward(grad, micro, exchanged, first or bool(self.came), chunk)
        x = self._asked.pop((self.micros_in_flight.number_micro(micro), chunk))
        return None if x is None else torch.empty_like(x)

    def stage_inputs(self, grad: Any, micro: int, chunk: int) -> torch.Tensor | None:
        x = self._asked[micro, chunk]
        return None if x is None else torch.empty_like(x)

    def stage_weights(self, micro: int, chunk: int, exchanged: bool, first: bool) -> None:
        self.run_backward(None, micro, exchanged, first or bool(self.came), chunk)
        del self._asked[micro, chunk]

    def store_loss(self, loss: torch.Tensor) -> None:
        """Does nothing: a loss has no value."""

    def activate_worker(self, worker: str) -> None:
        pass

    def run_forward(self, x: Any, micro: int) -> Any:
        self.opened[0] += 1
        self.taken_batches += 0 if self.split else 1  # `drawn` has counted it
        self.memory_account.note_forward()
        return x

    def run_backward(self, grad: Any, micro: int, exchanged: bool, kept: bool = False, chunk: int = 0) -> Any:
        """kept: whether gradients stay in the buckets, exchanged or not"""
        self.learning, self.roomy = self.learning or exchanged, self.roomy or exchanged
        self.going = chunk
        with self.memory_account.measure_backward(exchanged):
            self.opened[chunk] -= 1
            self.came, self.roomy = exchanged or kept, self.roomy or kept

    def kept(self, batch: int, counts: tuple[int, ...] = ()) -> list[KeptBytes] | None:
        return self._outline.kept(batch, self._count if self.piece else 1, self.layers, counts)

    def measure_evaluation(self) -> int | None:
        return self._outline.measure_evaluation()

    @property
    def alike(self) -> dict[Any, Any]:
        """Memory results that equal ranks share."""
        return self._outline.alike

    def list_standing(self) -> dict[str, memory.Storages]:
        stepped = self.optimizer if self.stepped and not self.away.has_kind("optimizer state") else None
        return self._outline.list_standing(self.layout, stepped, self.roomy and self.gradient_shards == 1, self.shards)

    def get_full_bucket(self, index: int) -> Bucket:
        return shape_bucket(self.cut.buckets[index])  # another rank may have freed its memory

    def make_optimizer(self, experiment: Experiment, params: list[Any] | None = None) -> Any:
        """Returns the optimizer of the parameters here. With `params`, returns the whole model's."""
        return (self._outline if params is None else self.whole).make_optimizer(experiment)

    def use_optimizer(self, optimizer: Any) -> None:
        self.optimizer, self._begun, self.stepped = optimizer, False, False

    def update_model(self, bucket: Bucket | None, longest: float, by: Callable[[], None] | None,
               squares: float | None = None) -> None:  # fmt: skip
        """Steps the optimizer without values. A new optimizer gets its state at its first step."""
        self.came = None
        self.stepped = self.stepped or by is None
        if by is None and not self._begun:
            create_optimizer_state(self.layout, self.optimizer)
            self._begun = True

    def note_shard_step(self) -> None:
        """Notes the update of an offloaded shard; all shards follow in the same step."""
        self.came, self.stepped = None, True
        if not self._begun:
            create_optimizer_state(self.layout, self.optimizer)
            self._begun = True

    def list_grads(self) -> list[Bucket]:
        self.roomy = True
        return self.cut.buckets

    @property
    def curvature(self) -> CurvatureOutline:
        return CurvatureOutline(self.model, self.layout, make_shaped(torch.empty((), device="meta")))

    def free_gradients(self) -> None:
        self.roomy = False

    def list_params(self) -> list[Bucket]:
        return self.cut.params

    # -- another generation begins --

    def discard_step(self) -> None:
        self._asked.clear()
        self.opened, self.going, self.came, self.roomy = [0.0] * len(self.shares), 0, None, False

    def forget_order(self) -> None:
        self._told = self.learning = False

    def release_state(self, e: Experiment, seed: int) -> None:
        self.lay_out_parameters(set(self.whole.names), None, 0, e, seed)

    def reallocate_state(self, e: Experiment) -> None:
        self.resize_buckets(e.bucket_mb)
        self.take_optimizer(self.make_optimizer(e))
