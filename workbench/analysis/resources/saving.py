"""A checkpoint that ranks are writing, and its usual time."""

from __future__ import annotations

from typing import NamedTuple

from workbench.record.timeline import Timeline


class CheckpointProgress(NamedTuple):
    """A checkpoint under way.

    step:  its step
    since: begin, in seconds of the run
    usual: seconds of the last checkpoint
    """

    step: int
    since: float
    usual: float | None


def checkpoint_progress(tl: Timeline) -> CheckpointProgress | None:
    """Returns the progress from the ranks' copies to the Mark of the result. Else None."""
    samples, marks = tl.samples.rows(), tl.marks.rows()
    began = samples[samples.equal("name", "checkpoint_copied")]
    if not len(began):
        return None
    ended = marks[marks.equal("name", "saved") | marks.equal("name", "not saved")]
    since, step = float(began.t.max()), int(began.step[began.t.argmax()])
    if len(ended) and float(ended.t.max()) >= since:
        return None
    usual = None
    if len(ended) and (before := began.t[began.t <= ended.t.max()]).size:
        usual = float(ended.t.max() - before.max())
    return CheckpointProgress(step, since, usual)
