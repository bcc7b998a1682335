"""Tests that Following tracks an evaluation's calls of torch from any caller."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from tests.ranks import toy
from workbench.host.core.valueless import make_outline
from workbench.host.memory.storage_tracker import StorageTracker
from workbench.sim.model.evaluation_memory import measure_evaluation

WIDTH, BATCH = 256, 32


def test_a_compiled_model_gives_the_same_result_without_warnings() -> None:
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    compiled, x = torch.compile(model, backend="eager"), torch.ones(BATCH, 64)
    with torch.no_grad(), warnings.catch_warnings(action="error"):
        plain = model(x)
        with StorageTracker() as following:
            assert torch.equal(compiled(x), plain)
    assert following.most[0] >= 2 * BATCH * WIDTH * 4, "both activations of the hidden layer are there at a time"


class Trimmed(nn.Module):
    """Reads as many columns as its own values say (`by_values`), or all of them."""

    def __init__(self, by_values: bool) -> None:
        super().__init__()
        self.by_values, self.layer = by_values, nn.Linear(1, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = int(x.max()) if self.by_values else x.shape[1]
        return torch.tanh(self.layer(x[:, :columns, None])).sum((1, 2))


@pytest.mark.parametrize("by_values", [False, True])
def test_batches_of_equal_sizes_take_the_memory_of_each_followed_one(by_values: bool) -> None:
    def evaluate(model: nn.Module) -> float:
        kept = [model(torch.full((BATCH, 8), float(columns))) for columns in (2, 3, 8, 5)]
        return float(torch.stack(kept).mean())

    found = []
    for pure in (True, False):
        task = toy(model=lambda: Trimmed(by_values), evaluate=evaluate, pure=pure)
        learner = task.build()
        found += measure_evaluation(make_outline(learner), learner, None, None, 0)
    assert found[0] == found[1] >= 2 * BATCH * 8 * 64 * 4


KEPT_FRAMES = """
import sys

class Keeps:  # keeps the frames of importers, as torch's modules do that store an exception
    frames = []
    def find_spec(self, name, path=None, target=None):
        self.frames.append(sys._getframe())

sys.meta_path.insert(0, Keeps())
from workbench.experiment.compiler_import import put_off_compiler
from workbench.host.core.valueless import make_outline
from workbench.sim.model.evaluation_memory import measure_evaluation
from workbench.tasks import ByteGPT
put_off_compiler()
learner = ByteGPT(layers=1).build()
first, second = (measure_evaluation(make_outline(learner), learner, None, None, 0) for _ in range(2))
assert first == second, (first, second)
"""


def test_an_import_during_the_first_evaluation_keeps_no_tensor_in_the_count() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KEPT_FRAMES], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
