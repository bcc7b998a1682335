"""`simulate`, the entry point of the simulator."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from workbench.experiment import Experiment, user_input
from workbench.host.checkpoint.restore import open_image
from workbench.host.core.planned_event import Planned, PlannedEvent
from workbench.host.reconfigure.validation import require_trainable
from workbench.rank import StrategyError
from workbench.record.checkpoints import Checkpoint, CheckpointFiles
from workbench.record.run import Run
from workbench.settings import Change, KnobError
from workbench.settings.describe_error import text_of
from workbench.settings.progress import doing
from workbench.sim.clock.record import Record
from workbench.sim.clock.world import VirtualWorld
from workbench.sim.compute.sizes import RankSizes
from workbench.sim.costs.chance_replay import ChanceReplay
from workbench.sim.costs.costs import Costs
from workbench.sim.costs.even_ranks import explain_unlike
from workbench.sim.fake.shape_cache import ShapeCacheMode
from workbench.sim.model.outline import Outline, make_outline
from workbench.sim.model.tensors import RankTensors
from workbench.sim.rank.changes import explain_refusal
from workbench.sim.rank.checkpoints import CheckpointStore
from workbench.sim.rank.evaluate import assemble_shards
from workbench.sim.rank.generations import Generations, can_crash
from workbench.sim.rank.session import Session
from workbench.tasks import Learner

PARAMETER_COPIES = (
    6  # copies of parameters per rank: weights, gradients, 2 for the optimizer, 1 each for strategy and codec
)


def simulate(
    experiment: Experiment, *, changes: Iterable[Change] = (), costs: Costs | None = None, real: bool = False,
    replay: Run | None = None, alike: bool = False, resume: Checkpoint | None = None, checkpoints: Path | None = None,
) -> Run:  # fmt: skip
    """Runs `experiment` on a virtual clock, without processes: the same strategies, the same record.

    changes:  applied before their steps. `simulate(run.experiment, changes=run.changes)` replays a run
    costs:    prices of compute and codecs (`Costs.measured(run)`); optional if the experiment has a `pace`. Without
              costs, codecs and unshaped Links take no time.
    real:     False: sizes only, thousands of ranks, no losses. True: real tensors, tens of ranks in this process, and
              the losses of real training, bit-identical between runs.
    replay:   a run on the engine with random choices to repeat. If ranks keep no common step, messages come from the
              same senders, and backgrounds run after the same steps.
    alike:    True: simulates and records only the first replica's ranks. They stand for the other replicas
              bit-identically, so thousands of ranks cost as little as a few. Needs sizes only and no changes. Data on a
              host or disk (ZeROOffload, ZeROInfinity) are the first rank's. Other ranks may differ by 4 bytes for each
              parameter in their shard, and by the shorter last shard.
    resume:   the checkpoint to continue from (`Checkpoint.open`), bit-identical to the engine. Needs real tensors, as
              many ranks and the same settings
    checkpoints: the folder for checkpoints of `save_every`, with real tensors

    Raises KnobError for an experiment that cannot be simulated, StrategyError if ranks' requests differ, and Deadlock
    if ranks wait for each other or loop while no time passes. Other errors of a strategy, compressor, optimizer or task
    pass through, but SystemExit becomes a RuntimeError, because it must not end the caller's process.
    """
    experiment, changes = user_input.experiment(experiment).checked(), user_input.changes(changes)
    user_input.planned(experiment, changes)  # raises the same errors as a lab
    user_input.instance(costs, Costs, "costs", "Costs.measured(run)")
    user_input.instance(replay, Run, "replay", "Run.open('runs/first')")
    user_input.instance(resume, Checkpoint, "resume", "Checkpoint.open('runs/first')")
    if resume is not None:
        _require_resumable(experiment, resume, real)
    if reason := explain_refusal(experiment, costs):
        raise KnobError(reason)
    if not experiment.steps:
        raise KnobError("steps=0: a simulation runs until its last step; give the experiment a number of steps")
    first = (
        _count_simulated_ranks(experiment, costs, real or replay is not None or bool(changes))
        if alike
        else experiment.ranks
    )
    followed = _make_replay(replay, experiment)
    if followed is not None and can_crash(experiment, list(changes)):
        raise KnobError("replay: a fault crashes a rank, and a replay cannot lose ranks; remove the Crash")
    with _catch_exit():
        return _run_simulation(experiment, experiment.task.build(), costs, first, None, changes, real, followed, resume,
                    checkpoints)  # fmt: skip


def _require_resumable(experiment: Experiment, checkpoint: Checkpoint, real: bool) -> None:
    if not real:
        raise KnobError("resume: a checkpoint holds values, and this simulation has sizes only; take real=True")
    if checkpoint.ranks != experiment.ranks:
        raise KnobError(f"resume: the checkpoint is of {checkpoint.ranks} ranks, and the experiment has "
                        f"ranks={experiment.ranks}; take as many, or lab.run(resume=...)")  # fmt: skip


def simulate_sizes(experiment: Experiment, learner: Learner, costs: Costs, alike: bool,
              seen: dict[Any, Any] | None) -> Run:  # fmt: skip
    """Simulates a checked experiment. seen: see `ModelPasses`. Raises the errors of `simulate`."""
    if reason := explain_refusal(experiment, costs):
        raise KnobError(reason)
    with _catch_exit():
        return _run_simulation(
            experiment, learner, costs, experiment.partition.size if alike else experiment.ranks, seen
        )


def restore_ranks(experiment: Experiment, checkpoint: Checkpoint, what: PlannedEvent) -> None:
    """Restores all ranks and applies `what`, without a step. Raises the errors of `simulate`."""
    with _catch_exit():
        _run_simulation(
            experiment, experiment.task.build(), None, experiment.ranks, None, [what], True, None, checkpoint
        )


def _run_simulation(
    experiment: Experiment,
    learner: Learner,
    costs: Costs | None,
    first: int,
    seen: dict[Any, Any] | None,
    changes: Iterable[Planned] = (),
    real: bool = False,
    replay: ChanceReplay | None = None,
    resume: Checkpoint | None = None,
    checkpoints: Path | None = None,
) -> Run:
    planned = sorted(changes, key=lambda c: c.at_step)
    with _isolate_process(real), nullcontext() if real else ShapeCacheMode():
        files = CheckpointFiles(resume) if resume is not None else None
        world = VirtualWorld(
            experiment.ranks, costs, experiment.seed, planned, real, replay, first,
            mortal=can_crash(experiment, planned),
            keeper=CheckpointStore(checkpoints, experiment.ranks) if checkpoints is not None and real else None,
            saved=None if resume is None or files is None else partial(open_image, resume, files),
        )  # fmt: skip
        bodies = _make_rank_tensors(experiment, learner) if real else _make_rank_sizes(experiment, learner, first, seen)
        body = next(bodies)
        if reason := explain_refusal(experiment, costs, lambda: body.optimizer):
            raise KnobError(reason)
        another = partial(_make_joining_rank, learner, body)
        generations = Generations(world, another, checkpoints if real else None)
        try:
            sessions = [Session(world, 0, experiment, body)]
            require_trainable(sessions[0], experiment)
            sessions += [Session(world, r, experiment, body) for r, body in enumerate(bodies, 1)]
            with doing("simulating", experiment.steps) as work:
                sessions[0].report_steps(work.at)
                sessions = generations.run_generations(sessions)
        except (RuntimeError, NotImplementedError) as error:
            if real or "meta" not in text_of(error):
                raise
            raise StrategyError(
                f"sizes only: {experiment.strategy} or {experiment.compressor} reads the values of a tensor; simulate "
                f"with real=True"
            ) from error
        finally:
            if files is not None:
                files.close()
        every = [session.body for session in sessions]
        for body in every if real and every[0].unsharder.sharded else ():
            assemble_shards(every, body)
    timeline = Record.make_timeline(generations.records)
    return Run(experiment, timeline=timeline, environment=_describe_environment(real), name="simulated")


def _count_simulated_ranks(experiment: Experiment, costs: Costs | None, more: bool) -> int:
    """Returns how many ranks stand for all. Raises KnobError."""
    reason = "alike: it needs sizes only, no changes and no replay" if more else explain_unlike(experiment, costs)
    if reason:
        raise KnobError(reason)
    return experiment.partition.size


def _make_replay(run: Run | None, experiment: Experiment) -> ChanceReplay | None:
    if run is None:
        return None
    if run.experiment.ranks != experiment.ranks:
        raise KnobError(f"ranks={experiment.ranks}: the run to replay had {run.experiment.ranks}; take as many")
    return ChanceReplay(run.timeline, experiment.ranks, experiment.steps)


def _describe_environment(real: bool) -> dict[str, Any]:
    return {"host": "simulated", "tensors": "real" if real else "sizes only", "torch": torch.__version__}


def _make_rank_sizes(
    experiment: Experiment, learner: Learner, first: int, seen: dict[Any, Any] | None
) -> Iterator[Any]:
    whole = Outline(experiment, learner, seen)
    return (RankSizes(whole, experiment.bucket_mb) for _ in range(first))


def _make_joining_rank(learner: Learner, body: Any, experiment: Experiment, place: int) -> Any:
    """Returns a new rank's model, data and optimizer. body: of an earlier rank"""
    if isinstance(body, RankSizes):
        return RankSizes(body.whole, experiment.bucket_mb)
    return RankTensors(experiment, learner, place)


