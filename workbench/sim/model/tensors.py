"""Real tensors: the model, data and optimizer of one virtual rank."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.experiment import Experiment
from workbench.experiment.partition_rules import find_data_shard
from workbench.host.core.gradient_hooks import BackwardInLoss, ModuleHooks, require_gradient, unscale_grads
from workbench.host.memory.batches import BatchReader
from workbench.host.memory.offload import OffloadStore
from workbench.host.passes.checkpointing import explain_second_gradient
from workbench.host.passes.piecewise import PiecewisePass
from workbench.host.placement.bucket_groups import ParameterPlace
from workbench.host.placement.canonical_state import clip_gradients
from workbench.host.placement.optimizer_slots import step_shard
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.transfer.momentum import subtract_gradients
from workbench.rank import Bucket, StrategyError
from workbench.rank.errors import explain_missing_forward
from workbench.sim.model.outline import BucketCut
from workbench.sim.model.portion import ModelPortion
from workbench.sim.model.session_parts import SessionParts
from workbench.strategies.second_order.curvature import CurvatureEstimator
from workbench.tasks import Learner
from workbench.tasks._shared_storage import require_own_storage


class RankTensors(ModelPortion):
    """One rank's model, data and optimizer, with the engine's seeds."""

    shards: Any = None  # as in RankSizes
    gradient_shards = 1

    def __init__(self, experiment: Experiment, learner: Learner, rank: int) -> None:
        super().__init__()
        torch.manual_seed(experiment.seed)
        random.seed(experiment.seed)
        self.learner = learner
        self.model = learner.model().train()
        require_own_storage(self.model)
        self._module_hooks = ModuleHooks(self.model)
        trained = lambda: ((place.name, place.param) for place in self.layout.order)  # noqa: E731
        self._backward_in_loss = BackwardInLoss(trained, learner.scripted)
        self._lay_out_model(experiment)
        self.curvature = CurvatureEstimator(self.model, learner.loss, self.layout)
        self.optimizer = self.make_optimizer(experiment)
        self.away = OffloadStore()
        self.batches = BatchReader(learner.data, rank, experiment.ranks, "cpu", learner.indexed)
        self.batches.set_share(*find_data_shard(experiment, rank))
        self.restart_data(experiment.batch, experiment.seed, 0)
        torch.manual_seed(experiment.seed * 100_003 + rank + 1)
        self._random_state = torch.get_rng_state()
        self.losses: list[float] = []
        self._open: dict[tuple[str, int], Tensor] = {}  # losses without a backward, by worker and micro-batch
        self._worker = ""
        self._looked: dict[str, Any] = {}  # by worker: the batch of its next forward, after a look-up of rows
        self._waves: PiecewisePass | None = None
        self._grads: dict[str, list[Tensor | None]] = {}  # gradients of inactive workers
        self._arrival: list[str] | None = None
        self._learned = False
        self._cut_buckets()

    def begin_generation(self, parts: SessionParts) -> None:
        """Uses the parts of a new session."""
        self._rank, self.memory, self._get_experiment = parts.rank, parts.rank.memory, parts.get_experiment
        self.memory_account, self.micros_in_flight = parts.memory_account, parts.micros_in_flight
        self.unsharder, self.usage, self.non_finite_guard = parts.unsharder, parts.usage, parts.non_finite_guard

    def make_optimizer(self, experiment: Experiment, params: list[Any] | None = None) -> Any:
        """Returns the optimizer of `params`; by default of the parameters here."""
        if params is None:
            here = {id(place.param) for place in self.layout.order}  # frozen parameters may be unfrozen later
            params = [p for p in self.model.parameters() if id(p) in here or not p.requires_grad]
        return experiment.optimizer.build(self.learner.optimizer, params, experiment.lr)

    def use_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def copy_values(self, other: RankTensors) -> None:
        """Copies parameters and buffers, because random initial values may differ."""
        mine, its = self.model.state_dict(), other.model.state_dict()
        for name, x in mine.items():
            x.copy_(its[name])

    def _lay_out_model(self, e: Experiment) -> None:
        """The layout keeps values, because whole passes run at once, but gathered parts arrive one by one."""
        self.layout = ParameterLayout(self.model, e.bucket_mb)
        self.layout.keeps_values = True

    def _cut_buckets(self) -> None:
        self.cut = BucketCut(self.layout, self._arrival or [p.name for p in self.layout.order])

    def resize_buckets(self, bucket_mb: float) -> None:
        self.layout.resize_buckets(bucket_mb)
        self._cut_buckets()

    def share_memory(self, other: RankTensors) -> None:
        if other is not self:
            self.layout.adopt_vectors(other.layout.weights)
            self._cut_buckets()

    def unshare_memory(self) -> None:
        self.layout.adopt_vectors([w.clone() for w in self.layout.weights])
        self._cut_buckets()

    @property
    def has_new_order(self) -> bool:
        """Whether a backward has shown the order of gradients, and `learn_order` has not returned it."""
        return self._arrival is not None and not self._learned

    def learn_order(self) -> list[str]:
        """Returns the order of gradients. Call it once."""
        assert self._arrival is not None
        self._learned = True
        return self._arrival

    def reorder_parameters(self, names: list[str]) -> None:
        self.layout.reorder_buckets(names)
        self._cut_buckets()

    def shard_data(self, rank: int, size: int, seed: int | None) -> None:
        """Reads the data of `rank` from the next restart on; see `BatchReader.set_share`."""
        self.batches.set_share(rank, size, seed)

    def restart_data(self, batch: int, seed: int, step: int, used: int = 0) -> None:
        self.batches.restart_reading(batch, seed, step, used)

    def next_batch(self) -> Any:
        return self.batches.next_batch()

    @property
    def taken_batches(self) -> int:
        return self.batches.taken

    def draw_ahead(self) -> Any:
        """Draws the batch of this worker's next forward before it."""
        batch = self._looked[self._worker] = self.batches.next_batch()
        return batch

    def use_client(self, index: int, count: int) -> None:
        self.batches.select_client(index, count)

    def run_forward(self, x: Any, micro: int) -> Tensor:
        with self._use_own_rng(), torch.enable_grad():
            looked = self._looked.pop(self._worker, None) if x is None else x
            inputs = self.batches.next_batch() if looked is None else looked
            with self.unsharder.run_pass("forward"), self.forward_context(None), self._module_hooks.wrap_hooks():
                with self._keep_writes(), self._backward_in_loss.watch_forward():
                    loss = self.learner.loss(self.model, inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError("the loss must be a scalar tensor with a gradient")
        self._open[self._worker, micro] = loss
        self.losses.append(float(loss.detach()))
        self.curvature.note_forward(inputs)
        self.memory_account.note_forward(inputs)
        self._check_loss(loss, inputs)
        return loss.detach()

    @contextmanager
    def _keep_writes(self) -> Iterator[None]:
        """Lets writes of a forward into parameters reach the shards, which this rank holds already."""
        layout = self.layout
        released = layout.list_released()
        before = {p: (p.param.data_ptr(), p.param._version) for index in released for p in layout.groups[index]}
        yield
        for index in released:
            written = {p.name for p in layout.groups[index] if before[p] != (p.param.data_ptr(), p.param._version)}
            if written:
                layout.adopt_released_writes(index, written)
                self.unsharder.written.add(index)

    def piece_forward(self, waves: PiecewisePass, micro: int, piece: int, of: int, falls: bool) -> Tensor | None:
        """Runs a batch through a piece. The last piece returns the loss."""
        self._waves = waves
        with self._use_own_rng(), torch.enable_grad():
            batch, loss = waves.piece_forward(self.batches.next_batch, micro, piece, of, falls)
        if loss is not None:
            self.losses.append(float(loss.detach()))
            if not falls:
                self._open[self._worker, micro] = loss
            self._check_loss(loss, batch)
        self.memory_account.note_forward(batch)
        return None if loss is None else loss.detach()

    def _check_loss(self, loss: Tensor, batch: Any) -> None:
        with self._use_own_rng():
            self.non_finite_guard.check_forward(loss.detach(), batch)

    def list_open(self) -> Iterable[Tensor]:
        risen = self._waves.list_open() if self._waves else ()
        return [*risen, *self._open.values(), *(self.piece.opened.values() if self.piece else ())]

    def activate_worker(self, worker: str) -> None:
        """Makes `worker` active. Workers share parameters, but not gradients."""
        if worker != self._worker:
            params = [place.param for place in self.layout.order]
            self._grads[self._worker] = [p.grad for p in params]
            for p, grad in zip(params, self._grads.pop(worker, [None] * len(params)), strict=True):
                p.grad = grad
            self._worker = worker

    def run_backward(self, grad: Any, micro: int, exchanged: bool) -> None:
        """Computes gradients. If `exchanged`, they go into the buckets."""
        if isinstance(grad, Tensor):
            raise StrategyError("a rank's backward begins with its loss, or its replica's: give a number, or nothing")
        loss = self._open.pop((self._worker, micro), None)
        if loss is None:
            raise StrategyError(explain_missing_forward(micro))
        if exchanged and self._worker:
            raise StrategyError("several workers have one set of buckets: await rank.backward() whole, or real=False")
        self._backward_in_loss.require_scale(grad)
        self.curvature.note_backward(grad)
        with unscale_grads((place.param for place in self.layout.order), grad), self._module_hooks.wrap_hooks(grad):
            self._collect_gradients(partial(_run_loss_backward, loss, grad), exchanged)

    def _collect_gradients(
        self, run: Callable[[], None], exchanged: bool, first: bool = False, there: Collection[str] = ()
    ) -> None:
        """Runs a backward. there: names of parameters with gradients from earlier backwards"""
        self.layout.note_unused(set())
        self.usage.begin_backward(self._rank.step)
        self.usage.require_trained(self._get_experiment().strategy)
        if exchanged:
            self.layout.allocate_gradients()
        with self.memory_account.measure_backward(exchanged), self._use_own_rng(), torch.enable_grad():
            with self.unsharder.run_pass("backward"):
                if exchanged:
                    names = self._run_watched(run)
                    if self._arrival is None:
                        self._arrival = [*there, *(name for name in names if name not in there)]
                        self.cut.note_arrival(self._arrival)
                    self._note_unused()
                elif self.piece is not None:  # gradients of several backwards add up
                    self._record_order(run)
                else:
                    run()
            if first:
                self.layout.move_gradients()
            elif exchanged:
                self.list_grads()

    def _note_unused(self) -> None:
        """Notes parameters that no backward of this step has used, and raises a hand if some exist."""
        unused = [place for place in self.layout.order if place.param.grad is None or place.filled]
        self.layout.note_unused({place.name for place in unused})
        if unused:
            self.usage.raise_hand(self._rank.step, min(place.bucket for place in unused))

    def _run_watched(self, run: Callable[[], None]) -> list[str]:
        """Returns the order of gradients in a backward, with unused parameters last.

        Raises StrategyError if one gradient came twice, as real ranks do.
        """
        names = self._record_order(run)
        if len(set(names)) < len(names):
            raise explain_second_gradient(next(name for name in names if names.count(name) > 1))
        return names + [p.name for p in self.layout.order if p.name not in set(names)]

    def _record_order(self, run: Callable[[], None]) -> list[str]:
        """Runs a backward. Returns its parameters in the order of gradients."""
        names: list[str] = []

        def hear(p: Tensor, place: ParameterPlace) -> None:
            if require_gradient(place.name, p):
                names.append(place.name)
                place.filled = False

        hooks = [
            place.param.register_post_accumulate_grad_hook(partial(hear, place=place))
            for place in self.layout.order
            if place.param.requires_grad
        ]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        return names

    def free_gradients(self) -> None:
        self.layout.drop_gradients()

    def get_full_bucket(self, index: int) -> Bucket:
        return self.layout.fill_bucket(index)

    def sum_squares(self) -> float:
        return clip_gradients(self.layout, math.inf) ** 2

    def update_model(self, bucket: Bucket | None, longest: float, by: Callable[[], None] | None,
               squares: float | None = None) -> float | None:  # fmt: skip
        """Steps the optimizer. Returns the norm of a gradient that is clipped to `longest`.

        squares: sum over a replica's gradients, if this rank is one of its stages
        """
        if bucket is None:
            of_replica = float if squares is None else lambda own: squares
            norm = clip_gradients(self.layout, longest, of_replica) if longest else None
            with self._ignore_versions():
                (by or self.optimizer.step)()
            subtract_gradients(self.layout, self.optimizer, self._rank.memory)
            self.optimizer.zero_grad(set_to_none=True)
            self.layout.release_gradients()
            self.curvature.note_update()
            return norm
        step_shard(self.layout, self.optimizer, bucket)
        return None

    def note_shard_step(self) -> None:
        """Does nothing: offloaded shards change no state here."""

    def list_grads(self) -> list[Bucket]:
        if self._worker:
            raise StrategyError("several workers have one set of buckets: await rank.backward() whole, or real=False")
        return self.layout.list_grads()

    def list_params(self) -> list[Bucket]:
        return self.layout.list_params()

    def _ignore_versions(self) -> Any:
        """Allows a worker's update between another worker's forward and backward, as without locks."""
        params = tuple(place.param for place in self.layout.order)
        return torch.autograd._unsafe_preserve_version_counter(params) if self._worker else nullcontext()

    @contextmanager
    def _use_own_rng(self) -> Iterator[None]:
        """Swaps in this rank's random state, because torch's belongs to the whole process."""
        torch.set_rng_state(self._random_state)
        yield
        self._random_state = torch.get_rng_state()

    # -- another generation begins --

    def discard_step(self) -> None:
        for kept in (self._open, self._looked, self._grads, self._batches, self.losses):
            kept.clear()
        self._worker, self._waves = "", None
        self.layout.drop_gradients()

    def forget_order(self) -> None:
        """Forgets the order of gradients. The next backward shows it to every rank."""
        self._arrival, self._learned = None, False

    def release_state(self, e: Experiment, seed: int) -> None:
        """Removes stages, slices and checkpointing."""
        self._stop_recomputing()
        if self._together is not None:
            self._together.restore_modules()
        self.spread = self.piece = self.split = self._together = None
        self.stage, self.share, self.shares, self.fresh = (0, 1), 1.0, (1.0,), True

    def reallocate_state(self, e: Experiment) -> None:
        """Lays out the whole model on this rank, with a new optimizer."""
        self._lay_out_model(e)
        self.curvature = CurvatureEstimator(self.model, self.learner.loss, self.layout)
        self.optimizer = self.make_optimizer(e)
        self._arrival, self._learned = None, False
        self._cut_buckets()
        self.tune_partition(e)


def _run_loss_backward(loss: Tensor, grad: float | None) -> None:
    loss.backward() if grad is None or grad == 1.0 else loss.backward(torch.full_like(loss, grad))
