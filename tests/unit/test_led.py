"""Tests training loops that lead ranks: numbers, live changes, pauses and errors."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import ended, experiment, live, run, shipped
from tests.scripts import SCRIPTS
from tests.waiting import until
from workbench import simulate, steps
from workbench.engine.script.loop import divide_gradients
from workbench.experiment import Experiment, user_input
from workbench.partitions import Pipeline
from workbench.record.checkpoints import FOLDER, Checkpoint
from workbench.settings import Change, KnobError
from workbench.sim.run.resuming import plan_resume, saved_state
from workbench.strategies import BMUF, DDP, EASGD, DiLoCo, LocalSGD, PostLocalSGD, SlowMo, Strategy, TorchDDP, ZeRO3
from workbench.tasks import Loop, Script, Task

SIX = ("torch's DDP tutorial", "gradient accumulation", "mixed precision", "a scheduler per step", "two optimizers",
       "a custom sampler")  # fmt: skip


def of(train: Callable[[], Any], ranks: int = 1, **rest: Any) -> Experiment:
    return Experiment(task=Loop(run=train), ranks=ranks, eval_every=0, bucket_mb=0.01, **rest)


def looped(name: str) -> Callable[[], None]:
    """Returns the script with a change in one line: the iterable of its loop."""
    script, times = SCRIPTS[name], ", 4" if name == "gradient accumulation" else ""
    loop = script.loop.replace("enumerate(loader)", f"enumerate(steps(loader, model{times}))")
    loop = loop.replace("in loader:", f"in steps(loader, model{times}):")
    assert loop != script.loop

    def train() -> None:
        names = {**script.make(8), "steps": steps}
        exec(f"losses = []\ntorch.manual_seed(0)\nrandom.seed(0)\n{loop}", names)

    return train


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*SIX, "a stream", "batches that a sampler makes"])
def test_one_rank_has_bit_identical_losses_to_the_plain_loop(name: str) -> None:
    (session,) = run(of(looped(name)))
    assert session.record.losses() == SCRIPTS[name].plain(8)["losses"]


def made() -> tuple[nn.Module, list[torch.Tensor]]:
    """Returns a model and 12 batches of 8, without chance."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) / 4
    return model, list(torch.randn(12 * 8, 6, generator=generator).split(8))


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def off(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch[:, :3].sin()).square().mean()


@pytest.mark.ranks
@pytest.mark.parametrize("joint", [True, False])
def test_a_loop_on_two_ranks_refuses_an_optimizer_of_parameters_outside_of_its_model(joint: bool) -> None:
    def train() -> None:
        model, batches = made()
        head = nn.Linear(3, 1)
        groups = [[*model.parameters(), *head.parameters()]] if joint else [model.parameters(), head.parameters()]
        optimizers = [torch.optim.SGD(group, lr=0.05) for group in groups]
        for x in steps(batches, model):
            head(model(x)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    assert run(of(train, steps=3))[0].rank.step == 3
    with pytest.raises(AssertionError, match="an optimizer steps parameters that the model does not have"):
        run(of(train, ranks=2, steps=3))


def test_gradients_are_divided_inside_only_also_after_a_backward_that_fails() -> None:
    p = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="does not require grad"), divide_gradients([p], 0.5):
        (3 * p).sum().backward()
        torch.ones(1).backward()
    assert p.grad is not None and p.grad.item() == 6
    (3 * p).sum().backward()
    assert p.grad.item() == 9


def on_two() -> tuple[Callable[[], None], list[nn.Module]]:
    """Returns a loop over such batches in two halves each, and the list of the ranks' models."""
    models: list[nn.Module] = []

    def train() -> None:
        model, batches = made()
        optimizer = stepped(model)
        models.append(model)
        for half in steps([part for batch in batches for part in batch.split(4)], model):
            optimizer.zero_grad()
            off(model, half).backward()
            optimizer.step()

    return train, models


def reference() -> nn.Module:
    model, batches = made()
    optimizer = stepped(model)
    for batch in batches:
        optimizer.zero_grad()
        off(model, batch).backward()
        optimizer.step()
    return model


def as_a_task() -> Task:
    """Returns the same as functions for the workbench's own loop."""
    return Task(model=lambda: made()[0], loss=off, optimizer=lambda params: torch.optim.SGD(params, 0.05, 0.9),
                data=lambda rank, ranks, seed: [batch.split(4)[rank] for batch in made()[1]])  # fmt: skip


def far(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)


