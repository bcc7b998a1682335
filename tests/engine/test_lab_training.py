"""Tests a lab on real engines that train a small model defined here, as in a notebook's cells."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from torch import nn

from tests.labs import apart
from tests.waiting import until
from workbench.cluster.run import run_ending, run_watch
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.lab import Lab, RankError
from workbench.run import Run
from workbench.settings import Change, knob
from workbench.strategies import DDP, LocalSGD
from workbench.tasks import Task

pytestmark = pytest.mark.engine


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2))


def data(rank: int, ranks: int, seed: int, batch: int = 16) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(seed * 1000 + rank)
    while True:
        x = torch.randn(batch, 20, generator=source)
        yield x, (x.sum(1) > 0).long()


def loss(net: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(net(x), y)


def slow_loss(net: nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(0.02)
    print("a step of the user's model")
    return loss(net, batch)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def task(loss: Callable[..., torch.Tensor] = slow_loss) -> Task:
    return Task(model=model, data=data, loss=loss, optimizer=optimizer)


@dataclass(frozen=True, kw_only=True)
class Lazy(DDP):
    """A strategy of the notebook that sleeps, then averages like DDP."""

    nap: float = knob(0.0, 0.0, 1.0, unit="s", doc="to sleep before each step")

    async def step(self, rank: Any, state: Any) -> None:
        await super().step(rank, state)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # as if this were a notebook
    with apart(tmp_path_factory):
        with Lab(ranks=2, name="training") as made:
            yield made.wait(90)
    cloudpickle.unregister_pickle_by_value(here)


@pytest.fixture(autouse=True)
def _idle(lab: Lab) -> Iterator[None]:
    yield
    if lab.live:
        lab.stop()
        assert until(lambda: not lab.live)


def running(lab: Lab, experiment: Experiment) -> Run:
    run = lab.run(experiment)
    assert until(lambda: (lab.state == "running" and lab.status[0]["step"]) or not lab.live), lab.notes
    return run


def test_a_model_of_the_notebook_learns_on_two_ranks(lab: Lab, tmp_path: Path) -> None:
    run = lab.run(Experiment(task=task(loss), steps=150), out=tmp_path / "mine").wait(60)
    losses = run.samples[(run.samples["name"] == "loss") & (run.samples["rank"] == 1)]["value"]
    assert len(losses) == 150 and losses.tail(20).mean() < 0.6 * losses.head(20).mean()
    assert run.state == "done" and run.missing == 0
    recorded = Run.open(tmp_path / "mine")
    assert len(recorded.spans) == len(run.spans) and recorded.environment["ranks"][1]["pid"] == lab.status[1]["pid"]


def test_the_example_of_contributing_runs_as_typed_into_a_cell(lab: Lab) -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    cell = text.partition("<!-- example -->\n```python\n")[2].partition("```")[0]
    exec(compile(cell, "<cell>", "exec"), vars(sys.modules["__main__"]))  # a notebook executes its cells here
    coin = sys.modules["__main__"].CoinSGD
    run = lab.run(Experiment(task=task(loss), strategy=coin(chance=1.0), steps=10)).wait(60)
    met = run.spans[(run.spans["lane"] == "comm") & run.spans["name"].str.startswith("all_reduce bucket")]
    assert run.state == "done" and set(met["step"]) == set(range(10)) and set(met["rank"]) == {0, 1}
    run = running(lab, Experiment(task=task()))
    assert lab.set("strategy", "CoinSGD").wait(60).applied_at and "CoinSGD" in str(lab.experiment.strategy)


def test_every_live_setting_is_answered_while_it_trains(lab: Lab) -> None:
    run = running(lab, Experiment(task=task()))
    asked = [("strategy", "LocalSGD"), ("strategy.every", 3), ("strategy", "DDP"), ("compressor", "TopK"),
             ("density", 0.1), ("bucket_mb", 0.05), ("pace", 20.0), ("lr", 0.005), ("batch", 8)]  # fmt: skip
    changes = [lab.set(path, value).wait(60) for path, value in asked]
    steps = [t.applied_at for t in changes]
    assert steps == sorted(steps) and [c.path for c in run.changes] == [t.path for t in changes]
    assert (lab.experiment.pace, lab.experiment.batch) == (20.0, 8)


def test_a_strategy_of_the_notebook_can_be_switched_to(lab: Lab) -> None:
    running(lab, Experiment(task=task()))
    assert lab.set("strategy", Lazy(nap=0.0)).wait(60).applied_at > 0
    assert lab.set("strategy.nap", 0.5).wait(60).applied_at > 0


def test_planned_changes_happen_at_their_steps(lab: Lab) -> None:
    changes = [Change(10, "strategy", LocalSGD(every=4)), Change(20, "every", 2)]
    run = lab.run(Experiment(task=task(loss), steps=30), changes=changes).wait(60)
    assert [(c.at_step, c.path) for c in run.changes] == [(10, "strategy"), (20, "strategy.every")]


def test_cells_see_the_model_while_it_trains(lab: Lab) -> None:
    running(lab, Experiment(task=task()))
    busy = lab.view.execute("print(sum(p.numel() for p in workbench_session.model.parameters()))", block=False)
    busy.get(60)
    assert until(lambda: busy.stdout[0].split() == ["1474"])  # the output of a cell arrives after its answer
    assert until(lambda: lab.run_now.details("log", rank=1))
    assert lab.run_now.details("log", rank=1)[0][2] == {"stream": "stdout", "text": "a step of the user's model"}


def test_pause_and_single_steps(lab: Lab) -> None:
    running(lab, Experiment(task=task()))
    lab.pause()
    assert until(lambda: lab.state == "paused")
    assert until(lambda: lab.status[0]["state"] == "paused")
    before = lab.status[0]["step"]
    lab.step(2)
    assert until(lambda: lab.state == "paused" and lab.status[0]["step"] == before + 2)
    lab.resume()
    assert until(lambda: lab.state == "running")


def test_stop_reaches_ranks_that_are_blocked_on_a_slow_link(lab: Lab) -> None:
    slow = Fabric(link=Link(bandwidth=1e-4))  # a step would take minutes
    run = lab.run(Experiment(task=task(loss), fabric=slow))
    assert until(lambda: lab.state == "running")
    time.sleep(0.5)
    lab.stop()
    assert until(lambda: not lab.live) and run.state == "stopped"
    assert "in the middle" not in run.details("state")[-1][2]["detail"], "not torn out of it"


def breaks_everywhere(net: nn.Module, batch: Any) -> torch.Tensor:
    return net(batch[0][:, :7]).sum()


def breaks_on_rank_one(net: nn.Module, batch: Any) -> torch.Tensor:
    import threading

    if threading.current_thread().name.startswith("rank 1"):
        raise ZeroDivisionError("only here")
    return loss(net, batch)


def turns_nan(net: nn.Module, batch: Any) -> torch.Tensor:
    import threading

    time.sleep(0.01)
    return loss(net, batch) * (float("nan") if threading.current_thread().name.startswith("rank 1") else 1.0)


def test_the_same_error_on_all_ranks_is_raised_once(lab: Lab) -> None:
    with pytest.raises(RankError, match=r"ranks 0, 1, step 0, forward: RuntimeError: mat1 and mat2") as caught:
        lab.run(Experiment(task=task(breaks_everywhere))).wait(60)
    assert "breaks_everywhere" in caught.value.traceback


def test_an_error_on_one_rank_names_it_and_frees_the_others(lab: Lab) -> None:
    with pytest.raises(RankError, match=r"rank 1, step 0, forward: ZeroDivisionError: only here") as caught:
        lab.run(Experiment(task=task(breaks_on_rank_one))).wait(60)
    assert caught.value.ranks == [1] and lab.state == "failed"
    assert lab.run(Experiment(task=task(loss), steps=3)).wait(60).state == "done"


def test_nan_pauses_and_says_which_rank_and_step(lab: Lab) -> None:
    lab.run(Experiment(task=task(turns_nan), strategy=LocalSGD(every=50)), on_nan="pause")
    assert until(lambda: lab.state == "paused"), "the ranks meet only every 50 steps"
    assert lab.notes[0].startswith("rank 1's loss was nan at step 0")


def bad_once(net: nn.Module, batch: Any, seen: list[int] = [0]) -> torch.Tensor:  # noqa: B006 (an engine's count)
    import threading

    seen[0] += 1
    bad = seen[0] in (6, 7) and threading.current_thread().name.startswith("rank 1")
    return loss(net, (batch[0] * float("nan"), batch[1]) if bad else batch)


def test_a_bad_step_is_skipped_and_named_and_the_policy_is_set_live(lab: Lab) -> None:
    run = lab.run(Experiment(task=task(bad_once), steps=30, on_nan="skip")).wait(60)
    assert run.state == "done"
    assert lab.notes == ["rank 1's gradient was not finite at step 5 (the input of the model is not finite); "
                         "that step was skipped"]  # fmt: skip
    running(lab, Experiment(task=task(turns_nan), on_nan="skip", diverged=0))
    with pytest.raises(RankError, match="rank 1, step 20: FloatingPointError: a gradient is not finite, and "):
        lab.run_now.wait(60)
    (said,) = [note for note in lab.notes if "step was skipped" in note]
    assert int(said.split("as ")[-1].split()[0]) >= 20, said


def test_what_a_bad_loss_does_is_set_live(lab: Lab) -> None:
    running(lab, Experiment(task=task(loss), on_nan="pause"))
    assert lab.set("on_nan", "stop").wait(60).applied_at > 0
    lab.set("lr", 100.0)
    with pytest.raises(RankError, match=r"FloatingPointError: the loss is .* as on_nan='stop' says; lower the "):
        lab.run_now.wait(60)
    assert (lab.state, lab.run_now.state) == ("failed", "failed")


def test_a_killed_engine_ends_the_run_at_the_next_check(lab: Lab) -> None:
    """The lab sees it within a second. The other rank alone would wait for minutes."""
    assert run_watch.POLL_INTERVAL + run_ending.REPORT_TIMEOUT < 1.0
    running(lab, Experiment(task=task()))
    psutil.Process(lab.status[0]["pid"]).kill()
    with pytest.raises(RankError, match=r"rank 0, step \d+.*its engine .* ended with signal SIGKILL"):
        lab.run_now.wait(60)
    assert lab.run(Experiment(task=task(loss), steps=3)).wait(90).state == "done"


def common() -> list[tuple[str, bool]]:
    """Runs on an engine: returns (inode, whether the file is unlinked) of each shared memory mapping."""
    import re

    found = re.finditer(r"(\d+) +\S+\.shared( \(deleted\))?$", open("/proc/self/maps").read(), re.M)
    return [(m[1], bool(m[2])) for m in found]


def test_real_processes_train_one_vector_and_are_killed_without_leaving_a_file(lab: Lab) -> None:
    running(lab, Experiment(task=task(), eval_every=5))
    assert lab.set("strategy", "Hogwild").wait(60).applied_at > 0
    ((one,), (other,)) = lab.view.apply_sync(common)
    assert one == other and one[1], "both map one file, which has no name any more"
    assert lab.set("bucket_mb", 0.01).wait(60).applied_at > 0
    assert lab.set("strategy", "DDP").wait(60).applied_at > 0
    assert lab.view.apply_sync(common) == [[], []]
    assert lab.set("strategy", "Hogwild").wait(60).applied_at > 0
    place = lab.cluster.place.path
    psutil.Process(lab.status[1]["pid"]).kill()
    with pytest.raises(RankError, match=r"rank 1, step \d+.*its engine .* ended with signal SIGKILL"):
        lab.run_now.wait(60)
    assert not list(place.glob("*.shared"))
