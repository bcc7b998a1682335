"""What a record says of its timeline, as frames: the methods that every Run has, each a question of this package.

An empty answer shows why it is empty, and has the sentence in `attrs["why"]`. See `workbench.analysis.summary.reasons`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench import analysis
from workbench.analysis.summary.reasons import Silence, explained, why_no_meeting, why_no_step
from workbench.record.run import Run

if TYPE_CHECKING:
    import pandas as pd

    from workbench.analysis import RankMemory


class Frames(Run):
    """A record that answers questions in frames."""

    def memory(self, last: int | None = None) -> list[RankMemory]:
        """By rank, what its memory held at most in the last so many steps, or in all: bytes by category, and the peak.

        >>> Frames({"ranks": 2}).memory()
        []  # No step ended on every rank.
        """
        stop = analysis.last_steps(self.timeline)[1]
        found = analysis.memory(self.timeline, 0 if last is None else max(0, stop - last))
        return found or Silence(why_no_step(self, last) or "The record says nothing of memory.")

    def lateness(self, last: int | None = None) -> pd.DataFrame:
        """Seconds by which each rank came later than the median of the others (negative: before), to where all meet.

        A row per rank, a column per step, of the last so many or of all; NaN where ranks did not meet. If they met in
        none of these steps, the frame shows why. See `workbench.analysis.communication.lateness`.

        >>> Frames({"ranks": 2}).lateness().shape
        (0, 0)
        """
        import pandas as pd

        stop = analysis.last_steps(self.timeline)[1]
        found = analysis.lateness(self.timeline, 0 if last is None else max(0, stop - last))
        rows, columns = pd.Index(found.ranks, name="rank"), pd.Index(found.steps, name="step")
        frame = pd.DataFrame(found.seconds.T, index=rows, columns=columns)
        return explained(frame, "" if found.met.any() else why_no_meeting(self, last))

    def collectives(self, last: int | None = None) -> pd.DataFrame:
        """A row per operation, group and bucket of the last so many steps, or of all: count, bytes, bandwidths.

        Seconds from the last rank's arrival on, bandwidths in Mbit/s as nccl-tests has them, median and worst; what
        ranks waited for the last is apart. `workbench.analysis.communication.bandwidth` explains each column.

        >>> Frames({"ranks": 2}).collectives().empty
        True
        """
        rows = analysis.by_collective(self.timeline, *self._last(last))
        return self._frame_of(rows, analysis.ByCollective, "" if rows else why_no_meeting(self, last))

    def critical_path(self, last: int | None = None) -> pd.DataFrame:
        """What each of the last so many steps, or of all, had to wait for: a row per piece, in order of time.

        Columns step, rank (-1: all had a part in it), cause, begin and end in seconds since the run began. See
        `workbench.analysis.stragglers.path`.

        >>> Frames({"ranks": 2}).critical_path().columns.tolist()
        ['step', 'rank', 'cause', 'begin', 'end']
        """
        rows = analysis.critical_path(self.timeline, *self._last(last))
        return self._frame_of(rows, analysis.Piece, "" if rows else why_no_step(self, last))

    def overlap(self, last: int | None = None) -> pd.DataFrame:
        """Communication of each rank, hidden behind its compute or exposed, in seconds per step; unions of intervals.

        A row per rank: communication, hidden, of that behind forward, backward and update, and exposed; of the last so
        many steps, or of all.

        >>> Frames({"ranks": 2}).overlap().columns.tolist()
        ['communication', 'hidden', 'forward', 'backward', 'update', 'exposed']
        """
        import pandas as pd

        first, stop = self._last(last)
        found = analysis.overlap(self.timeline, first, stop)
        columns = {"communication": found.communication, "hidden": found.hidden, **found.behind}
        table = {name: v / max(stop - first, 1) for name, v in {**columns, "exposed": found.exposed}.items()}
        frame = pd.DataFrame(table, index=pd.Index(found.ranks, name="rank"))
        return explained(frame, "" if found.communication.any() else why_no_meeting(self, last))

    def entered(self) -> pd.DataFrame:
        """Of a live run the collectives that some ranks wait in: who has entered each, since when, and who has not.

        What ranks last said, a second ago at most; empty while all go on. See
        `workbench.analysis.communication.entered`.

        >>> Frames({"ranks": 2}).entered().columns.tolist()
        ['step', 'collective', 'entered', 'seconds', 'missing']
        """
        why = "No rank waits in a collective." if self.live else "The run is not live, so no rank waits."
        return self._frame_of(analysis.entered(self.standing), analysis.Entered, why)

    def clocks(self) -> pd.DataFrame:
        """By rank its host, by how much that one's clock was ahead of rank 0's, and the error of that, in seconds.

        >>> Frames({"ranks": 2}).clocks().columns.tolist()
        ['rank', 'host', 'offset', 'error']
        """
        return self._frame_of(analysis.clocks(self), analysis.RankClock, "No rank has said which host it is on.")

    def recording(self) -> pd.DataFrame:
        """By rank the CPU seconds of its process while it trained, and of them those that recording took.

        >>> Frames({"ranks": 2}).recording().columns.tolist()
        ['rank', 'process', 'recording']
        """
        why = "No rank has said what recording took. Real ranks say it every few seconds and at the end."
        return self._frame_of(analysis.recording(self.timeline), analysis.RankCost, why)

    def gpus(self, seconds: float = 10.0) -> pd.DataFrame:
        """By rank how its GPU did in the record's last seconds: use (a share), power (W), bytes/s sent and received.

        Empty where no GPU was read, for which nvidia-ml-py must be installed. Not run on a GPU.

        >>> Frames({"ranks": 2}).gpus().empty
        True
        """
        why = f"The last {seconds:g} s of the record have no reading of a GPU; engines need nvidia-ml-py and a GPU."
        return self._frame_of(analysis.gpus(self.timeline, seconds), analysis.RankGpu, why)

    def _last(self, last: int | None) -> tuple[int, int]:
        first, stop = analysis.last_steps(self.timeline, last)
        return first, stop

    @staticmethod
    def _frame_of(rows: Sequence[Any], kind: Any, why: str) -> pd.DataFrame:
        """A frame of rows of a kind. why: what it shows if there are none"""
        import pandas as pd

        frame = pd.DataFrame(rows, columns=pd.Index(kind._fields))
        return explained(frame, "" if rows else why)
