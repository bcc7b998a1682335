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
from workbench.cluster.engines.engines import here
from workbench.cluster.processes.place import ClusterError, Place, alive, host, places, runs_dir
from workbench.cluster.run.beginning import begin
from workbench.cluster.run.changes import Changes, PendingChange, classes
from workbench.cluster.run.errors import RankError
from workbench.cluster.run.live import Live
from workbench.cluster.run.resizing import resize as resize
from workbench.experiment import Experiment, given
from workbench.record.folders import make_private_folder
from workbench.record.run import Run, RunError
from workbench.record.store import write_atomically
from workbench.settings import Change, KnobError
from workbench.settings.said import said

R = TypeVar("R", bound=Run)
LOOK = 0.2  # seconds between two looks at engines
SETTLED = 3.0  # seconds for ranks to write what they have sent, when a kernel attaches
ATTACH = 20.0  # seconds for an engine to answer a kernel that attaches: it may share a core with many
SESSION = "workbench.engine.rank.session:Session"  # tests use a lighter one


def fitted(experiment: Experiment, ranks: int) -> Experiment:
    """Returns the checked `experiment` for a lab of `ranks` engines. Without a number of ranks it takes all engines."""
    default = next(f.default for f in fields(Experiment) if f.name == "ranks")
    if experiment.ranks == default:
        experiment = replace(experiment, ranks=ranks)
    return within(experiment, ranks).checked()


def within(experiment: Experiment, ranks: int) -> Experiment:
    """Returns `experiment` if a lab of `ranks` engines can run it. Raises KnobError."""
    if experiment.ranks > ranks:
        raise KnobError(f"ranks={experiment.ranks}: must be an integer in [1, {ranks}], the engines of this lab")
    return experiment


def open_run(experiment: Experiment, out: Path | str | None, kind: type[R], parent: Any = None) -> R:
    """Opens a run of class `kind` in a new directory: `out`, or `<time>-<strategy>` among this user's runs.

    Raises ClusterError if nothing can be written there.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{type(experiment.strategy).__name__}"
    path = given.path(out, "out", "runs/first") if out is not None else runs_dir() / name
    try:
        path = path if out is not None else _claimed(path)
        run = kind(
            experiment, name=path.name, environment=environment(experiment), path=path.resolve(), epoch=time.time(),
            parent=parent,
        )  # fmt: skip
        run.save()
    except OSError as error:
        raise _unwritable(path, error) from None
    except RunError as error:
        if isinstance(error.__cause__, OSError):
            raise _unwritable(path, error.__cause__) from None
        raise
    return run


def refuse_closed(cluster: Cluster, knob: str = "") -> None:
    """Raises ClusterError if the lab is over or, when a `knob` is to be set, has no engines."""
    if cluster.closed and not cluster.error:
        raise ClusterError(f"lab {cluster.name!r} is closed; make it again with Lab(ranks={cluster.ranks})")
    if knob and cluster.error:
        name = cluster.name
        raise ClusterError(f"{knob}: lab {name!r} has no engines, lab.run() starts them again; {cluster.error}")


def seen(watchers: Sequence[Callable[[], bool]]) -> bool:
    """Whether a person sees a lab: a dashboard of it is on show, or was in the last ten minutes."""
    return any(sees() for sees in watchers)


def renewed(cluster: Cluster) -> Cluster:
    """Returns `cluster`, or a new one if it lost an engine or its controller, has a stuck rank, or did not come up."""
    refuse_closed(cluster)
    if not cluster.error and (not cluster.ready or cluster.healthy):
        return cluster
    cluster.close()
    made = Cluster(cluster.name, cluster.ranks, cluster.device, cluster.connection, cluster.spares.count)
    made.spares.used, made.renewal.ahead = cluster.spares.used, cluster.renewal.ahead
    return made.start()


def _unwritable(path: Path, error: OSError) -> ClusterError:
    why = error.strerror or str(error)
    return ClusterError(f"nothing can be recorded in {path}: {why}; make room, or name another place with run(out=...)")


def _claimed(path: Path) -> Path:
    """Makes and returns `path`, or the first free one of `path`-2, `path`-3, …, so that no other kernel takes it."""
    for number in itertools.count(1):
        tried = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            make_private_folder(tried.parent)
            tried.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return tried
    raise AssertionError("count has no end")


def environment(experiment: Experiment) -> dict[str, Any]:
    """Returns the versions and the machine of this kernel."""
    machine = {"host": host(), "platform": platform.platform(), "cpus": os.cpu_count(), "ranks": experiment.ranks}
    return {**{k.lower(): v for k, v in here().items()}, **{k: v for k, v in machine.items() if k != "ranks"}}


def launch(live: Live, changes: Sequence[Change], resume: Callable[[Path], Path] | None = None) -> None:
    """Waits for the engines and starts every rank's session. An error ends the run.

    resume: returns the checkpoint to go on from; it may put one into the folder that it gets
    """
    cluster, run, experiment = live.cluster, live.run, live.changes.experiment
    try:
        while not live.ending.asked and not cluster.settled(LOOK):
            continue
        if live.ending.asked:  # before anything began
            return live.end("stopped")
        cluster.wait()
        cluster.renewal.replace_used(live.ranks, experiment.task.leads)
        if live.ending.asked:
            return live.end("stopped")
        cluster.take = live.take
        begun = resume(Path(run.path or ".") / "begun") if resume else ""
        new = [*classes(experiment), *(c for change in changes for c in classes(change.value))]
        blob = _pickled((experiment, tuple(changes), new))
        _stamp(run)
        job = {"session": SESSION, "generation": live.generation, "run_dir": str(run.path), "epoch": run.epoch,
               "resume": str(begun) if begun else "", "leads": experiment.task.leads}  # fmt: skip
        told = {"path": str(run.path), "generation": live.generation, "ranks": experiment.ranks, "epoch": run.epoch}
        cluster.place.write(run=told)
        cluster.health.begin()
        live.job, live.blob, live.secret = {**job, "size": experiment.ranks}, blob, secrets.token_hex(32)
        live.spools = begin(cluster, job, blob, live.ranks, lambda: live.ending.unwanted, secret=live.secret)
        live.begun()
    except BaseException as error:
        stopped = live.ending.asked and isinstance(error, RankError)
        live.end("stopped") if stopped else live.end("failed", error)


def _stamp(run: Run) -> None:
    """Counts the run's times from now on, because its engines are up."""
    run.epoch = time.time()
    file = Path(run.path or ".") / "run.json"
    try:
        write_atomically(file, json.dumps({**json.loads(file.read_text()), "epoch": run.epoch}, indent=1))
    except OSError as error:
        raise _unwritable(file.parent, error) from None


