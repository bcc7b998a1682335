"""Builds, checks, wraps and orders the model of a rank."""

from __future__ import annotations

import gc
import random
from collections.abc import Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.engine.baselines.torch_ddp import (
    choose_options,
    convert_to_mib,
    remove_hooks,
    require_all_grads,
    wrap_model,
)
from workbench.engine.compute import shared_parameters
from workbench.engine.control.canonical import broadcast_model, check_model, gather_numbers
from workbench.engine.rank.model_view import BuiltModel, ModelView, ScriptRankView
from workbench.engine.script.interception import hook_name
from workbench.engine.script.loop import ScriptLoop
from workbench.engine.script.optimizers import ScriptRate
from workbench.experiment import Experiment, closure_rules, momentum_rules, sharding_rules, sparse_rules
from workbench.fabric import traffic
from workbench.host.core.learning_rate import Rate
from workbench.host.core.planned_event import Planned
from workbench.host.memory.batches import BatchReader
from workbench.host.placement.canonical_state import hash_model_state
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.reconfigure import validation
from workbench.rank import Op
from workbench.settings import Change, KnobError
from workbench.tasks import Learner, rate
from workbench.tasks._shared_storage import require_own_storage


class TaskModel:
    """A task's model."""

    repeats = True

    def __init__(self, run: ModelView) -> None:
        self._run = run

    def build_parts(self) -> BuiltModel:
        run, e, rank, device = self._run, self._run.experiment, self._run.rank, self._run.session.device
        learner = e.task.build()
        torch.manual_seed(e.seed)
        random.seed(e.seed)
        model = learner.model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"task.model() must return a torch Module, not a {type(model).__name__}")
        require_own_storage(model)
        model = model.to(device).train()
        layout = ParameterLayout(model, e.bucket_mb)
        if not run.session.joins:  # a joining rank receives the other ranks' state
            check_model(run.control, model)
            broadcast_model(run.control, layout, model)
        optimizer = make_optimizer(learner, model, layout, e)
        torch.manual_seed(e.seed * 100_003 + rank.id + 1)
        batches = BatchReader(learner.data, rank.id, rank.size, device, learner.indexed)
        return BuiltModel(learner, model, layout, optimizer, e.lr or rate(optimizer), Rate(e, optimizer), batches)

    def mark_limits(self) -> None:
        """The record shows everything."""

    def run_loss_backward(self, loss: Tensor, share: float | None) -> None:
        loss.backward() if share is None or share == 1.0 else loss.backward(torch.full_like(loss, share))

    def show_loss(self, loss: Tensor) -> Tensor:
        return loss.detach()

    def wrap_model(self) -> None:
        wrap_run_model(self._run)

    def keep_sums(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def follow_change(self, change: Planned, made: Coroutine[Op, Any, bool]) -> bool:
        return await made


class ScriptModel:
    """A script's own model. See [Note: Hand in hand] in engine/script/loop.py."""

    repeats = False

    def __init__(self, run: ScriptRankView, loop: ScriptLoop) -> None:
        self._run, self._loop = run, loop
        self._has_new_size = False  # whether a person has set the bucket size, so that the script's is void
        self._bucket_asked_at: float | None = None  # when torch asked for its last bucket in the present backward
        self._asked_by_script: Change | None = None  # the script's bucket size, as a change at the start

    def build_parts(self) -> BuiltModel:
        run, e, rank, loop = self._run, self._run.experiment, self._run.rank, self._loop
        if run.session.resume:
            raise KnobError(f"resume={run.session.resume!r}: a script or a loop starts at its beginning; load a "
            f"checkpoint in the script")  # fmt: skip
        learner = loop.make_learner()
        torch.manual_seed(e.seed)
        random.seed(e.seed)
        model = learner.model()
        require_own_storage(model)
        layout = ParameterLayout(model, e.bucket_mb)
        self._take_bucket_size()
        check_model(run.control, model)
        if loop.ddp_shim is None:
            broadcast_model(run.control, layout, model)
        elif len(set(gather_numbers(run.control, hash_model_state(layout)))) > 1:
            raise KnobError(
                f"{loop.loop_name}: ranks start with different parameters, which no strategy supports; remove "
                f"init_sync=False, and load the same values on all ranks"
            )
        optimizer = make_optimizer(learner, model, layout, e)
        batches = BatchReader(learner.data, rank.id, rank.size, run.session.device)
        return BuiltModel(learner, model, layout, optimizer, rate(optimizer), ScriptRate(e, optimizer), batches)

    def _take_bucket_size(self) -> None:
        """Makes the script's `bucket_cap_mb` the run's first change, unless `bucket_mb` is set already."""
        usual = {f.name: f.default for f in fields(Experiment)}["bucket_mb"]
        self._has_new_size = self._run.experiment.bucket_mb != usual
        cap = self._loop.ddp_shim.options.get("bucket_cap_mb") if self._loop.ddp_shim else None
        if cap is not None and not self._has_new_size:
            size = min(max(cap * 2**20 / 1e6, 0.01), 1024.0)  # the knob's range
            self._asked_by_script = Change(0, "bucket_mb", size)
            self._run.queue.planned.insert(0, self._asked_by_script)

    def mark_limits(self) -> None:
        if self._run.rank.id == 0 and self._loop.ddp_shim is not None and self._loop.ddp_shim.comm_hook is not None:
            name = hook_name(self._loop.ddp_shim.comm_hook)
            text = (
                f"the script's communication hook {name} exchanges the gradients: the bytes on the record are those of "
                f"its buckets, and it may send fewer"
            )
            self._run.mark("warning", {"text": text})

    def run_loss_backward(self, loss: Tensor, share: float | None) -> None:
        """Once torch asks for its last bucket, all gradients exist and it waits."""
        run, self._bucket_asked_at = self._run, None
        self._loop.run_backward(loss, share)
        if (asked := self._bucket_asked_at) is not None and not run.chip.runs_ahead:
            now = run.clock.now()
            run.record.span(run.rank.step, "wait", "all_reduce", asked, asked, now, 0)
            run.host.timing.note_wait(asked, now, now - asked)

    def show_loss(self, loss: Tensor) -> Tensor:
        return self._loop.recorded_loss(loss)

    def wrap_model(self) -> None:
        run, shim = self._run, self._loop.ddp_shim
        if run.peers.data is not None:
            run.host.hooks.detach_hooks()
            lane = run.lane if run.port.is_active else None
            seen = None if run.chip.runs_ahead else self._record_exchange
            hook = shim.comm_hook if shim else None
            made = wrap_model(run.model, run.peers.data, self._make_options(), lane, seen, self._note_bucket, hook)
            made.broadcast_buffers = shim is None  # the script's wrapper broadcasts them
            run.host.parts.wrap_model(made)

    def _make_options(self) -> dict[str, Any]:
        """The script's, except settings that a person has changed."""
        experiment, shim = self._run.experiment, self._loop.ddp_shim
        options = dict(shim.options) if shim else {}
        if self._has_new_size or shim is None:
            options.pop("bucket_cap_mb_list", None)
            options["bucket_cap_mb"] = convert_to_mib(experiment.bucket_mb)
        if getattr(experiment.strategy, "find_unused_parameters", False):
            options["find_unused_parameters"] = True
        return options

    def _record_exchange(self, name: str, began: float, nbytes: int) -> None:
        """The last byte of one of torch's own buckets has arrived."""
        run = self._run
        sent, _ = traffic("all_reduce", nbytes, run.rank.size)
        run.record.span(run.rank.step, "comm", name, began, began, run.clock.now(), sent)

    def _note_bucket(self) -> float:
        self._bucket_asked_at = self._run.clock.now()
        return self._bucket_asked_at

    @contextmanager
    def keep_sums(self) -> Iterator[None]:
        sums = self._loop.copy_sums()
        yield
        for p, grad in sums:
            p.grad = grad

    async def follow_change(self, change: Planned, made: Coroutine[Op, Any, bool]) -> bool:
        was, self._has_new_size = self._has_new_size, self._has_new_size or self._is_new_bucket_size(change)
        if (done := await made) and isinstance(change, Change):
            self._loop.changes.append(replace(change, at_step=self._run.rank.step))
        elif not done:
            self._has_new_size = was
        return done

    def _is_new_bucket_size(self, change: Planned) -> bool:
        return isinstance(change, Change) and "bucket_mb" in change.settings and change is not self._asked_by_script


def make_optimizer(learner: Learner, model: nn.Module, layout: ParameterLayout, wanted: Experiment,
                   params: list[nn.Parameter] | None = None) -> Optimizer:  # fmt: skip
    """params: default: all parameters that train or are frozen"""
    if params is None:
        here = {id(place.param) for place in layout.order}  # a frozen parameter may be unfrozen later
        params = [p for p in model.parameters() if id(p) in here or not p.requires_grad]
    return wanted.optimizer.build(learner.optimizer, params, wanted.lr)


def explain_refusal(run: ModelView, strategy: Any) -> str | None:
    """Returns why the engine cannot run `strategy` here, with an alternative; None if it can."""
    if reason := shared_parameters.explain_refusal(strategy, run.rank.size, run.session.device, run.peers.local):
        return reason
    name = type(strategy).__name__
    if strategy.opaque and strategy.shards and (run.session.kind != "gloo" or run.session.device != "cpu"):
        return f"strategy={name}: torch's fully_shard was tried on CPUs over gloo only; take ZeRO3"
    if strategy.late_update and run.session.kind != "gloo":
        return (
            f"strategy={name}: over {run.session.kind} children run in the order of their start, and it has "
            f"priorities; take DDP"
        )
    if strategy.workers > 1 and run.session.device != "cpu":
        return (
            f"strategy={name}: workers={strategy.workers} have their parameters in the memory of their host, and "
            f"these are on {run.session.device}; take workers=1, or a lab with device='cpu'"
        )
    return None


def require_trainable(run: ModelView, wanted: Experiment) -> Experiment:
    """Returns `wanted`. Raises KnobError if the engine cannot run its strategy here, on this model."""
    made = partial(run.make_optimizer, wanted)
    if not wanted.fabric.algorithm.native and run.session.device != "cpu":
        raise KnobError(
            f"fabric.algorithm={type(wanted.fabric.algorithm).__name__}: its messages go through a host's memory, "
            f"and this run is on {run.session.device}; take Native(), or device='cpu'"
        )
    reason = (
        explain_refusal(run, wanted.strategy)
        or momentum_rules.explain_refusal(wanted, made)
        or sharding_rules.explain_refusal(wanted, made)
    )
    if reason := reason or sparse_rules.explain_refusal(wanted, made) or closure_rules.explain_refusal(wanted, made):
        raise KnobError(reason)
    validation.require_trainable(run, wanted)
    return wanted


def wrap_run_model(run: ModelView) -> None:
    """Wraps the model in torch's own DDP, or a copy in fully_shard. On an emulated Link both use our lane."""
    if run.peers.data is None:
        return
    run.host.hooks.detach_hooks()
    lane = run.lane if run.port.is_active else None
    if run.experiment.strategy.shards:
        from workbench.engine.baselines.fully_sharded import FullySharded  # takes a second to import

        fully = FullySharded(run, run.peers.data, lane)
        run.host.parts.wrap_model(fully.module, fully)
    else:
        options = choose_options(getattr(run.experiment.strategy, "find_unused_parameters", False))
        options["bucket_cap_mb"] = convert_to_mib(run.experiment.bucket_mb)
        with require_all_grads(run.layout):
            run.host.parts.wrap_model(wrap_model(run.model, run.peers.data, options, lane))


def unwrap_run_model(run: ModelView) -> None:
    """Makes forward call the model itself again."""
    remove_hooks(run.host.parts.module)
    fully = run.host.parts.unwrap_model()
    if fully is not None:
        fully.end()
        del fully
        gc.collect()  # torch's hooks and the copy reference each other, and keep shards and sockets


def _take_first_order(run: ModelView, order: Tensor) -> Tensor:
    assert run.control is not None
    if run.spread is None:
        run.control.wait(run.control.broadcast(order, 0))
        return order
    trained = {name for name, p in run.model.named_parameters() if p.requires_grad}
    for place in range(len(run.spread)):
        count = len(run.spread.select_trained(place, trained))
        said = order if place == run.rank.id % len(run.spread) else torch.empty(count, dtype=torch.int64)
        run.control.wait(run.control.broadcast(said, place))
    return order


def take_first_names(run: ModelView, names: list[str]) -> list[str]:
    """Returns one order of gradients: rank 0's, or that of the first rank that holds the same parts."""
    index = {p.name: i for i, p in enumerate(run.layout.order)}
    order = torch.tensor([index[n] for n in names], dtype=torch.int64)
    if run.control is not None:
        run.take_early_requests()
        order = _take_first_order(run, order)
    return [run.layout.order[i].name for i in order.tolist()]


def adopt_order(run: ModelView, names: list[str]) -> None:
    """Lays parameters out in this order once, as torch's DDP does."""
    run.host.hooks.detach_hooks()
    run.shared.share_again(lambda: run.layout.reorder_buckets(names))
    run.mark_buckets()
