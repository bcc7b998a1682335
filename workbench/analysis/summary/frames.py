"""A record's analyses as frames, in methods of every Run. An empty one has the reason in `attrs["why"]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench import analysis
from workbench.analysis.summary.reasons import EmptyAnswer, explain_empty, why_no_meeting, why_no_step
from workbench.record.run import Run

if TYPE_CHECKING:
    import pandas as pd

    from workbench.analysis import RankMemory


class RunFrames(Run):
    """A run that returns its analyses as frames.

    last:  number of steps before the newest complete step. None: all steps
    """

    def memory(self, last: int | None = None) -> list[RankMemory]:
        """Returns each rank's peak memory in bytes, also by category.

        >>> RunFrames({"ranks": 2}).memory()
        []  # No step ended on every rank.
        """
        stop = analysis.last_steps(self.timeline)[1]
        found = analysis.measure_memory(self.timeline, 0 if last is None else max(0, stop - last))
        return found or EmptyAnswer(why_no_step(self, last) or "The record has no memory data.")

    def lateness(self, last: int | None = None) -> pd.DataFrame:
        """Returns each rank's arrival after the other ranks' median, in seconds (negative: before).

        A row per rank and a column per step. NaN without a meeting. See `workbench.analysis.communication.lateness`.

        >>> RunFrames({"ranks": 2}).lateness().shape
        (0, 0)
        """
        import pandas as pd

        stop = analysis.last_steps(self.timeline)[1]
        found = analysis.measure_lateness(self.timeline, 0 if last is None else max(0, stop - last))
        rows, columns = pd.Index(found.ranks, name="rank"), pd.Index(found.steps, name="step")
        frame = pd.DataFrame(found.seconds.T, index=rows, columns=columns)
        return explain_empty(frame, "" if found.met.any() else why_no_meeting(self, last))

    def collectives(self, last: int | None = None) -> pd.DataFrame:
        """Returns collectives by operation, group and bucket: count, bytes, bandwidths.

        Seconds count from the last arrival; waits are separate. Bandwidths are in Mbit/s, median and worst. See
        `workbench.analysis.communication.bandwidth`.

        >>> RunFrames({"ranks": 2}).collectives().empty
        True
        """
        rows = analysis.by_collective(self.timeline, *self._last_steps(last))
        return self._frame_of(rows, analysis.ByCollective, "" if rows else why_no_meeting(self, last))

    def critical_path(self, last: int | None = None) -> pd.DataFrame:
        """Returns the critical path of each step: a row per piece, in order of time.

        `begin` and `end` are seconds since the run began. `rank` is -1 for all ranks. See
        `workbench.analysis.stragglers.path`.

        >>> RunFrames({"ranks": 2}).critical_path().columns.tolist()
        ['step', 'rank', 'cause', 'begin', 'end']
        """
        rows = analysis.critical_path(self.timeline, *self._last_steps(last))
        return self._frame_of(rows, analysis.PathPiece, "" if rows else why_no_step(self, last))

    def overlap(self, last: int | None = None) -> pd.DataFrame:
        """Returns each rank's communication in seconds per step, hidden behind compute or exposed.

        The hidden part is also split by phase. Overlapping spans count once.

        >>> RunFrames({"ranks": 2}).overlap().columns.tolist()
        ['communication', 'hidden', 'forward', 'backward', 'update', 'exposed']
        """
        import pandas as pd

        first, stop = self._last_steps(last)
        found = analysis.measure_overlap(self.timeline, first, stop)
        columns = {"communication": found.communication, "hidden": found.hidden, **found.behind}
        table = {name: v / max(stop - first, 1) for name, v in {**columns, "exposed": found.exposed}.items()}
        frame = pd.DataFrame(table, index=pd.Index(found.ranks, name="rank"))
        return explain_empty(frame, "" if found.communication.any() else why_no_meeting(self, last))

    def entered(self) -> pd.DataFrame:
        """Returns the collectives that a live run's ranks wait in, and the missing ranks.

        Reports are at most a second old. See `workbench.analysis.communication.open_collectives`.

        >>> RunFrames({"ranks": 2}).entered().columns.tolist()
        ['step', 'collective', 'entered', 'seconds', 'missing']
        """
        why = "No rank waits in a collective." if self.live else "The run is not live, so no rank waits."
        return self._frame_of(analysis.list_open(self.standing), analysis.OpenCollective, why)

    def clocks(self) -> pd.DataFrame:
        """Returns each rank's host, its clock minus rank 0's and the error in seconds.

        >>> RunFrames({"ranks": 2}).clocks().columns.tolist()
        ['rank', 'host', 'offset', 'error']
        """
        return self._frame_of(analysis.list_clocks(self), analysis.RankClock, "No rank has reported its host.")

    def recording(self) -> pd.DataFrame:
        """Returns each rank's CPU seconds during training, and the recorder's part.

        >>> RunFrames({"ranks": 2}).recording().columns.tolist()
        ['rank', 'process', 'recording']
        """
        why = "No rank has reported the cost of recording. Real ranks report it every few seconds and at the end."
        return self._frame_of(analysis.recording_costs(self.timeline), analysis.RankCost, why)

    def gpus(self, seconds: float = 10.0) -> pd.DataFrame:
        """Returns each rank's GPU use (a share), power (W) and bytes/s sent and received.

        Empty without GPU readings, which need nvidia-ml-py. Not tested on a GPU.

        seconds:  the record's last seconds, over which the means are taken

        >>> RunFrames({"ranks": 2}).gpus().empty
        True
        """
        why = f"The last {seconds:g} s of the record have no reading of a GPU; engines need nvidia-ml-py and a GPU."
        return self._frame_of(analysis.measure_gpus(self.timeline, seconds), analysis.RankGpu, why)

    def _last_steps(self, last: int | None) -> tuple[int, int]:
        first, stop = analysis.last_steps(self.timeline, last)
        return first, stop

    @staticmethod
    def _frame_of(rows: Sequence[Any], kind: Any, why: str) -> pd.DataFrame:
        import pandas as pd

        frame = pd.DataFrame(rows, columns=pd.Index(kind._fields))
        return explain_empty(frame, "" if rows else why)
