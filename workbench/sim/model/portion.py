"""A virtual rank's portion of a model: a stage, or slices of all matrices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.experiment import Experiment
from workbench.host.memory.batches import BatchReader
from workbench.host.memory.memory_account import MemoryAccount
from workbench.host.passes.checkpointing import CheckpointedUnits, list_units
from workbench.host.passes.coded_exchange import Ask, MeetingKind
from workbench.host.passes.in_flight import InFlight
from workbench.host.passes.recomputing import find_recomputed
from workbench.host.passes.stage_module import StageModule
from workbench.host.passes.tensor_parallel import TensorParallelGroup
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.replica_spread import ReplicaSpread
from workbench.host.placement.tensor_split import TensorSplit
from workbench.partitions import Partition
from workbench.rank import Memory, StrategyError
from workbench.rank.errors import explain_missing_forward
from workbench.sim.model.outline import BucketCut, compute_ready_shares
from workbench.tasks import Learner


class ModelPortion:
    """The part of RankTensors that handles a spread model.

    spread: how a replica is spread over ranks
    piece:  this rank's stage; split: how matrices are split; stage: (its index, number of stages)
    share:  this rank's share of the model's compute; shares: of that, by piece
    again:  by piece, the share of its forward that its backward recomputes
    fresh:  whether the next batch is the first with this spread
    ask:    exchanges a tensor with the other ranks of the present pass
    """

    batches: BatchReader
    micros_in_flight: InFlight
    cut: BucketCut
    layout: ParameterLayout
    learner: Learner
    memory_account: MemoryAccount
    losses: list[float]
    memory: Memory
    model: nn.Module
    spread: ReplicaSpread | None = None
    piece: StageModule | None = None
    split: TensorSplit | None = None
    stage = (0, 1)
    share = 1.0
    shares: tuple[float, ...] = (1.0,)
    fresh = False
    ask: Ask
    _arrival: list[str] | None
    _cut_buckets: Callable[[], None]
    _collect_gradients: Callable[..., None]
    _learned: bool
    _use_own_rng: Callable[[], AbstractContextManager[None]]
    _random_state: Tensor
    _together: TensorParallelGroup | None = None
    _checkpointed: CheckpointedUnits | None = None
    again: tuple[float, ...] = (0.0,)
    computed: int | None = None  # bytes for the last held-out metrics here

    def __init__(self) -> None:
        self._batches: dict[int, Any] = {}  # before their way through the stages

    def lay_out_parameters(self, names: set[str], spread: ReplicaSpread | None, rank: int, e: Experiment, seed: int,
               held: bool = True) -> None:  # fmt: skip
        """This rank holds and computes these parameters. spread: None if `names` are the whole model"""
        self.layout.take_parameters(self.model, names, held)
        self.spread = spread
        stage, index = spread.locate_rank(rank) if spread else (0, 0)
        stages, self.split = (spread.stages, spread.split) if spread else (None, None)
        self._stop_recomputing()
        if self._together is not None:
            self._together.restore_modules()
        self.share = stages.compute_share(stage) if stages else 1.0
        self.shares = tuple(share / self.share for share in stages.shares[stage :: len(stages)]) if stages else (1.0,)
        self.piece = StageModule(self.model, stages.pieces_of_stage(stage), stage, len(stages)) if stages else None
        self._together = None
        if self.split:
            self._together = TensorParallelGroup(self.model, self.split, index, self._meet_group, seed=seed)
            self.share *= self.split.share
            self.stage = stage, len(stages) if stages else 1
        self._arrival, self._learned, self.fresh = None, False, True
        self._cut_buckets()
        self.tune_partition(e)

    def tune_partition(self, e: Experiment) -> None:
        self._stop_recomputing()
        if units := list_units(self.model, self.learner, e.partition):
            self._checkpointed = CheckpointedUnits(units, e.partition.recompute[0])
        stage, stages = (self.piece.stage, self.piece.stages) if self.piece else (0, 1)
        self.again = find_recomputed(e, self.learner, self.split)[stage::stages]
        if self._together is not None:
            self._together.coding = e.partition.inside(self.memory)

    def _stop_recomputing(self) -> None:
        if self._checkpointed is not None:
            self._checkpointed.restore_forwards()
        self._checkpointed = None

    @property
    def common_params(self) -> Any:
        """By owner, parameters that all ranks of a group have."""
        assert self._together is not None
        return self._together.common

    def forward_context(self, x: Tensor | None, chunk: int = 0) -> AbstractContextManager[None]:
        """x: output of the stage before; None: the first stage"""
        params = self.piece.list_params(chunk) if self.piece is not None else None
        return nullcontext() if self._together is None else self._together.run_pass(x, params)

    def _meet_group(self, meeting: MeetingKind, x: Tensor) -> Tensor:
        return self.ask(meeting, x)

    def run_exchanging(self, ask: Ask, compute: Callable[[], Any]) -> Any:
        """Runs a pass that exchanges tensors with the other slices by `ask`."""
        self.ask = ask
        return compute()

    def take_fresh(self) -> bool:
        """Returns whether a batch is the first with this spread. Call it once a batch."""
        fresh, self.fresh = self.fresh, False
        return fresh

    def draw_batch(self, x: Any) -> Any:
        return self.batches.next_batch() if x is None else x

    @property
    def random_state(self) -> Any:
        return self._random_state

    @random_state.setter
    def random_state(self, state: Tensor) -> None:
        self._random_state = state

    @property
    def slice_rng(self) -> Any:
        """The state of random numbers that a replica's slices share."""
        return self._together.random_position if self._together is not None else None

    @slice_rng.setter
    def slice_rng(self, at: Any) -> None:
        if self._together is not None:
            self._together.random_position = at

    def reseed_rng(self, number: int) -> None:
        self._random_state = torch.Generator().manual_seed(number).get_state()

    def store_batch(self, x: Any, micro: int) -> None:
        """Stores a batch until its backward takes it through the stages."""
        self._batches[micro] = self.batches.next_batch() if x is None else x

    def begin_batch(self, micro: int, partition: Partition) -> Any:
        if micro not in self._batches:
            raise StrategyError(explain_missing_forward(micro))
        batch = self._batches.pop(micro)
        self.micros_in_flight.cut_batch(batch, partition)
        return batch

    def peek_batch(self, after: int) -> Any:
        """The batch `after` batches from now."""
        return self.batches.peek_batch(after)

    def list_buffers(self) -> list[Tensor]:
        """Tensors that forwards change, apart from parameters."""
        return self.piece.list_buffers() if self.piece is not None else []

    def forget_micros(self, micros: list[int]) -> None:
        """They get no backward."""
        if self.piece is not None:
            self.piece.drop_micros(micros)

    def _list_other_names(self, chunk: int) -> list[str]:
        assert self.piece is not None
        here = {id(p) for p in self.piece.list_params(chunk)}
        return [place.name for place in self.layout.order if id(place.param) not in here]

    def list_ready_shares(self, chunk: int) -> list[float]:
        """Returns by bucket the share of this piece's backward (the batch's last) after which it is full."""
        assert self._arrival is not None
        there = self._list_other_names(chunk)
        return compute_ready_shares(self.layout, self._arrival, there) if there else self.cut.ready

    def stage_forward(self, x: Tensor | None, micro: int, chunk: int) -> Tensor:
        assert self.piece is not None
        part, number = self.micros_in_flight.take_micro(micro), self.micros_in_flight.number_micro(micro)
        with (
            self._use_own_rng(),
            torch.enable_grad(),
            self.forward_context(x, chunk),
            self.micros_in_flight.read_in_forward(micro),
        ):
            made = self.piece.run_forward(self.learner.loss, part, x, number, chunk)
        self.memory_account.note_forward(list(self.micros_in_flight.inputs.values()))
        return made

    def stage_backward(self, grad: Any, micro: int, chunk: int, exchanged: bool, first: bool) -> Tensor | None:
        """A batch's last backward is `exchanged`. From the `first` on, gradients are in the buckets."""
        assert self.piece is not None
        came: list[Tensor | None] = []
        piece, number = self.piece, self.micros_in_flight.number_micro(micro)
        there = self._list_other_names(chunk) if exchanged else []
        with self.micros_in_flight.read_in_backward(micro):
            self._collect_gradients(
                lambda: came.append(piece.run_backward(grad, number, chunk)), exchanged, first, there
            )
        return came[0]

    def stage_inputs(self, grad: Any, micro: int, chunk: int) -> Tensor | None:
        """Runs the first half of a backward, without gradients of parameters."""
        assert self.piece is not None
        with self._use_own_rng(), torch.enable_grad():
            return self.piece.backward_inputs(grad, self.micros_in_flight.number_micro(micro), chunk)

    def stage_weights(self, micro: int, chunk: int, exchanged: bool, first: bool) -> None:
        """Runs the second half of a backward."""
        assert self.piece is not None
        there = self._list_other_names(chunk) if exchanged else []
        self._collect_gradients(
            partial(self.piece.backward_weights, self.micros_in_flight.number_micro(micro), chunk),
            exchanged,
            first,
            there,
        )

    def begin_evaluation(self, ask: Ask) -> None:
        """ask: exchanges a tensor with the other slices"""
        self.ask = ask
        self.model.eval()

    def end_evaluation(self, most: int) -> None:
        """most: its peak bytes here"""
        self.note_evaluation(most)
        self.model.train()

    def note_evaluation(self, most: int) -> None:
        self.computed = most

    def measure_evaluation(self) -> int | None:
        return self.computed

    def store_loss(self, loss: Tensor) -> None:
        self.losses.append(float(loss))
