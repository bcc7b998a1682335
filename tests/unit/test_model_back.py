"""Rebuilds the trained model from ranks: the whole from slices and stages, the mean from drifted replicas."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from tests.scripts import SCRIPTS
from tests.sim.insides import parameters, simulated
from workbench import Run, RunError, simulate
from workbench.experiment import Experiment
from workbench.partitions import Partition, Pipeline, Tensor
from workbench.record.checkpoint_request import wait_for_checkpoint
from workbench.record.checkpoints import FOLDER, Checkpoint
from workbench.settings import KnobError
from workbench.sim.resuming import model_of  # where scripts from before the sub-packages import it
from workbench.strategies import LocalSGD, ZeRO3
from workbench.tasks import Digits

SCRIPT = SCRIPTS["a scheduler per step"]


def made(folder: Path, **other: object) -> Experiment:
    """Writes a checkpoint of two ranks before step 24 into `folder`; returns the experiment."""
    e = Experiment(**{"task": SCRIPT.task(), "ranks": 2, "steps": 24, "eval_every": 0, "pace": 1.0, "save_every": 24,
                      **other})  # fmt: skip
    simulate(e, real=True, checkpoints=folder)
    return e


@pytest.mark.parametrize("partition", [Tensor(), Pipeline(micros=2)], ids=lambda p: type(p).__name__)
def test_slices_and_stages_give_the_whole_model(partition: Partition, tmp_path: Path) -> None:
    e = made(tmp_path, partition=partition)
    found = model_of(Checkpoint.open(tmp_path), e.task).state_dict()
    torch.testing.assert_close(dict(found), dict(SCRIPT.plain()["model"].state_dict()), rtol=1e-3, atol=1e-4)


def test_drifted_replicas_give_their_mean(tmp_path: Path) -> None:
    e = made(tmp_path, strategy=LocalSGD(every=64))
    _, sessions = simulated(e)
    each = parameters(sessions)
    assert not torch.equal(each[0], each[1])
    named = dict(model_of(Checkpoint.open(tmp_path), e.task).named_parameters())
    found = torch.cat([named[place.name].detach().reshape(-1) for place in sessions[0].layout.order])
    torch.testing.assert_close(found.double(), each.mean(0), rtol=1e-5, atol=1e-6)


def test_shards_give_the_whole_model(tmp_path: Path) -> None:
    e = made(tmp_path, strategy=ZeRO3(), steps=12, save_every=12)
    found = model_of(Checkpoint.open(tmp_path), e.task).state_dict()
    torch.testing.assert_close(dict(found), dict(SCRIPT.plain(16)["model"].state_dict()), rtol=1e-3, atol=1e-4)


def test_a_run_on_disk_gives_the_model_of_a_step_and_names_the_kept_steps(tmp_path: Path) -> None:
    e = made(tmp_path / FOLDER, task=Digits(width=8), steps=4, save_every=2)
    Run(e, name="tour", path=tmp_path).save()
    run = Run.open(tmp_path)
    first, second = (run.model(step=step).state_dict() for step in (2, 4))
    assert any(not torch.equal(x, second[name]) for name, x in first.items())
    with pytest.raises(RunError, match=r"step=3: tour keeps no checkpoint before it; give step=4 \(there are 2, 4\)"):
        run.model(step=3)
    with pytest.raises(KnobError, match="step=True: must be the step of a checkpoint"):
        run.model(step=True)
    with pytest.raises(KnobError, match="path=None: must be a file to write"):
        run.save_model(None)  # type: ignore[arg-type]
    with patch.dict("sys.modules", {"safetensors.torch": None}):
        with pytest.raises(RunError, match="needs safetensors, which is not installed; install it"):
            run.save_model(tmp_path / "m.safetensors", step=4)
    with patch("workbench.tasks._written._plain", side_effect=OSError("no room")):
        with pytest.raises(RunError, match=r"the model cannot be written \(no room\); give another path"):
            run.save_model(tmp_path / "m.pt", step=4)
    assert not list(tmp_path.glob("*m.pt*"))


def test_an_evaluation_after_the_last_step_is_not_counted_as_a_step(tmp_path: Path) -> None:
    e = Experiment(task=Digits(width=8), ranks=2, steps=4, eval_every=2, save_every=4, pace=1.0)
    simulate(e, real=True, checkpoints=tmp_path / FOLDER).save(tmp_path)
    run = Run.open(tmp_path)
    assert run.made == 4 and run.spans.step.max() == 4
    torch.testing.assert_close(run.model().state_dict(), run.model(step=4).state_dict(), rtol=0, atol=0)


def test_a_model_is_only_loaded_into_a_model_of_the_same_shape(tmp_path: Path) -> None:
    e = Experiment(task=Digits(width=8), ranks=2, steps=2, eval_every=0, save_every=2, pace=1.0)
    simulate(e, real=True, checkpoints=tmp_path / FOLDER).save(tmp_path)
    mine, run = e.task.build().model(), Run.open(tmp_path)
    assert run.model(into=mine) is mine
    torch.testing.assert_close(mine.state_dict(), run.model().state_dict(), rtol=0, atol=0)
    with pytest.raises(KnobError, match="into=Linear: is another model: "):
        run.model(into=torch.nn.Linear(2, 3))
    with pytest.raises(KnobError, match="into=3: must be a torch Module"):
        run.model(into=3)  # type: ignore[arg-type]


def test_a_checkpoint_that_is_late_raises_timeout_and_the_run_goes_on() -> None:
    run = Run(Experiment(), name="tour", live=True)
    run._control = Mock()
    with pytest.raises(TimeoutError, match=r"no checkpoint of tour was complete within 0 s; the run goes on"):
        wait_for_checkpoint(run, None, 0.0)
    run._control.request_checkpoint.assert_called_once()
