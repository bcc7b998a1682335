"""Tests parameters that a model unfreezes or freezes during training, under every strategy, on both hosts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kept import lived, twice
from tests.laws.dynamic_models import CASES, Batch, Dynamic, batches, freeze_b, layers, pull, through, two
from tests.ranks import ended, experiment, live, make_fitting, run, shipped
from tests.thinned import thinned
from tests.unit.test_resizing import Crowd
from workbench import Checkpoint, simulate
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.rank import StrategyError
from workbench.record.checkpoints import FOLDER, list_checkpoints, step_of
from workbench.settings import Change, knobs
from workbench.sim.run.resuming import gather_checkpoint
from workbench.strategies import DDP, LocalSGD, Strategy, TorchDDP
from workbench.tasks import Colwise, Rowwise, Task

SHIPPED = shipped(Strategy)
RANKS, STEPS = 2, 10
SLOW = Fabric(link=Link(bandwidth=80.0, latency=2.0))
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
ON_STEP = {
    "all ranks": lambda batch: batch.index >= 2,
    "one rank": lambda batch: batch.rank == 1 and batch.index >= 2,
}
UNFREEZE = [(name, when) for name, cls in SHIPPED.items() for when in ON_STEP
            if when == "all ranks" or make_fitting(cls, RANKS).trains(1, RANKS)]  # fmt: skip
UNFREEZE_SIMULATED = [(name, when) for name, when in UNFREEZE if not SHIPPED[name].opaque]
# Strategies whose ranks keep approaching one value; TEASQFed's server moves by a share with each mixing.
APPROACH = ("DABMD", "EASGD", "ShadowEASGD", "ShadowSync", "TEASQFed")
FREEZE = [(name,) for name in SHIPPED]


def many(rank: int, ranks: int, seed: int) -> list[Batch]:
    """Returns as many batches as any strategy draws here; `index` continues from pass to pass."""
    few = batches(rank, ranks, seed)
    return [few[index % len(few)]._replace(index=index) for index in range(200)]


def task_of(trains: Callable[[Batch], bool], note: Callable[[Any, Batch], None] = lambda model, batch: None,
            prepare: Callable[[nn.Module], None] = lambda model: None) -> Task:  # fmt: skip
    """A model that trains its parameter b while `trains` returns True; each forward of a step calls `note`."""

    def rule(model: Any, batch: Batch) -> Tensor:
        if model.b.requires_grad != trains(batch):
            model.b.requires_grad_(trains(batch))
        note(model, batch)
        return pull(model.a, batch) + pull(model.b, batch) + through(model, batch)

    case = Dynamic(lambda: {**two(), **layers()}, rule, SGD, prepare)
    return Task(model=case.model, data=many, loss=lambda model, batch: model(batch).square(), optimizer=SGD,
                lookups=lambda batch: {}, split=lambda model: {"first": Colwise(), "second": Rowwise()})  # fmt: skip


def chosen(name: str, steps: int, **rest: Any) -> Experiment:
    strategy = make_fitting(SHIPPED[name], RANKS)
    if any(knob.name == "every" for knob in knobs(type(strategy))):
        strategy = replace(strategy, every=2)
    if isinstance(strategy, TorchDDP):
        strategy = replace(strategy, find_unused_parameters=True)
    return experiment(RANKS, steps, strategy=strategy, **rest)


def is_trained(model: Any) -> bool:
    """Whether this is a rank's own model, and not one that predicts a step."""
    return type(model.b.data) is Tensor and not model.b.is_meta


