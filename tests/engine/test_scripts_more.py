"""Checks that scripts on three ranks, with SyncBatchNorm or after a resume, give torchrun's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.labs import shared_lab
from tests.torchrun import HERE, started_by_torchrun
from workbench.experiment import Experiment
from workbench.lab import Lab, RankError
from workbench.run import Run
from workbench.strategies import DDP, Strategy, TorchDDP
from workbench.tasks import Script

pytestmark = [pytest.mark.engine, pytest.mark.long]
RANKS = 3
FAR = 1e-5  # largest relative difference between DDP and torch
STRATEGIES = (TorchDDP(), DDP())

lab = shared_lab(RANKS, "three")


def run_in(lab: Lab, script: str, words: tuple[str, ...], strategy: Strategy) -> Run:
    task = Script(file=str(HERE / f"{script}.py"), args=words)
    return lab.run(Experiment(task=task, ranks=RANKS, strategy=strategy, eval_every=0)).wait(300)


def require_equal(found: Any, plain: Any, strategy: Strategy) -> None:
    off = 0.0 if strategy == TorchDDP() else FAR
    torch.testing.assert_close(found, plain, rtol=off, atol=off)


SCRIPTS = [("batchnorm", ()), ("batchnorm", ("--own-statistics",)), ("options", ())]


@pytest.mark.parametrize(("script", "words"), SCRIPTS)
def test_a_script_on_three_ranks_gives_the_numbers_of_torchrun(
    script: str, words: tuple[str, ...], lab: Lab, tmp_path: Path
) -> None:
    plain = started_by_torchrun(script, tmp_path / "plain.pt", (str(tmp_path / "plain.pt"), *words), RANKS)
    for strategy in STRATEGIES:
        run = run_in(lab, script, (str(tmp_path / "ours.pt"), *words), strategy)
        assert (run.state, run.made) == ("done", 12)
        require_equal(torch.load(tmp_path / "ours.pt"), plain, strategy)


def test_a_script_that_resumes_its_own_save_gives_the_numbers_of_torchrun(lab: Lab, tmp_path: Path) -> None:
    for _ in range(2):
        (out := tmp_path / "plain.pt").unlink(missing_ok=True)
        plain = started_by_torchrun("resumed", out, (str(out), "--saved", str(tmp_path / "plain")), RANKS)
    assert len(plain["losses"]) == 16
    for strategy in STRATEGIES:
        words = (str(tmp_path / "ours.pt"), "--saved", str(tmp_path / type(strategy).__name__))
        for _ in range(2):
            run = run_in(lab, "resumed", words, strategy)
            assert (run.state, run.made) == ("done", 8)
        require_equal(torch.load(tmp_path / "ours.pt"), plain, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_sync_batch_norm_on_cpus_raises_torchs_own_error(strategy: Strategy, lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="SyncBatchNorm layers only work with GPU modules"):
        run_in(lab, "batchnorm", (str(tmp_path / "ours.pt"), "--sync-bn"), strategy)
    assert not (tmp_path / "ours.pt").exists()
