"""Tests that ranks step optimizers without torch's compiler, which loads on first use."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from workbench.experiment import compiler_import

STEPS = """
import sys, torch
def stepped():
    said = []
    for make in (lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW([p], lr=0.1)):
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer = make(weight)
        for _ in range(3):
            (weight ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        said.append(weight.tolist())
    return said
"""
COMPILER = """
from torch._subclasses.fake_tensor import FakeTensorMode
from workbench.experiment.compiler_import import put_off_compiler
put_off_compiler()
light = stepped()
with FakeTensorMode(allow_non_fake_inputs=True):
    torch.nn.Linear(2, 1)(torch.zeros(3, 2)).sum().backward()
assert "torch._dynamo.eval_frame" not in sys.modules and not hasattr(torch._dynamo, "__wrapped__")
import torch._dynamo.eval_frame
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert torch._dynamo is sys.modules["torch._dynamo"] and "torch._dynamo.eval_frame" in sys.modules
assert torch._dynamo.disable.__module__ == "torch._dynamo.decorators"
put_off_compiler()
assert light == stepped() and torch._dynamo is sys.modules["torch._dynamo"]
"""
CHANGES = """
import sys
from workbench.experiment import Experiment
from workbench.tasks import Digits
Experiment(task=Digits(), ranks=2).set("optimizer", "AdamW").set("strategy", "ZeRO3")
assert "torch._dynamo.eval_frame" not in sys.modules
"""


@pytest.mark.timeout(300)
def test_steps_are_the_same_without_the_compiler_which_loads_on_use() -> None:
    command = [sys.executable, "-W", "ignore", "-c", STEPS + COMPILER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.timeout(300)
def test_a_change_from_a_notebook_does_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", CHANGES], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


def test_threads_that_use_the_compiler_at_once_all_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has seen the stand-in before a thread removes it."""
    both, stand_in, real = (
        threading.Barrier(2),
        compiler_import.CompilerStandIn(compiler_import.NAME),
        types.SimpleNamespace(reset="reset"),
    )

    class Modules(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            found = super().get(name, default)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(1.0)
            return found

    monkeypatch.setattr(
        compiler_import, "sys", types.SimpleNamespace(modules=Modules({compiler_import.NAME: stand_in}))
    )
    monkeypatch.setattr(compiler_import, "torch", types.SimpleNamespace())
    monkeypatch.setattr(compiler_import, "importlib", types.SimpleNamespace(import_module=lambda name: real))
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda _: stand_in.reset, range(2))) == ["reset"] * 2
