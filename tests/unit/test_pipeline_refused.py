"""Tests unusual models, losses and data in a pipeline: supported ones, and those refused with a reason."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.piped import ROWS, WIDTH, assembled, batches, deep, loss, piped, seen
from tests.ranks import ended, live, run, toy
from workbench import simulate
from workbench.compressors import PowerSGD
from workbench.experiment import Experiment
from workbench.host.passes.stage_module import cut_batch
from workbench.host.placement.stage_cuts import replace_forward
from workbench.host.reconfigure import validation
from workbench.optimizers import SGD
from workbench.partitions import Pipeline, Whole
from workbench.partitions.schedules import Interleaved, OneFOneB, Schedule
from workbench.settings import Change, KnobError
from workbench.strategies import AsyncServer, LocalSGD, SelSync, ZeRO3
from workbench.tasks import Task, TaskError

pytestmark = pytest.mark.ranks

OWN = toy(model=deep, data=batches)
REFUSED = [
    ({"partition": Pipeline(stages=3)}, "4 ranks are not a multiple of that; take a number that divides 4"),
    ({"partition": Pipeline(micros=3), "batch": 8}, "take micros=1, 2, 4 or 8, or another batch"),
    ({"partition": Pipeline(), "strategy": ZeRO3()}, "ranks shard parameters that"),
    ({"partition": Pipeline(), "strategy": AsyncServer()}, "ranks also exchange in the background"),
    ({"partition": Pipeline(activations=PowerSGD())}, "activations=PowerSGD"),
    ({"partition": Pipeline(micros=6, schedule=Interleaved(), stages=4)}, "a multiple of 4, such as micros=8"),
    ({"partition": Pipeline(activations=PowerSGD()), "task": OWN}, "activations=PowerSGD"),
    ({"partition": Pipeline(micros=3, schedule=Interleaved()), "task": OWN}, "a multiple of 2, such as micros=4"),
    (
        {"partition": Pipeline(), "strategy": SelSync()},
        "a rank needs all gradients or examples of its replica",
    ),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[words[:20] for _, words in REFUSED])
def test_incompatible_settings_raise_knob_error(given: dict[str, Any], words: str) -> None:
    with pytest.raises(KnobError, match=re.escape(words)):
        replace(Experiment(), **given).checked()


class Tied(nn.Module):
    """A model whose last layer is also its first."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.into, self.between, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.out.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.out(torch.relu(self.between(self.into(x)))))


def inside_out(model: Any) -> list[nn.Module]:
    return [model.into, model.between, nn.Sequential(nn.ReLU(), model.out), model.head]


def twice(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(pair[0]) + model(-pair[0]), pair[1])


UNCUT = [
    ({"model": Tied}, "give the task `parts`"),
    ({"model": Tied, "parts": inside_out}, "parameter into.weight is tied: stages 0 and 1"),
    ({"model": Tied, "parts": lambda m: [m.into, m.between]}, "parameter out.bias is in no part"),
    ({"loss": twice}, "the loss calls the model 2 times"),
    ({"parts": lambda m: [*list(m)[-2::-1], m[-1]]}, "one after the other, give the loss"),
    ({"model": lambda: nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 4))}, "would have no parameters to train"),
    ({"model": lambda: nn.Sequential(nn.Linear(WIDTH, 4))}, "has one part, too few for 2 stages; take Whole()"),
]


@pytest.mark.parametrize(("given", "words"), UNCUT, ids=[words[:24] for _, words in UNCUT])
def test_a_model_that_cannot_be_split_is_refused_and_the_run_goes_on(given: dict[str, Any], words: str) -> None:
    task = Task(**{"model": deep, "data": batches, "loss": loss, "optimizer": _sgd, **given})
    sessions = run(piped(2, 6, task=task), Change(3, "partition", Pipeline()))
    (refused,) = sessions[0].record.noted("refused")
    assert words in json.loads(refused[3])["reason"]
    assert len(seen(sessions[0], "loss")) == 6
    (begun, _) = live(piped(2, 6, task=task, partition=Pipeline()))
    assert begun.join(60) and begun.error is not None and words in begun.error["text"]


def test_more_pieces_than_parts_are_refused_with_the_allowed_number() -> None:
    way = Pipeline(stages=2, micros=2, schedule=Interleaved(chunks=4))
    sessions = run(piped(2, 4), Change(2, "partition", way))
    (refused,) = sessions[0].record.noted("refused")
    words = "the model has 7 parts, too few for 2 stages of 4 pieces; take at most 7 pieces in all, or a deeper model"
    assert words in json.loads(refused[3])["reason"]


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.01)