@pytest.mark.ranks
def test_two_ranks_make_the_loops_steps_through_live_changes() -> None:
    train, models = on_two()
    turns = [Change(3, "strategy", DDP()), Change(5, "bucket_mb", 0.02), Change(7, "strategy", LocalSGD(every=1)),
             Change(9, "strategy", TorchDDP())]  # fmt: skip
    sessions = run(of(train, 2, strategy=TorchDDP()), *turns)
    assert [far(m, reference()) < 1e-6 for m in models] == [True, True]
    assert [len(s.record.losses()) for s in sessions] == [12, 12]
    rows = [[r for r in sessions[0].record if r[0] == step] for step in (1, 4)]
    for found, name in zip(rows, ("TorchDDP", "DDP"), strict=True):
        assert {r[2] for r in found if r[1] in ("compute", "step")} == {"forward", "backward", "update", name}
        assert sum(r[6] for r in found if r[1] == "comm") == sum(p.numel() * 4 for p in models[0].parameters())


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [LocalSGD(every=4), PostLocalSGD(every=4, warmup=3), DiLoCo(every=4),
                                      SlowMo(every=4), BMUF(every=4), EASGD(every=4)], ids=str)  # fmt: skip
def test_strategies_with_rounds_train_a_loop_like_a_task(strategy: Strategy) -> None:
    train, models = on_two()
    sessions, left = run(of(train, 2, strategy=strategy), Change(10, "strategy", "DDP")), Change(10, "strategy", "DDP")
    assert sessions[0].record.noted("refused") == []
    ours = run(Experiment(task=as_a_task(), ranks=2, steps=12, eval_every=0, bucket_mb=0.01, strategy=strategy), left)
    assert far(*models) == 0.0 and far(models[0], ours[0].model) < 1e-6


def again() -> nn.Module:
    """Returns the model with recomputed first layers, by a backward inside the backward."""

    class Again(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=True)

    model = made()[0]
    return nn.Sequential(Again(*list(model)[:2]), list(model)[2])


def in_odd_ways(loader: Any, model: nn.Module) -> list[torch.Tensor]:
    """Runs backwards of two losses, of a vector and through recomputation, with a step after two of them."""
    optimizer = stepped(model)
    for number, batch in enumerate(loader):
        body = model(batch.requires_grad_())
        if number % 3 == 0:
            torch.autograd.backward([body.mean(), body.square().mean()], [torch.tensor(0.5), torch.tensor(2.0)])
        elif number % 3 == 1:
            body.backward(torch.full_like(body, 0.01))
        else:
            body.square().mean().backward(retain_graph=True)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("every", [1, 2])
def test_unusual_backwards_give_the_same_result_as_without_ranks(every: int) -> None:
    models, found, batches = [again(), again()], [], made()[1]

    def train() -> None:
        found.append(in_odd_ways(steps(batches, models[0], every), models[0]))

    run(of(train, strategy=LocalSGD()))
    assert "forward" not in vars(models[0])
    torch.testing.assert_close(found[0], in_odd_ways(batches, models[1]), rtol=1e-5, atol=1e-6)


@pytest.mark.ranks
def test_a_copy_of_a_loops_model_computes_with_parameters_of_its_own() -> None:
    found: list[torch.Tensor] = []

    def train() -> None:
        model, batches = made()
        optimizer = stepped(model)
        for batch in steps(batches[:2], model):
            file = BytesIO()
            torch.save(model, file)
            file.seek(0)
            for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
                with torch.no_grad():
                    for p in other.parameters():
                        p.zero_()
                    found.append(other(batch))
            off(model, batch).backward()
            optimizer.step()

    run(of(train))
    assert len(found) == 4 and not any(x.any() for x in found)