def _make_rank_tensors(experiment: Experiment, learner: Learner) -> Iterator[Any]:
    model = make_outline(learner)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    nbytes = PARAMETER_COPIES * nbytes + sum(b.numel() * b.element_size() for b in model.buffers())
    free = psutil.virtual_memory().available
    if nbytes * experiment.ranks > free:
        raise KnobError(
            f"ranks={experiment.ranks}: with real tensors each rank takes about {nbytes / 1e6:.0f} MB and "
            f"{free / 1e6:.0f} MB are free; take at most {free // nbytes} ranks, or real=False"
        )
    bodies = [RankTensors(experiment, learner, r) for r in range(experiment.ranks)]
    for other in bodies[1:]:
        other.copy_values(bodies[0])
    return iter(bodies)


@contextmanager
def _catch_exit() -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        where = ", ".join(getattr(error, "__notes__", ["before the first step"]))
        raise RuntimeError(
            f"SystemExit({code}) was raised {where}: a strategy, compressor, optimizer or task must not end the "
            f"process; raise an error with the reason instead"
        ) from error


@contextmanager
def _isolate_process(real: bool) -> Iterator[None]:
    """Restores the caller's random numbers, threads and garbage-collector thresholds afterwards.

    A step of a thousand ranks creates and frees some 100,000 objects. At the usual threshold, half of the time goes
    into the search for cycles.
    """
    state, own, threads, often = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), gc.get_threshold()
    gc.set_threshold(1_000_000, 20, 20)
    if real:
        torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        gc.set_threshold(*often)
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
        random.setstate(own)
