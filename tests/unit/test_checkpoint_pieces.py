"""Tests that a checkpoint's model is read without training or tracing the model."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.kept import lived, losses, simulated
from tests.piped import piped
from tests.ranks import experiment, make_fitting, mse, shipped, toy
from tests.thinned import thinned
from workbench import simulate
from workbench.experiment import Experiment
from workbench.host.checkpoint.model_pieces import read_whole_model
from workbench.partitions import Partition, Pipeline, Tensor, Whole
from workbench.record.checkpoints import FOLDER, MANIFEST, Checkpoint, CheckpointFiles, list_checkpoints
from workbench.settings import KnobError
from workbench.sim.run import resuming
from workbench.sim.run.resuming import gather_checkpoint, model_of, settings_of
from workbench.strategies import DDP, HSDP, HpZ, LocalSGD, Strategy, ZeRO3, ZeROInfinity

AGREEING = {n: cls for n, cls in shipped(Strategy).items() if not (cls.opaque or cls.periodic)}
PARTITIONS = {"Whole": Whole(), "Pipeline": Pipeline(micros=2), "Tensor": Tensor()}


def reads_a_number(model: torch.nn.Module, pair: Any) -> torch.Tensor:
    """A loss that a trace cannot follow."""
    return mse(model, pair) * (1.0 + abs(float(pair[0].sum())) * 1e-3)


def refuses(model: torch.nn.Module, pair: Any) -> torch.Tensor:
    raise AssertionError("the model was run")


def chosen(strategy: Strategy, partition: Partition, loss: Any = mse) -> Experiment:
    """Returns a run with a checkpoint before step 5. Raises KnobError for a pair that cannot train."""
    if partition == Whole():
        return experiment(4, 7, task=toy(loss=loss), strategy=strategy, pace=5.0, save_every=5)
    return piped(4, 7, strategy=strategy, partition=partition, pace=5.0, save_every=5)


def wrote(folder: Path, strategy: Strategy, partition: Partition, loss: Any = mse) -> tuple[Checkpoint, Experiment]:
    """Makes the checkpoint before step 5 of a simulated run."""
    e = chosen(strategy, partition, loss)
    simulate(e, real=True, checkpoints=folder)
    return Checkpoint.open(list_checkpoints(folder)[0]), e


def is_refused(name: str, partition: str) -> bool:
    try:
        chosen(make_fitting(AGREEING[name], 4), PARTITIONS[partition])
    except KnobError as refusal:
        assert f"under {name}" in str(refusal)
        return True
    return False


PAIRS = [pair for pair in product(AGREEING, PARTITIONS) if not is_refused(*pair)]


def test_every_strategy_trains_a_whole_model_and_ddp_its_parts() -> None:
    assert {(name, "Whole") for name in AGREEING} | {("DDP", partition) for partition in PARTITIONS} <= set(PAIRS)


def simulated_model(checkpoint: Checkpoint, task: Any) -> dict[str, torch.Tensor]:
    """Returns the model that the checkpoint's ranks assemble when they leave their strategy."""
    with patch.object(resuming, "_fill_from_pieces", return_value=False):
        return dict(model_of(checkpoint, task).state_dict())


@pytest.mark.parametrize(("name", "partition"), thinned(PAIRS, of=12))
def test_pieces_give_the_model_that_ranks_assemble(name: str, partition: str, tmp_path: Path) -> None:
    checkpoint, e = wrote(tmp_path, make_fitting(AGREEING[name], 4), PARTITIONS[partition])
    files = CheckpointFiles(checkpoint)
    direct = read_whole_model(checkpoint, files)
    files.close()
    assert direct is not None
    for key, x in simulated_model(checkpoint, e.task).items():
        assert torch.equal(direct[key], x), key


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_model_is_read_although_its_loss_raises(partition: str, tmp_path: Path) -> None:
    checkpoint, e = wrote(tmp_path, DDP(), PARTITIONS[partition])
    state = model_of(checkpoint, replace(e.task, loss=refuses)).state_dict()
    for key, x in model_of(checkpoint, e.task).state_dict().items():
        assert torch.equal(state[key], x)


def test_a_checkpoint_without_boxes_is_read_by_simulating_its_ranks(tmp_path: Path) -> None:
    checkpoint, e = wrote(tmp_path, ZeRO3(), Whole())
    said = json.loads((checkpoint.path / MANIFEST).read_text())
    for each in said["each"]:
        each["items"] = [item[:3] for item in each["items"]]
    del said["reads"]
    old, files = Checkpoint(checkpoint.path, said), CheckpointFiles(checkpoint)
    assert read_whole_model(old, files) is None
    for key, x in model_of(checkpoint, e.task).state_dict().items():
        assert torch.equal(model_of(old, e.task).state_dict()[key], x)


def test_different_replicas_are_not_assembled_from_pieces(tmp_path: Path) -> None:
    checkpoint, _ = wrote(tmp_path, LocalSGD(every=64), Whole())
    assert read_whole_model(checkpoint, CheckpointFiles(checkpoint)) is None


SHARDING: dict[str, Strategy] = {"ZeRO3": ZeRO3(), "ZeROInfinity": ZeROInfinity(), "HSDP": HSDP(group=2),
                                 "HpZ": HpZ(group=2)}  # fmt: skip


MOST = [pytest.param(name, marks=[] if name == "ZeRO3" else pytest.mark.long) for name in SHARDING]


@pytest.mark.parametrize("name", MOST)
def test_shards_with_a_loss_that_reads_a_number_are_read_and_assembled(name: str, tmp_path: Path) -> None:
    checkpoint, e = wrote(tmp_path, SHARDING[name], Whole(), loss=reads_a_number)
    model = dict(model_of(checkpoint, e.task).state_dict())
    for key, x in simulated_model(checkpoint, e.task).items():
        assert torch.equal(model[key], x)
    whole = gather_checkpoint(checkpoint, settings_of(checkpoint, e.task), 2, tmp_path / "two")
    went_on, _ = simulated(2, 7, tmp_path / "on", resume=whole, task=e.task)
    assert [len(each) for each in losses(went_on, 2)] == [2, 2], "steps 5 and 6 on each of two ranks"


@pytest.mark.ranks
@pytest.mark.parametrize("name", MOST)
def test_ranks_resume_shards_with_a_loss_that_reads_a_number(name: str, tmp_path: Path) -> None:
    e = experiment(4, 8, task=toy(loss=reads_a_number), strategy=SHARDING[name], save_every=4)
    whole = lived(e, tmp_path / "whole")
    rest = lived(e, tmp_path / "rest", list_checkpoints(tmp_path / "whole" / FOLDER)[0])
    late = [[v for step, kind, _, v in s.record.samples if kind == "loss" and step >= 4] for s in whole]
    assert [s.record.losses() for s in rest] == late and len(late[0]) == 4


def test_a_simulation_resumes_only_with_values_and_as_many_ranks(tmp_path: Path) -> None:
    simulated(2, 4, tmp_path, every=2)
    checkpoint = Checkpoint.open(list_checkpoints(tmp_path)[0])
    e = experiment(3, 4, pace=5.0)
    with pytest.raises(KnobError, match=r"resume: the checkpoint is of 2 ranks, and the experiment has ranks=3"):
        simulate(e, real=True, resume=checkpoint)
    with pytest.raises(KnobError, match=r"resume: .* this simulation has sizes only; take real=True"):
        simulate(e.set("ranks", 2), resume=checkpoint)
