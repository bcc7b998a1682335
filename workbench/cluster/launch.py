"""Opens a run and sends it to the engines; reports its end and its progress to whoever waits."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import cloudpickle

from workbench.cluster import worker
from workbench.cluster.cluster import Cluster
from workbench.cluster.engines import here, spans_hosts
from workbench.cluster.errors import RankError
from workbench.cluster.live import Live
from workbench.cluster.place import ClusterError, Place, alive, host, places, runs_dir
from workbench.cluster.turns import Turn, Turns, classes
from workbench.experiment import Experiment
from workbench.knobs import Change, KnobError
from workbench.run import Run
from workbench.store import write_atomically

SESSION = "workbench.engine.session:Session"  # tests put a lighter one in its place


def fitted(experiment: Experiment, ranks: int) -> Experiment:
    """`experiment`, checked, for a lab of `ranks` engines; one that names no number of ranks takes them all."""
    default = next(f.default for f in fields(Experiment) if f.name == "ranks")
    if experiment.ranks == default:
        experiment = replace(experiment, ranks=ranks)
    return within(experiment, ranks).checked()


def within(experiment: Experiment, ranks: int) -> Experiment:
    """`experiment` if a lab of `ranks` engines can run it. Raises KnobError."""
    if experiment.ranks > ranks:
        raise KnobError(f"ranks={experiment.ranks}: must be an integer in [1, {ranks}], the engines of this lab")
    return experiment


def open_run(experiment: Experiment, out: Path | str | None) -> Run:
    """A new Run in a directory of its own: `out`, or `<time>-<strategy>` among this user's runs."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{type(experiment.strategy).__name__}"
    path = Path(out) if out is not None else _claimed(runs_dir() / name)
    run = Run(experiment, name=path.name, environment=environment(experiment), path=path.resolve(), epoch=time.time())
    run.save()
    return run


def _claimed(path: Path) -> Path:
    """`path`, or the first of `path`-2, `path`-3, … that nobody had; made here, so that no other kernel takes it."""
    for number in itertools.count(1):
        tried = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            tried.mkdir(parents=True)
        except FileExistsError:
            continue
        return tried
    raise AssertionError("count has no end")


def environment(experiment: Experiment) -> dict[str, Any]:
    """Where the run was asked for: versions and machine."""
    machine = {"host": host(), "platform": platform.platform(), "cpus": os.cpu_count(), "ranks": experiment.ranks}
    return {**{k.lower(): v for k, v in here().items()}, **{k: v for k, v in machine.items() if k != "ranks"}}


def launch(live: Live, changes: Sequence[Change]) -> None:
    """Waits for the engines and starts every rank's session; what fails ends the run with that error."""
    cluster, run, experiment = live.cluster, live.run, live.turns.experiment
    try:
        cluster.wait()
        cluster.take = live.take
        new = [*classes(experiment), *(c for change in changes for c in classes(change.value))]
        blob = _pickled((experiment, tuple(changes), new))
        _stamp(run)
        job = {"session": SESSION, "generation": live.generation, "run_dir": str(run.path), "epoch": run.epoch}
        cluster.place.write(run={"path": str(run.path), "generation": live.generation, "ranks": experiment.ranks})
        live.spools = begin(cluster, job, blob, experiment.ranks)
    except BaseException as error:
        live.end("failed", error)
    else:
        live.begun()


def _stamp(run: Run) -> None:
    """The run begins now that its engines are up: its times count from here."""
    run.epoch = time.time()
    file = Path(run.path or ".") / "run.json"
    write_atomically(file, json.dumps({**json.loads(file.read_text()), "epoch": run.epoch}, indent=1))


def begin(cluster: Cluster, job: dict[str, Any], blob: bytes, ranks: int) -> dict[int, str]:
    """Starts a session on each rank's engine; {rank: the directory it spools into}."""
    first, asked = cluster.engines[0], {}
    loop, store = not spans_hosts(cluster.engines), (str(cluster.place.path / "ranks"), 0)
    try:
        if not loop:
            store = cluster.call(first.id, worker.host_store, job["session"], first.reach)
    except Exception as error:
        raise RankError([_why(cluster, 0, error)]) from None
    shared = {**job, "size": ranks, "store": store, "kind": cluster.kind, "loopback": loop}
    for engine in cluster.engines[:ranks]:
        own = {"rank": engine.rank, "device": cluster.devices[engine.rank]}
        asked[engine.rank] = cluster.client[engine.id].apply_async(worker.begin, {**shared, **own}, blob)
    spools, errors = {}, []
    for rank, answer in asked.items():
        try:
            spools[rank] = str(answer.get(60))
        except Exception as error:
            errors.append(_why(cluster, rank, error))
    if errors:
        raise RankError(errors)
    return spools


def _why(cluster: Cluster, rank: int, error: Exception) -> dict[str, Any]:
    """Why a rank could not begin."""
    about = {"rank": rank, "step": 0, "op": "set-up"}
    if how := cluster.death(rank):
        return {**about, "type": "EngineDied", "text": f"its engine {how}"}
    name = getattr(error, "ename", type(error).__name__)
    return {**about, "type": name, "text": getattr(error, "evalue", str(error))}


def _pickled(what: Any) -> bytes:
    try:
        return cloudpickle.dumps(what)
    except Exception as error:
        text = re.sub(r"\s+", " ", str(error))
        raise ClusterError(f"the experiment cannot be sent to the engines: {type(error).__name__}: {text}") from None


def new_generation() -> str:
    """A name that no other run has: rows and collectives of another run are never mistaken for this one's."""
    return uuid.uuid4().hex


def find(name: str | None) -> Place:
    """The place of a live lab: one that was detached before one that another kernel owns; the newest."""
    found = [p for p in places() if (name is None or p.read()["name"] == name) and p.read().get("engines")]
    living = [p for p in found if all(alive(e) for e in _local(p))]
    if not living:
        called = f" called {name!r}" if name else ""
        raise ClusterError(f"there is no live lab{called} of yours on {host()}; start one with Lab(ranks=4)")
    return min(living, key=lambda p: p.read()["owner"] is not None)


def _local(place: Place) -> list[list[float]]:
    return [[e["pid"], e["created"]] for e in place.read()["engines"] if e["host"] == host()]


def rejoin(cluster: Cluster, turns: list[Turn]) -> Live | None:
    """Follows the run that a cluster's engines are in, from its first row on; None if they are in none."""
    about = cluster.place.read().get("run")
    if not about:
        return None
    blob = cluster.line.ask(0, "experiment")[1]
    if not blob:
        return None
    experiment, _, _ = cloudpickle.loads(blob)
    waiting: list[Any] = []
    cluster.take = waiting.append  # rows that come while the disk is read
    run = Run.open(about["path"])
    live = Live(run, cluster, Turns(experiment, turns), about["generation"])
    live.replay()
    cluster.take = live.take
    for batch in waiting:
        live.take(batch)
    live.begun()
    return live
