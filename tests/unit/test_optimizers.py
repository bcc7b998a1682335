"""Tests the optimizer family: LARS and LAMB against timm's, and live changes of the optimizer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.ranks import Net, batch, experiment, mse, net, run, shipped, toy, weights
from tests.sim.virtual import paced, samples
from widgets.controls.rows import ControlState, make_rows
from widgets.controls.stops import list_stops
from widgets.views.log import Log
from workbench import simulate
from workbench.analysis.export.export import as_python
from workbench.cli import setting
from workbench.experiment import Experiment
from workbench.host.placement.canonical_state import hash_model_state
from workbench.optimizers import LAMB, LARS, SGD, Adam, AdamW, Optimizer, TaskOwn, carry
from workbench.run import Run
from workbench.settings import Change, KnobError, to_plain, walk
from workbench.strategies import DDP, AsyncServer, Gossip, LocalSGD, ShadowMA, Strategy, SyncServer, TorchDDP

pytestmark = pytest.mark.ranks

ALL = shipped(Optimizer)
MOMENTS = ["exp_avg", "exp_avg_sq", "step"]


@pytest.mark.parametrize("name", ALL)
def test_only_the_tasks_own_optimizer_is_made_by_the_task(name: str) -> None:
    asked = []

    def own(lr: float) -> torch.optim.Optimizer:
        asked.append(lr)
        return torch.optim.SGD(params, lr or 1.0)

    params = [nn.Parameter(torch.zeros(2))]
    ALL[name]().make(params, 0.5, own)
    assert bool(asked) == ALL[name].of_task


def no_own(lr: float) -> Any:
    raise AssertionError("the task's own optimizer is not asked where a rate is given")


def made(settings: Optimizer, model: nn.Module, lr: float) -> Any:
    return settings.make(list(model.parameters()), lr, no_own)


# LARS and LAMB step by step.


@pytest.fixture
def timm() -> Iterator[Callable[[str], Any]]:
    """Loads a file of timm.optim by name. The files need torch only; timm as a whole imports its models and
    torchvision.
    """
    found = find_spec("timm")
    assert found is not None and found.submodule_search_locations, "pip install --no-deps timm"
    before = set(sys.modules)
    home = Path(found.submodule_search_locations[0])
    for name, path in (("timm", home), ("timm.optim", home / "optim")):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    yield lambda name: import_module(f"timm.optim.{name}")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "timm":
            del sys.modules[name]


class Normed(Net):
    """A net with weights, biases and a normalisation, which layer-wise rules treat differently."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


def normed() -> nn.Module:
    """Returns a model with one weight that begins as zero, and so has length 0."""
    model = net(Normed)
    with torch.no_grad():
        model.norm.weight.fill_(1.0)
        model.b.weight.zero_()
    return model


def timms(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns timm's parameter groups: weights are adapted and decay, biases and normalisations are not."""
    every = list(model.parameters())
    return [
        {"params": [p for p in every if p.ndim > 1], "weight_decay": weight_decay, "always_adapt": True},
        {"params": [p for p in every if p.ndim <= 1], "weight_decay": 0.0, "always_adapt": False},
    ]


def assert_same_steps(ours: Any, theirs: Any, mine: nn.Module, its: nn.Module) -> None:
    """Checks that both optimizers agree after each of 20 steps with the gradients of `mine`; the rate halves midway.

    With separate gradients the last bits would differ by processor, and LAMB amplifies small differences.
    """
    for step in range(20):
        for optimizer in (ours, theirs):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5 if step == 12 else 1.0
        ours.zero_grad()
        mse(mine, batch(0, step, 0)).backward()
        for p, q in zip(mine.parameters(), its.parameters(), strict=True):
            assert p.grad is not None
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        for p, q in zip(mine.parameters(), its.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("momentum", "nesterov", "weight_decay"),
    [(0.9, False, 1e-2), (0.9, True, 1e-2), (0.9, False, 0.0), (0.0, False, 1e-2)],
)
def test_lars_makes_timms_steps(timm: Any, momentum: float, nesterov: bool, weight_decay: float) -> None:
    mine, its = normed(), normed()
    ours = made(LARS(momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, trust=0.02), mine, 3.0)
    rest = {"momentum": momentum, "nesterov": nesterov, "trust_coeff": 0.02, "eps": 1e-8, "foreach": False}
    assert_same_steps(ours, timm("lars").Lars(timms(its, weight_decay), lr=3.0, **rest), mine, its)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9)])
