"""Opens and starts a run; finds a live lab and follows its run."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from workbench.cluster.engines.cluster import Cluster
from workbench.cluster.engines.engine_probe import list_versions
from workbench.cluster.processes.lab_place import ClusterError, LabPlace, alive, host_name, list_places, runs_dir
from workbench.cluster.run.rank_errors import RankError
from workbench.cluster.run.run_changes import Changes, PendingChange, list_foreign_classes
from workbench.cluster.run.run_controller import RunController
from workbench.cluster.run.run_resize import resize_run as resize_run
from workbench.cluster.run.run_watch import RunWatch
from workbench.cluster.run.session_start import begin_sessions
from workbench.experiment import Experiment, user_input
from workbench.record.folders import make_private_folder
from workbench.record.run import Run, RunError
from workbench.record.store import write_atomically
from workbench.settings import Change, KnobError
from workbench.settings.describe_error import said

R = TypeVar("R", bound=Run)
POLL_INTERVAL = 0.2  # seconds
SETTLE_TIMEOUT = 3.0  # seconds for ranks' sent rows, when a kernel attaches
ATTACH_TIMEOUT = 20.0  # seconds for an engine that may share a core with many
SESSION_CLASS = "workbench.engine.rank.session:Session"  # tests use a lighter one


def fit_experiment(experiment: Experiment, ranks: int) -> Experiment:
    """Returns the checked experiment, on all `ranks` engines by default."""
    default = next(f.default for f in fields(Experiment) if f.name == "ranks")
    if experiment.ranks == default:
        experiment = replace(experiment, ranks=ranks)
    return check_ranks(experiment, ranks).checked()


def check_ranks(experiment: Experiment, ranks: int) -> Experiment:
    """Raises KnobError if the lab has fewer ranks than the experiment."""
    if experiment.ranks > ranks:
        raise KnobError(f"ranks={experiment.ranks}: must be an integer in [1, {ranks}], the engines of this lab")
    return experiment


def open_run(experiment: Experiment, out: Path | str | None, kind: type[R], parent: Any = None) -> R:
    """Opens a run of class `kind` in the new directory `out`, by default `<time>-<strategy>` among this user's runs.

    Raises ClusterError if that is not writable.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{type(experiment.strategy).__name__}"
    path = user_input.path(out, "out", "runs/first") if out is not None else runs_dir() / name
    try:
        path = path if out is not None else _claim_folder(path)
        run = kind(
            experiment,
            name=path.name,
            environment=describe_environment(experiment),
            path=path.resolve(),
            epoch=time.time(),
            parent=parent,
        )
        run.save()
    except OSError as error:
        raise _name_write_error(path, error) from None
    except RunError as error:
        if isinstance(error.__cause__, OSError):
            raise _name_write_error(path, error.__cause__) from None
        raise
    return run


def refuse_closed(cluster: Cluster, knob: str = "") -> None:
    """Raises ClusterError if the lab is closed or, given a `knob` to set, has no engines."""
    if cluster.closed and not cluster.error:
        raise ClusterError(f"lab {cluster.name!r} is closed; create it again with Lab(ranks={cluster.ranks})")
    if knob and cluster.error:
        name = cluster.name
        raise ClusterError(f"{knob}: lab {name!r} has no engines, lab.run() starts them again; {cluster.error}")


def is_watched(watchers: Sequence[Callable[[], bool]]) -> bool:
    """Whether a dashboard of the lab is visible, or was in the last ten minutes."""
    return any(sees() for sees in watchers)


def renew_cluster(cluster: Cluster) -> Cluster:
    """Returns a new cluster if `cluster` failed to start, lost an engine or its controller, or has a stuck rank."""
    refuse_closed(cluster)
    if not cluster.error and (not cluster.is_ready or cluster.is_healthy):
        return cluster
    cluster.close()
    made = Cluster(cluster.name, cluster.ranks, cluster.device, cluster.connection, cluster.spares.count)
    made.spares.list_used_ranks, made.renewal.starts_ahead = (
        cluster.spares.list_used_ranks,
        cluster.renewal.starts_ahead,
    )
    return made.start_or_connect()


def _name_write_error(path: Path, error: OSError) -> ClusterError:
    why = error.strerror or str(error)
    return ClusterError(f"nothing can be recorded in {path}: {why}; make room, or name another place with run(out=...)")


def _claim_folder(path: Path) -> Path:
    """Makes `path`, or the first free `path`-2, `path`-3, …, safe against other kernels. Raises OSError."""
    make_private_folder(path.parent)
    for number in itertools.count(1):
        tried = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            tried.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return tried
    raise AssertionError("count has no end")


def describe_environment(experiment: Experiment) -> dict[str, Any]:
    """Returns the versions and the machine of this kernel."""
    machine = {"host": host_name(), "platform": platform.platform(), "cpus": os.cpu_count(), "ranks": experiment.ranks}
    return {**{k.lower(): v for k, v in list_versions().items()}, **{k: v for k, v in machine.items() if k != "ranks"}}


