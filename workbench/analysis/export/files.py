"""Exports a run to files for other tools, by format.

perfetto:     one merged trace, for ui.perfetto.dev
chrome:       a folder with a trace per rank, like torch.profiler's, for Holistic Trace Analysis and chrome://tracing
parquet, csv: a folder with spans, samples and marks
tensorboard:  a log folder with each rank's samples and step times; needs the package tensorboard
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyarrow import csv, parquet

from workbench.analysis.export.chrome import to_chrome
from workbench.analysis.export.export import to_perfetto
from workbench.analysis.export.tensorboard import to_tensorboard
from workbench.record.store import RunError
from workbench.record.timeline import KINDS
from workbench.settings import short

if TYPE_CHECKING:
    from workbench.record.run import Run

SUFFIX = {"perfetto": ".json.gz"}  # of single files


def export_run(run: Run, to: str, out: Path | str | None = None) -> Path:
    """Writes `run` in format `to`, by default to `NAME-FORM`. Raises RunError on failure."""
    if to not in FORMS:
        raise RunError(f"to={short(to)}: must be one of {', '.join(FORMS)}")
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in run.name).strip("-.") or "run"
    where = Path(out) if out is not None else Path(f"{plain}-{to}{SUFFIX.get(to, '')}")
    try:
        return FORMS[to](run, where)
    except OSError as error:
        raise RunError(f"{where}: cannot be written ({error.strerror or error}); choose another place") from error


def to_parquet(run: Run, folder: Path) -> Path:
    """Writes the record's 3 tables as Parquet."""
    return _write_tables(run, folder, "parquet", lambda table, path: parquet.write_table(table, path))


def to_csv(run: Run, folder: Path) -> Path:
    """Writes the record's 3 tables as CSV."""
    return _write_tables(run, folder, "csv", lambda table, path: csv.write_csv(table, path))


def _write_tables(run: Run, folder: Path, suffix: str, write: Callable[[pa.Table, Path], None]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        rows = run.timeline.table(kind).rows()
        write(pa.table({name: pa.array(column) for name, column in rows.columns.items()}), folder / f"{kind}.{suffix}")
    return folder


FORMS: dict[str, Callable[[Run, Path], Path]] = {
    "perfetto": to_perfetto, "chrome": to_chrome, "parquet": to_parquet, "csv": to_csv, "tensorboard": to_tensorboard,
}  # fmt: skip
