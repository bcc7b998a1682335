"""What is said of a run's record while the run is under way: that it is not written, what it lacks, where it was saved.

Rows that the disk lacks are held by the kernel that shows them, as long as it lives; so they are no missing rows. It
reads no rows: it is told what ranks say, and asks the disk only whether the run directory is there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.cluster.observe.disk import PATIENCE, Folder, lacking, within
from workbench.cluster.observe.silence import named
from workbench.record.run import Run
from workbench.record.timeline import KINDS

RESCUE = "run.save('elsewhere') writes all rows that are shown here"


class Recording:
    """One run's. say: puts a sentence among the notes, in place of what was said about the same; see Attention."""

    def __init__(self, run: Run, say: Callable[..., None]) -> None:
        self.run, self.say = run, say
        self._folder = Folder(run.path)
        self._expected = self._folder.there
        self._gone = False
        self._lost: dict[int, int] = {}  # rows of each rank that the disk lacks
        # a kernel that attaches has read what is on disk; what that lacks, this kernel cannot write either
        self._before: dict[int, int] | None = {} if run._following else None
        self._failing: dict[int, str] = {}  # what keeps a rank from writing
        self._was = False  # was there a fault?
        self.said = ""  # of the record, last

    def heard(self, rank: int, lost: int) -> None:
        """A rank has said how many of its rows are not on disk."""
        if self._before is not None:
            lost -= self._before.setdefault(rank, lost)
        self._lost[rank] = max(lost, 0)
        self._count()

    def mark(self, rank: int, detail: dict[str, Any]) -> None:
        """A rank has written down that its record stood still, or goes on."""
        fresh = not self._failing
        if what := str(detail.get("error") or ""):
            self._failing[rank] = what
        elif rank in self._failing:
            del self._failing[rank]
        else:  # rows that no file can hold
            self.say(("record", rank), str(detail.get("text")))
        self._was = True
        if self._before is None and isinstance(lost := detail.get("lost"), int):
            self._lost[rank] = lost
        self._count()
        self._tell(fresh or not self._failing)

    def look(self) -> None:
        """Asks whether the run directory is there. To be called about once a second."""
        gone = self._expected and not self._folder.look()
        if gone != self._gone:
            self._gone, self._was = gone, True
            self._tell(fresh=True)
        elif self._was:
            self._tell(fresh=False)

    def saved(self, path: Path, rows: int, step: int | None) -> None:
        """The rows that were here have been written elsewhere, up to a `step` (None: up to the end)."""
        if step is None:
            return self.say("record", f"the whole record, {_rows(rows)}, was saved in {path}")
        so_far = f"the record up to step {step}, {_rows(rows)}, was saved in {path}"
        self.say("saved", f"{so_far}; what comes later is not in it")

    def disturbed(self) -> None:
        """This kernel could not write what ranks cannot; it is counted at the end."""
        self._was = True

    def ended(self) -> None:
        """The run is over: what its directory lacks is counted there, if anything was wrong with it."""
        if not self._was or self.run.path is None:
            return
        path = self.run.path
        try:
            self.run.unwritten = within(PATIENCE, lambda: lacking(path, self.run.timeline))
        except OSError:
            self._count()  # then what ranks said of it has to do
        lacks = f"{_rows(self.run.unwritten)} of this run; {RESCUE}"
        if self._gone:
            self._put(f"the run directory {path} is gone, and lacks {lacks}")
        elif self.run.unwritten:
            self._put(f"the record in {path} ends without {lacks}")
        else:
            self._put(f"the record in {path} is whole, though it was not written for a while")

    def _count(self) -> None:
        """Rows that came before this kernel attached are not here, so they do not count."""
        here = sum(len(self.run.timeline.table(kind)) for kind in KINDS)
        self.run.unwritten = min(sum(self._lost.values()), here)

    def _tell(self, fresh: bool) -> None:
        lacks = f"{_rows(self.run.unwritten)} {'is' if self.run.unwritten == 1 else 'are'} not on disk so far"
        if self._gone:
            text = f"the run directory {self.run.path} is gone; {lacks}, {RESCUE}"
        elif self._failing:
            text = f"{self._who()}; {lacks}, {RESCUE}"
        elif self.run.unwritten:
            text = f"the record is being written again; {lacks}, {RESCUE}"
        else:
            text = "the record is being written again, and lacks no row"
        self._put(text, fresh)

    def _put(self, text: str, fresh: bool = True) -> None:
        if text != self.said:
            self.said = text
            self.say("record", text, fresh)

    def _who(self) -> str:
        """Which ranks cannot write, by what keeps them from it."""
        why: dict[str, list[int]] = {}
        for rank, what in sorted(self._failing.items()):
            why.setdefault(what, []).append(rank)
        return "; ".join(f"{named(ranks)}: the record is not being written: {what}" for what, ranks in why.items())


def _rows(n: int) -> str:
    return f"{n} row{'s' * (n != 1)}"
