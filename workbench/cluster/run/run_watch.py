"""Watches one run: checks its engines, asks its ranks for status, and does what `RunEnding` decides."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cluster.processes.lab_place import ClusterError, alive
from workbench.cluster.processes.supervised_thread import SupervisedThread
from workbench.cluster.run import last_rows
from workbench.cluster.run.rank_errors import RankError, align_death_steps, explain_lost_state
from workbench.record import checkpoints
from workbench.record.free_memory import READER_INTERVAL, MemoryRelease

if TYPE_CHECKING:
    from workbench.cluster.engines.cluster import Cluster
    from workbench.cluster.run.run_controller import RunController

POLL_INTERVAL = 0.2  # seconds
STATUS_INTERVAL = 1.0  # seconds
SILENCE_LIMIT = 2.0  # seconds before reading marks from disk


class RunWatch:
    """Watches `live` until it is over."""

    def __init__(self, live: RunController) -> None:
        self.live, self.ending = live, live.ending
        self._asked_at, self._tidy = 0.0, MemoryRelease(READER_INTERVAL)
        self._answered_at = dict.fromkeys(live.ranks, time.monotonic())  # last answers
        self.silent: set[int] = set()

    def start_watch(self) -> None:
        SupervisedThread("run watch", self._watch_once, self.live.over, self.live.note_error).start()

    def _watch_once(self) -> None:
        try:
            self._check_engines()
            if time.monotonic() - self._asked_at > (POLL_INTERVAL if self.ending.is_end_near else STATUS_INTERVAL):
                self._asked_at = time.monotonic()
                self.request_status()
            self._tidy.due()
        finally:  # a failed look must not prevent the end
            self._take_action(self.ending.next_action())
            self.live.over.wait(POLL_INTERVAL)

    def _take_action(self, action: str) -> None:
        match action:
            case "abort":
                self.live.abort_ranks()
            case "give up":
                self._give_up(sorted(self.ending.awaited_ranks))
            case "over":
                self._finish_run(self.silent)

    def _check_engines(self) -> None:
        for rank in self.live.ranks:
            known = rank in self.ending.errors or rank in self.ending.dead_ranks
            if not known and (how := self.live.cluster.describe_death(rank)) and not self.live.evictions.has_left(rank):
                self.live.note_death(rank, self.live.hang_monitor.describe_death(rank, how))

    def request_status(self) -> None:
        """Asks every rank for its status. Reads a silent rank's marks from a visible disk."""
        live, now = self.live, time.monotonic()
        for rank, answer in live.cluster.rpc.ask_all("status", timeout=0.8, ranks=self.ending.living_ranks).items():
            if isinstance(answer, dict) and (answer["run_id"], answer["as"]) == (live.run_id, rank):
                live.status[rank], self._answered_at[rank] = answer, now
                self.silent.discard(rank)
                live.reorder_buffer.take_count("marks", rank, answer["sent"].get("marks", 0))  # maybe no later message
                if answer["error"]:
                    self.ending.note_error(rank, answer["error"])
                self.ending.take_status(rank, answer)
                live.hang_monitor.take_status(rank, answer)
                self._note_error(rank, answer.get("trouble", ""))
            elif now - self._answered_at.setdefault(rank, now) > SILENCE_LIMIT:
                self.silent.add(rank)
                last_rows.read_silent_rows(live, "marks", rank)

        live.hang_monitor.find_stalls(
            "failing" if self.ending.errors else live.state, {*self.ending.final_states, *self.ending.lost}
        )

    def _note_error(self, rank: int, what: str) -> None:
        if (
            what
            and (
                text := f"rank {rank}'s connection to this kernel failed with {what}; the traceback is in the "
                f"log of its engine"
            )
            not in self.live.notes
        ):
            self.live.notes.append(text)

    def _give_up(self, late: list[int]) -> None:
        ended, live = self.live.cluster.health.give_up_engines(late), self.live
        for rank in late:
            last = live.status.get(rank, {})
            said = "does not answer" if rank in self.silent else "did not leave the run"
            where = f"it was at step {last.get('step', live.step)}"
            where += f", in {last['busy']}" if last.get("busy") else ""
            then = "its engine was ended" if rank in ended else "its engine is not used again"
            live.notes.append(f"rank {rank} {said}: {where}; {then}, and the next run gets new ones")
        self._finish_run(self.silent | set(late))

    def _finish_run(self, silent: set[int]) -> None:
        live, dead = self.live, self.ending.dead_ranks
        try:
            left = {r for r in live.preempted if live.cluster.describe_death(r)} | set(live.successor_ranks)
            last_rows.gather_last_rows(live, dead | silent | left)
            align_death_steps(self.ending.errors, live.changes.experiment)
            self._explain_lost_state()
            last_rows.record_deaths(live, dead)
        except Exception as failure:  # a full disk or silent rank must not prevent the end
            live.note_error(failure)
        if self.ending.is_stop_requested:
            self.ending.forget_ranks(set(self.ending.errors) - set(live.members))
        state, errors = self.ending.find_outcome()
        if state != "done" and (why := _describe_orphan(live.cluster)):
            return live.end_run("failed", ClusterError(why))
        live.end_run(state, RankError(errors) if errors else None)

    def _explain_lost_state(self) -> None:
        """Adds to the errors if all ranks with the trained state died."""
        live, ending = self.live, self.ending
        joining = sorted(live.used_ranks - set(live.members) - ending.dead_ranks - set(ending.lost))
        kept = (
            checkpoints.list_checkpoints(Path(live.run.path) / checkpoints.FOLDER) if live.run.path is not None else []
        )
        explain_lost_state(ending.errors, live.members, joining, str(kept[-1]) if kept else "")


def _describe_orphan(cluster: Cluster) -> str:
    """Describes how a guest's owner ended or closed the lab, or ""."""
    if cluster.is_guest and not alive(cluster.owner):
        return f"the kernel that owned lab {cluster.name!r} ended, and its ranks with it"
    if cluster.is_guest and not cluster.place.read_state():
        return f"lab {cluster.name!r} was closed by the kernel that owns it"
    return ""
