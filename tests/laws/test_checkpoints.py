"""Resumes every member from a checkpoint on the simulator, bit-identically and with a live switch's hand-over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kept import losses, simulated
from tests.ranks import make_fitting, shipped, toy
from workbench.compressors import Compressor
from workbench.host.checkpoint.restore import open_image
from workbench.optimizers import Optimizer
from workbench.record.checkpoints import Checkpoint, CheckpointFiles, list_checkpoints
from workbench.settings import Change
from workbench.sim.run.resuming import gather_checkpoint, settings_of
from workbench.strategies import Strategy

pytestmark = pytest.mark.ranks

RANKS, AT, STEPS = 3, 5, 10
STRATEGIES = {n: cls for n, cls in shipped(Strategy).items() if not cls.opaque}  # only the engine has opaque strategies
COMPRESSORS, OPTIMIZERS = shipped(Compressor), shipped(Optimizer)


def resumes_to_the_bit(folder: Path, **rest: Any) -> None:
    whole, ends = simulated(RANKS, STEPS, folder / "whole", AT, **rest)
    first = Checkpoint.open(list_checkpoints(folder / "whole")[0])
    assert not whole.details("not saved") and first.step == AT
    again, others = simulated(RANKS, STEPS, folder / "again", AT, resume=first, **rest)
    assert not again.details("data")
    assert losses(again, RANKS) == losses(whole, RANKS, since=AT)
    assert len(ends) == len(others) == RANKS and all(map(torch.equal, ends, others))


@pytest.mark.parametrize("name", [n for n, cls in STRATEGIES.items() if cls.lockstep])
def test_a_strategy_resumes_bit_identically_from_the_middle_of_a_round(name: str, tmp_path: Path) -> None:
    resumes_to_the_bit(tmp_path, strategy=make_fitting(STRATEGIES[name], RANKS))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_compressor_resumes_bit_identically(name: str, tmp_path: Path) -> None:
    resumes_to_the_bit(tmp_path, compressor=COMPRESSORS[name].usual())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_resumes_bit_identically_during_a_learning_rate_warmup(name: str, tmp_path: Path) -> None:
    resumes_to_the_bit(tmp_path, optimizer=OPTIMIZERS[name](), lr=1e-3, lr_warmup=8)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_checkpoint_for_other_strategies_equals_the_hand_over_of_a_switch(name: str, tmp_path: Path) -> None:
    strategy = make_fitting(STRATEGIES[name], RANKS)
    simulated(RANKS, 2 * STEPS, tmp_path, 7, strategy=strategy)
    kept = Checkpoint.open(list_checkpoints(tmp_path)[0])
    to = Change(kept.step, "strategy", "LocalSGD" if name == "DDP" else "DDP")
    _, switched = simulated(RANKS, kept.step, tmp_path, 0, changes=(to,), strategy=strategy)
    whole = gather_checkpoint(kept, settings_of(kept, toy()), 2, tmp_path / "begun")
    saved = open_image(whole, CheckpointFiles(whole), 1)
    flat = torch.cat(
        [saved.read_tensor(n).reshape(-1).double() for _, n in sorted(saved.entries["parameters"].items())]
    )
    if STRATEGIES[name].lockstep:
        assert torch.equal(flat, switched[0])
    else:  # a resumed background exchanges at other moments
        torch.testing.assert_close(flat, switched[0], rtol=1e-5, atol=1e-6)
