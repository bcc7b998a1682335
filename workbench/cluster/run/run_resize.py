"""The kernel's side of a resize.

A new rank's session begins on an idle or new engine, and waits. Then the training ranks invite it
(`engine/rank/resizing.py`). So a rank that cannot begin changes nothing.
"""

from __future__ import annotations

import time

from workbench.cluster.engines.engine_admission import find_start_obstacle, reuse_engine, start_more_engines
from workbench.cluster.processes.lab_place import ClusterError
from workbench.cluster.processes.uninterruptible import without_interrupts
from workbench.cluster.run import last_rows
from workbench.cluster.run.run_changes import PendingChange
from workbench.cluster.run.run_state import RunState
from workbench.cluster.run.run_waiting import wait_for_start
from workbench.cluster.run.session_start import begin_sessions
from workbench.experiment.user_input import MAX_RANKS
from workbench.settings import KnobError
from workbench.settings.progress import doing
from workbench.settings.rank_text import format_ranks

BEGIN_TIMEOUT = 60.0  # seconds until a rank waits
POLL_INTERVAL = 0.05  # seconds
STATUS_TIMEOUT = 1.0  # seconds for a free engine


class RankNotBegun(ClusterError):
    """A new rank has not begun to wait for its invitation."""


def resize_run(live: RunState, ranks: int) -> PendingChange:
    """Makes `ranks` ranks train from one of the next steps. Raises KnobError if that is impossible."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise KnobError(f"ranks={ranks!r}: must be an integer of at least 1")
    if live.changes.experiment.task.has_own_loop:
        name = type(live.changes.experiment.task).__name__
        here = len(live.members)
        raise KnobError(f"ranks={ranks}: the loop of a {name} keeps the {here} ranks that it started with")
    with doing(f"bringing the run to {ranks} rank{'s' * (ranks != 1)}"), live.resize_lock:
        wait_for_start(live)
        return _make_resize(live, ranks, list(live.members))  # no other request takes these engines


def _make_resize(live: RunState, ranks: int, here: list[int]) -> PendingChange:
    spare = list_idle(live)
    if ranks > len(here) + len(spare):
        with live.cluster.start_lock:  # waits for starting engines, reserves returned ones
            spare = list_idle(live) + list_returned(live)
            return _request_resize(live, ranks, here, spare, max(0, ranks - len(here) - len(spare)))
    return _request_resize(live, ranks, here, spare, 0)


def _request_resize(live: RunState, ranks: int, here: list[int], spare: list[int], missing: int) -> PendingChange:
    if missing and (why := find_start_obstacle(live.cluster, missing)):
        raise KnobError(
            f"ranks={ranks}: {len(here)} ranks train, {len(spare)} engines of this lab are idle, and more cannot be "
            f"started: {why}; take at most {len(here) + len(spare)}"
        )
    if ranks > len(here) and (how := live.cluster.health.describe_controller_death()):
        raise KnobError(f"ranks={ranks}: no rank can join, because the controller {how}; take at most {len(here)}")
    if live.state not in ("running", "paused"):
        raise ClusterError(
            f"ranks={ranks}: the run is {live.state}; the number of ranks can change only while it trains"
        )
    if missing:
        spare += start_more_engines(live.cluster, missing)
    new, asked = spare[: max(0, ranks - len(here))], None
    try:
        if new:
            _begin_sessions(live, new)
        with without_interrupts():
            asked = live.changes.request_resize([*here[:ranks], *new], new)
            live.commands.put_change(asked)
    except BaseException:  # also for an interrupt
        if asked is None:  # no rank would invite the new ones
            live.commands.dismiss_ranks(new)
        raise
    return asked


def list_idle(live: RunState) -> list[int]:
    """Returns ranks with living engines that never were in this run."""
    engines, used_ranks = live.cluster.engines, live.used_ranks
    used = {engines[rank].process_key for rank in used_ranks if rank < len(engines)}
    fresh = {e.process_key: e.rank for e in engines if e.process_key not in used}
    return [rank for rank in fresh.values() if not live.cluster.describe_death(rank)]


def list_returned(live: RunState) -> list[int]:
    """Returns new ranks for engines that the run left behind and that are free again.

    Such a rank was removed, was dismissed before it joined, or was unreachable (stopped or disconnected). Its engine is
    free once it finds that the run went on. The kernel first fetches its last rows.
    """
    with live.cluster.start_lock:
        return _list_returned(live)


def _list_returned(live: RunState) -> list[int]:
    cluster, engines = live.cluster, live.cluster.engines
    here = {engines[rank].process_key for rank in live.members}
    last = {engines[rank].process_key: rank for rank in sorted(live.used_ranks) if rank < len(engines)}
    ends = live.preempted
    gone = [
        rank for process, rank in last.items() if not (process in here or rank in ends or cluster.describe_death(rank))
    ]
    answers = cluster.rpc.ask_all("status", timeout=STATUS_TIMEOUT, ranks=gone) if gone else {}
    over = {rank: (one["run_id"], one["as"]) == (live.run_id, rank) for rank, one in answers.items()
            if isinstance(one, dict) and one["over"]}  # fmt: skip
    found = []
    for rank, begun in over.items():
        if not (begun or rank in live.commands.dismissed):  # it is about to begin
            continue
        if rank not in live.successor_ranks and len(engines) < MAX_RANKS:
            if begun:
                last_rows.fetch_departed_rows(live, rank, answers[rank]["sent"])
            with without_interrupts():
                live.successor_ranks[rank] = reuse_engine(cluster, engines[rank])
        if rank in live.successor_ranks:
            found.append(live.successor_ranks[rank])
    return found


def _begin_sessions(live: RunState, new: list[int]) -> None:
    """Begins these ranks' waiting sessions. Raises RankError or RankNotBegun if one does not."""
    live.admit_ranks(new)
    live.spool_folders |= begin_sessions(
        live.cluster, {**live.session_arguments, "joins": True}, live.pickled_experiment, new, secret=live.secret
    )
    until = time.monotonic() + BEGIN_TIMEOUT
    while True:
        answers = live.cluster.rpc.ask_all("status", timeout=1.0, ranks=new)
        states = {rank: answer["state"] for rank, answer in answers.items() if isinstance(answer, dict)}
        if set(states.values()) == {"waiting"} and len(states) == len(new):
            return
        died = {rank: how for rank in new if (how := live.cluster.describe_death(rank))}
        if died or time.monotonic() > until or live.over.is_set():
            live.cluster.rpc.ask_all("abort", timeout=1.0, ranks=new, of=(live.run_id, new))
            why = "; ".join(f"the engine of rank {rank} {how}" for rank, how in died.items())
            why = why or f"they did not begin within {BEGIN_TIMEOUT:.0f} s"
            raise RankNotBegun(f"{format_ranks(new)} did not join: {why}; the run goes on without them; ask again")
        time.sleep(POLL_INTERVAL)
