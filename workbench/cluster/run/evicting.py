"""Ranks that hang, put out of a run that goes on without them: because somebody says so, or as `on_hang` does.

The others are told first, and say whether they could go on. Then the engine that hangs is ended, so that nothing of it
burns a core or wakes up later, and what follows is what follows a death.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from workbench.cluster.engines.engines import spans_hosts
from workbench.cluster.engines.meeting import cannot_start
from workbench.cluster.observe import links
from workbench.cluster.observe.silence import Verdict, named
from workbench.cluster.processes.place import ClusterError
from workbench.cluster.run.errors import RankError
from workbench.cluster.run.resizing import LOOK, NotBegun, idle, resize, returned
from workbench.record.run import FINAL
from workbench.settings import KnobError

if TYPE_CHECKING:
    from workbench.cluster.run.changes import PendingChange
    from workbench.cluster.run.live import Live

TELL = 2.0  # seconds that the others have to say whether they could go on
AGAIN = "ask again"  # the end of a refusal that holds no longer
TRIES = 3  # times that ranks are asked for again after such a refusal
WORD = 2.0  # seconds that their word may take that they went on


class Evicting:
    """One run's.

    reasons:   why ranks were put out, by rank; leaving: those whom the others have not left behind yet
    acts:      does it replace who is lost? Not while what the record says is heard again
    lacking:   then, how many of those who were lost nobody has come for
    preempted: ranks that have said that they leave, and when their engines were first seen to be gone
    """

    def __init__(self, live: Live) -> None:
        self.live = live
        self.reasons: dict[int, str] = {}
        self.leaving: set[int] = set()
        self.acts, self.lacking = True, 0
        self.preempted: dict[int, float | None] = {}
        self._replaced: set[int] = set()  # in whose place another is to come
        self._refused = ""
        self._refusals = 0  # in a row, of ranks that were to come in for others
        self._lock, self._counts = threading.Lock(), threading.Lock()
        self._replacing = threading.Lock()  # of the thread that asks for new ranks, until the ranks have answered
        self._wanted = 0  # how many are to come in for others and nobody has seen to yet

    # -- what the ranks do

    def hangs(self, found: Verdict, fresh: bool) -> None:
        """Ranks stand still and hold up others. fresh: was that not so a moment ago?"""
        live = self.live
        if fresh:
            self.note("hang", {"ranks": found.odd, "seconds": found.seconds, "text": found.text}, besides=found.odd)
        does = live.changes.experiment.on_hang
        odd = [rank for rank in found.odd if rank not in self.leaving]
        if does == "wait" or not found.sure or live.ending.asked or not odd:
            return
        try:
            self.evict(odd, found.text, replace=does == "replace", whatever=True)
        except (ClusterError, KnobError) as failure:
            if str(failure) != self._refused:
                self._refused = str(failure)
                live.note(failure)

    def between(self, found: Verdict) -> Verdict:
        """All ranks wait: which link is dead, if one is."""
        return links.named(found, self.live.cluster.line.ask_all("wires", timeout=TELL, ranks=self.live.members))

    def note(self, name: str, detail: dict[str, Any], besides: Collection[int] = ()) -> None:
        """A mark in the record, by the first rank that can write it."""
        for rank in (m for m in self.live.members if m not in besides and m not in self.live.ending.dead):
            try:
                self.live.cluster.line.ask(rank, "note", timeout=1.0, name=name, detail=detail)
            except ClusterError:
                continue
            return

    def left(self, rank: int) -> bool:
        """Is the engine of this rank gone because it was preempted, and had its rank left before?

        The word of those who go on may come a moment later than the engine's end.
        """
        if rank not in self.preempted:
            return False
        since = self.preempted[rank] = self.preempted[rank] or time.monotonic()
        over = rank not in self.live.members or self.live.ending.left.get(rank) == "stopped"
        return over or time.monotonic() - since < WORD

    def went_on(self, gone: Sequence[int], preempted: Collection[int] = (), new: Collection[int] | None = None,
                spare: Collection[int] = ()) -> None:  # fmt: skip
        """The others went on without these, of whom some were preempted. new: who came, if ranks were asked for.

        spare: who was only not needed without one that is lost: in their place others come, too
        """
        self.leaving -= set(gone)
        lost = {rank for rank in gone if rank in preempted or self.live.cluster.death(rank)}
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

    def attached(self) -> None:
        """Others come in for those who were lost while no kernel was there to ask for them."""
        count, self.lacking = self.lacking, 0
        if count and self.live.changes.experiment.on_death == "replace" and not self.live.ending.asked:
            self._begin_replacing(count)

    def _begin_replacing(self, count: int) -> None:
        with self._counts:
            self._wanted += count
            if self._wanted == count:  # else one waits already who sees to these, too
                threading.Thread(target=self._replace, name="run replacing", daemon=True).start()

    # -- what is asked

    def evict(self, ranks: Sequence[int], why: str, replace: bool = False, whatever: bool = False) -> None:
        """Ends the engines of these ranks, and the others go on.

        One that this lab has not started, or that is on another machine, is left behind: it is not ended, and finds
        once it moves that the others went on.

        why: in words, for the record; whatever: also where the others cannot go on, so that the run fails
        Raises KnobError or ClusterError where it cannot be, and ends nothing then.
        """
        with self._lock:
            able = self._able(ranks)
            outlived = self._told(able, whatever)
            self.reasons |= dict.fromkeys(able, why)
            self.leaving |= set(able) if outlived else set()
            self._replaced |= set(able) if replace and outlived else set()
            self.note("evicted", {"ranks": able, "text": f"{named(able)} put out: {why}"}, besides=able)
            ours = [rank for rank in able if self.live.cluster.health.mine(self.live.cluster.engines[rank])]
            if behind := [rank for rank in able if rank not in ours]:
                self.leave_behind(behind, able)
            if left := [rank for rank in ours if not self.live.cluster.health.end(rank)]:
                raise ClusterError(f"{named(left)} could not be ended: the system keeps the process")

    def _able(self, ranks: Sequence[int]) -> list[int]:
        live = self.live
        here = [rank for rank in live.members if rank not in live.ending.dead]
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
        """The others are told to go on without these, whose engines nobody here can end."""
        live = self.live
        others = [m for m in live.members if m not in (*ranks, *besides) and m not in live.ending.dead]
        live.cluster.line.ask_all("without", timeout=TELL, ranks=others, members=list(ranks))

    def _told(self, ranks: list[int], whatever: bool) -> bool:
        """Tells the others; whether they could go on. Raises ClusterError where they could not."""
        live, these = self.live, ", ".join(map(str, ranks))
        others = [rank for rank in live.members if rank not in ranks and rank not in live.ending.dead]
        said = live.cluster.line.ask_all("outlive", timeout=TELL, ranks=others)
        silent = [rank for rank, one in said.items() if isinstance(one, Exception)]
        reason = next((one for one in said.values() if isinstance(one, str) and one), "")
        if silent or reason:
            live.cluster.line.ask_all("outlive", timeout=TELL, ranks=set(others) - set(silent), so=False)
        if silent:
            raise ClusterError(f"rank={these}: {named(silent)} would have to go on, and does not answer either; put "
                               f"out all that hang, or lab.stop()")  # fmt: skip
        if reason and not whatever:
            raise ClusterError(f"rank={these}: the others cannot go on alone: {reason}")
        return not reason

    def _replace(self) -> None:
        """Brings in as many new ranks as are lost, on idle or new engines, or as many as there are engines for.

        One request at a time: each names the number of ranks that the run is to have. A second one would count neither
        the new ranks of the first nor their engines.
        """
        with self._replacing:
            self._replace_lost()

    def _replace_lost(self) -> None:
        live = self.live
        while live.state == "starting":  # the word that they train may have been lost with who says it: who is first
            if live.over.wait(LOOK):  # now does so once they have gone on
                break
        with self._counts:
            count, self._wanted = self._wanted, 0
        if live.over.is_set() or live.ending.asked or live.state in FINAL:
            return
        try:
            if cannot_start(live.cluster, 1):
                count = min(count, len(idle(live)) + len(returned(live)))
            if not count:
                raise ClusterError("nobody can come in for a rank that is gone: no engine of this lab is idle, and "
                                   "none can be started")  # fmt: skip
            asked = resize(live, len(live.members) + count)
        except Exception as failure:  # the run goes on without
            live.note(failure)
            if isinstance(failure, RankError | NotBegun) and not isinstance(failure, KnobError):
                self._try_again(count)
            return
        self._ask_again(asked)

    def _try_again(self, count: int) -> None:
        """Asks for so many ranks again, a few times in a row at most."""
        self._refusals += 1
        if count and self._refusals <= TRIES:
            self._begin_replacing(count)

    def _ask_again(self, asked: PendingChange) -> None:
        """Asks for new ranks again if they were refused because a rank or a connection was lost while they joined.

        Only for those that still live: `went_on` counts the others.
        """
        live = self.live
        while not live.over.is_set():
            try:
                asked.wait(LOOK)
            except TimeoutError:
                continue
            except KnobError as refusal:
                alive = [rank for rank in asked.coming if not live.cluster.death(rank)]
                self._try_again(len(alive) if str(refusal).endswith(AGAIN) else 0)
                return
            self._refusals = 0
            return