def began() -> Tensor:
    return dict(CASES["unfrozen"].model().named_parameters())["b"].detach()


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "when"), thinned(UNFREEZE, of=12, long=2))
def test_a_parameter_that_a_rank_unfreezes_is_trained_and_averaged_on_all_ranks(name: str, when: str) -> None:
    task = task_of(ON_STEP[when], prepare=freeze_b)
    switch = () if name == "DDP" else (Change(STEPS - 1, "strategy", "DDP"),)
    sessions = run(chosen(name, STEPS, task=task), *switch, within=60.0)
    one, other = (session.model.b.detach() for session in sessions)
    assert torch.equal(one, other) and not torch.equal(one, began())
    assert sessions[0].record.noted("unfrozen")


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "when"), thinned(UNFREEZE_SIMULATED, of=12, long=2))
def test_a_parameter_that_a_simulated_rank_unfreezes_is_trained_on_all_ranks(name: str, when: str) -> None:
    models: dict[int, Any] = {}

    def note(model: Any, batch: Batch) -> None:
        if is_trained(model):
            models[batch.rank] = model

    e = chosen(name, STEPS, task=task_of(ON_STEP[when], note, freeze_b), pace=5.0)
    done = simulate(e, real=True, changes=[] if name == "DDP" else [Change(STEPS - 1, "strategy", "DDP")])
    assert [detail["names"] for _, _, detail in done.details("unfrozen")] == [["b"]]
    one, other = (models[rank].b.detach() for rank in range(RANKS))
    assert torch.equal(one, other) and not torch.equal(one, began())


@pytest.mark.ranks
@pytest.mark.parametrize("name", thinned(FREEZE, of=6, long=2))
def test_a_frozen_parameter_stays_unchanged_or_the_run_names_it(name: str) -> None:
    values: dict[int, list[Tensor]] = {0: [], 1: []}

    def note(model: Any, batch: Batch) -> None:
        if is_trained(model) and batch.rank in values:
            values[batch.rank].append(model.b.detach().clone())

    pace = 0.0 if SHIPPED[name].lockstep else 5.0  # so that background work keeps up with the steps
    sessions = live(chosen(name, 30, task=task_of(lambda batch: batch.index < 2, note), pace=pace))
    ended(sessions)
    said = [session.error["text"] for session in sessions if session.error]
    if SHIPPED[name].moves_frozen:
        assert any("parameter b: was frozen during the run" in text for text in said)
        return
    assert not said
    for seen in filter(None, values.values()):  # a server saw no batch
        moved = [float((after - before).abs().max()) for before, after in pairwise(seen)]
        assert max(moved[-5:]) < (0.5 if name in APPROACH else 1e-3) * max(moved)


def freezes_once() -> Task:
    """The models of the first 2 ranks freeze b and unfreeze a before batch 2, and leave both so."""

    def rule(model: Any, batch: Batch) -> Tensor:
        if batch.index == 2 and batch.rank < 2:
            model.a.requires_grad_(True)
            model.b.requires_grad_(False)
        return pull(model.a, batch) + pull(model.b, batch) + through(model, batch)

    case = Dynamic(lambda: {**two(), **layers()}, rule, SGD, lambda model: model.a.requires_grad_(False))
    return Task(model=case.model, data=many, loss=lambda model, batch: model(batch), optimizer=SGD)


def require_equal_ends(first: Path, second: Path, task: Task) -> None:
    one, other = (dict(Checkpoint.open(at).model(task).named_parameters()) for at in (first, second))
    assert step_of(first) == step_of(second)
    for name, p in one.items():
        assert torch.equal(p, other[name]), name


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["DDP", "ZeRO3"])
def test_a_resumed_run_trains_the_parameters_that_the_first_one_did(name: str, tmp_path: Path) -> None:
    e = chosen(name, 8, task=freezes_once(), save_every=4)
    _, (resumed, *_) = twice(e, tmp_path, 4)
    assert not resumed.model.b.requires_grad and resumed.model.a.requires_grad
    require_equal_ends(*(list_checkpoints(tmp_path / run / FOLDER)[-1] for run in ("whole", "rest")), e.task)


@pytest.mark.ranks
@pytest.mark.parametrize("gathered", [False, True])
def test_a_resumed_simulation_trains_the_parameters_that_the_first_one_did(gathered: bool, tmp_path: Path) -> None:
    e = chosen("DDP", 8, task=freezes_once(), save_every=4, pace=5.0)
    simulate(e, real=True, checkpoints=tmp_path / "whole")
    first = Checkpoint.open(list_checkpoints(tmp_path / "whole")[0])
    if gathered:  # as for another number of ranks; these begin their data again
        first = gather_checkpoint(first, e, RANKS, tmp_path / "gathered" / first.path.name)
        e = replace(e, task=replace(e.task, data=lambda *given: many(*given)[4:]))
    simulate(e, real=True, checkpoints=tmp_path / "rest", resume=first)
    require_equal_ends(list_checkpoints(tmp_path / "whole")[-1], list_checkpoints(tmp_path / "rest")[-1], e.task)


