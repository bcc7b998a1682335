"""Writes a run as one self-contained page, which an entry point draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from workbench.record.run import Run, RunError, hearers


def write_page(run: Run, path: Path | str) -> Path:
    """Writes `run` as a self-contained HTML page at `path`."""
    for entry in entry_points(group="workbench.display", name="report"):
        entry.load()(run, Path(path))
        return Path(path)
    raise RunError(f"{path}: the package to draw a page is missing; install training-workbench with its widgets")


@contextlib.contextmanager
def report(path: Path | str) -> Iterator[list[Run]]:
    """Writes the runs that begin within the block as pages at its end, also after an error.

        with workbench.report("out.html"):
            lab.run(experiment).wait()

    The first run's page is `path`. The second run's page is `out-2.html`. Simulations count as runs. The block gets
    the list of the runs so far. A run that is still live at the end appears up to that point.

    path:  the page to write

    Raises RunError if no run began, or if a page cannot be written.
    """
    if not isinstance(path, str | Path) or not str(path) or "\0" in str(path):
        raise RunError(f"path={str(path)[:60]!r}: must be a page to write, such as 'out.html'")
    page, runs = Path(path), list[Run]()
    hearers.append(runs.append)
    try:
        yield runs
    except BaseException:
        with contextlib.suppress(RunError):  # the block's own error comes first
            _written(page, runs)
        raise
    finally:
        hearers.remove(runs.append)
    if not runs:
        raise RunError(f"{page}: is not written, because no run began in the block")
    _written(page, runs)


def _written(page: Path, runs: list[Run]) -> None:
    for number, run in enumerate(runs, start=1):
        where = page if number == 1 else page.with_name(f"{page.stem}-{number}{page.suffix}")
        try:
            write_page(run, where)
        except OSError as error:
            raise RunError(f"{where}: cannot be written ({error.strerror}); choose another place") from error
