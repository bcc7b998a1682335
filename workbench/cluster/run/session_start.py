"""Sends every rank the secret and starts its session, or starts none."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from workbench.cluster.engines import engine_server
from workbench.cluster.engines.cluster import Cluster
from workbench.cluster.engines.engine_probe import spans_hosts
from workbench.cluster.processes.lab_place import ClusterError
from workbench.cluster.run.rank_errors import RankError
from workbench.cluster.run.run_ending import LEAVE_TIMEOUT
from workbench.settings.describe_error import class_of, text_of

SECRET_TIMEOUT = 30.0  # seconds for all ranks
BEGIN_TIMEOUT = 60.0  # seconds for all ranks
POLL_INTERVAL = 0.2  # seconds


class StartTimeout(ClusterError):
    """An engine has not begun in time, but still may."""


def begin_sessions(
    cluster: Cluster, job: dict[str, Any], blob: bytes, ranks: Sequence[int],
    unwanted: Callable[[], bool] = lambda: False, *, secret: str,
) -> dict[int, str]:  # fmt: skip
    """Starts a session on each rank's engine. Returns {rank: its spool directory}.

    secret:   hexadecimal digits that only these ranks know
    unwanted: whether the run was stopped a while ago

    Raises RankError if a rank cannot begin; then none does.
    """
    first, asked = cluster.engines[0], {}
    loop, store = not spans_hosts(cluster.engines), (str(cluster.place.path / "ranks"), 0)
    try:
        if not loop:
            store = cluster.call(first.id, engine_server.host_store, job["session"], first.reach)
    except Exception as error:
        raise RankError([_describe_failure(cluster, 0, error)]) from None
    _send_secret(cluster, ranks, secret, unwanted)
    shared = {"size": len(ranks), **job, "store": store, "kind": cluster.backend, "loopback": loop}
    for engine in (cluster.engines[rank] for rank in ranks):
        rank_arguments = {
            "rank": engine.rank,
            "device": cluster.devices[engine.rank],
            "owns_process": cluster.health.is_own(engine),
        }
        asked[engine.rank] = cluster.client[engine.id].apply_async(
            engine_server.begin_session, {**shared, **rank_arguments}, blob
        )
    spools, errors, until = {}, {}, time.monotonic() + BEGIN_TIMEOUT
    for rank, answer in asked.items():
        try:
            spools[rank] = str(_await_session(cluster, rank, answer, until, unwanted))
        except Exception as error:
            errors[rank] = error
    if errors:
        late = {rank for rank, error in errors.items() if isinstance(error, StartTimeout)}
        why = [_describe_failure(cluster, rank, error) for rank, error in errors.items()]
        _dismiss_begun(cluster, job["run_id"], spools, late)
        raise RankError(why)
    return spools


def _send_secret(cluster: Cluster, ranks: Sequence[int], secret: str, unwanted: Callable[[], bool]) -> None:
    """Sends ranks the secret, only over the encrypted connection. Raises RankError if one does not take it."""
    until, waiting = time.monotonic() + SECRET_TIMEOUT, set(ranks)
    while waiting:
        answers = cluster.rpc.ask_all("trust", timeout=1.0, ranks=waiting, secret=secret)
        silent = {rank: error for rank, error in answers.items() if isinstance(error, Exception)}
        late = silent and time.monotonic() > until
        if late or (silent and unwanted()) or any(cluster.describe_death(rank) for rank in silent):
            why = [_describe_failure(cluster, rank, error) for rank, error in silent.items()]
            cluster.health.give_up_engines(silent if late else ())
            raise RankError(why)
        waiting = set(silent)


def _await_session(cluster: Cluster, rank: int, answer: Any, until: float, unwanted: Callable[[], bool]) -> Any:
    """Waits while engine and controller live."""
    while not answer.ready():
        answer.wait(POLL_INTERVAL)
        if cluster.describe_death(rank) or cluster.health.describe_controller_death():
            break
        if time.monotonic() > until or unwanted():
            raise StartTimeout(f"its engine did not begin within {BEGIN_TIMEOUT:g} s (is a cell running there?)")
    return answer.get(POLL_INTERVAL)


def _dismiss_begun(cluster: Cluster, run_id: str, begun: Collection[int], late: set[int]) -> None:
    """Dismisses ranks that otherwise would wait for the failed one."""
    cluster.rpc.ask_all("abort", timeout=1.0, ranks=begun, of=(run_id, list(begun)))
    until, inside = time.monotonic() + LEAVE_TIMEOUT, set(begun)
    while inside and time.monotonic() < until:
        answers = cluster.rpc.ask_all("status", timeout=1.0, ranks=inside)
        inside -= {rank for rank, answer in answers.items() if isinstance(answer, dict) and answer["over"]}
        time.sleep(POLL_INTERVAL)
    if inside | late:
        cluster.health.give_up_engines(inside | late)


def _describe_failure(cluster: Cluster, rank: int, error: Exception) -> dict[str, Any]:
    about = {"rank": rank, "step": 0, "op": "set-up"}
    if how := cluster.describe_death(rank):
        return {**about, "type": "EngineDied", "text": f"its engine {how}"}
    if how := cluster.health.describe_controller_death():
        return {**about, "type": "ControllerDied", "text": f"the controller {how}, so that no run can begin"}
    name = getattr(error, "ename", class_of(error))
    return {**about, "type": name, "text": getattr(error, "evalue", text_of(error))}