class Chosen(torch.utils.data.Dataset[Any]):
    """Rows whose targets follow from the inputs, if a rank reads both from the same row."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((WIDTH,), index / 64.0 - 0.5)
        return x, x[:4]


def shuffled(rank: int, ranks: int, seed: int) -> Any:
    return torch.utils.data.DataLoader(Chosen(), batch_size=ROWS, shuffle=True)


@pytest.mark.parametrize("start", [True, False])
def test_stages_read_the_same_batches_even_if_torch_shuffles_the_data(start: bool) -> None:
    """In the simulator ranks have separate random numbers, as in processes."""
    task = toy(model=deep, data=shuffled, loss=loss, evaluate=None)
    e = piped(2, 60, pace=2.0, task=task, partition=Pipeline() if start else Whole())
    rows = simulate(e, changes=() if start else [Change(1, "partition", Pipeline())], real=True).timeline.samples.rows()
    losses = rows.value[rows.equal("name", "loss") & (rows.rank == 1)]
    assert losses[-5:].mean() < 0.2 * losses[:3].mean()


def test_stages_that_read_different_batches_raise_an_error() -> None:
    def own(rank: int, ranks: int, seed: int) -> list[Any]:
        drawn = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(threading.get_ident() % 2**31))
        return [(drawn, drawn[:, :4])]

    sessions = live(piped(2, 4, partition=Pipeline(), task=toy(model=deep, data=own, loss=loss, evaluate=None)))
    ended(sessions)
    assert any("read different batches" in (s.error or {}).get("text", "") for s in sessions)


def inplace() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.ReLU(inplace=True), nn.Linear(40, 4))


def frozen() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 4))
    model[0].requires_grad_(False)
    return model


class Twins(nn.Module):
    """A model with tied first and third layers, which are two pieces on one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 4)])
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def untwined(model: Any) -> list[nn.Module]:
    return [nn.Sequential(layer, nn.Tanh()) for layer in model.layers]


def seeded(make: Any) -> Any:
    def model() -> nn.Module:
        made, rng = make(), torch.Generator().manual_seed(5)
        for p in made.parameters():
            p.data = 0.3 * torch.randn(p.shape, generator=rng)
        return made

    return model


CUT = [({"model": seeded(inplace)}, OneFOneB()), ({"model": seeded(frozen)}, Interleaved()),
       ({"model": seeded(Twins), "parts": untwined}, Interleaved())]  # fmt: skip


@pytest.mark.parametrize(("given", "schedule"), CUT, ids=["in place", "frozen piece", "tied pieces"])
def test_unusual_models_train_as_in_one_process(given: dict[str, Any], schedule: Schedule) -> None:
    task = Task(**{"data": batches, "loss": loss, "optimizer": _sgd, **given})
    e = piped(2, 6, task=task, partition=Pipeline(schedule=schedule), lr=0.05, optimizer=SGD(momentum=0.0))
    sessions, model = run(e), given["model"]()
    params = [p for p in model.parameters() if p.requires_grad]
    for step in range(6):
        model.zero_grad()
        for part in cut_batch(batches(0, 1, 0)[step], 4):
            (loss(model, part) / 4).backward()
        for p in params:
            p.data -= 0.05 * p.grad
    found = assembled(sessions, 2)
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(found[name], p.detach(), rtol=1e-5, atol=1e-6)
    simulated = simulate(e.set("pace", 2.0), real=True).timeline.samples.rows()
    mine = simulated.value[simulated.equal("name", "loss") & (simulated.rank == 0)].tolist()
    assert mine == seen(sessions[0], "loss")


def tuples(model: Any) -> list[nn.Module]:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = model[0]

        def forward(self, x: torch.Tensor) -> Any:
            return self.own(x), x

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = model[1]

        def forward(self, pair: Any) -> torch.Tensor:
            return self.own(pair[0])

    return [Pair(), One(), *list(model)[2:]]


def summed(model: nn.Module, pair: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(pair[0]), pair[1], reduction="sum")


def noisy(model: nn.Module, pair: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(pair[0]), pair[1]) * (1.0 + torch.rand(()))


def turned(model: Any) -> list[nn.Module]:
    return [model[1], model[0]]


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Linear(9, 4))


