"""Evicts ranks that hang, on request or by `on_hang`, and replaces lost ranks.

The remaining ranks first report whether they can continue. Then the lab ends the hanging engine, so that it uses no
core and never wakes up. The run treats this as a death.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from workbench.cluster.engines.engines import spans_hosts
from workbench.cluster.engines.meeting import cannot_start
from workbench.cluster.observe import links
from workbench.cluster.observe.hang_diagnosis import StallVerdict, name_ranks
from workbench.cluster.processes.place import ClusterError
from workbench.cluster.run.errors import RankError
from workbench.cluster.run.resizing import LOOK, RankNotBegun, list_idle, list_returned, resize_run
from workbench.cluster.run.state import RunState
from workbench.record.run import FINAL
from workbench.settings import KnobError

if TYPE_CHECKING:
    from workbench.cluster.run.changes import PendingChange

TELL = 2.0  # seconds for the remaining ranks to report whether they can go on
AGAIN = "ask again"  # ends a temporary refusal
TRIES = 3  # requests after such refusals
WORD = 2.0  # seconds from an engine's end to the ranks' report


class Evictions:
    """The evictions and replacements of one run.

    reasons:   by rank
    leaving:   evicted ranks that the run still counts
    acts:      whether to replace lost ranks; False while a kernel replays the record
    lacking:   lost ranks without a replacement in that record
    """

    def __init__(self, live: RunState) -> None:
        self.live = live
        self.reasons: dict[int, str] = {}
        self.leaving: set[int] = set()
        self.acts, self.lacking = True, 0
        self._replaced: set[int] = set()
        self._refused = ""
        self._refusals = 0
        self._lock, self._counts = threading.Lock(), threading.Lock()
        self._replacing = threading.Lock()  # held from a request for ranks to its answer
        self._wanted = 0  # replacements not requested yet

    # -- events

    def take_stall(self, found: StallVerdict, fresh: bool) -> None:
        """Takes in a stall. fresh: whether it is new"""
        live = self.live
        if fresh:
            self.record_mark(
                "hang", {"ranks": found.odd, "seconds": found.seconds, "text": found.text}, besides=found.odd
            )
        does = live.changes.experiment.on_hang
        odd = [rank for rank in found.odd if rank not in self.leaving]
        if does == "wait" or not found.sure or live.ending.asked or not odd:
            return
        try:
            self.evict_ranks(odd, found.text, replace=does == "replace", whatever=True)
        except (ClusterError, KnobError) as failure:
            if str(failure) != self._refused:
                self._refused = str(failure)
                live.note_error(failure)

    def name_dead_link(self, found: StallVerdict) -> StallVerdict:
        """Names a dead link, if any, when all ranks wait."""
        return links.name_dead_link(
            found, self.live.cluster.rpc.ask_all("wires", timeout=TELL, ranks=self.live.members)
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
        over = rank not in self.live.members or self.live.ending.left.get(rank) == "stopped"
        return over or time.monotonic() - since < WORD

    def went_on(self, gone: Sequence[int], preempted: Collection[int] = (), new: Collection[int] | None = None,
                spare: Collection[int] = ()) -> None:  # fmt: skip
        """Takes in that the run continued without the ranks `gone`, and replaces lost ranks by the settings.

        preempted: preempted ranks among `gone`
        new:       ranks that joined; None without a resize
        spare:     ranks that left because the remaining number did not fit; they are replaced, too
        """
        self.leaving -= set(gone)
        lost = {rank for rank in gone if rank in preempted or self.live.cluster.describe_death(rank)}
        if not self.acts:
            if new is None or preempted:
                self.lacking += len(lost | set(spare)) if lost else 0
            else:
                self.lacking = max(0, self.lacking - len(new)) if new else 0
            return
        if self.live.changes.experiment.on_death == "replace":
            self._replaced |= lost
        if mine := self._replaced & set(gone):
            self._replaced -= mine
            self._begin_replacing(len(mine | lost | set(spare)))

    def replace_lost(self) -> None:
        """Replaces ranks lost while no kernel was attached."""
        count, self.lacking = self.lacking, 0
        if count and self.live.changes.experiment.on_death == "replace" and not self.live.ending.asked:
            self._begin_replacing(count)

    def _begin_replacing(self, count: int) -> None:
        with self._counts:
            self._wanted += count
            if self._wanted == count:  # else a waiting thread requests these
                threading.Thread(target=self._replace, name="run replacing", daemon=True).start()

    # -- orders

    def evict_ranks(self, ranks: Sequence[int], why: str, replace: bool = False, whatever: bool = False) -> None:
        """Ends the engines of these ranks; the remaining ranks continue.

        It ends no engine of another lab or machine. Once that moves, it finds that the run went on.

        why:      the reason, for the record
        whatever: also evict if the remaining ranks cannot continue and the run fails

        Raises KnobError or ClusterError, and ends nothing, if the eviction is impossible.
        """
        with self._lock:
            able = self._check_ranks(ranks)
            outlived = self._warn_remaining(able, whatever)
            self.reasons |= dict.fromkeys(able, why)
            self.leaving |= set(able) if outlived else set()
            self._replaced |= set(able) if replace and outlived else set()
            self.record_mark("evicted", {"ranks": able, "text": f"{name_ranks(able)} put out: {why}"}, besides=able)
            ours = [rank for rank in able if self.live.cluster.health.is_own(self.live.cluster.engines[rank])]
            if behind := [rank for rank in able if rank not in ours]:
                self.leave_behind(behind, able)
            if left := [rank for rank in ours if not self.live.cluster.health.end_rank(rank)]:
                raise ClusterError(f"{name_ranks(left)} could not be ended: the system keeps the process")

    def _check_ranks(self, ranks: Sequence[int]) -> list[int]:
        live = self.live
        here = [rank for rank in live.members if rank not in live.ending.dead_ranks]
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, int) or rank not in here:
                raise KnobError(f"rank={rank!r}: must be one of those that train now: {', '.join(map(str, here))}")
        if not ranks or set(ranks) >= set(here):
            raise KnobError(f"rank={', '.join(map(str, ranks)) or 'none'}: put out at least one rank, and leave at "
                            f"least one; lab.stop() ends the run")  # fmt: skip
        first = live.cluster.engines[0]
        if first.rank in ranks and spans_hosts(live.cluster.engines):
            raise ClusterError(
                f"rank={first.rank}: where ranks find each other lies with {first}, and nobody can go on without that; "
                f"lab.stop() ends the run"
            )
        return list(dict.fromkeys(ranks))

    def leave_behind(self, ranks: Sequence[int], besides: Collection[int] = ()) -> None:
        """Makes the remaining ranks continue without these, whose engines the lab cannot end."""
        live = self.live
        others = [m for m in live.members if m not in (*ranks, *besides) and m not in live.ending.dead_ranks]
        live.cluster.rpc.ask_all("without", timeout=TELL, ranks=others, members=list(ranks))

    def _warn_remaining(self, ranks: list[int], whatever: bool) -> bool:
        """Warns the remaining ranks. Returns whether they can continue; raises ClusterError if not."""
        live, these = self.live, ", ".join(map(str, ranks))
        others = [rank for rank in live.members if rank not in ranks and rank not in live.ending.dead_ranks]
        said = live.cluster.rpc.ask_all("outlive", timeout=TELL, ranks=others)
        silent = [rank for rank, one in said.items() if isinstance(one, Exception)]
        reason = next((one for one in said.values() if isinstance(one, str) and one), "")
        if silent or reason:
            live.cluster.rpc.ask_all("outlive", timeout=TELL, ranks=set(others) - set(silent), so=False)
        if silent:
            raise ClusterError(
                f"rank={these}: {name_ranks(silent)} would have to go on, and does not answer either; put "
                f"out all that hang, or lab.stop()"
            )
        if reason and not whatever:
            raise ClusterError(f"rank={these}: the others cannot go on alone: {reason}")
        return not reason

    def _replace(self) -> None:
        """Replaces the lost ranks on idle or new engines, as far as there are any.

        One request at a time: each names the run's total, and a second would not count the first's ranks or engines.
        """
        with self._replacing:
            self._replace_lost()

    def _replace_lost(self) -> None:
        live = self.live
        # the first rank may be lost before it reports training; the new first rank then reports it
        while live.state == "starting":
            if live.over.wait(LOOK):
                break
        with self._counts:
            count, self._wanted = self._wanted, 0
        if live.over.is_set() or live.ending.asked or live.state in FINAL:
            return
        try:
            if cannot_start(live.cluster, 1):
                count = min(count, len(list_idle(live)) + len(list_returned(live)))
            if not count:
                raise ClusterError("nobody can come in for a rank that is gone: no engine of this lab is idle, and "
                                   "none can be started")  # fmt: skip
            asked = resize_run(live, len(live.members) + count)
        except Exception as failure:  # the run continues without
            live.note_error(failure)
            if isinstance(failure, RankError | RankNotBegun) and not isinstance(failure, KnobError):
                self._try_again(count)
            return
        self._ask_again(asked)

    def _try_again(self, count: int) -> None:
        """Repeats the request, at most `TRIES` times in a row."""
        self._refusals += 1
        if count and self._refusals <= TRIES:
            self._begin_replacing(count)

    def _ask_again(self, asked: PendingChange) -> None:
        """Repeats the request if a rank or a connection was lost while new ranks joined.

        It counts living new ranks only; `went_on` counts the dead ones.
        """
        live = self.live
        while not live.over.is_set():
            try:
                asked.wait(LOOK)
            except TimeoutError:
                continue
            except KnobError as refusal:
                alive = [rank for rank in asked.coming if not live.cluster.describe_death(rank)]
                self._try_again(len(alive) if str(refusal).endswith(AGAIN) else 0)
                return
            self._refusals = 0
            return