def test_lamb_makes_timms_steps(timm: Any, weight_decay: float, betas: tuple[float, float]) -> None:
    mine, its = normed(), normed()
    ours = made(LAMB(beta1=betas[0], beta2=betas[1], weight_decay=weight_decay), mine, 0.02)
    rest = {"betas": betas, "max_grad_norm": None, "foreach": False}
    assert_same_steps(ours, timm("lamb").Lamb(timms(its, weight_decay), lr=0.02, **rest), mine, its)


@pytest.mark.parametrize(("settings", "lr"), [(LARS(weight_decay=0.0, momentum=0.0, trust=0.01), 2.0), (LAMB(), 0.01)])
def test_layers_move_in_proportion_to_their_length_for_any_gradient(settings: Optimizer, lr: float) -> None:
    moved = []
    for scale in (1.0, 1000.0):
        model = net()
        optimizer = made(settings, model, lr)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        (mse(model, batch(0, 0, 0)) * scale).backward()
        optimizer.step()
        moved.append({n: (p.detach() - before[n]).norm() / before[n].norm() for n, p in model.named_parameters()})
    share = lr * (settings.trust if isinstance(settings, LARS) else 1.0)
    for name in ("a.weight", "b.weight", "c.weight"):
        assert [float(m[name]) for m in moved] == pytest.approx([share] * 2, rel=2e-3)


def test_biases_take_the_plain_optimizers_steps() -> None:
    for layered, plain in ((LARS(weight_decay=0.5), SGD()), (LAMB(weight_decay=0.5, eps=1e-8), Adam())):
        one, other = net(), net()
        for model, settings in ((one, layered), (other, plain)):
            optimizer = made(settings, model, 0.01)
            mse(model, batch(0, 0, 0)).backward()
            optimizer.step()
        torch.testing.assert_close(one.a.bias, other.a.bias, rtol=1e-6, atol=1e-8)
        assert not torch.allclose(one.a.weight, other.a.weight, rtol=1e-3)


# The family.


def test_each_optimizer_is_a_choice_with_knobs_and_docs() -> None:
    assert set(ALL) == {"Adam", "AdamW", "LAMB", "LARS", "SGD", "TaskOwn"}
    for name, cls in ALL.items():
        e = Experiment().set("optimizer", name)
        assert type(e.optimizer) is cls and Experiment.read(e.plain()) == e
        assert "When to use it" in (cls.__doc__ or "")
    assert Experiment().optimizer == TaskOwn()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("SDG", "did you mean SGD"), ({"SGD": {"momentum": 1.5}}, r"momentum=1.5: must be a number in \[0, 0.999\]"),
        ({"SGD": {"momentum": 0, "nesterov": True}}, "set momentum above 0"),
        ({"LARS": {"momentum": 0, "nesterov": True}}, "set momentum above 0"),
    ],
)  # fmt: skip
def test_invalid_optimizer_settings_raise_knob_error(settings: Any, words: str) -> None:
    with pytest.raises(KnobError, match=words):
        Experiment().set("optimizer", settings)


def test_without_a_learning_rate_the_tasks_own_applies() -> None:
    (session,) = run(experiment(1, 1, optimizer=SGD()))
    assert session.rank.lr == 0.02 == session.optimizer.param_groups[0]["lr"]


def test_a_run_with_an_optimizer_is_code_that_can_be_run_again() -> None:
    e = Experiment(steps=3, optimizer=LAMB(weight_decay=0.1), lr_warmup=5, clip=1.0)
    code = as_python(Run(e))
    assert "from workbench.optimizers import LAMB" in code
    names: dict[str, Any] = {}
    exec(code.split("lab = ")[0], names)
    assert names["experiment"] == e


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=3)], ids=str)
def test_both_hosts_train_alike_with_each(name: str, strategy: Strategy) -> None:
    e = experiment(3, 8, strategy=strategy, optimizer=ALL[name](), lr=0.01)
    sessions = run(e)
    simulated = simulate(e.set("pace", 5.0), real=True)
    for s in sessions:
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-5, atol=1e-6)


