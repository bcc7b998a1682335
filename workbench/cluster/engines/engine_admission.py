"""Makes engines ranks of a lab: checks them, opens their sockets, and starts further ones."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from workbench.cluster.engines import engine_server
from workbench.cluster.engines.cluster_state import ClusterState
from workbench.cluster.engines.engine_probe import Engine, check_versions, choose_devices, probe_engines, spans_hosts
from workbench.cluster.processes.duration_history import describe_start, time_work
from workbench.cluster.processes.fork_server import ForkedEngine
from workbench.cluster.processes.lab_place import ClusterError, host_name, this_process
from workbench.cluster.processes.process_logs import describe_exit_code, read_log_tail
from workbench.cluster.processes.uninterruptible import without_interrupts
from workbench.experiment.user_input import MAX_RANKS

START_TIMEOUT = 60.0  # seconds
POLL_INTERVAL = 0.05  # seconds


def admit_engines(cluster: ClusterState, ids: Sequence[int], ranks: Sequence[int] = ()) -> list[Engine]:
    """Returns the engines with these ipyparallel ids, as `ranks` or as the next ranks.

    Raises ClusterError or KnobError if they cannot train together or with this kernel.
    """
    first = len(cluster.engines)
    ranks = ranks or range(first, first + len(ids))
    probed = probe_engines(cluster.client, list(ids), cluster.find_controller_address())
    admitted = [replace(e, rank=rank) for e, rank in zip(probed, ranks, strict=True)]
    check_versions(admitted)
    kept = [e for e in cluster.engines if e.rank not in ranks]
    places, kind = choose_devices(sorted([*kept, *admitted], key=lambda e: e.rank), cluster.device)
    if kept and kind != cluster.backend:
        raise ClusterError(f"{admitted[0]} would have to share a GPU, and ranks of one run talk over {cluster.backend}")
    spans = spans_hosts([*kept, *admitted])
    setup = {
        "lab": cluster.place.path.name, "place": str(cluster.place.path), "client": cluster.keys.public,
        "owner": this_process(), "host": host_name(),
        "paths": [os.path.abspath(p) for p in sys.path], "spans_hosts": spans,
    }  # fmt: skip
    opened: list[Engine] = []
    for engine in admitted:
        reach = engine.reach if spans else "127.0.0.1"
        addresses = cluster.call(engine.id, engine_server.open_server, {**setup, "reach": reach})
        opened.append(replace(engine, rows_address=addresses["rows_address"], rpc_address=addresses["rpc_address"]))
    cluster.devices, cluster.backend = places, kind
    return opened


def reuse_engine(cluster: ClusterState, engine: Engine) -> int:
    """Returns a new rank for a free engine that a run left behind."""
    again = replace(engine, rank=len(cluster.engines))
    cluster.rpc.connect_rank(again.rank, again.rpc_address)
    cluster.devices = [*cluster.devices, cluster.devices[engine.rank]]
    cluster.engines.append(again)
    cluster.save_engines()
    return again.rank


def find_start_obstacle(cluster: ClusterState, count: int) -> str:
    """Returns why `count` more engines cannot start; "" if they can."""
    if cluster.processes is None or cluster.is_guest:
        return "another has started its engines"
    if how := cluster.describe_controller_death():
        return f"the controller {how}"
    room = MAX_RANKS - len(cluster.engines)
    return f"a lab has at most {MAX_RANKS} engines, lost engines included" if count > room else ""


def start_more_engines(cluster: ClusterState, count: int) -> list[int]:
    """Starts more engines here, in seconds of imports. Returns their ranks.

    Raises ClusterError if they do not come up; then none stays.
    """
    with cluster.start_lock:
        return _start_engines(cluster, count)


def _start_engines(cluster: ClusterState, count: int) -> list[int]:
    assert cluster.processes is not None
    first = cluster.processes.next_engine
    numbers, joined = list(range(first, first + count)), list[int]()
    try:
        with time_work(describe_start(count, " more")) as work:
            for number in numbers:
                cluster.processes.start_engine(number)
            wait_for_engines(cluster, numbers, work.tell)
            admitted = admit_engines(cluster, numbers)
        with without_interrupts():
            joined += [_join_engine(cluster, engine) for engine in admitted]
            cluster.save_engines()
    except BaseException:  # also for an interrupt: no other code knows these engines
        for number in numbers if not joined else ():
            cluster.processes.dismiss_engine(number)
        raise
    return joined


def _join_engine(cluster: ClusterState, engine: Engine) -> int:
    cluster.rpc.connect_rank(engine.rank, engine.rpc_address)
    assert cluster.row_subscriber is not None
    cluster.row_subscriber.connect_engine(engine.rows_address)
    cluster.engines.append(engine)
    return engine.rank


def replace_engines(cluster: ClusterState, numbers: Mapping[int, int]) -> list[Engine]:
    """Replaces ranks' engines and returns the old ones. numbers: new ipyparallel id by rank"""
    admitted = admit_engines(cluster, list(numbers.values()), list(numbers))
    before = [cluster.engines[rank] for rank in numbers]
    assert cluster.row_subscriber is not None
    with without_interrupts():
        for old, engine in zip(before, admitted, strict=True):
            cluster.row_subscriber.disconnect_engine(old.rows_address)
            cluster.row_subscriber.connect_engine(engine.rows_address)
            for same in [e.rank for e in cluster.engines if e.process_key == old.process_key]:
                cluster.rpc.connect_rank(same, engine.rpc_address)
                cluster.engines[same] = replace(engine, rank=same)
        cluster.save_engines()
    return before


def wait_for_engines(cluster: ClusterState, numbers: Sequence[int], show_progress: Callable[[], None]) -> None:
    """Waits for the engines with these numbers. Raises ClusterError if they do not come up."""
    assert cluster.processes is not None
    until = time.monotonic() + START_TIMEOUT
    while not set(numbers) <= set(cluster.client.ids):
        for number in numbers:
            engine = cluster.processes.started[f"engine {number}"]
            if (code := engine.poll()) is not None or (isinstance(engine, ForkedEngine) and engine.is_lost):
                tail = read_log_tail(cluster.place, f"engine {number}")
                raise ClusterError(f"engine {number} ended with {describe_exit_code(code)} before it was up.{tail}")
        if cluster.closed:
            raise ClusterError("the lab was closed while an engine came up")
        if time.monotonic() > until:
            raise ClusterError(f"engines {list(numbers)} were not up within {START_TIMEOUT:g} s")
        show_progress()
        time.sleep(POLL_INTERVAL)
