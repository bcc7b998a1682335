"""Setting a session up: wires, model, layout, lane, host; every rank does the same and checks that it did."""

from __future__ import annotations

import os
import platform
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workbench import changes, momentum
from workbench.batches import Batches
from workbench.engine.canonical import broadcast_model, check_equal
from workbench.engine.clocks import agree_on_time
from workbench.engine.collectives import Wire, connect_store
from workbench.engine.commons import Commons
from workbench.engine.host import Host
from workbench.engine.lane import Lane
from workbench.engine.meeting import Meeting
from workbench.engine.post import Post
from workbench.engine.shaping import Board, Pace, Port, Shaper
from workbench.engine.ticket import Bell, Tickets
from workbench.engine.watch import watch
from workbench.experiment import Experiment
from workbench.knobs import KnobError
from workbench.layout import Layout, signature
from workbench.optimizers import built
from workbench.rates import Rate
from workbench.tasks import rate


def able(run: Any, experiment: Experiment) -> Experiment:
    """`experiment` if the engine performs what its strategy claims here, and on this model if known. Or KnobError."""
    strategy, layout = experiment.strategy, getattr(run, "layout", None)
    if reason := run.commons.refuses(strategy):
        raise KnobError(reason)
    if layout is not None and (reason := changes.refuses_model(experiment, layout.parts)):
        raise KnobError(reason)
    if layout is not None and (reason := momentum.refused(experiment, lambda: run.make_optimizer(experiment))):
        raise KnobError(reason)
    if strategy.staged:
        what = "every rank computes the whole model"
    elif strategy.workers > 1:
        what = "every rank has one worker"
    else:
        return experiment
    raise KnobError(f"strategy={type(strategy).__name__}: on the engine {what}; simulate it, or take another strategy")


def set_up(run: Any) -> None:
    """Fills in what a Session needs to train; raises in words what cannot be trained."""
    torch.set_num_threads(1)
    if run.device.startswith("cuda"):
        torch.cuda.set_device(run.device)
    run.local, doubt = _wires(run)
    run.commons = Commons(run)
    able(run, run.experiment)
    run.tickets = Tickets(run.control, run.rank.index, run.inbox, bell(run))
    _model(run)
    able(run, run.experiment)
    _host(run)
    run.set_fabric(None, run.experiment)
    changes.begin(run)
    run.choose_lane()
    if run.experiment.strategy.opaque:
        run.enter_opaque()
    if run.experiment.strategy.shared:
        run.commons.enter()
    run.state = run.experiment.strategy.init(run.rank)
    run.tickets.enter(run.experiment.strategy, run.lane)
    run.board = partial(board, run)
    run.meeting = Meeting(run)
    run.meeting.enter()
    run.mark("start", _environment(run, doubt))
    run.mark_buckets()


def board(run: Any, name: str = "") -> Board | None:
    """Where the ranks of this host post their arrivals at the collectives of one wire."""
    path = _shared(run, f"{name}.board")
    return Board(path, run.rank.index, run.rank.size) if path else None


def bell(run: Any) -> Bell | None:
    """What rank 0 rings when it has something to say."""
    path = _shared(run, ".bell")
    return Bell(path) if path else None


def _shared(run: Any, name: str) -> Path | None:
    """A file of this run that all ranks of this host open and rank 0 removes at the end; None where they have none."""
    if not run.local or run.rank.size == 1:
        return None
    run.boards.append(Path(tempfile.gettempdir()) / f"workbench-{os.getuid()}-{run.generation}{name}")
    return run.boards[-1]


def _wires(run: Any) -> tuple[bool, float]:
    """One wire for control and one for data; returns (all ranks on one host, error of this rank's clock)."""
    rank = run.rank
    if rank.size == 1:
        run.store = run.control = run.data_wire = None
        return True, 0.0
    run.store = store = connect_store(*run.where, run.generation)
    rest = {"leaving": run.leaving, "loopback": run.loopback, "precise": run.experiment.precise}
    run.control = Wire(store, rank.index, rank.size, "control", **rest)
    run.data_wire = Wire(store, rank.index, rank.size, "data", kind=run.kind, **rest)
    run.wires = [run.control, run.data_wire]
    return agree_on_time(run.control, run.clock)


def _model(run: Any) -> None:
    e, rank = run.experiment, run.rank
    run.learner = e.task.build()
    torch.manual_seed(e.seed)
    random.seed(e.seed)
    model = run.learner.model()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"task.model() must return a torch Module, not a {type(model).__name__}")
    run.model = model.to(run.device).train()
    run.layout = Layout(run.model, e.bucket_mb)
    check_equal(run.control, signature(run.model), "parameter names, shapes or types")
    broadcast_model(run.control, run.layout, run.model)
    params = [p for p in run.model.parameters() if p.requires_grad]
    run.optimizer = built(e.optimizer, run.learner.optimizer, params, e.lr)
    torch.manual_seed(e.seed * 100_003 + rank.index + 1)
    rank.lr = e.lr or rate(run.optimizer)
    run.rate = Rate(e, run.optimizer)
    run.batches = Batches(run.learner.data, rank.index, rank.size, run.device)
    run.restart_data()


def _host(run: Any) -> None:
    rank = run.rank
    run.port = Port(rank.index, rank.size, run.naps, run.experiment.seed)
    run.post = Post(rank, run.store, run.where, run.generation, run.port, run.leaving, run.record.span,
                    local=run.loopback)
    run.post.step = lambda: run.lane.step
    run.lane = Lane("comm", run.data_wire, run.clock, Shaper(run.port, board(run)), run.record, run.device)
    run.host = Host(rank, run.model, run.learner.loss, run.optimizer, run.layout, run.lane, run.post,
                    Pace(rank.index, run.naps), watch(run.device, run.clock, run.record))
    run.host.still_well = lambda: run.meeting.check()
    run.host.batches = run.batches.next
    run.host.before_update = run.before_update
    run.lane.before = run.tickets.ring
    run.host.clip = lambda: run.experiment.clip


def _environment(run: Any, doubt: float) -> dict[str, Any]:
    return {
        "host": platform.node(), "pid": os.getpid(), "device": run.device, "backend": run.kind,
        "torch": torch.__version__, "python": platform.python_version(), "clock_error": doubt,
        "parameters": run.layout.numel, "nbytes": run.layout.nbytes,
    }
