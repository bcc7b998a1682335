"""Labs of tests: none meets another's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.waiting import until
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.run import Run
from workbench.tasks import Digits

BOUND = 120.0  # seconds, on a machine that is busy with other things


@contextmanager
def apart(folders: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """Gives labs that start inside the block separate folders for files and discovery."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNTIME_DIR", str(folders.mktemp("runtime")))
        patch.setenv("XDG_DATA_HOME", str(folders.mktemp("data")))
        yield patch


def shared_lab(ranks: int, name: str) -> Any:
    """A fixture: one lab for all tests of a module, which keeps its files apart."""

    @pytest.fixture(scope="module")
    def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
        with apart(tmp_path_factory), Lab(ranks=ranks, name=name) as made:
            yield made.wait(BOUND)

    return lab


def endless(**more: object) -> Experiment:
    """Makes an experiment that runs until it is stopped."""
    return Experiment(**{"task": Digits(), "steps": 0, "eval_every": 25, "pace": 10.0, **more}).checked()


def rows(run: Run, rank: int) -> int:
    """How many spans of a rank have come so far."""
    return int((run.spans["rank"] == rank).sum())


def reached(lab: Lab, step: int) -> None:
    """Waits for the step of the run under way."""
    assert until(lambda: lab._live is not None and lab._live.step >= step, BOUND), lab.notes
