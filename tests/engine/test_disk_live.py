"""Tests disks that fill up, vanish, refuse writes or hang under two real ranks.

Training goes on, and the lab reports every lost row. The faults are real if this user may cause them: a small tmpfs,
immutable files, a frozen file system. One lab serves all tests of this file, because a start takes seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from tests.labs import apart
from tests.spinning import spinning
from tests.waiting import until
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.run import Run
from workbench.tasks import Task

pytestmark = pytest.mark.engine
ROOT = hasattr(os, "getuid") and os.getuid() == 0
RESCUE = "run.save('elsewhere') writes all rows that are shown here"


def model() -> nn.Module:
    return nn.Linear(8, 2)


def data(rank: int, ranks: int, seed: int) -> Iterator[Any]:
    while True:
        time.sleep(0.02)
        yield torch.randn(4, 8), torch.randint(0, 2, (4,))


def loss(net: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def experiment() -> Experiment:
    optimizer = lambda params: torch.optim.SGD(params, lr=0.01)  # noqa: E731
    return Experiment(task=Task(model=model, data=data, loss=loss, optimizer=optimizer), eval_every=0)


def hinder(disk: str) -> None:
    """From now on this process's spool writes slowly, and not at all while the file `disk` exists."""
    from workbench.engine.record import row_spool as spool

    write = os.write

    class Slow:
        """The module `os` as the record's writer sees it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, fd: int, rows: Any) -> int:
            time.sleep(0.2)
            while os.path.exists(disk):
                time.sleep(0.05)
            return write(fd, rows)

    sys.modules[spool.Writer.__module__].os = Slow()


def freed() -> None:
    """Restores the normal speed of the disk."""
    from workbench.engine.record import row_spool as spool

    sys.modules[spool.Writer.__module__].os = os


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # as if this were a notebook
    with apart(tmp_path_factory):
        with Lab(ranks=2, name="disk") as made:
            yield made.wait(120)
    cloudpickle.unregister_pickle_by_value(here)


@pytest.fixture(autouse=True)
def _idle(lab: Lab) -> Iterator[None]:
    yield
    if lab.live:
        lab.abort()
        assert until(lambda: not lab.live)


def running(lab: Lab, out: Path) -> Run:
    run = lab.run(experiment(), out=out)
    assert until(lambda: len(run.timeline.spans) > 50 or not lab.live), lab.notes
    assert until(lambda: len(on_disk(out)) > 3), "and its first rows are on disk"
    return run


def remove(path: Path) -> None:
    """Removes a directory, even if a rank creates another file in it at the same time."""
    assert until(lambda: shutil.rmtree(path, ignore_errors=True) or not path.exists())


def on_disk(path: Path) -> list[Path]:
    return [p for p in path.glob("*.arrow") if p.stat().st_size]


def stopped(lab: Lab, run: Run) -> None:
    lab.stop()
    assert until(lambda: not run.live), lab.notes
    assert run.state == "stopped", lab.notes


def noted(lab: Lab, text: str) -> str:
    """Waits for a note that contains `text` and returns it; tests/unit/test_recorder.py has the time limits."""
    assert until(lambda: any(text in n for n in lab.notes)), (text, lab.notes)
    return next(n for n in lab.notes if text in n)


@contextmanager
def goes_on(run: Run) -> Iterator[None]:
    """Checks that steps and live rows continue in this block, although the disk takes no rows."""

    def steps() -> int:
        rows = run.timeline.spans.rows()
        return int((rows.equal("lane", "step") & (rows.rank == 0)).sum())

    assert until(lambda: steps() > 5), "rows of rank 0 come"
    yield
    before = steps()
    assert until(lambda: steps() > before + 20), "rows still come"


def rows(run: Any) -> tuple[int, int, int]:
    return len(run.timeline.spans), len(run.timeline.samples), len(run.timeline.marks)


def rescued(run: Run, path: Path) -> None:
    """Checks that the record is complete after it is saved elsewhere."""
    assert run.save(path) == path == run.path
    again = Run.open(path)
    assert rows(again) == rows(run) and not again.missing and not again.warnings and not run.unwritten


def root(*command: str | Path) -> None:
    """Runs a command that needs root; skips the test if it is not permitted."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=30)
    if done.returncode:
        pytest.skip(f"{command[0]} is not permitted here: {done.stderr.strip()}")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mounts a disk of 256 kB."""
    if not ROOT:
        pytest.skip("mounts a small disk, which takes root")
    (tmp_path / "small").mkdir()
    root("mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path / "small")
    yield tmp_path / "small"
    subprocess.run(["umount", "-l", str(tmp_path / "small")], check=True)


@pytest.mark.parametrize("others", [0, 2])
def test_a_disk_that_is_full_for_a_while(lab: Lab, small: Path, tmp_path: Path, others: int) -> None:
    with spinning(others):
        run = running(lab, small / "run")
        with goes_on(run):
            with pytest.raises(OSError, match="No space"), (small / "ballast").open("wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(4096))
            note = noted(lab, "ranks 0, 1: the record is not being written: No space left on device")
            assert note.endswith(RESCUE) and run.path == small / "run"
        assert run.unwritten > 0 and run.summary()["unwritten"] == run.unwritten and "rows not on disk" in repr(run)
        run.save(tmp_path / "copy")
        assert f"rows, was saved in {tmp_path / 'copy'}; what comes later is not in it" in lab.notes[-1]
        assert run.path == small / "run" and len(Run.open(tmp_path / "copy").timeline.spans) > 50
        (small / "ballast").unlink()
        noted(lab, "the record is being written again; ")
        stopped(lab, run)
    recorded = Run.open(run.path)
    assert recorded.missing == run.unwritten > 0 and run.missing == 0, "counted to the row"
    assert sum(rows(recorded)) + run.unwritten == sum(rows(run))
    assert f"the record in {small / 'run'} ends without {run.unwritten} rows" in lab.notes[-1]
    rescued(run, tmp_path / "whole")
    assert f"was saved in {tmp_path / 'whole'}" in lab.notes[-1]


def test_a_disk_that_stays_full_to_the_end(lab: Lab, small: Path, tmp_path: Path, capfd: Any) -> None:
    (small / "ballast").write_bytes(bytes(140_000))
    run = lab.run(experiment(), out=small / "run")
    noted(lab, "No space left on device")
    stopped(lab, run)
    run.wait()
    recorded = Run.open(run.path)
    assert sum(rows(recorded)) + run.unwritten == sum(rows(run)) and run.missing == 0
    said = f"the record in {small / 'run'} ends without {run.unwritten} rows of this run; {RESCUE}"
    assert said in lab.notes and said in capfd.readouterr().err, "also to who waits at a prompt"
    assert len(list((small / "run").glob("*.arrow"))) < 10, "tries that failed leave no empty files"
    rescued(run, tmp_path / "whole")


@pytest.mark.parametrize("others", [0, 2])
def test_a_run_directory_that_is_removed(lab: Lab, tmp_path: Path, others: int) -> None:
    with spinning(others):
        run = running(lab, tmp_path / "mine")
        with goes_on(run):
            remove(tmp_path / "mine")
            noted(lab, f"the run directory {tmp_path / 'mine'} is gone; ")
            had = rows(run)
            assert until(lambda: run.unwritten > sum(had)), "what was in it is not on disk either"
        stopped(lab, run)
    assert not (tmp_path / "mine").exists(), "nobody makes one without a run.json"
    assert run.unwritten == sum(rows(run)) and run.missing == 0
    assert lab.notes[-1] == (
        f"the run directory {tmp_path / 'mine'} is gone, and lacks {run.unwritten} rows of this run; {RESCUE}"
    )
    rescued(run, tmp_path / "whole")


def test_a_file_of_the_record_that_is_removed(lab: Lab, tmp_path: Path) -> None:
    run = running(lab, tmp_path / "mine")
    (tmp_path / "mine" / "spans-1.arrow").unlink()
    noted(lab, "rank 1: the record is not being written: spans-1.arrow is gone")
    noted(lab, "the record is being written again; ")
    stopped(lab, run)
    recorded = Run.open(run.path)
    assert recorded.missing == run.unwritten > 0 and run.missing == 0
    rescued(run, tmp_path / "whole")


def test_a_directory_that_is_moved_away_and_back(lab: Lab, tmp_path: Path) -> None:
    run = running(lab, tmp_path / "mine")
    (tmp_path / "mine").rename(tmp_path / "yours")
    noted(lab, "is gone; ")
    (tmp_path / "yours").rename(tmp_path / "mine")
    noted(lab, "the record is being written again")
    stopped(lab, run)
    assert Run.open(run.path).missing == run.unwritten, "what was in the files is not lost"
    rescued(run, tmp_path / "whole")


def test_files_that_may_not_be_written_any_more(lab: Lab, tmp_path: Path) -> None:
    if not ROOT:
        pytest.skip("makes files immutable, which takes root")
    run = running(lab, tmp_path / "mine")
    kept = [*(tmp_path / "mine").glob("*.arrow"), tmp_path / "mine"]
    root("chattr", "+i", *kept)
    try:
        with goes_on(run):
            noted(lab, "ranks 0, 1: the record is not being written: Operation not permitted")
        stopped(lab, run)
        assert sum(rows(Run.open(run.path))) + run.unwritten == sum(rows(run)) and run.unwritten > 0
        rescued(run, tmp_path / "whole")
    finally:
        subprocess.run(["chattr", "-i", *map(str, kept)], check=True)


@pytest.fixture
def slow(lab: Lab, tmp_path: Path) -> Iterator[Path]:
    """The engines' disks are slow, and hang while the yielded file exists."""
    hung = tmp_path / "hung"
    lab.view.apply_sync(hinder, str(hung))
    yield hung
    hung.unlink(missing_ok=True)
    lab.view.apply_sync(freed)


