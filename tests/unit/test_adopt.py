"""Tests adopted training scripts: numbers on 1 and 2 ranks, live changes, and refusals."""

from __future__ import annotations

from itertools import islice
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from tests.ranks import run
from tests.scripts import SCRIPTS
from tests.sim.insides import parameters, simulated
from workbench import adopt, simulate
from workbench.experiment import Experiment
from workbench.partitions import Partition, Pipeline, Tensor
from workbench.settings import Change, KnobError
from workbench.strategies import AsyncDrop, LocalSGD, Strategy, ZeRO3
from workbench.tasks import at_rate

DECAYS = SCRIPTS["a scheduler per step"]
TORN = ("batches that a sampler makes", "a stream")  # batches go to ranks whole
OTHER = ("dicts, a frozen layer and a dropped rest",)  # with a fixed batch of its own


def of(task: Any, ranks: int, steps: int, **rest: Any) -> Experiment:
    return Experiment(task=task, ranks=ranks, steps=steps, eval_every=0, **rest)


def same(model: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    """Checks that both have the same parameters, and that `other` has trained."""
    for (name, p), q in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(q, p, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_adopting_a_script_takes_at_most_five_lines(name: str) -> None:
    run_it = "lab = Lab(4)\nrun = lab.run(Experiment(task=task))"
    assert len((SCRIPTS[name].adopted.strip() + "\n" + run_it).splitlines()) <= 5


@pytest.mark.ranks
@pytest.mark.parametrize("name", SCRIPTS)
def test_one_rank_makes_the_steps_of_the_scripts_own_loop(name: str) -> None:
    script = SCRIPTS[name]
    plain, begun = script.plain(), script.make()["model"]
    (session,) = run(of(script.task(), 1, len(plain["losses"])))
    assert session.record.losses() == pytest.approx(plain["losses"], rel=1e-5)
    same(plain["model"], session.training.model)
    assert any(not torch.equal(p, q) for p, q in zip(begun.parameters(), plain["model"].parameters(), strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in (*TORN, *OTHER)])
def test_two_ranks_make_the_steps_of_the_loop_with_batches_twice_as_large(name: str) -> None:
    script = SCRIPTS[name]
    plain = script.plain(16)
    sessions = run(of(script.task(8), 2, len(plain["losses"])))
    for session in sessions:
        same(plain["model"], session.training.model, 1e-2 if name == "mixed precision" else 1e-4)


@pytest.mark.parametrize("name", SCRIPTS)
def test_ranks_share_an_epoch_without_duplicates(name: str) -> None:
    learner, first = SCRIPTS[name].task().build(), []
    batch = SCRIPTS[name].task().batch
    for rank in range(3):
        data = iter(learner.data(rank, 3, batch, 0))
        first += [next(data) for _ in range((96 if name not in OTHER else 80) // (batch or 8) // 3)]
    rows = [r for b in first for part in (b if type(b).__name__ == "Micros" else [b]) for r in rows_of(part)]
    assert len(rows) >= 48 and len(set(rows)) == len(rows)


def rows_of(batch: Any) -> list[tuple[float, ...]]:
    return list(map(tuple, (batch["x"] if isinstance(batch, dict) else batch[0]).tolist()))


def test_the_order_continues_after_used_examples_and_depends_on_the_seed() -> None:
    learner = SCRIPTS["a custom sampler"].task().build()
    whole = [rows_of(b) for b in islice(learner.data(0, 1, 8, 0), 30)]
    later = [rows_of(b) for b in islice(learner.data(0, 1, 8, 0, 160), 10)]
    assert whole[20:] == later
    assert whole != [rows_of(b) for b in islice(learner.data(0, 1, 8, 1), 30)]


@pytest.mark.ranks
def test_strategies_are_switched_live_and_every_group_keeps_its_settings() -> None:
    """These strategies make the same step, so a parameter in a wrong group would show."""
    plain = DECAYS.plain(16)
    way = [Change(2 * k + 1, "strategy", name) for k, name in enumerate(["ZeRO3", "TorchFSDP", "ZeRO1", "HSDP", "DDP"])]
    sessions = run(of(DECAYS.task(8), 2, 12), *way)
    assert not sessions[0].record.noted("refused")
    for session in sessions:
        same(plain["model"], session.training.model, 1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize("partition", [Tensor(), Pipeline(micros=2)], ids=lambda p: type(p).__name__)
def test_one_replica_of_two_ranks_makes_the_steps_of_the_loop(partition: Partition) -> None:
    plain = DECAYS.plain()
    sessions = run(of(DECAYS.task(), 2, 24, partition=partition), Change(24, "partition", "Whole"))
    assert sessions[-1].record.losses()[-1] == pytest.approx(plain["losses"][-1], rel=1e-3)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [LocalSGD(every=2), ZeRO3()], ids=lambda s: type(s).__name__)
def test_the_simulator_trains_an_adopted_script_like_ranks(strategy: Strategy) -> None:
    e = of(DECAYS.task(), 2, 6, strategy=strategy, pace=1.0)
    _, virtual = simulated(e)
    torch.testing.assert_close(parameters(virtual), parameters(run(e)), rtol=1e-4, atol=1e-5)


def test_the_simulator_runs_an_adopted_script_without_values() -> None:
    told = simulate(of(DECAYS.task(), 4, 8, strategy=ZeRO3(), pace=5.0))
    assert told.summary()["steps"] == 8
    part = simulate(of(DECAYS.task(), 4, 4, partition=Tensor(), pace=5.0))
    assert part.summary()["steps"] == 4


@pytest.mark.ranks
def test_a_rank_that_trains_a_part_of_the_model_keeps_its_groups() -> None:
    sessions = run(of(DECAYS.task(), 2, 6, strategy=AsyncDrop()))
    assert all(len(s.training.optimizer.param_groups) == 2 for s in sessions)


def test_an_adopted_task_is_pickled_with_its_state_at_adoption() -> None:
    names = DECAYS.make()
    exec(DECAYS.adopted, names)
    sent = cloudpickle.dumps(names["task"])
    with torch.no_grad():
        names["model"][0].weight.zero_()
    rates = []
    for _ in range(3):
        rates.append(names["optimizer"].param_groups[0]["lr"] / 0.01)
        names["optimizer"].step()
        names["scheduler"].step()
    for task in (names["task"], cloudpickle.loads(sent)):
        learner = task.build()
        same(DECAYS.make()["model"], learner.model(), 0.0)
        assert [learner.schedule(step) for step in range(3)] == pytest.approx(rates)
        optimizer = learner.optimizer(learner.model().parameters(), 0.0)
        assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [
            (0.01, 0.5, 2), (0.03, 0.0, 2)]  # fmt: skip
        assert type(optimizer) is torch.optim.AdamW


def test_adopting_draws_no_random_number_and_changes_no_model() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before, drawn = {n: x.clone() for n, x in model.state_dict().items()}, torch.get_rng_state()
    adopt(model, torch.optim.SGD(model.parameters(), lr=0.1), ROWS, nn.MSELoss(), batch=4)
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


def test_adopting_an_optimizer_with_state_warns() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="optimizer=Adam: its state from earlier steps is not adopted") as told:
        task = adopt(model, optimizer, ROWS, nn.MSELoss(), batch=4)
    assert len(told) == 1
    learner = task.build()
    assert not learner.optimizer(learner.model().parameters(), 0.0).state


def test_a_batch_that_accumulates_is_changed_live_in_multiples_only() -> None:
    e = of(SCRIPTS["gradient accumulation"].task(), 1, 1).checked()
    assert e.batch == 8 and e.set("batch", 16).batch == 16
    with pytest.raises(KnobError, match="batch=6: must be a multiple of 4, the batches of a step"):
        e.set("batch", 6)
    with pytest.raises(KnobError, match="batch=6: the adopted loader makes its own batches"):
        of(SCRIPTS["a stream"].task(), 1, 1).set("batch", 6)


def test_a_learning_rate_of_zero_keeps_the_ratio_of_groups() -> None:
    learner = DECAYS.task().build()
    optimizer = learner.optimizer(learner.model().parameters(), 0.0)
    at_rate(optimizer, 0.0)
    at_rate(optimizer, 0.02)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.02, 0.06])


ROWS = TensorDataset(torch.ones(12, 6), torch.ones(12, 3))


class Endless(Sampler):
    def __iter__(self) -> Any:
        while True:
            yield 0


def given(**other: Any) -> dict[str, Any]:
    """Returns arguments of `adopt` with these changes. A function gets the model or the optimizer."""
    model = other.pop("model", None) or nn.Linear(6, 3)
    optimizer = other.pop("optimizer", lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = optimizer(model) if callable(optimizer) else optimizer
    rest = {"loader": DataLoader(ROWS, 4), "loss": nn.MSELoss(), **other}
    if callable(rest.get("scheduler")):
        rest["scheduler"] = rest["scheduler"](optimizer)
    return {"model": model, "optimizer": optimizer, **rest}


schedules = torch.optim.lr_scheduler


@pytest.mark.parametrize(("other", "said"), [
    ({"model": "resnet", "optimizer": None}, "model='resnet': must be a torch.nn.Module"),
    ({"model": nn.ReLU(), "optimizer": None}, "model=ReLU: has no parameters that learn"),
    ({"optimizer": None}, "optimizer=None: must be a torch.optim.Optimizer"),
    ({"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, "optimizer=LBFGS: its step needs a closure"),
    ({"optimizer": lambda m: torch.optim.SGD(nn.Linear(6, 3).parameters())}, "2 of its parameters are not in"),
    ({"optimizer": lambda m: [torch.optim.SGD([m.weight]), torch.optim.Adam([m.bias])]}, "must be of one class"),
    ({"optimizer": lambda m: [torch.optim.SGD([m.weight]), torch.optim.SGD([m.weight])]}, "step the same parameter"),
    ({"loader": ROWS}, "batch=0: must be 1 or more for a TensorDataset; take batch=32"),
    ({"batch": 4}, "batch=4: the loader makes its own batches"),
    ({"batch": True, "loader": ROWS}, "batch=True: must be an integer in [0, 1000000]"),
    ({"loader": iter([1])}, "loader=a list_iterator: can be read only once"),
    ({"loader": 3}, "loader=a int: must be a DataLoader, a Dataset or an iterable of batches"),
    ({"loader": []}, "loader: its first batch cannot be read"),
    ({"loader": DataLoader(ROWS, 64, drop_last=True)}, "examples: has no whole batch of 64"),
    ({"loader": DataLoader(ROWS, 4, sampler=Endless())}, "sampler=Endless: must have a length"),
    ({"loss": None}, "loss=None: must be a function (model, batch) or a criterion"),
    ({"loss": lambda model, batch: 1.0}, "of (model, batch) it is a float"),
    ({"loss": nn.MSELoss(reduction="none")}, "of (output, target) it is a Tensor of shape (4, 3)"),
    ({"loss": nn.CrossEntropyLoss(), "loader": [torch.ones(4, 6)]}, "a criterion needs (input, target)"),
    ({"evaluate": 0.5}, "evaluate=0.5: must be a function (model)"),
    ({"accumulate": 0}, "accumulate=0: must be an integer in [1, 1000000]"),
    ({"autocast": "fp8"}, "autocast='fp8': must be 'bf16' or None"),
    ({"autocast": torch.float16}, "autocast='torch.float16': float16 needs scaled losses"),
    ({"scheduler": 0.1}, "scheduler=float: must be a torch.optim.lr_scheduler"),
    ({"scheduler": schedules.ReduceLROnPlateau}, "scheduler=ReduceLROnPlateau: needs a measured loss"),
    ({"scheduler": lambda _: schedules.ExponentialLR(torch.optim.SGD([torch.ones(1)]), 0.9)}, "steps another"),
    ({"scheduler": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=9),
      "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)}, "give it cycle_momentum=False"),
    ({"optimizer": lambda m: torch.optim.SGD([{"params": [m.weight]}, {"params": [m.bias]}], lr=0.1),
      "scheduler": lambda o: schedules.LambdaLR(o, [lambda t: 1.0, lambda t: 0.5**t])}, "changes the rates of groups"),
])  # fmt: skip
def test_scripts_that_cannot_be_adopted_are_refused_in_a_sentence(other: dict[str, Any], said: str) -> None:
    with pytest.raises(KnobError) as refused:
        adopt(**given(**other))
    assert said in str(refused.value) and "\n" not in str(refused.value)