def test_under_ddp_a_chosen_optimizer_is_torchs_on_the_joined_batch() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.01)
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(2):
            (mse(model, batch(rank, step, 0)) / 2).backward()
        optimizer.step()
    whole = torch.cat([p.detach().reshape(-1).double() for _, p in sorted(model.named_parameters())])
    for s in run(experiment(2, 6, optimizer=AdamW(), lr=0.01)):
        torch.testing.assert_close(weights(s), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_controls_and_the_command_line_have_each_optimizer_and_its_knobs(name: str) -> None:
    e = Experiment().set(*setting(f"optimizer={name}"))
    made = {r["path"]: r for r in make_rows(e, ControlState(live=True))}
    assert {o["text"] for o in made["optimizer"]["options"]} == set(ALL) and made["optimizer"]["value"] == name
    assert not any(made["optimizer"][k] for k in ("disabled", "why"))
    for path, k in walk(e.optimizer, "optimizer."):
        assert made[path]["doc"] == k.doc and not made[path]["disabled"]
        if k.kind is float:
            assert all(k.check(v) == v for v in list_stops(k)) and len(list_stops(k)) > 5
            assert e.set(*setting(f"{path}={list_stops(k)[3]}")).optimizer != e.optimizer


def test_the_log_says_what_was_carried_over() -> None:
    changes = (Change(2, "optimizer", "Adam"),)
    run = simulate(experiment(2, 4, pace=5.0), changes=changes, real=True)
    assert "carried: none; fresh: exp_avg, exp_avg_sq, step; dropped: momentum_buffer" in Log().update(run).html


# A live change.


def stepped(settings: Optimizer, model: nn.Module) -> Any:
    optimizer = made(settings, model, 0.01)
    mse(model, batch(0, 0, 0)).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("before", "after", "carried", "fresh", "dropped"),
    [
        (SGD(), LARS(), ["momentum_buffer"], [], []),
        (LARS(), SGD(nesterov=True), ["momentum_buffer"], [], []),
        (Adam(), LAMB(), MOMENTS, [], []),
        (LAMB(), AdamW(), MOMENTS, [], []),
        (AdamW(), AdamW(beta1=0.5), MOMENTS, [], []),
        (SGD(), Adam(), [], MOMENTS, ["momentum_buffer"]),
        (LAMB(), LARS(), [], ["momentum_buffer"], MOMENTS),
        (SGD(momentum=0.0), SGD(), [], ["momentum_buffer"], []),
        (SGD(), SGD(momentum=0.0), [], [], ["momentum_buffer"]),
    ],
    ids=str,
)
def test_slots_of_equal_meaning_are_carried_over_and_other_slots_start_empty(
    before: Optimizer, after: Optimizer, carried: list[str], fresh: list[str], dropped: list[str]
) -> None:
    model = net()
    old, new = stepped(before, model), made(after, model, 0.01)
    moved = carry(old, new)
    assert (moved["carried"], moved["fresh"], moved["dropped"]) == (carried, fresh, dropped)
    assert f"carried: {', '.join(carried) or 'none'}; fresh: {', '.join(fresh) or 'none'}" in moved["text"]
    for p in model.parameters():
        assert {k: v.data_ptr() for k, v in new.state[p].items()} == {k: old.state[p][k].data_ptr() for k in carried}
    new.step()  # a state without a slot would fail here


def test_nothing_is_carried_over_from_an_unknown_optimizer() -> None:
    model = net()
    old = torch.optim.RMSprop(model.parameters(), 0.01, momentum=0.9)
    mse(model, batch(0, 0, 0)).backward()
    old.step()
    moved = carry(old, made(SGD(), model, 0.01))
    assert moved["carried"] == [] and "momentum_buffer" in moved["dropped"]


def marks(session: Any) -> list[str]:
    return [json.loads(m[3])["text"] for m in session.record.noted("optimizer")]


@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=4)], ids=str)
def test_a_live_change_keeps_ranks_equal_on_both_hosts_and_records_the_carried_slots(strategy: Strategy) -> None:
    e = experiment(3, 16, strategy=strategy, optimizer=SGD(), lr=0.01)
    changes = (
        Change(4, "optimizer", to_plain(LARS(trust=0.1))), Change(7, "optimizer", "SGD"),
        Change(10, "optimizer", "Adam"), Change(13, "strategy", "DDP" if strategy != DDP() else "LocalSGD"),
    )  # fmt: skip
    sessions = run(e, *changes)
    said = ["carried: momentum_buffer; fresh: none"] * 2
    said += ["carried: none; fresh: exp_avg, exp_avg_sq, step; dropped: momentum_buffer"]
    assert marks(sessions[0]) == said and not marks(sessions[1])
    simulated = simulate(e.set("pace", 5.0), changes=changes, real=True)
    assert [d["text"] for _, _, d in simulated.details("optimizer")] == said
    for s in sessions:
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-5, atol=1e-6)
    if strategy != DDP():
        assert len({hash_model_state(s.layout) for s in sessions}) == 1