@pytest.mark.ranks
def test_a_rank_that_joins_does_not_train_what_the_others_have_frozen() -> None:
    with Crowd(chosen("DDP", 0, task=freezes_once(), pace=5.0)) as crowd:
        crowd.reach(4)
        crowd.resize(0, 1, 2)
        crowd.reach(crowd.first.rank.step + 2)
        assert [s.model.b.requires_grad for s in crowd.stopped()] == [False] * 3


def replaces(model: Any) -> None:
    model.a = nn.Parameter(torch.ones_like(model.a))


def grows(model: Any) -> None:
    model.more = nn.Parameter(torch.ones(3))


@pytest.mark.ranks
@pytest.mark.parametrize(("change", "said"), [(replaces, "a was replaced or removed"), (grows, "more was added")])
def test_no_checkpoint_is_made_of_a_model_whose_parameters_are_others(change: Any, said: str, tmp_path: Path) -> None:
    def rule(model: Any, batch: Batch) -> Tensor:
        if batch.index == 2:
            change(model)
        return pull(model.b, batch) + through(model, batch)

    task = replace(freezes_once(), model=Dynamic(lambda: {**two(), **layers()}, rule).model)
    e = chosen("DDP", 4, task=task, save_every=2)
    sessions = lived(e, tmp_path / "real")
    assert said in json.loads(sessions[0].record.noted("not saved")[0][3])["text"]
    done = simulate(e.set("pace", 5.0), real=True, checkpoints=tmp_path / "simulated")
    assert said in done.details("not saved")[0][2]["text"]
    for folder in (tmp_path / "real" / FOLDER, tmp_path / "simulated"):
        assert [step_of(path) for path in list_checkpoints(folder)] == [2]


@pytest.mark.ranks
def test_local_sgd_averages_an_unfrozen_parameter_as_if_trained_from_then_on() -> None:
    """Computes it by hand: each rank steps from batch 2 on, and every 2 steps all ranks take the mean."""
    plain = partial(torch.optim.SGD, lr=0.1)
    case = replace(CASES["unfrozen"], optimizer=plain)
    sessions = run(experiment(RANKS, 6, task=case.task(), strategy=LocalSGD(every=2)))
    b = [began().double() for _ in range(RANKS)]
    for index in range(2, 6):
        for rank in range(RANKS):
            aim = batches(rank, RANKS, 0)[index].x.mean(0).double()
            b[rank] = b[rank] - 0.1 * 2 * (b[rank] - aim) / aim.numel()
        if index % 2:
            b = [sum(b) / RANKS] * RANKS  # type: ignore[list-item]
    for session in sessions:
        torch.testing.assert_close(session.model.b.detach().double(), b[0], rtol=1e-5, atol=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["used by one rank at times", "unfrozen"])
def test_simulated_ranks_exchange_used_parameters_as_real_ranks_do(name: str) -> None:
    real = run(experiment(RANKS, 6, task=CASES[name].task(), strategy=DDP()))[0].record.comm()
    done = simulate(experiment(RANKS, 6, task=CASES[name].task(), strategy=DDP(), pace=5.0, fabric=SLOW), real=True)
    rows = done.timeline.spans.rows()
    rows = rows[rows.equal("lane", "comm") & (rows.rank == 0)]
    simulated = list(zip(rows.step.tolist(), map(str, rows.name), rows.nbytes.tolist(), strict=True))
    about = [row for row in simulated if row[1].split()[1] in ("used", "unfrozen")]
    assert about and about == [row for row in real if row[1].split()[1] in ("used", "unfrozen")]
    assert min(rows.t1 - rows.t0) > 0


@pytest.mark.ranks
def test_the_simulator_also_refuses_a_strategy_that_would_move_a_frozen_parameter() -> None:
    task = task_of(lambda batch: batch.index < 2)
    with pytest.raises(StrategyError, match="parameter b: was frozen during the run, and DiLoCo would still change it"):
        simulate(chosen("DiLoCo", 6, task=task, pace=5.0), real=True)
