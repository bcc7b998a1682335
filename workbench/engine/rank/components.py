"""The parts that one rank trains with. All ranks check that theirs are equal."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.engine.collectives.lane import Lane
from workbench.engine.collectives.lane_wires import GroupWires
from workbench.engine.collectives.shaping import ComputePace, LinkShaper, Port
from workbench.engine.collectives.stopwatch import make_stopwatch
from workbench.engine.collectives.wire import Aborted
from workbench.engine.compute import shared_parameters
from workbench.engine.compute.compute_parts import ComputeParts
from workbench.engine.compute.host import Host
from workbench.engine.compute.offload import OffloadTransfers
from workbench.engine.control.canonical import broadcast_text, gather_numbers
from workbench.engine.control.control_channel import ControlChannel
from workbench.engine.control.peers import Peers
from workbench.engine.control.rendezvous import Rendezvous
from workbench.engine.device import make_chip
from workbench.engine.p2p.mailbox import Mailbox
from workbench.engine.rank.checkpoints import CheckpointStore, CheckpointWriter, open_resumed
from workbench.engine.rank.lane_opener import LaneOpener
from workbench.engine.rank.lead import ScriptLead, TaskLead
from workbench.engine.rank.model_setup import ScriptModel, TaskModel, explain_refusal, make_optimizer, require_trainable
from workbench.engine.rank.model_view import LoopLead, RankSessionView, TrainedModel
from workbench.engine.script.loop import ScriptLoop
from workbench.experiment import Experiment, partition_rules
from workbench.fabric.load import crashed, pauses
from workbench.host.checkpoint.checkpointer import Checkpointer
from workbench.host.checkpoint.divergence import DivergenceRecovery
from workbench.host.core.change_queue import ChangeQueue
from workbench.host.core.request_answers import RequestAnswer
from workbench.host.elastic.rollback import Rollback
from workbench.host.loop.rank_loop import RankLoop
from workbench.host.memory.batches import BatchReader, Chance, Numbers, make_example, numbers
from workbench.host.memory.memory_account import MemoryAccount
from workbench.host.memory.memory_counts import RealMemoryCounts
from workbench.host.memory.offload import OffloadStore
from workbench.host.observe.compression_error import CompressionErrorProbe
from workbench.host.observe.non_finite import NonFiniteGuard
from workbench.host.passes.checkpointing import list_units
from workbench.host.passes.recomputing import find_recomputed
from workbench.host.passes.submodel_training import SubModelTraining
from workbench.host.passes.tensor_schedule import PassPlan, find_plans
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.replica_spread import ReplicaSpread
from workbench.host.reconfigure.policy_runner import PolicyRunner, TappedRecorder
from workbench.host.sharding.parameter_usage import ParameterUsage
from workbench.host.sharding.read_order import foresee_trace
from workbench.host.sharding.unsharder import Unsharder
from workbench.settings import Json, KnobError
from workbench.tasks import Learner, at_rate

MESSAGE_MODELS = 16  # a message's bytes, as a multiple of the model's, at most
MIN_MESSAGE_LIMIT = 2**26  # bytes that a message may have in any run


class RankComponents(RankLoop):
    """A rank's loop with all its parts on the engine.

    paused, credit:     whether the ranks make no steps; how many they make before they pause again
    early_requests:     received before their turn
    longest_evaluation: seconds
    spread:             how several ranks share a replica; None while every rank holds all of it
    evaluation_copy:    of the model, while the model itself changes
    """

    learner: Learner
    model: nn.Module
    layout: ParameterLayout
    optimizer: Optimizer
    lane: Lane
    host: Host

    def __init__(self, session: RankSessionView, before: RankComponents | None = None) -> None:
        """before: the same rank in the previous generation; this rank takes over its parts"""
        torch.set_num_threads(1)
        self.session, self.experiment, self.rank = session, session.experiment, session.rank
        self.clock, self.paced_sleep = session.clock, session.paced_sleep
        self.leaving, self.inbox = session.leaving, session.inbox
        self.trained, self.lead = self._make_lead()
        try:
            self._make_parts(before)
        except BaseException:
            self.lead.close()  # else a script would wait forever, with its process group open
            raise

    def _make_lead(self) -> tuple[TrainedModel, LoopLead]:
        if self.experiment.task.has_own_loop:
            loop = ScriptLoop(self)
            return ScriptModel(self, loop), ScriptLead(self, loop)
        return TaskModel(self), TaskLead(self)

    def _make_parts(self, before: RankComponents | None) -> None:
        session = self.session
        self.policy_runner = before.policy_runner if before else PolicyRunner(self)
        self.policy_runner.follow_rank(self)
        self.record = TappedRecorder(session.record, self.policy_runner)
        self.queue = ChangeQueue(before.queue.planned if before else session.planned)
        self.chip = make_chip(session.device)
        self.chip.bind_thread()
        self.peers = Peers(session)
        self.control = self.peers.control
        if reason := explain_refusal(self, self.experiment.strategy):
            raise KnobError(reason)
        self.control_channel = ControlChannel(self.control, self.rank.id, self.inbox, self.peers.make_flag())
        self.spread: ReplicaSpread | None = None
        self._take_over(before) if before else self._make_model()
        self.require_trainable(self.experiment)
        self.rollback = Rollback(self)
        self._make_host(before.non_finite_guard.first if before else None)
        self.trained.mark_limits()
        self.shared = shared_parameters.SharedParameters(self.layout, self.control, self.peers.make_path)
        self.meeting = Rendezvous(self)
        self.state: Any = None
        store = CheckpointStore(session.run_dir)
        writer = CheckpointWriter(self, store.folder) if store.folder is not None else None
        self.checkpointer = Checkpointer(
            self, writer, None if before or session.joins else open_resumed(session.resume, self.rank.id)
        )
        self.error_probe, self.back = CompressionErrorProbe(), DivergenceRecovery(self, store)
        self.paused, self.credit = False, 0
        self.early_requests: list[dict[str, Any]] | None = None
        self.longest_evaluation = 0.0
        self.evaluation_copy: nn.Module | None = None

    def _make_model(self) -> None:
        made = self.trained.build_parts()
        self.learner, self.model, self.layout, self.optimizer = made.learner, made.model, made.layout, made.optimizer
        self.rank.lr, self.rate, self.batches = made.lr, made.rate, made.batches
        self.restart_data(self.session.used)

    def _take_over(self, before: RankComponents) -> None:
        self.learner, self.model, self.layout = before.learner, before.model, before.layout
        self.optimizer, self.rate, self.batches = before.optimizer, before.rate, before.batches
        self.layout.drop_gradients()
        self.restart_data(self.session.used)

    def make_optimizer(self, wanted: Experiment, params: list[nn.Parameter] | None = None) -> Optimizer:
        return make_optimizer(self.learner, self.model, self.layout, wanted, params)

    def _make_for(self, params: list[nn.Parameter]) -> Optimizer:
        optimizer = self.make_optimizer(self.experiment, params)
        at_rate(optimizer, self.rank.lr)
        return optimizer

    def copy_model(self) -> nn.Module:
        """Its values are from an earlier evaluation."""
        self.evaluation_copy = self.evaluation_copy or copy.deepcopy(self.model)
        return self.evaluation_copy

    def make_example(self, wanted: Experiment) -> Any:
        return make_example(self.learner, wanted, self.session.device)

    @property
    def offloaded_state(self) -> OffloadStore:
        return self.away.kept

    @property
    def reads(self) -> BatchReader:
        return self.batches

    @property
    def rng_states(self) -> Numbers | None:
        return numbers()

    def restore_rng(self, states: Numbers | None) -> None:
        if states is not None:
            Chance(states).begin()

    @property
    def slice_rng(self) -> tuple[int, int] | None:
        group = self.host.tensor.group
        return group.random_position if group is not None else None

    def restore_slice_rng(self, at: tuple[int, int] | None) -> None:
        if at is not None and (group := self.host.tensor.group) is not None:
            group.random_position = at

    def restart_data(self, used: int) -> None:
        self.batches.set_share(*partition_rules.find_data_shard(self.experiment, self.rank.id))
        self.batches.restart_reading(self.experiment.batch, self.experiment.seed, self.rank.step, used)

    def _make_host(self, first: float | None) -> None:
        """first: the run's first loss, if a generation before knew it"""
        self.port = Port(self.rank.id, self.rank.size, self.paced_sleep, self.experiment.seed)
        self.mailbox = self._make_mailbox()
        self.watch = make_stopwatch(self.chip, self.clock, self.record, self._check_peers)
        self.away = OffloadTransfers(self)
        submodel = SubModelTraining(self.model, self.learner, self._make_for, lambda: self.experiment)
        self.memory_account = self._make_memory_account(submodel)
        opener = self._open_lane()
        self.unsharder = Unsharder(self, lambda *asked: self.host.whole.unshard_buckets(*asked), listens=True)
        self.non_finite_guard = NonFiniteGuard(self, self.handle_alarm, first, self.trained.repeats)
        self.host = Host(
            self._list_compute_parts(submodel),
            opener.open_lane,
            self.before_update,
            lambda: self.meeting.check_background(),
            self.peers.check_with_grace,
        )
        self.micros_in_flight = self.host.pipeline.micros_in_flight

    def _make_mailbox(self) -> Mailbox:
        rank, session = self.rank, self.session
        limit = max(MIN_MESSAGE_LIMIT, MESSAGE_MODELS * self.layout.byte_count)
        return Mailbox(
            rank, self.peers.store, session.store_address, session.secret, self.port, self.leaving, self.record.span,
            session.loopback, limit, chip=self.chip, step=lambda: self.lane.step, check_peers=self.peers.check_peers,
            report_strangers=lambda n: self.record.sample(rank.step, "strangers", self.clock.now(), n),
        )  # fmt: skip

    def _make_memory_account(self, submodel: SubModelTraining) -> MemoryAccount:
        counts = RealMemoryCounts(self, lambda: self.host.list_open(), lambda: self.batches.nbytes,
                                  lambda: self.host.parts.fully, lambda: submodel.own_params)  # fmt: skip
        return MemoryAccount(self, counts, self.away.kept, self._read_allocator)

    def _open_lane(self) -> LaneOpener:
        """Opens the lane of all ranks. Returns what opens further lanes."""
        peers = self.peers
        opener = LaneOpener(self.session.kind, peers, self.port, self.mailbox, self.watch, self.chip, self.away,
                            self.memory_account, lambda handle: self.host.lanes.wait(handle))  # fmt: skip
        self.perform_hop = opener.perform_hop
        self.lane = opener.open_lane(
            "comm", GroupWires(peers.data, LinkShaper(self.port, peers.make_arrival_table()), peers.arrivals),
            self.control_channel.notify_ranks,
        )  # fmt: skip
        return opener

    def _list_compute_parts(self, submodel: SubModelTraining) -> ComputeParts:
        assert self.rollback is not None
        return ComputeParts(
            rank=self.rank,
            experiment=lambda: self.experiment,
            learner=self.learner,
            model=self.model,
            layout=self.layout,
            optimizer=self.optimizer,
            batches=self.batches,
            lane=self.lane,
            mailbox=self.mailbox,
            pace=ComputePace(self.rank.id, self.paced_sleep),
            watch=self.watch,
            memory_account=self.memory_account,
            unsharder=self.unsharder,
            submodel=submodel,
            non_finite_guard=self.non_finite_guard,
            rollback=self.rollback,
            away=self.away,
            usage=ParameterUsage(self.peers.make_unused_flags()),
            run_loss_backward=self.trained.run_loss_backward,
            show_loss=self.trained.show_loss,
        )

    @abstractmethod
    def before_update(self) -> None:
        """Called before each update of the model."""

    @abstractmethod
    def end_wait(self) -> Any:
        """Records how long this rank has waited for the next step. Returns when that step began."""

    def _read_allocator(self) -> dict[str, int]:
        here = {"allocated": self.chip.allocated_bytes(), "allocated peak": self.chip.peak_bytes()}
        return here if any(here.values()) else {}

    def _check_peers(self) -> None:
        """The host calls it while it waits for its chip."""
        if self.peers.data is not None:
            self.peers.data.check_peers()
        elif self.leaving.is_set():
            raise Aborted("told to leave")

    def require_trainable(self, wanted: Experiment) -> Experiment:
        self.lead.require_followed(wanted)
        return require_trainable(self, wanted)

    def handle_alarm(self, does: str) -> None:
        """On rank 0: pauses, stops or rolls back all ranks after a bad loss. The lab acts on other ranks' alarms."""
        if self.rank.id == 0:
            self.inbox.put({"kind": does, "id": "nan", "step": self.rank.step})

    @property
    def now(self) -> float:
        return self.clock.now()

    def span(self, lane: str, name: str, began: float, nbytes: int = 0) -> None:
        self.record.span(self.rank.step, lane, name, began, began, self.now, nbytes)

    def mark(self, name: str, detail: Mapping[str, Json]) -> None:
        self.session.mark(name, detail)

    def set_phase(self, phase: str) -> None:
        self.session.set_phase(phase)

    # -- changes --

    def set_paused(self, so: bool) -> None:
        self.paused, self.credit = so, 0 if so else self.credit

    def refuse_request(self, refusal: dict[str, Json]) -> None:
        """Answers the present request with a refusal, which rank 0 records."""
        self.answer = RequestAnswer("refused", self.rank.step, self.now, refusal)
        if self.rank.id == 0:
            self.mark("refused", refusal)

    def set_fabric(self, was: Experiment | None, wanted: Experiment) -> None:
        """A new fault may halt its rank for a while, or end it."""
        self.port.fabric = wanted.fabric
        self.host.pace.set_pace(wanted.pace * 1e-3, wanted.fabric.faults)
        old, new = was.fabric.faults if was else (), wanted.fabric.faults
        self.pending_pause += pauses(old, new, self.rank.id)
        self.crashing = {*self.crashing, *crashed(old, new, self.rank.size)}

    def choose_lane(self) -> None:
        alone = self.session.kind == "gloo" or self.rank.mesh.flat  # else two communicators would be under way at once
        quick = self.rank.compressor.immediate and not self.port.is_active and not self.experiment.strategy.offloads
        quick = quick and self.port.fabric.algorithm.native
        self.lane.run_eagerly(quick and alone)

    def resize_own_buckets(self, bucket_mb: float) -> None:
        self.layout.resize_buckets(bucket_mb)

    def release_state(self, seed: int) -> None:
        self.host.take_part(None, seed)

    def reallocate_state(self) -> None:
        self.spread, self.layout = None, ParameterLayout(self.model, self.experiment.bucket_mb)
        self.optimizer = self.make_optimizer(self.experiment)
        at_rate(self.optimizer, self.rank.lr)

    def use_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.host.parts.use_optimizer(optimizer)

    def sample(self, name: str, value: float) -> None:
        self.record.sample(self.rank.step, name, self.clock.now(), value)

    async def resize_buckets(self, bucket_mb: float) -> None:
        self.shared.share_again(lambda: self.layout.resize_buckets(bucket_mb))
        self.mark_buckets()

    def lay_out_parameters(self, names: set[str], spread: ReplicaSpread | None, held: bool = True) -> None:
        self.host.hooks.detach_hooks()
        self.layout.take_parameters(self.model, names, held)
        seed = partition_rules.find_random_seed(self.experiment, self.rank.id, self.rank.step)
        self.host.take_part(spread, seed)
        if (spread and spread.split) or (self.spread and self.spread.split):
            torch.manual_seed(seed)
        self.spread, self.evaluation_copy = spread, None
        self.tune_partition()
        self.mark_buckets()

    def tune_partition(self) -> None:
        e, split = self.experiment, self.spread.split if self.spread else None
        units = list_units(self.model, self.learner, e.partition)
        self.host.pipeline.tune_partition(
            self._plan_passes(self.spread), units, find_recomputed(e, self.learner, split)
        )

    def _plan_passes(self, spread: ReplicaSpread | None) -> tuple[PassPlan, ...]:
        """Returns the plans by piece of the model; () if they are unknown, or if ranks hold no slices."""
        if spread is None or spread.split is None:
            return ()
        try:
            return find_plans(self.experiment, self.learner, spread.split)
        except KnobError:  # the pace is then kept less finely
            return ()

    def sharded(self, buckets: Any) -> None:
        """The optimizer's state is already in place."""

    @property
    def sent_bytes(self) -> int:
        return self.host.lanes.sent_bytes

    async def gather(self, number: int) -> list[int]:
        return gather_numbers(self.control, number)

    async def broadcast_text(self, text: str, by: int = 0) -> str:
        return self.broadcast_text_now(text, by)

    def broadcast_text_now(self, text: str, by: int = 0) -> str:
        return broadcast_text(self.control, text.encode(), by).decode() if self.control is not None else text

    def take_early_requests(self) -> None:
        """Another exchange follows, so requests on their way come first."""
        if self.control_channel.has_pending:
            self.early_requests = self.control_channel.take_requests()

    def foresee_reads(self, cheaply: bool) -> Any:
        return foresee_trace(self.learner, self.experiment, cheaply)
