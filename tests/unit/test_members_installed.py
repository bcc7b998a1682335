"""Checks that a strategy and a compressor of an installed package are found by name, on both clocks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = """
from dataclasses import dataclass
from workbench.compressors import Cast
from workbench.strategies import DDP

@dataclass(frozen=True, kw_only=True)
class Theirs(DDP):
    '''DDP by another name.'''

@dataclass(frozen=True, kw_only=True)
class TheirCast(Cast):
    '''Cast by another name.'''
"""
ASKED = """
from workbench import Experiment, simulate
run = simulate(Experiment(ranks=2, steps=3, pace=5.0).set({"strategy": "Theirs", "compressor": "TheirCast"}))
print(run, run.made, type(run.experiment.compressor).__name__)
"""


def installed(folder: Path, **entries: str) -> dict[str, str]:
    """Installs a package with these entry points below `folder`; returns the environment of a Python that finds it."""
    (folder / "theirs.py").write_text(PACKAGE)
    about = folder / "theirs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    named = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (about / "entry_points.txt").write_text(f"[workbench.members]\n{named}\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.mark.ranks
@pytest.mark.timeout(300)  # another Python imports the whole package
def test_members_of_an_installed_package_are_found_even_if_another_entry_point_fails(tmp_path: Path) -> None:
    env = installed(tmp_path, good="theirs", gone="theirs_that_is_gone")
    done = subprocess.run([sys.executable, "-c", ASKED], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Theirs, 2 ranks" in done.stdout and "3 TheirCast" in done.stdout
    assert "workbench.members: gone = theirs_that_is_gone is left out (ModuleNotFoundError" in done.stderr