def start_sessions(
    live: RunController, changes: Sequence[Change], resume: Callable[[Path], Path] | None = None
) -> None:
    """Waits for the engines and starts every rank's session. An error ends the run.

    resume: returns the checkpoint to resume; may write one into its folder
    """
    cluster, run, experiment = live.cluster, live.run, live.changes.experiment
    try:
        while not live.ending.is_stop_requested and not cluster.wait_settled(POLL_INTERVAL):
            continue
        if live.ending.is_stop_requested:  # before anything began
            return live.end_run("stopped")
        cluster.wait()
        cluster.renewal.replace_used(live.ranks, experiment.task.has_own_loop)
        if live.ending.is_stop_requested:
            return live.end_run("stopped")
        cluster.on_batch = live.take_batch
        begun = resume(Path(run.path or ".") / "begun") if resume else ""
        new = [
            *list_foreign_classes(experiment),
            *(c for change in changes for c in list_foreign_classes(change.value)),
        ]
        blob = _pickle_experiment((experiment, tuple(changes), new))
        _stamp_epoch(run)
        job = {"session": SESSION_CLASS, "run_id": live.run_id, "run_dir": str(run.path), "epoch": run.epoch,
               "resume": str(begun) if begun else "", "leads": experiment.task.has_own_loop}  # fmt: skip
        told = {"path": str(run.path), "run_id": live.run_id, "ranks": experiment.ranks, "epoch": run.epoch}
        cluster.place.write_state(run=told)
        cluster.health.note_shortages()
        live.session_arguments, live.pickled_experiment, live.secret = (
            {**job, "size": experiment.ranks},
            blob,
            secrets.token_hex(32),
        )
        unwanted = lambda: live.ending.is_stop_overdue  # noqa: E731
        live.spool_folders = begin_sessions(cluster, job, blob, live.ranks, unwanted, secret=live.secret)
        live.start_commands()
        RunWatch(live).start_watch()
    except BaseException as error:
        stopped = live.ending.is_stop_requested and isinstance(error, RankError)
        live.end_run("stopped") if stopped else live.end_run("failed", error)


def _stamp_epoch(run: Run) -> None:
    run.epoch = time.time()
    file = Path(run.path or ".") / "run.json"
    try:
        write_atomically(file, json.dumps({**json.loads(file.read_text()), "epoch": run.epoch}, indent=1))
    except OSError as error:
        raise _name_write_error(file.parent, error) from None


def _pickle_experiment(what: Any) -> bytes:
    try:
        return cloudpickle.dumps(what)
    except (Exception, SystemExit) as error:
        text = re.sub(r"\s+", " ", said(error))
        raise ClusterError(f"the experiment cannot be sent to the engines: {text}") from None


def new_generation() -> str:
    """Returns a unique name, to tell this run's messages from another run's."""
    return uuid.uuid4().hex


def find_place(name: str | None) -> LabPlace:
    """Returns the newest detached lab, or else the newest of another kernel. Raises ClusterError if none lives."""
    found = [(p, p.read_state()) for p in list_places()]
    mine = [(p, s) for p, s in found if s.get("engines") and (name is None or s["name"] == name)]
    living = [(p, s) for p, s in mine if any(alive(e) for e in _list_local(s))]  # a run may go on without some
    if not living:
        called = f" called {name!r}" if name else ""
        raise ClusterError(f"there is no live lab{called} of yours on {host_name()}; start one with Lab(ranks=4)")
    return min(living, key=lambda pair: pair[1]["owner"] is not None)[0]


def _list_local(state: dict[str, Any]) -> list[list[float]]:
    return [[e["pid"], e["created"]] for e in state["engines"] if e["host"] == host_name()]


def _fetch_session_arguments(cluster: Cluster, run_id: str) -> tuple[dict[str, Any], bytes]:
    """Returns the job and the pickled experiment from any engine of this run, or ({}, b"").

    Raises ClusterError if no engine answers.
    """
    error, answered = ClusterError("all engines of the run have ended"), False
    for rank in [engine.rank for engine in cluster.engines if not cluster.describe_death(engine.rank)]:
        try:
            if blob := cluster.rpc.ask_rank(rank, "experiment", timeout=ATTACH_TIMEOUT)[1]:
                job = cluster.rpc.ask_rank(rank, "job", timeout=ATTACH_TIMEOUT)[0]
                if job.get("run_id") == run_id:
                    return job, blob
            answered = True
        except ClusterError as failed:
            error = failed
    if answered:
        return {}, b""
    raise error


def _open_run(about: dict[str, Any], experiment: Experiment, kind: type[R]) -> R:
    """Opens the live run, without its earlier rows if its directory is gone or damaged."""
    path = Path(about["path"])
    try:
        return kind.open(path)
    except RunError as error:
        run = kind(
            experiment, name=path.name, environment=describe_environment(experiment), path=path, epoch=about["epoch"]
        )
        run.warnings = (f"it could not be read from disk ({error}); it begins where this kernel attached",)
        return run


def rejoin_run(cluster: Cluster, listed: list[PendingChange], kind: type[R]) -> RunController | None:
    """Follows the run of a cluster's engines from its first row; None without a run."""
    about = cluster.place.read_state().get("run")
    if not about:
        return None
    job, blob = _fetch_session_arguments(cluster, about["run_id"])
    if not blob:
        return None
    experiment, _, _ = cloudpickle.loads(blob)
    waiting: list[Any] = []
    cluster.on_batch = waiting.append  # earlier rows are on disk, or soon will be
    cluster.health.note_shortages()
    living = [engine.rank for engine in cluster.engines if not cluster.describe_death(engine.rank)]
    cluster.rpc.ask_all("settle", timeout=SETTLE_TIMEOUT, ranks=living)
    run = _open_run(about, experiment, kind)
    live = RunController(run, cluster, Changes(experiment, listed), about["run_id"])
    live.secret, live.pickled_experiment, live.session_arguments = job.pop("secret"), blob, job
    live.replay_record()
    cluster.on_batch = live.take_batch
    for batch in waiting:
        live.take_batch(batch)
    live.start_commands()
    RunWatch(live).start_watch()
    live.evictions.replace_lost()
    return live