@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=4)], ids=str)
def test_from_sgd_to_lars_and_back_momentum_is_kept(strategy: Strategy) -> None:
    """At a rate near zero only the buffers change; LARS without adaptation leaves them as SGD's."""
    e = experiment(2, 10, strategy=strategy, optimizer=SGD(), lr=0.01)
    back = (Change(5, "optimizer", "LARS"), Change(5, "optimizer", "SGD"))
    plain, there_and_back = run(e), run(e, *back)
    for a, b in zip(plain, there_and_back, strict=True):
        assert torch.equal(weights(a), weights(b))
        buffers = [[s.optimizer.state[p.param]["momentum_buffer"] for p in s.layout.order] for s in (a, b)]
        assert all(torch.equal(x, y) for x, y in zip(*buffers, strict=True))
    forgetful = run(e, Change(5, "optimizer", "Adam"), Change(5, "optimizer", "SGD"))
    assert not torch.equal(weights(plain[0]), weights(forgetful[0]))


def test_switching_from_the_tasks_own_to_an_equal_optimizer_changes_nothing() -> None:
    """The toy's own optimizer is SGD with momentum 0.9."""
    e = experiment(2, 10)
    plain, turned = run(e), run(e, Change(5, "optimizer", "SGD"))
    assert all(torch.equal(weights(a), weights(b)) for a, b in zip(plain, turned, strict=True))
    assert marks(turned[0]) == ["carried: momentum_buffer; fresh: none"]


def test_a_live_change_of_an_optimizers_knob_takes_effect_and_keeps_its_state() -> None:
    e = experiment(2, 8, optimizer=Adam(), lr=0.01)
    turned = run(e, Change(4, "optimizer.beta1", 0.5))
    assert marks(turned[0]) == ["carried: exp_avg, exp_avg_sq, step; fresh: none"]
    assert turned[0].optimizer.param_groups[0]["betas"] == (0.5, 0.999)
    assert all(float(turned[0].optimizer.state[p.param]["step"]) == 8 for p in turned[0].layout.order)
    assert torch.equal(weights(turned[0]), weights(turned[1]))
    assert not torch.equal(weights(turned[0]), weights(run(e)[0]))


def test_a_changed_learning_rate_stays_under_another_optimizer() -> None:
    (session,) = run(experiment(1, 6), Change(2, "lr", 0.005), Change(4, "optimizer", "Adam"))
    assert session.optimizer.param_groups[0]["lr"] == 0.005 == session.rank.lr


def test_a_hand_over_after_a_change_of_optimizer_costs_the_same_with_sizes_only() -> None:
    """From SGD's one slot to Adam's two: LocalSGD hands over twice as much optimizer state."""
    e = paced(3, 12, strategy=LocalSGD(every=4), task=toy(), optimizer=SGD())
    changes = [Change(5, "optimizer", "Adam"), Change(9, "strategy", "DDP")]
    sent = []
    for real in (False, True):
        spans = simulate(e, changes=changes, real=real).spans
        sent.append(int(spans[(spans.lane == "comm") & (spans.name == "all_reduce optimizer state")].nbytes.max()))
    alone = simulate(e, changes=changes[1:]).spans
    assert sent[0] == sent[1] > 1.9 * int(alone[alone.name == "all_reduce optimizer state"].nbytes.max())


@pytest.mark.parametrize("strategy", [Gossip(), ShadowMA(), AsyncServer(servers=1), SyncServer(), TorchDDP()], ids=str)
def test_a_change_of_optimizer_reaches_all_ranks_under_every_kind_of_strategy(strategy: Strategy) -> None:
    """Even a rank that only served, and so never had a slot, goes on with the other ranks' state."""
    turns = [
        Change(5, "optimizer", "LAMB"), Change(5, "clip", 0.5), Change(8, "optimizer.weight_decay", 0.1),
        Change(11, "strategy", "DDP"),
    ]  # fmt: skip
    sessions = run(experiment(3, 16, strategy=strategy, optimizer=Adam(), lr=0.01), *turns)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    assert marks(sessions[0]) == ["carried: exp_avg, exp_avg_sq, step; fresh: none"] * 2
    for s in sessions:
        assert {g["weight_decay"] for g in s.optimizer.param_groups} == {0.0, 0.1}
        a, b = (torch.cat([x.optimizer.state[p.param]["exp_avg"].flatten() for p in x.layout.order])
                for x in (s, sessions[0]))  # fmt: skip
        assert torch.equal(a, b)
