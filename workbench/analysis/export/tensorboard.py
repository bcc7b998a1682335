"""Writes TensorBoard event files, in a folder per rank so that ranks share a chart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.analysis.steps.steps import step_times
from workbench.record.store import RunError

if TYPE_CHECKING:
    from workbench.record.run import Run

NEEDS = "TensorBoard's files need its package: pip install 'training-workbench[tensorboard]'"


def to_tensorboard(run: Run, folder: Path | str) -> Path:
    """Writes samples (`loss`, ...) and `step_seconds`. Raises RunError without tensorboard."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise RunError(NEEDS) from None

    folder = Path(folder)
    tl = run.timeline
    samples, times = tl.samples.rows(), step_times(tl)
    ended = tl.spans.rows()
    ended = ended[ended.equal("lane", "step")] if len(ended) else ended
    for rank in sorted({*samples.rank.tolist(), *times.ranks.tolist()}):
        writer = EventFileWriter(str(folder / f"rank-{rank}"))

        def put(name: str, step: int, t: float, value: float, to: Any = writer) -> None:
            tagged = Summary.Value(tag=name, simple_value=value)
            to.add_event(Event(wall_time=run.epoch + t, step=step, summary=Summary(value=[tagged])))

        try:
            mine = samples[samples.rank == rank]
            for name, step, t, value in zip(mine.name, mine.step, mine.t, mine.value, strict=True):
                put(_make_tag(name), int(step), float(t), float(value))
            own = ended[ended.rank == rank]
            at = dict(zip(own.step.tolist(), own.t1.tolist(), strict=True))
            for step, seconds in zip(times.steps, _rank_column(times.seconds, times.ranks, rank), strict=True):
                if seconds == seconds:
                    put("step_seconds", int(step), at.get(int(step), 0.0), float(seconds))
        finally:
            writer.close()
    return folder


def _rank_column(seconds: np.ndarray, ranks: np.ndarray, rank: int) -> np.ndarray:
    return np.asarray(seconds[:, ranks == rank].ravel()) if (ranks == rank).any() else np.full(len(seconds), np.nan)


def _make_tag(name: str) -> str:
    first, _, rest = name.partition(" ")
    return f"{first}/{rest.replace(' ', '_')}" if rest else name
