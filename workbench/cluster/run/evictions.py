"""Evicts ranks that hang, on request or by `on_hang`, and replaces lost ranks.

The remaining ranks first report whether they can continue. Then the lab ends the hanging engine, so that it uses no
core and never wakes up. The run treats this as a death.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from workbench.cluster.engines.engine_admission import find_start_obstacle
from workbench.cluster.engines.engine_probe import spans_hosts
from workbench.cluster.observe import dead_links
from workbench.cluster.observe.hang_diagnosis import StallVerdict
from workbench.cluster.processes.lab_place import ClusterError
from workbench.cluster.run.rank_errors import RankError
from workbench.cluster.run.run_resize import POLL_INTERVAL, RankNotBegun, list_idle, list_returned, resize_run
from workbench.cluster.run.run_state import RunState
from workbench.record.run import FINAL
from workbench.settings import KnobError
from workbench.settings.rank_text import format_ranks

if TYPE_CHECKING:
    from workbench.cluster.run.run_changes import PendingChange

ANSWER_TIMEOUT = 2.0  # seconds for the remaining ranks
RETRY_SUFFIX = "ask again"  # ends a temporary refusal
MAX_RETRIES = 3  # after such refusals
REPORT_TIMEOUT = 2.0  # seconds from an engine's end


class Evictions:
    """The evictions and replacements of one run.

    reasons:     by rank
    leaving:     evicted ranks that the run still counts
    can_replace: whether to replace lost ranks; False while a kernel replays the record
    unreplaced:  lost ranks without a replacement in that record
    """

    def __init__(self, live: RunState) -> None:
        self.live = live
        self.reasons: dict[int, str] = {}
        self.leaving: set[int] = set()
        self.can_replace, self.unreplaced = True, 0
        self._to_replace: set[int] = set()
        self._last_refusal = ""
        self._retries = 0
        self._lock, self._count_lock = threading.Lock(), threading.Lock()
        self._replacing = threading.Lock()  # from a request for ranks to its answer
        self._unrequested = 0  # replacements

    # -- events

    def handle_stall(self, stall: StallVerdict, fresh: bool) -> None:
        """Takes in a stall. fresh: whether it is new"""
        live = self.live
        if fresh:
            detail = {"ranks": stall.stalled_ranks, "seconds": stall.seconds, "text": stall.text}
            self.record_mark("hang", detail, besides=stall.stalled_ranks)
        policy = live.changes.experiment.on_hang
        stalled = [rank for rank in stall.stalled_ranks if rank not in self.leaving]
        if policy == "wait" or not stall.is_certain or live.ending.is_stop_requested or not stalled:
            return
        try:
            self.evict_ranks(stalled, stall.text, replace=policy == "replace", force=True)
        except (ClusterError, KnobError) as failure:
            if str(failure) != self._last_refusal:
                self._last_refusal = str(failure)
                live.note_error(failure)

    def name_dead_link(self, stall: StallVerdict) -> StallVerdict:
        """Names a dead link, if any, when all ranks wait."""
        return dead_links.name_dead_link(
            stall, self.live.cluster.rpc.ask_all("wires", timeout=ANSWER_TIMEOUT, ranks=self.live.members)
        )

    def record_mark(self, name: str, detail: dict[str, Any], besides: Collection[int] = ()) -> None:
        """Records a mark through an able rank outside `besides`."""
        for rank in (m for m in self.live.members if m not in besides and m not in self.live.ending.dead_ranks):
            try:
                self.live.cluster.rpc.ask_rank(rank, "note", timeout=1.0, name=name, detail=detail)
            except ClusterError:
                continue
            return

    def has_left(self, rank: int) -> bool:
        """Whether a preempted rank left before its engine ended. Its report may come slightly later."""
        if rank not in self.live.preempted:
            return False
        since = self.live.preempted[rank] = self.live.preempted[rank] or time.monotonic()
        over = rank not in self.live.members or self.live.ending.final_states.get(rank) == "stopped"
        return over or time.monotonic() - since < REPORT_TIMEOUT

    def note_continued(self, gone: Sequence[int], preempted: Collection[int] = (), new: Collection[int] | None = None,
                spare: Collection[int] = ()) -> None:  # fmt: skip
        """The run continued without the ranks `gone`. Replaces lost ranks by the settings.

        preempted: among `gone`
        new:       ranks that joined; None without a resize
        spare:     ranks that left because the remaining number did not fit; they are replaced, too
        """
        self.leaving -= set(gone)
        lost = {rank for rank in gone if rank in preempted or self.live.cluster.describe_death(rank)}
        if not self.can_replace:
            if new is None or preempted:
                self.unreplaced += len(lost | set(spare)) if lost else 0
            else:
                self.unreplaced = max(0, self.unreplaced - len(new)) if new else 0
            return
        if self.live.changes.experiment.on_death == "replace":
            self._to_replace |= lost
        if mine := self._to_replace & set(gone):
            self._to_replace -= mine
            self._begin_replacing(len(mine | lost | set(spare)))

    def replace_lost(self) -> None:
        """Replaces ranks lost while no kernel was attached."""
        count, self.unreplaced = self.unreplaced, 0
        if count and self.live.changes.experiment.on_death == "replace" and not self.live.ending.is_stop_requested:
            self._begin_replacing(count)

    def _begin_replacing(self, count: int) -> None:
        with self._count_lock:
            self._unrequested += count
            if self._unrequested == count:  # else a waiting thread requests these
                threading.Thread(target=self._replace_now, name="run replacing", daemon=True).start()

    # -- orders

    def evict_ranks(self, ranks: Sequence[int], why: str, replace: bool = False, force: bool = False) -> None:
        """Ends the engines of these ranks; the remaining ranks continue.

        It ends no engine of another lab or machine. Once that moves, it finds that the run went on.

        why:      the reason, for the record
        force:    also evict if the remaining ranks cannot continue and the run fails

        Raises KnobError or ClusterError, and ends nothing, if the eviction is impossible.
        """
        with self._lock:
            able = self._check_ranks(ranks)
            outlived = self._prepare_remaining(able, force)
            self.reasons |= dict.fromkeys(able, why)
            self.leaving |= set(able) if outlived else set()
            self._to_replace |= set(able) if replace and outlived else set()
            self.record_mark("evicted", {"ranks": able, "text": f"{format_ranks(able)} put out: {why}"}, besides=able)
            ours = [rank for rank in able if self.live.cluster.health.is_own(self.live.cluster.engines[rank])]
            if behind := [rank for rank in able if rank not in ours]:
                self.leave_behind(behind, able)
            if left := [rank for rank in ours if not self.live.cluster.health.end_rank(rank)]:
                raise ClusterError(f"{format_ranks(left)} could not be ended: the system keeps the process")

    def _check_ranks(self, ranks: Sequence[int]) -> list[int]:
        live = self.live
        here = [rank for rank in live.members if rank not in live.ending.dead_ranks]
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, int) or rank not in here:
                raise KnobError(f"rank={rank!r}: must be one of those that train now: {', '.join(map(str, here))}")
        if not ranks or set(ranks) >= set(here):
            raise KnobError(f"rank={', '.join(map(str, ranks)) or 'none'}: name at least one rank, and leave at "
            f"least one; lab.stop() ends the run")  # fmt: skip
        first = live.cluster.engines[0]
        if first.rank in ranks and spans_hosts(live.cluster.engines):
            raise ClusterError(
                f"rank={first.rank}: {first} hosts the store that ranks need to find each other, so no rank can go "
                f"on without it; lab.stop() ends the run"
            )
        return list(dict.fromkeys(ranks))

    def leave_behind(self, ranks: Sequence[int], besides: Collection[int] = ()) -> None:
        """Makes the remaining ranks continue without these, because the lab cannot end their engines."""
        live = self.live
        remaining = [m for m in live.members if m not in (*ranks, *besides) and m not in live.ending.dead_ranks]
        live.cluster.rpc.ask_all("without", timeout=ANSWER_TIMEOUT, ranks=remaining, members=list(ranks))

    def _prepare_remaining(self, ranks: list[int], force: bool) -> bool:
        """Returns whether the remaining ranks can continue; raises ClusterError if not."""
        live, these = self.live, ", ".join(map(str, ranks))
        remaining = [rank for rank in live.members if rank not in ranks and rank not in live.ending.dead_ranks]
        answers = live.cluster.rpc.ask_all("outlive", timeout=ANSWER_TIMEOUT, ranks=remaining)
        silent = [rank for rank, one in answers.items() if isinstance(one, Exception)]
        reason = next((one for one in answers.values() if isinstance(one, str) and one), "")
        if silent or reason:
            live.cluster.rpc.ask_all("outlive", timeout=ANSWER_TIMEOUT, ranks=set(remaining) - set(silent), so=False)
        if silent:
            raise ClusterError(
                f"rank={these}: {format_ranks(silent)} would have to go on, and does not answer either; name all ranks "
                f"that hang, or call lab.stop()"
            )
        if reason and not force:
            raise ClusterError(f"rank={these}: the other ranks cannot go on without it: {reason}")
        return not reason

    def _replace_now(self) -> None:
        """Replaces the lost ranks on idle or new engines, as far as there are any.

        One request at a time: each names the run's total, and a second would not count the first's ranks or engines.
        """
        with self._replacing:
            self._replace_lost()

    def _replace_lost(self) -> None:
        live = self.live
        # the first rank may be lost before it reports training; the new first rank then reports it
        while live.state == "starting":
            if live.over.wait(POLL_INTERVAL):
                break
        with self._count_lock:
            count, self._unrequested = self._unrequested, 0
        if live.over.is_set() or live.ending.is_stop_requested or live.state in FINAL:
            return
        try:
            if find_start_obstacle(live.cluster, 1):
                count = min(count, len(list_idle(live)) + len(list_returned(live)))
            if not count:
                raise ClusterError("no rank can replace a lost one: no engine of this lab is idle, and none can be "
                "started")  # fmt: skip
            change = resize_run(live, len(live.members) + count)
        except Exception as failure:  # the run continues without
            live.note_error(failure)
            if isinstance(failure, RankError | RankNotBegun) and not isinstance(failure, KnobError):
                self._retry_replacing(count)
            return
        self._retry_if_refused(change)

    def _retry_replacing(self, count: int) -> None:
        """Repeats the request, at most `MAX_RETRIES` times in a row."""
        self._retries += 1
        if count and self._retries <= MAX_RETRIES:
            self._begin_replacing(count)

    def _retry_if_refused(self, change: PendingChange) -> None:
        """Repeats the request if a rank or a connection was lost while new ranks joined.

        Counts living new ranks only; `note_continued` counts the dead ones.
        """
        live = self.live
        while not live.over.is_set():
            try:
                change.wait(POLL_INTERVAL)
            except TimeoutError:
                continue
            except KnobError as refusal:
                alive = [rank for rank in change.joining if not live.cluster.describe_death(rank)]
                self._retry_replacing(len(alive) if str(refusal).endswith(RETRY_SUFFIX) else 0)
                return
            self._retries = 0
            return
