"""Runs unchanged torchrun scripts on real engines: their results, their records and live changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.labs import apart
from tests.torchrun import HERE, started_by_torchrun
from tests.waiting import until
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, TorchDDP
from workbench.tasks import Script

pytestmark = pytest.mark.engine
SIX = ["tutorial", "accumulation", "mixed", "scheduler", "two_optimizers", "sampler"]


def words(name: str, out: Path) -> tuple[str, ...]:
    return (str(out / f"{name}.pt"), *(("--steps", "12") if name == "scheduler" else ()))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with apart(tmp_path_factory):
        with Lab(ranks=2, name="scripts") as made:
            yield made.wait(90)


@pytest.mark.parametrize("name", SIX)
def test_a_script_gives_torchruns_results_also_with_a_live_change(lab: Lab, name: str, tmp_path: Path) -> None:
    plain = started_by_torchrun(name, tmp_path / f"{name}.pt", words(name, tmp_path))
    for strategy, turns in ((TorchDDP(), ()), (TorchDDP(), (Change(5, "strategy", "DDP"),)), (DDP(), ())):
        task = Script(file=str(HERE / f"{name}.py"), args=words(name, tmp_path))
        (tmp_path / f"{name}.pt").unlink()
        run = lab.run(Experiment(task=task, ranks=2, strategy=strategy, eval_every=0), turns).wait(120)
        found = torch.load(tmp_path / f"{name}.pt")
        assert run.state == "done" and run.made == 12
        if not turns and strategy == TorchDDP():
            torch.testing.assert_close(found, plain, rtol=0, atol=0)
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    run.save_model(tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt")
    assert back.keys() == found["model"].keys()
    mine = {name: x for name, x in back.items() if "running" not in name}  # running statistics are the mean over ranks
    torch.testing.assert_close(mine, {name: found["model"][name] for name in mine}, rtol=0, atol=0)
    rows = run.timeline.samples.rows()
    mine = rows.value[rows.equal("name", "loss") & (rows.rank == 0)]
    assert sum(mine) == pytest.approx(sum(plain["losses"]), rel=1e-5)


def test_passes_buckets_and_output_of_torchs_own_ddp_are_recorded(lab: Lab, tmp_path: Path) -> None:
    task = Script(file="tutorial.py", args=words("tutorial", tmp_path), folder=str(HERE))
    run = lab.run(Experiment(task=task, ranks=2, strategy=TorchDDP(), eval_every=0)).wait(120)
    spans = run.spans
    assert set(spans[spans.lane == "compute"].name) == {"forward", "backward", "update"}
    buckets = spans[(spans.lane == "comm") & (spans["rank"] == 0)]
    assert list(buckets.groupby("step").nbytes.sum()) == [4 * 165] * 12
    lines = [line["text"] for _, _, line in run.details("log")]
    assert "Start running basic DDP example on rank 1." in "".join(lines)


ENDLESS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    while True:
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step(), optimizer.zero_grad()
finally:
    print("left", "MASTER_PORT" in __import__("os").environ)
"""


def test_a_script_is_changed_paused_and_stopped_live_but_cannot_roll_back(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    task = Script(file="endless.py", folder=str(tmp_path))
    run = lab.run(Experiment(task=task, ranks=2, strategy=TorchDDP(), eval_every=0, pace=5.0))
    assert until(lambda: run.made > 3)
    lab.set("strategy", "LocalSGD").wait()
    lab.set("strategy", "DDP").wait()
    lab.set("compressor", "TopK").wait()
    lab.pause()
    assert until(lambda: lab.state == "paused")
    at = run.made
    lab.step(2)
    assert until(lambda: lab.state == "paused" and run.made == at + 2)
    with pytest.raises(KnobError, match="keeps the 2 ranks that it started with"):
        lab.resize(1)
    with pytest.raises(KnobError, match="into=None: a custom loop built this model, which settings cannot do"):
        run.model()
    with pytest.raises(KnobError, match="holds only the model of a custom loop, which cannot continue in the middle"):
        lab.run(resume=str(run.path))
    lab.resume()
    assert until(lambda: run.made > at + 3)
    lab.stop()
    run.wait(60)
    assert run.state == "stopped"
    assert "left True" in "".join(line["text"] for _, _, line in run.details("log"))
    again = lab.run(Experiment(task=Script(file="tutorial.py", args=words("tutorial", tmp_path), folder=str(HERE)),
                               ranks=2, strategy=DDP(), eval_every=0)).wait(120)  # fmt: skip
    assert again.state == "done"