@pytest.mark.parametrize("others", [0, 2])
def test_a_disk_that_hangs_for_a_while(lab: Lab, tmp_path: Path, slow: Path, others: int) -> None:
    with spinning(others):
        run = running(lab, tmp_path / "mine")
        assert lab.notes == [], "a slow disk is no fault"
        hangs_for_a_while(lab, run, slow.touch, slow.unlink)
        assert until(lambda: not run.unwritten)
        stopped(lab, run)
    recorded = Run.open(run.path)
    assert rows(recorded) == rows(run) and not recorded.missing and not run.unwritten
    assert lab.notes == [f"the record in {run.path} is complete, after a pause in writing"]


def hangs_for_a_while(lab: Lab, run: Run, hang: Callable[[], Any], thaw: Callable[[], Any]) -> None:
    with goes_on(run):
        hang()
        noted(lab, "ranks 0, 1: the record is not being written: the disk does not answer; ")
        was = run.unwritten
        assert until(lambda: run.unwritten > was), "rows that wait are not on disk so far"
    thaw()
    noted(lab, "the record is being written again, and no row is missing")


def test_a_run_ends_though_the_disk_hangs(lab: Lab, tmp_path: Path, slow: Path) -> None:
    run = running(lab, tmp_path / "mine")
    slow.touch()
    noted(lab, "the disk does not answer; ")
    stopped(lab, run)
    assert slow.exists() and all(run.details("end", rank) for rank in (0, 1))
    assert f"ends without {run.unwritten} rows" in lab.notes[-1] and run.unwritten > 0
    rescued(run, tmp_path / "whole")
    lab.run(experiment().set("steps", 3), out=tmp_path / "next").wait(60)
    slow.unlink()
    assert until(lambda: rows(Run.open(tmp_path / "mine")) == rows(run)), "what the disk takes later is written"


@contextmanager
def frozen(path: Path) -> Iterator[Callable[[], Any]]:
    """Freezes a file system until the caller calls the yielded function."""
    root("fsfreeze", "-f", path)
    left = [path]

    def thaw() -> None:
        for one in left:
            left.remove(one)
            subprocess.run(["fsfreeze", "-u", str(one)], check=True)

    try:
        yield thaw
    finally:
        thaw()


def test_a_file_system_that_is_frozen(lab: Lab, tmp_path: Path) -> None:
    if not ROOT:
        pytest.skip("freezes a file system of its own, which takes root")
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    image.write_bytes(bytes(8 << 20))
    root("mkfs.ext4", "-q", image)
    root("mount", "-o", "loop", image, disk)
    try:
        run = running(lab, disk / "run")
        with frozen(disk) as thaw:
            hangs_for_a_while(lab, run, lambda: None, thaw)
        stopped(lab, run)
        recorded = Run.open(run.path)
        assert rows(recorded) == rows(run) and not run.unwritten
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