def _pickled(what: Any) -> bytes:
    try:
        return cloudpickle.dumps(what)
    except (Exception, SystemExit) as error:
        text = re.sub(r"\s+", " ", said(error))
        raise ClusterError(f"the experiment cannot be sent to the engines: {text}") from None


def new_generation() -> str:
    """Returns a unique name, so that rows and collectives of another run are never mistaken for this run's."""
    return uuid.uuid4().hex


def find(name: str | None) -> Place:
    """Returns the place of a live lab: the newest detached one, or else the newest that another kernel owns.

    Raises ClusterError if none lives.
    """
    found = [(p, p.read()) for p in places()]  # empty if its kernel has removed it
    mine = [(p, s) for p, s in found if s.get("engines") and (name is None or s["name"] == name)]
    living = [(p, s) for p, s in mine if any(alive(e) for e in _local(s))]  # a run may go on without some engines
    if not living:
        called = f" called {name!r}" if name else ""
        raise ClusterError(f"there is no live lab{called} of yours on {host()}; start one with Lab(ranks=4)")
    return min(living, key=lambda pair: pair[1]["owner"] is not None)[0]


def _local(state: dict[str, Any]) -> list[list[float]]:
    return [[e["pid"], e["created"]] for e in state["engines"] if e["host"] == host()]


def _asked_of_any(cluster: Cluster, generation: str) -> tuple[dict[str, Any], bytes]:
    """Returns the job and the pickled experiment of the first engine that has this run; all engines have the same.

    ({}, b"") if no engine that answers has one. Raises ClusterError if no engine answers.
    """
    error, answered = ClusterError("all engines of the run have ended"), False
    for rank in [engine.rank for engine in cluster.engines if not cluster.death(engine.rank)]:
        try:
            if blob := cluster.line.ask(rank, "experiment", timeout=ATTACH)[1]:
                job = cluster.line.ask(rank, "job", timeout=ATTACH)[0]
                if job.get("generation") == generation:  # else the engine did not begin this run
                    return job, blob
            answered = True
        except ClusterError as failed:
            error = failed
    if answered:
        return {}, b""
    raise error


def _opened(about: dict[str, Any], experiment: Experiment, kind: type[R]) -> R:
    """Opens the live run from its directory. If that is gone or damaged, begins with the rows from now on."""
    path = Path(about["path"])
    try:
        return kind.open(path)
    except RunError as error:
        run = kind(experiment, name=path.name, environment=environment(experiment), path=path, epoch=about["epoch"])
        run.warnings = (f"it could not be read from disk ({error}); it begins where this kernel attached",)
        return run


def rejoin(cluster: Cluster, listed: list[PendingChange], kind: type[R]) -> Live | None:
    """Follows the run that a cluster's engines are in, from its first row on; None if there is no run."""
    about = cluster.place.read().get("run")
    if not about:
        return None
    job, blob = _asked_of_any(cluster, about["generation"])
    if not blob:
        return None
    experiment, _, _ = cloudpickle.loads(blob)
    waiting: list[Any] = []
    cluster.take = waiting.append  # new rows; earlier rows are on disk, or will be soon
    cluster.health.begin()
    living = [engine.rank for engine in cluster.engines if not cluster.death(engine.rank)]
    cluster.line.ask_all("settle", timeout=SETTLED, ranks=living)
    run = _opened(about, experiment, kind)
    live = Live(run, cluster, Changes(experiment, listed), about["generation"])
    live.secret, live.blob, live.job = job.pop("secret"), blob, job
    live.replay()
    cluster.take = live.take
    for batch in waiting:
        live.take(batch)
    live.begun()
    live.evicting.attached()
    return live