WORSE = [
    ({"parts": tuples, "model": lambda: nn.Sequential(nn.Linear(WIDTH, 99), nn.Linear(99, 4))}, "return one Tensor"),
    ({"parts": turned, "model": narrow}, "in a trial on one batch, a stage fails"),
    ({"parts": lambda m: m}, "must return a list of torch.nn.Modules"),
    ({"loss": summed}, "reduction='mean'"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "words"), WORSE, ids=[words[:24] for _, words in WORSE])
def test_a_model_that_would_fail_in_a_step_is_refused_before(given: dict[str, Any], words: str) -> None:
    task = Task(**{"model": deep, "data": batches, "loss": loss, "optimizer": _sgd, **given})
    sessions = run(piped(2, 6, task=task), Change(3, "partition", Pipeline()))
    (refused,) = sessions[0].record.noted("refused")
    assert words in json.loads(refused[3])["reason"]
    with pytest.raises(KnobError, match=re.escape(words)):
        simulate(piped(2, 6, task=task, pace=2.0, partition=Pipeline()), real=True)


def test_a_noisy_loss_is_not_mistaken_for_a_wrong_split() -> None:
    task = Task(model=deep, data=batches, loss=noisy, optimizer=_sgd)
    e = piped(4, 6, task=task, pace=2.0)  # in the simulator: threads share torch's random numbers, processes do not
    assert not list(simulate(e, changes=[Change(3, "partition", Pipeline())], real=True).details("refused"))


def test_all_ranks_refuse_if_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    able = validation.require_trainable

    def picky(of: Any, wanted: Experiment) -> None:
        if of.rank.id == 2 and wanted.partition.size > 1:
            raise KnobError("not here")
        able(of, wanted)

    monkeypatch.setattr(validation, "require_trainable", picky)
    sessions = run(piped(4, 8, strategy=LocalSGD(every=2)), Change(3, "partition", Pipeline()))
    assert [json.loads(m[3])["reason"] for s in sessions for m in s.record.noted("refused")] == ["not here"]
    assert not sessions[0].record.noted("change") and len(seen(sessions[0], "loss")) == 8


def test_instead_restores_a_models_own_forward() -> None:
    model, own = deep(), lambda x: x
    model.forward = own  # type: ignore[method-assign]
    with replace_forward(model, lambda x: 2 * x):
        assert model(1) == 2
    assert model.forward is own and "forward" not in deep().__dict__


def test_a_batch_that_cannot_be_split_is_refused_and_the_run_goes_on() -> None:
    """The task makes its own batches, so only they show how many examples they have."""
    sessions = run(piped(2, 6, partition=Pipeline()), Change(3, "micros", 3))
    (refused,) = sessions[0].record.noted("refused")
    assert "have 8 rows and cannot be cut into 3 equal parts" in json.loads(refused[3])["reason"]
    assert len(seen(sessions[0], "loss")) == 6


def test_reading_a_parameter_of_another_stage_raises_an_error() -> None:
    def nosy(model: nn.Module) -> float:
        return float(model[-1].weight.sum())  # type: ignore[index]

    sessions = live(piped(2, 4, partition=Pipeline(), task=toy(model=deep, data=batches, loss=loss, evaluate=nosy)))
    ended(sessions)
    assert any("it is on another stage" in (s.error or {}).get("text", "") for s in sessions)


class Wrapping(nn.Module):
    """Returns its input in something that is no Tensor."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(x)


@pytest.mark.parametrize(("wrap", "kind"), [(lambda x: (x, x), "tuple"), (lambda x: {"all": [x]}, "dict")])
def test_an_evaluation_of_a_model_that_returns_no_named_tensors_is_refused(wrap: Any, kind: str) -> None:
    def first(made: Any) -> torch.Tensor:
        return made["all"][0] if isinstance(made, dict) else made[0]

    task = Task(model=lambda: nn.Sequential(*deep(), Wrapping(wrap)), data=batches, optimizer=_sgd,
                loss=lambda model, pair: nn.functional.mse_loss(first(model(pair[0])), pair[1]),
                evaluate=lambda model: float(first(model(batches(9, 1, 0)[0][0])).sum()))  # fmt: skip
    with pytest.raises(TaskError, match=f"and the model returns a {kind}"):
        simulate(piped(2, 2, task=task, pace=2.0, partition=Pipeline(), eval_every=1), real=True)
