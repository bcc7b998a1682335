"""Keeps notes of a live run's record: faults, lacking rows, and saved copies.

This kernel holds rows that the disk lacks, so they are not lost. It asks the disk only whether the run directory
exists.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.cluster.observe.run_folder import DISK_TIMEOUT, RunFolder, count_missing_rows, run_with_timeout
from workbench.record.run import Run
from workbench.record.timeline import KINDS
from workbench.settings.rank_text import format_ranks

RESCUE = "run.save('elsewhere') writes all rows that are shown here"


class RecordMonitor:
    """say: replaces the note on a topic; see HangMonitor"""

    def __init__(self, run: Run, say: Callable[..., None]) -> None:
        self.run, self.replace_note = run, say
        self._folder = RunFolder(run.path)
        self._expected = self._folder.is_there
        self._is_folder_gone = False
        self._lacking_rows: dict[int, int] = {}  # rows that the disk lacks
        # an attaching kernel lacks what the disk lacked before
        self._lacking_at_attach: dict[int, int] | None = {} if run._following else None
        self._failing: dict[int, str] = {}
        self._had_fault = False
        self.last_note = ""  # the last note

    def take_status(self, rank: int, lost: int) -> None:
        """lost: how many of the rank's rows are not on disk"""
        if self._lacking_at_attach is not None:
            lost -= self._lacking_at_attach.setdefault(rank, lost)
        self._lacking_rows[rank] = max(lost, 0)
        self._count_unwritten()

    def take_mark(self, rank: int, detail: dict[str, Any]) -> None:
        """Takes in a mark that the rank's record stands still, or continues."""
        fresh = not self._failing
        if what := str(detail.get("error") or ""):
            self._failing[rank] = what
        elif rank in self._failing:
            del self._failing[rank]
        else:  # rows that no file can hold
            self.replace_note(("record", rank), str(detail.get("text")))
        self._had_fault = True
        if self._lacking_at_attach is None and isinstance(lost := detail.get("lost"), int):
            self._lacking_rows[rank] = lost
        self._count_unwritten()
        self._update_note(fresh or not self._failing)

    def check_folder(self) -> None:
        """Call it about once a second."""
        there = self._folder.was_there()
        self._expected |= there  # a slow disk answers late
        gone = self._expected and not there
        if gone != self._is_folder_gone:
            self._is_folder_gone, self._had_fault = gone, True
            self._update_note(fresh=True)
        elif self._had_fault:
            self._update_note(fresh=False)

    def note_saved(self, path: Path, rows: int, step: int | None) -> None:
        """step: of the last saved row; None: the end"""
        if step is None:
            return self.replace_note("record", f"the whole record, {_count_rows(rows)}, was saved in {path}")
        so_far = f"the record up to step {step}, {_count_rows(rows)}, was saved in {path}"
        self.replace_note("saved", f"{so_far}; what comes later is not in it")

    def note_failure(self) -> None:
        """Notes that this kernel could not write for a rank."""
        self._had_fault = True

    def count_lacking(self) -> None:
        """Counts, at the end of a run with faults, the rows that its directory lacks."""
        if not self._had_fault or self.run.path is None:
            return
        path = self.run.path
        try:
            self.run.unwritten = run_with_timeout(DISK_TIMEOUT, lambda: count_missing_rows(path, self.run.timeline))
        except OSError:
            self._count_unwritten()  # from the ranks' reports
        lacks = f"{_count_rows(self.run.unwritten)} of this run; {RESCUE}"
        if self._is_folder_gone:
            self._put_note(f"the run directory {path} is gone, and lacks {lacks}")
        elif self.run.unwritten:
            self._put_note(f"the record in {path} ends without {lacks}")
        else:
            self._put_note(f"the record in {path} is complete, after a pause in writing")

    def _count_unwritten(self) -> None:
        """Counts unwritten rows since this kernel attached."""
        here = sum(len(self.run.timeline.table(kind)) for kind in KINDS)
        self.run.unwritten = min(sum(self._lacking_rows.values()), here)

    def _update_note(self, fresh: bool) -> None:
        lacks = f"{_count_rows(self.run.unwritten)} {'is' if self.run.unwritten == 1 else 'are'} not on disk so far"
        if self._is_folder_gone:
            text = f"the run directory {self.run.path} is gone; {lacks}, {RESCUE}"
        elif self._failing:
            text = f"{self._list_failing()}; {lacks}, {RESCUE}"
        elif self.run.unwritten:
            text = f"the record is being written again; {lacks}, {RESCUE}"
        else:
            text = "the record is being written again, and no row is missing"
        self._put_note(text, fresh)

    def _put_note(self, text: str, fresh: bool = True) -> None:
        if text != self.last_note:
            self.last_note = text
            self.replace_note("record", text, fresh)

    def _list_failing(self) -> str:
        why: dict[str, list[int]] = {}
        for rank, what in sorted(self._failing.items()):
            why.setdefault(what, []).append(rank)
        return "; ".join(
            f"{format_ranks(ranks)}: the record is not being written: {what}" for what, ranks in why.items()
        )


def _count_rows(n: int) -> str:
    return f"{n} row{'s' * (n != 1)}"
