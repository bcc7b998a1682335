"""Tests the public names, which are lazy and documented, and the code in README and CONTRIBUTING."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import workbench
from workbench.compressors import Compressor
from workbench.fabric import Fault
from workbench.optimizers import Optimizer
from workbench.settings import members, shipped
from workbench.strategies import Strategy
from workbench.tasks import TaskBase

ROOT = Path(__file__).parent.parent.parent

DRIVEN = """
import torch
from coin_sgd import CoinSGD
from workbench.experiment import Experiment
from workbench.rank import Bucket, Rank

def ops(coroutine, buckets):
    asked, answer = [], None
    try:
        while True:
            op = coroutine.send(answer)
            asked.append(op.verb)
            answer = buckets if op.verb == "params" else None
    except StopIteration:
        return asked

experiment = Experiment().set("strategy", "CoinSGD").set("chance", 1.0)
assert experiment.strategy == CoinSGD(chance=1.0)
buckets = [Bucket(0, torch.zeros(3), (), 0), Bucket(1, torch.zeros(2), (), 3)]
local = ["forward", "backward", "update"]
assert ops(experiment.strategy.step(Rank(0, 2), None), buckets) == [*local, "params", "all_reduce", "all_reduce"]
assert ops(CoinSGD(chance=0.001).step(Rank(0, 2), None), buckets) == local
print("steps")
"""


def test_every_public_name_exists_and_is_documented() -> None:
    for name in workbench.__all__:
        assert (getattr(workbench, name).__doc__ or "").strip(), name
    assert set(workbench.__all__) <= set(dir(workbench))


def test_every_member_in_a_familys_folder_is_public_without_a_list() -> None:
    for base in (Strategy, Compressor, Optimizer, Fault, TaskBase):
        found = {name for name, cls in members(base).items() if cls.__module__.startswith("workbench.")}
        assert found and found <= set(workbench.__all__) and found <= set(dir(sys.modules[base.home]))
        assert found <= set(shipped(base.home)), "read off the files without importing them"
        for name in found:
            assert getattr(workbench, name) is getattr(sys.modules[base.home], name) is members(base)[name]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        workbench.Trainer  # noqa: B018


def test_opening_a_run_imports_no_torch() -> None:
    code = "import sys, workbench; workbench.Run, workbench.Timeline, workbench.knob; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_readmes_first_screen_gives_the_commands() -> None:
    screen = (ROOT / "README.md").read_text().splitlines()[:40]
    assert [line.split()[1] for line in screen if line.startswith("make ")] == ["lab", "demo", "test"]


def test_the_readmes_python_is_a_dozen_lines_of_public_names() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len([line for line in block.splitlines() if line]) <= 12
    imports = [node for node in ast.parse(block).body if isinstance(node, ast.ImportFrom)]
    imported = {alias.name for node in imports for alias in node.names}
    assert imported <= set(workbench.__all__)


@pytest.mark.long
def test_the_readmes_python_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "first.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{block}")
    ran = subprocess.run(
        [sys.executable, "first.py"], cwd=tmp_path, env=os.environ | {"XDG_DATA_HOME": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert (
        "strategy = LocalSGD" in ran.stdout and "compressor = ErrorFeedback" in ran.stdout and "simulated" in ran.stdout
    )


def test_the_example_in_contributing_is_a_strategy_that_works(tmp_path: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    example = re.search(r"<!-- example -->\n```python\n(.*?)```", text, re.S)  # the first example
    assert example
    (tmp_path / "coin_sgd.py").write_text(example[1])
    paths = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
    ran = subprocess.run([sys.executable, "-c", paths + DRIVEN], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "steps", ran.stderr


def test_an_old_name_still_imports_its_class_with_a_warning() -> None:
    found = {old: cls for cls in members(Fault).values() for old in getattr(cls, "formerly_called", ())}
    assert found
    for old, cls in found.items():
        with pytest.warns(DeprecationWarning, match=rf"workbench\.{old} is called workbench\.{cls.__name__}"):
            assert getattr(workbench, old) is cls
    code = "from workbench import Stumble, TransientStraggler\nassert Stumble is TransientStraggler"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0, "nothing else imported"


def test_the_former_name_of_entrypoints_still_imports_the_laws_with_a_warning() -> None:
    code = "from workbench.doors.laws import laws\nimport workbench.entrypoints.laws as new\nassert laws is new.laws"
    ran = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "workbench.doors is called workbench.entrypoints since version 0.2" in ran.stderr