class Two(nn.Module):
    """Two layers; forward uses the first, and the second if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([made()[0], made()[0]])

    def forward(self, x: torch.Tensor, second: bool = False) -> torch.Tensor:
        return sum(layer(x) for layer in list(self.layers)[: 1 + second])


@pytest.mark.ranks
def test_torchs_own_ddp_finds_unused_parameters_in_a_loop_without_a_wrapper() -> None:
    models: list[nn.Module] = []

    def train() -> None:
        model, batches = Two(), made()[1]
        optimizer = stepped(model)
        models.append(model)
        for number, batch in enumerate(steps(batches, model)):
            optimizer.zero_grad()
            model(batch, number > 2).square().mean().backward()
            optimizer.step()

    run(of(train, 2, strategy=TorchDDP(find_unused_parameters=True)))
    assert far(*models) == 0.0 and far(models[0].layers[1], made()[0]) > 0.0


def growing(batches: Any, model: Two) -> Two:
    """Trains a model that gets its second layer before the third batch."""
    optimizer = stepped(model)
    for number, batch in enumerate(batches):
        if number == 2:
            model.layers.append(made()[0])
            optimizer.add_param_group({"params": model.layers[1].parameters()})
        optimizer.zero_grad()
        model(batch, number >= 2).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), TorchDDP(), LocalSGD(every=1)], ids=str)
def test_a_layer_that_a_loop_adds_to_its_model_is_trained_on_all_ranks(strategy: Strategy) -> None:
    models, batches = [Two() for _ in range(3)], made()[1]
    for model in models:
        del model.layers[1]
    left = models[:2]

    def train() -> None:
        model = left.pop()
        growing(steps([part for batch in batches for part in batch.split(4)], model), model)

    run(of(train, 2, strategy=strategy))
    assert far(*models[:2]) == 0.0 and far(models[0], growing(batches, models[2])) < 1e-6


@pytest.mark.ranks
def test_a_compressor_is_turned_on_under_a_loop() -> None:
    train, models = on_two()
    sessions = run(of(train, 2), Change(6, "compressor", "Cast"))
    sent = [sum(r[6] for r in sessions[0].record if r[0] == step and r[1] == "comm") for step in (3, 9)]
    assert sent[1] == sent[0] / 2
    assert far(models[0], reference()) < 1e-2 and far(*models) == 0.0


@pytest.mark.ranks
def test_a_loop_pauses_between_two_steps_goes_on_and_stops() -> None:
    did: list[Any] = []

    def train() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for x in steps([torch.ones(2, 4)] * 10**6, model):
                model(x).mean().backward()
                optimizer.step()
                did.append(0)
        finally:
            did.append("left")

    (session,) = live(of(train))
    assert until(lambda: len(did) > 3)
    session.request({"kind": "pause", "id": "p"})
    assert until(lambda: session.phase == "paused")
    before = session.rank.step
    session.request({"kind": "step", "n": 2, "id": "s"})
    assert until(lambda: session.phase == "paused" and session.rank.step == before + 2)
    assert len(did) == before + 1  # it waits after the last step's optimizer step
    session.request({"kind": "stop", "id": "e"})
    session.hurry()
    ended([session])
    assert did[-1] == "left" and session.phase == "stopped" and session.error is None


def failing(kind: str) -> Callable[[], None]:
    def train() -> None:
        model, other = nn.Linear(4, 1), nn.Linear(4, 1)
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1) if kind != "bare" else None
        if kind == "none":
            return
        for number, x in enumerate(steps([torch.ones(2, 4)] * 5, model)):
            if number == 2 and kind == "raises":
                raise ValueError("a bad example")
            if number == 2 and kind == "exits":
                raise SystemExit(3)
            loss = model(x).mean()
            if number == 2 and kind == "two":
                for y in steps([x], other):
                    loss = loss + other(y).mean()
            loss.backward()
            assert optimizer is not None
            optimizer.step()

    return train


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "said"), [
    ("raises", "a bad example"), ("exits", "ended with exit code 3"), ("none", "train: ended without a step; it must"),
    ("bare", "train: no optimizer has a parameter of its model"), ("two", "train: trains two models"),
])  # fmt: skip
def test_an_error_in_a_loop_ends_the_run_with_a_reason(kind: str, said: str) -> None:
    (session,) = live(of(failing(kind)))
    ended([session])
    assert session.error is not None and said in session.error["text"]


REFUSED = {
    "strategy": ("ZeRO3", "take .*BMUF,.* DDP,.* DiLoCo, EASGD, Hier.*, LocalSGD,.* PostLocalSGD,.* SlowMo"),
    "lr": (0.1, "the loop of a Script sets its own rates"),
    "batch": (8, "the script makes its own batches"),
    "on_nan": ("roll back", "the loop of a Script cannot go back"),
    "on_death": ("go on", "cannot lose or replace ranks"),
    "save_every": (10, "save the model in the loop"),
    "optimizer": ("AdamW", "uses its own optimizer"),
    "strategy.accumulate": (4, "decides itself how many batches it sums"),
}


@pytest.mark.parametrize("path", REFUSED)
def test_settings_that_a_loop_cannot_follow_are_refused(path: str) -> None:
    value, said = REFUSED[path]
    e = Experiment(task=Script(file="train.py"), strategy=DDP(), ranks=2).checked()
    with pytest.raises(KnobError, match=said):
        e.set(path, value)


def test_a_record_restores_a_script_but_only_names_a_function() -> None:
    e = Experiment(task=Script(file="train.py", args=("--lr", "0.1")), strategy=TorchDDP(), ranks=2)
    assert Experiment.read(json.loads(json.dumps(e.plain()))) == e
    read = Experiment.read(json.loads(json.dumps(Experiment(task=Loop(run=reference)).plain())))
    with pytest.raises(KnobError, match="a record keeps only the name of its function"):
        read.checked()


def test_a_loop_runs_on_whole_real_ranks_only() -> None:
    with pytest.raises(KnobError, match="computes a whole model"):
        Experiment(task=Loop(run=print), partition=Pipeline(stages=2), ranks=2, batch=0).checked()
    with pytest.raises(KnobError, match="runs only on ranks"):
        simulate(Experiment(task=Loop(run=print), ranks=2, steps=3, pace=5.0))
    with pytest.raises(KnobError, match="there is no such file"):
        user_input.script("no/such.py")
    for wrong in ({"file": ""}, {"file": "a.py", "args": "--lr 1"}, {"file": "a.py", "args": (1,)}):
        with pytest.raises(KnobError, match="must be"):
            Script(**wrong)  # type: ignore[arg-type]


FOLLOWING = {name: cls for name, cls in sorted(shipped(Strategy).items()) if cls.follows}


def test_one_strategy_that_follows_a_loop_lets_torch_make_its_passes() -> None:
    assert {"DDP", "LocalSGD", "DiLoCo"} < FOLLOWING.keys()
    assert [name for name, cls in FOLLOWING.items() if cls.opaque] == ["TorchDDP"]  # test_scripts_live.py runs it


@pytest.mark.parametrize("name", [name for name, cls in FOLLOWING.items() if not cls.opaque])
def test_a_following_strategy_makes_forward_backward_and_update_in_order(name: str) -> None:
    cls = FOLLOWING[name]
    asked: list[str] = []
    really = cls.step

    async def step(self: Any, rank: Any, state: Any) -> Any:
        return await Heard(really(self, rank, state), asked if rank.id == 0 else [])

    with patch.object(cls, "step", step):
        strategy = cls(**{"fragments": 2} if name == "StreamingDiLoCo" else {})
        simulate(experiment(4, 9, strategy=strategy, pace=4.0), real=True)
    assert asked == ["forward", "backward", "update of all"] * 9


class Heard:
    """A coroutine that lists the passes that it requests."""

    def __init__(self, coro: Any, asked: list[str]) -> None:
        self.coro, self.asked = coro, asked

    def __await__(self) -> Any:
        its, answer = self.coro.__await__(), SimpleNamespace(value=None, error=None)
        while True:
            try:
                op = its.throw(answer.error) if answer.error is not None else its.send(answer.value)
            except StopIteration as end:
                return end.value
            if op.verb.partition("_")[0] in ("forward", "backward"):
                self.asked.append(op.verb.partition("_")[0])
            elif op.verb in ("batch", "grads", "slots", "hold", "curve", "update"):
                whole = op.verb == "update" and op.args[:2] == (None, None)
                self.asked.append("update of all" if whole else op.verb)
            answer.value = answer.error = None
            try:
                answer.value = yield op
            except (StopAsyncIteration, RuntimeError) as error:
                answer.error = error


def test_strategies_that_cannot_follow_a_loop_declare_it() -> None:
    assert not ZeRO3.follows and not shipped(Strategy)["SelSync"].follows


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=64)], ids=lambda s: type(s).__name__)
def test_a_checkpoint_of_a_loop_contains_the_model_alone(strategy: Strategy, tmp_path: Path) -> None:
    """If replicas have drifted apart, the saved model is their mean."""
    train, models = on_two()
    sessions = live(of(train, ranks=2, strategy=strategy), run_dir=tmp_path)
    assert all(s.join(60) for s in sessions) and not any(s.error for s in sessions)
    first, second = (dict(model.state_dict()) for model in models)
    assert all(torch.equal(x, second[name]) for name, x in first.items()) == (strategy == DDP())
    kept = Checkpoint.open(tmp_path / FOLDER)
    found = saved_state(kept)
    torch.testing.assert_close(found, {name: (x + second[name]) / 2 for name, x in first.items()})
    if strategy == DDP():
        torch.testing.assert_close(found, first, rtol=0, atol=0)
    with pytest.raises(KnobError, match="holds only the model of a custom loop"):
        plan_resume(kept, None)
