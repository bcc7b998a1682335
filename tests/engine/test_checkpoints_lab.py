"""Resumes a lab's checkpoint on engines, also with a notebook's own task and on fewer engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.kept import losses
from workbench.compressors import TopK
from workbench.experiment import Experiment
from workbench.lab import ClusterError, Lab
from workbench.record.checkpoints import FOLDER, list_checkpoints
from workbench.run import Checkpoint, Run, RunError
from workbench.strategies import LocalSGD
from workbench.tasks import Digits, Task

pytestmark = pytest.mark.engine


def task() -> Task:
    """A task that draws its examples and its dropout from torch's random numbers."""

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        x = nn.functional.dropout(batch, 0.2)
        return nn.functional.mse_loss(net(x), batch.sum(1, keepdim=True))

    def data(rank: int, ranks: int, seed: int) -> Any:
        while True:
            yield torch.randn(8, 6)

    return Task(model=lambda: nn.Linear(6, 1), data=data, loss=loss, optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
                evaluate=lambda net: float(net.weight.detach().square().sum()))  # fmt: skip


def test_a_lab_resumes_a_checkpoint_bit_identically_and_branches_from_it(tmp_path: Path) -> None:
    e = Experiment(task=task(), ranks=2, steps=16, save_every=6, strategy=LocalSGD(every=4), compressor=TopK.usual())
    with Lab(ranks=2, name="checkpoints") as lab:
        whole = lab.run(e, out=tmp_path / "whole").wait(120)
        at = list_checkpoints(tmp_path / "whole" / FOLDER)[0]
        rest = lab.run(e, out=tmp_path / "rest", resume=at).wait(120)
        assert losses(rest, 2) == losses(whole, 2, since=Checkpoint.open(at).step) and len(losses(rest, 2)[0]) == 10
        assert Run.open(tmp_path / "rest").parent == {
            "checkpoint": str(at), "step": 6, "run": str(tmp_path / "whole")}  # fmt: skip
        one = lab.run(e.set("ranks", 1).set("steps", 9), out=tmp_path / "one", resume=at).wait(120)
        assert len(losses(one, 1)[0]) == 3 and one.experiment.ranks == 1
        with pytest.raises(RunError, match="holds no complete checkpoint"):
            lab.run(e, resume=tmp_path / "one" / "spans-0.arrow")
        lab.run(e.set("steps", 0), out=tmp_path / "live")
        with pytest.raises(ClusterError, match="a run is live"):
            lab.run(e, resume=at)
        mine = lab.checkpoint().wait(60)
        assert Checkpoint.open(mine).asked and mine.parent == tmp_path / "live" / FOLDER


def test_a_lab_refuses_a_checkpoint_with_one_changed_digit_in_its_manifest(tmp_path: Path) -> None:
    with Lab(ranks=2, name="manifest") as lab:
        run = lab.run(Experiment(task=Digits(), ranks=2, steps=8, save_every=4), out=tmp_path / "run")
        run.wait(timeout=120)
        older, newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-2:]
        trained = [p.detach().clone() for p in run.model().parameters()]
        given = Checkpoint.open(newest).model().parameters()
        assert all(torch.equal(a, b) for a, b in zip(trained, given, strict=True))
        text = (newest / "manifest.json").read_text()
        at = text.index('.distcp", ') + len('.distcp", ')
        (newest / "manifest.json").write_text(text[:at] + ("3" if text[at] != "3" else "7") + text[at + 1 :])
        with pytest.raises(RunError, match=rf"manifest.json was changed.*from the previous checkpoint, {older}"):
            lab.run(Experiment(task=Digits(), ranks=2, steps=12), resume=newest)
