"""Adopts a script on real engines, changes its settings live, and returns its model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.labs import apart
from tests.scripts import SCRIPTS
from tests.waiting import until
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.run import Run, RunError
from workbench.settings import Change
from workbench.strategies import LocalSGD
from workbench.tasks import Digits

pytestmark = pytest.mark.engine
SCRIPT = SCRIPTS["a scheduler per step"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with apart(tmp_path_factory):
        with Lab(ranks=2, name="adopted") as made:
            yield made.wait(90)


def test_a_script_is_trained_on_two_engines(lab: Lab) -> None:
    plain = SCRIPT.plain(16)
    run = lab.run(Experiment(task=SCRIPT.task(), ranks=2, steps=12, eval_every=0)).wait(120)
    rows = run.timeline.samples.rows()
    losses = rows.value[rows.equal("name", "loss")]
    assert len(losses) == 24
    assert sum(losses) / 2 == pytest.approx(sum(plain["losses"]), rel=1e-3)


def test_a_script_with_its_own_model_switches_strategies_live_and_returns_the_model(lab: Lab, tmp_path: Path) -> None:
    """Checks strategies that make the loop's own steps. The model is the loop's, of a class of `__main__`."""
    script = SCRIPTS["torch's DDP tutorial"]
    plain, task = script.plain(16), script.task()
    turned = [Change(3, "strategy", "ZeRO3"), Change(8, "strategy", "ZeRO1")]
    run = lab.run(Experiment(task=task, ranks=2, steps=12, eval_every=0), turned, out=tmp_path / "run").wait(120)
    found = run.model().state_dict()
    torch.testing.assert_close(found, plain["model"].state_dict(), rtol=1e-4, atol=1e-5)
    for path, load in (("m.pt", lambda p: torch.load(p, weights_only=True)), ("m.safetensors", load_file)):
        torch.testing.assert_close(load(run.save_model(tmp_path / path)), dict(found), rtol=0, atol=0)
    again = Run.open(tmp_path / "run").model(task=task).state_dict()
    torch.testing.assert_close(again, found, rtol=0, atol=0)
    with pytest.raises(RunError, match="step=7: run keeps no checkpoint before it; give step=12"):
        run.model(step=7)
    with pytest.raises(RunError, match="there is no folder"):
        run.save_model(tmp_path / "none" / "m.pt")


def test_a_live_run_returns_its_model_and_keeps_training(lab: Lab) -> None:
    run = lab.run(Experiment(task=SCRIPT.task(), ranks=2, eval_every=0, strategy=LocalSGD(every=64), pace=5.0))
    assert until(lambda: run.made > 3)
    first = run.model().state_dict()
    assert run.live
    lab.pause()
    assert until(lambda: lab.state == "paused")
    second, again = run.model().state_dict(), run.model().state_dict()
    torch.testing.assert_close(second, again, rtol=0, atol=0)
    assert any(not torch.equal(x, second[name]) for name, x in first.items())
    lab.stop()
    run.wait(60)
    torch.testing.assert_close(run.model().state_dict(), second, rtol=1e-6, atol=1e-6)


def test_a_run_without_kept_state_explains_how_to_keep_its_model(lab: Lab) -> None:
    run = lab.run(Experiment(task=Digits(), ranks=2, steps=3, eval_every=0)).wait(120)
    with pytest.raises(RunError, match="ended after 3 steps without a checkpoint of that step"):
        run.model()
