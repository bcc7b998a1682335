"""Reads the stacks of the ranks' threads on the kernel's side.

An engine that does not answer gets a signal. A stopped process has no stacks; the text then says so.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from workbench.cluster.engines.cluster import Cluster
from workbench.cluster.processes.stack_dump import DUMP_SIGNAL, make_stacks_path

ANSWER_TIMEOUT = 2.0  # seconds
DUMP_TIMEOUT = 2.0  # seconds from signal to stacks
POLL_INTERVAL = 0.02  # seconds


class Stacks(dict[int, str]):
    """Each rank's stacks, training thread first, or why it has none."""

    def __str__(self) -> str:
        return "\n\n".join(f"rank {rank}: {text}" for rank, text in sorted(self.items()))

    __repr__ = __str__


def gather_stacks(cluster: Cluster, ranks: Collection[int]) -> Stacks:
    """Returns these ranks' stacks within a few seconds."""
    ended = {rank: how for rank in ranks if (how := cluster.describe_death(rank))}
    stacks_by_rank = Stacks({rank: f"its engine {how}" for rank, how in ended.items()})
    stopped = {rank: how for rank in ranks if rank not in ended and (how := cluster.health.describe_stop(rank))}
    stacks_by_rank |= {rank: f"{how}; no thread of it runs" for rank, how in stopped.items()}
    silent = [rank for rank in ranks if rank not in stacks_by_rank]
    answers = cluster.rpc.ask_all("stacks", timeout=ANSWER_TIMEOUT, ranks=silent) if silent else {}
    for rank, answer in answers.items():
        stacks_by_rank[rank] = answer if isinstance(answer, str) else _request_by_signal(cluster, rank)
    return stacks_by_rank


def _request_by_signal(cluster: Cluster, rank: int) -> str:
    """Returns a silent engine's stacks as faulthandler writes them, newest call first."""
    engine, file = cluster.engines[rank], make_stacks_path(cluster.place.path / "log", cluster.engines[rank].pid)
    if DUMP_SIGNAL is None or not cluster.health.is_own(engine) or not file.exists():  # the signal would end it
        return "it does not answer, and this lab has no other way to inspect its process"
    before = seen = file.stat().st_size
    cluster.health.send_signal(rank, DUMP_SIGNAL)
    until = time.monotonic() + DUMP_TIMEOUT
    while time.monotonic() < until:
        time.sleep(POLL_INTERVAL)
        size = file.stat().st_size
        if size > before and size == seen:
            break
        seen = size
    with file.open("rb") as written:
        written.seek(before)
        text = written.read().decode(errors="replace").strip()
    return f"it does not answer, because its code lets no other thread run\n{text}" if text else "it does not answer"
