"""Compares torch's fully_shard as a strategy with DDP and one process, with live switches and unusual models."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.ranks import Net, experiment, mse, net, run, toy, train_joined, weights
from workbench.engine.rank.session import Session
from workbench.optimizers import SGD, AdamW
from workbench.settings import Change, KnobError
from workbench.sim import simulate
from workbench.strategies import DDP, TorchFSDP

pytestmark = pytest.mark.ranks

adamw = partial(torch.optim.AdamW, lr=1e-2)


def seen(session: Session, name: str) -> list[float]:
    return [value for _, said, _, value in session.record.samples if said == name]


def remembered(session: Session) -> dict[str, torch.Tensor]:
    """Returns the final optimizer state by slot and parameter."""
    state = session.training.optimizer.state
    return {f"{slot}/{place.name}": x for place in session.layout.order
            for slot, x in state[place.param].items() if isinstance(x, torch.Tensor)}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_learns_as_ddp_does(ranks: int) -> None:
    e = experiment(ranks, 20, task=toy(adamw), eval_every=5)
    theirs, ours = run(e.set("strategy", TorchFSDP())), run(e)
    assert theirs[0].record.losses() == pytest.approx(ours[0].record.losses(), rel=1e-6)
    assert seen(theirs[0], "held_out") == pytest.approx(seen(ours[0], "held_out"), rel=1e-6)
    for s in theirs:
        torch.testing.assert_close(weights(s), weights(ours[0]), rtol=1e-5, atol=1e-6)


def test_it_learns_as_one_process_does() -> None:
    sessions = run(experiment(3, 10, strategy=TorchFSDP()))
    torch.testing.assert_close(weights(sessions[0]), train_joined(3, 10), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_switch_in_and_out_without_a_step_changes_nothing(ranks: int) -> None:
    """Three ranks have unequal shards of rows; parameters and both moments return unchanged."""
    e = experiment(ranks, 9, task=toy(adamw))
    visited = run(e, Change(5, "strategy", "TorchFSDP"), Change(5, "strategy", "DDP"))
    plain = run(e)
    for s, p in zip(visited, plain, strict=True):
        assert len(s.record.noted("change")) == (2 if s.rank.id == 0 else 0)
        assert torch.equal(weights(s), weights(p))
        found, expected = remembered(s), remembered(p)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_on_two_ranks_the_hand_over_from_ddp_and_to_local_sgd_is_bit_identical() -> None:
    """Two numbers have one sum, so on two ranks its steps equal DDP's, and each hand-over must keep every bit."""
    e = experiment(2, 20, task=toy(adamw))
    via = run(e, Change(6, "strategy", "TorchFSDP"), Change(12, "strategy", "LocalSGD"))
    plain = run(e, Change(12, "strategy", "LocalSGD"))
    assert len(via[0].record.noted("change")) == 2
    assert via[0].record.losses() == plain[0].record.losses()
    assert all(torch.equal(weights(v), weights(p)) for v, p in zip(via, plain, strict=True))


@pytest.mark.parametrize("target", ["ZeRO3", "ZeRO1", "TorchDDP", "DiLoCo", "Gossip", "AsyncServer", "Hogwild"])
def test_it_is_switched_to_and_from_strategies_of_every_kind(target: str) -> None:
    changes = [Change(3, "strategy", "TorchFSDP"), Change(6, "strategy", target), Change(9, "strategy", "TorchFSDP"),
               Change(12, "strategy", "DDP")]  # fmt: skip
    sessions = run(experiment(3, 15, optimizer=SGD(momentum=0.9), eval_every=4), *changes)
    assert len(sessions[0].record.noted("change")) == 4
    assert all(torch.equal(weights(s), weights(sessions[0])) for s in sessions)


@pytest.mark.parametrize(("path", "value"), [
    ("optimizer", AdamW(weight_decay=0.1)), ("bucket_mb", 0.03), ("bandwidth", 200), ("lr", 0.004), ("clip", 0.05),
])  # fmt: skip
def test_live_changes_have_the_same_effect_as_under_ddp(path: str, value: Any) -> None:
    e = experiment(2, 14, task=toy(adamw), optimizer=AdamW(), clip=1.0)
    theirs, ours = (run(e.set("strategy", which), Change(6, path, value)) for which in (TorchFSDP(), DDP()))
    assert not theirs[0].record.noted("refused")
    torch.testing.assert_close(weights(theirs[0]), weights(ours[0]), rtol=1e-5, atol=1e-6)
    assert seen(theirs[0], "grad_norm") == pytest.approx(seen(ours[0], "grad_norm"), rel=1e-5)


def test_on_an_emulated_link_its_messages_are_recorded() -> None:
    linked = experiment(2, 6, task=toy(adamw), strategy=TorchFSDP()).set("bandwidth", 50)
    sessions, plain = run(linked), run(experiment(2, 6, task=toy(adamw), strategy=TorchFSDP()))
    torch.testing.assert_close(weights(sessions[0]), weights(plain[0]), rtol=1e-5, atol=1e-7)
    step = [(what, n) for at, what, n in sessions[0].record.comm() if at == 3]
    psi = sessions[0].layout.byte_count
    assert sum(n for what, n in step if what == "reduce_scatter gradients") == pytest.approx(psi / 2, rel=0.01)
    assert psi / 2 <= sum(n for what, n in step if what == "all_gather params") <= psi * 1.01


class Odd(Net):
    """A frozen layer, a tied weight, running statistics, and a layer of three rows for four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.three = nn.BatchNorm1d(64), nn.Linear(4, 3)
        self.d = nn.Linear(64, 64, bias=False)
        self.d.weight = self.b.weight
        self.a.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.d(torch.tanh(self.norm(self.b(torch.tanh(self.a(x))))))
        return torch.cat([self.three(self.c(hidden)), self.c(hidden)[:, :1]], 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_may_have_frozen_and_tied_weights_buffers_and_fewer_rows_than_ranks(ranks: int) -> None:
    e = experiment(ranks, 12, task=toy(model=partial(net, Odd)), eval_every=4)  # Adam would amplify b.bias' noise
    theirs, ours = (run(e.set("strategy", which), Change(8, "strategy", "LocalSGD")) for which in (TorchFSDP(), DDP()))
    torch.testing.assert_close(weights(theirs[0]), weights(ours[0]), rtol=1e-4, atol=1e-5)
    for mine, its in zip(ours[0].model.buffers(), theirs[0].model.buffers(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_the_record_has_a_ranks_memory() -> None:
    """8 layers of 0.26 MB on 4 ranks: shards of all layers, and the whole parameters at the worst moment."""

    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 256), *[nn.Linear(256, 256) for _ in range(8)], nn.Linear(256, 4))

    e = experiment(4, 5, task=toy(adamw, model=partial(net, layers)), bucket_mb=0.26, eval_every=4)
    session = run(e.set("strategy", TorchFSDP()))[0]
    psi, unit = session.layout.byte_count, 4 * 256 * 257
    held = seen(session, "memory parameters")
    assert psi / 4 + unit <= held[-1] <= psi / 4 + 4 * unit < psi, "in a step"
    assert seen(session, "memory optimizer state")[-1] == pytest.approx(2 * psi / 4, rel=0.02)
    assert psi / 4 <= seen(session, "memory gradients")[-1] <= psi / 4 + 3 * unit
    whole = run(e)[0]
    assert seen(whole, "memory parameters")[-1] == psi
    assert seen(session, "memory peak")[-1] < 0.6 * seen(whole, "memory peak")[-1]


def test_after_a_switch_to_ddp_the_wrapped_copy_is_freed() -> None:
    found: list[Any] = []

    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        if isinstance(model, FSDPModule) and not found:
            found.append(weakref.ref(model))
        return mse(model, pair)

    run(experiment(2, 8, task=toy(loss=loss), strategy=TorchFSDP()), Change(4, "strategy", "DDP"))
    gc.collect()  # it has reference cycles
    assert found[0]() is None


def test_the_simulator_refuses_it_and_suggests_zero3() -> None:
    with pytest.raises(KnobError, match=r"TorchFSDP: only torch itself can run its exchange.*simulate ZeRO3"):
        simulate(experiment(2, 4, strategy=TorchFSDP(), pace=2.0))


def test_reading_the_runs_own_model_raises_an_error() -> None:
    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        return mse(model, pair) + 0.0 * outside[0].c.weight.sum()

    outside: list[Any] = []

    def kept() -> nn.Module:
        outside.append(net())
        return outside[-1]

    with pytest.raises(AssertionError, match="fully_shard keeps parameters in shards"):
        run(experiment(2, 4, task=toy(model=kept, loss=loss), strategy=TorchFSDP()))


def test_it_refuses_an_optimizer_whose_state_is_not_element_by_element() -> None:
    with pytest.raises(KnobError, match="TorchFSDP: it shards the optimizer's state by element"):
        experiment(2, 4, strategy=TorchFSDP()).set("optimizer", "LARS")


class Mixed(nn.Module):
    """A linear layer whose bias is float64."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, nn.Parameter(layer.bias.detach().double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias.float())


class Kinds(nn.Module):
    """Layers of which torch shards some parameters only: a scalar, one without elements, and a wider type."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = net().children()
        self.scale, self.nothing = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 3))
        self.b = Mixed(self.b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))) * self.scale + self.nothing.sum()


def test_parameters_that_torch_cannot_shard_stay_whole_through_switches_and_clipping() -> None:
    e = experiment(3, 12, task=toy(adamw, model=Kinds), optimizer=AdamW(), clip=0.5)
    switches = [Change(3, "strategy", "TorchFSDP"), Change(8, "strategy", "DDP")]
    theirs, ours = run(e, *switches), run(e)
    assert len(theirs[0].record.noted("change")) == 2
    torch.testing.assert_close(weights(theirs[0]), weights(ours[0]), rtol=1e-5, atol=1e-6)
    assert seen(theirs[0], "grad_norm") == pytest.approx(seen(ours[0], "grad_norm"), rel=1e-5)
    found, expected = remembered(theirs[0]), remembered(ours[0])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_recomputed_units_give_the_same_result() -> None:
    e = experiment(2, 10, task=toy(adamw, model=lambda: nn.Sequential(*net().children())), strategy=TorchFSDP())
    again = run(e, Change(3, "checkpoint", "units"), Change(7, "checkpoint", "none"))
    assert not again[0].record.noted("refused")
    assert torch.equal(weights(again[0]), weights(run(e)[0]))


class Experts(nn.Module):
    """Each batch reaches one of three last layers, which differs by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last[int(x[0, 0].abs() * 10) % 3](torch.tanh(self.first(x)))


def test_ranks_that_use_different_parameters_learn_as_under_ddp() -> None:
    e = experiment(3, 8, task=toy(model=partial(net, Experts)))
    theirs, ours = run(e.set("strategy", TorchFSDP())), run(e)
    for s in theirs:
        torch.testing.assert_close(weights(s), weights(ours[0]), rtol=1e-5, atol=1e-6)


class Outside(nn.Module):
    """Reads a layer's weight outside of the layer's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = net().children()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(torch.tanh(self.a(x)) @ self.b.weight.t()))


def test_a_parameter_read_outside_of_its_unit_is_refused_with_what_to_do() -> None:
    e = experiment(2, 6, task=toy(model=Outside), strategy=TorchFSDP())
    with pytest.raises(AssertionError, match="TorchFSDP: the model reads a parameter of a module outside"):
        run(e)
    theirs, ours = run(e.set("bucket_mb", 0.5)), run(e.set("strategy", DDP()))
    torch.testing.assert_close(weights(theirs[0]), weights(ours[0]), rtol=1e-5, atol=1e-6)


class Branch(nn.Module):
    """Its children's parameters come before its own in torch's order, and after them in the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(40)), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) * self.scale)


class Skipping(nn.Module):
    """Ranks use different ones of `which` branches, each a unit of its own, or none."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(8, 40), nn.Linear(40, 4)
        self.blocks = nn.ModuleList(Branch() for _ in range(which))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, which = torch.tanh(self.first(x)), len(self.blocks)
        for i in range(int(x[0, 1].abs() * 10) % 3):
            y = self.blocks[(int(x[0, 0].abs() * 10) + 2 * i) % which](y)
        return self.out(y)


@pytest.mark.parametrize(("which", "ranks", "rest"), [
    (1, 2, {}), (4, 3, {}), (3, 2, {"clip": 0.5}), (3, 2, {"fabric.link.bandwidth": 100}),
])  # fmt: skip
def test_ranks_may_skip_units_that_other_ranks_use(which: int, ranks: int, rest: dict[str, Any]) -> None:
    e = experiment(ranks, 12, task=toy(model=partial(net, partial(Skipping, which))), bucket_mb=0.01)
    for path, value in rest.items():
        e = e.set(path, value)
    theirs, ours = run(e.set("strategy", TorchFSDP())), run(e)
    for s in theirs:
        torch.testing.assert_close(weights(s), weights(ours[0]), rtol=1e-5, atol=1e-6)


def hooked(seen: list[str]) -> nn.Module:
    """A model whose gradients are changed by hooks of its own: one from the start, one from its first forward."""
    model = net()
    model.a.weight.register_hook(lambda grad: 3 * grad)

    def clamp(p: Any) -> None:
        p.grad.clamp_(-0.01, 0.01)

    model.b.weight.register_post_accumulate_grad_hook(clamp)

    def first(module: nn.Module, inputs: Any) -> None:
        if not hasattr(module, "done"):
            module.done = True
            module.c.weight.register_hook(lambda grad: seen.append("c") or 2 * grad)

    model.register_forward_pre_hook(first)
    return model


def test_hooks_on_gradients_act_as_under_ddp_and_after_a_switch() -> None:
    ends = []
    for strategy in (TorchFSDP(), DDP()):
        seen: list[str] = []
        e = experiment(2, 8, task=toy(model=partial(hooked, seen)), strategy=strategy)
        other = "DDP" if isinstance(strategy, TorchFSDP) else "TorchDDP"
        ends.append((weights(run(e, Change(4, "strategy", other))[0]), len(seen)))
    assert ends[0][1] == ends[1][1] == 16
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-5, atol=1e-6)


class HooksLate(Net):
    """Registers hooks in its 3rd forward, on a unit that torch has not gathered yet."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def clamp(p: Any) -> None:
            p.grad.clamp_(-1e-3, 1e-3)

        self.forwards += 1
        if self.forwards == 3:
            self.b.weight.register_hook(lambda grad: 3 * grad)
            self.b.weight.register_post_accumulate_grad_hook(clamp)
        return super().forward(x)


def test_hooks_registered_while_a_unit_is_in_shards_act_as_under_ddp() -> None:
    e = experiment(2, 8, task=toy(model=partial(net, HooksLate)))
    theirs, ours = run(e.set("strategy", TorchFSDP()), Change(5, "strategy", "DDP")), run(e)
    torch.testing.assert_close(weights(theirs[0]), weights(ours[0]), rtol=1e-5, atol=1e-6)


class Freezes(Net):
    """Freezes a layer in its 4th forward of a step, and never thaws it."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        if self.forwards == 4:
            self.b.requires_grad_(False)
        return super().forward(x)


def test_what_was_frozen_under_it_stays_frozen_after_a_switch() -> None:
    e = experiment(2, 10, task=toy(model=partial(net, Freezes)))
    switched, stayed = run(e.set("strategy", TorchFSDP()), Change(6, "strategy", "DDP")), run(e)
    torch.testing.assert_close(weights(switched[0]), weights(stayed[0]), rtol=1e-5, atol=1e-6)
    again = run(e.set("strategy", TorchFSDP()), Change(6, "fabric.link.bandwidth", 200))
    torch.testing.assert_close(weights(again[0]), weights(stayed[0]), rtol=1e-5, atol=1e-6)


class FreezesItself(nn.Linear):
    """Freezes itself in the forward in which torch has gathered it."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        self.calls += 1
        if self.calls == 4:
            self.requires_grad_(False)
        return made


def test_a_unit_that_freezes_itself_while_it_is_whole_stays_frozen() -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.b = FreezesItself(64, 64)

    e = experiment(2, 8, task=toy(model=partial(net, Model)))
    theirs, ours = run(e.set("strategy", TorchFSDP())), run(e)
    torch.testing.assert_close(weights(theirs[0]), weights(ours[0]), rtol=1e-5, atol=1e-6)
    simulated = simulate(e.set("pace", 1.0), real=True).samples.query("name == 'loss'").value.tolist()
    measured = [x for losses in zip(*(seen(s, "loss") for s in ours), strict=True) for x in losses]
    assert simulated == pytest.approx(measured, rel=1e-5)
    assert not theirs[0].model.get_parameter("b.weight").requires_grad


class Trained(Net):
    """Its layer b is frozen on the way here."""

    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + self.training
        if self.calls == 3:
            self.b.requires_grad_(True)
        return super().forward(x)


def test_an_unfrozen_parameter_keeps_its_optimizer_state() -> None:
    e = experiment(2, 10, task=toy(adamw, model=partial(net, Trained)))
    theirs, ours = run(e.set("strategy", TorchFSDP())), run(e)
    torch.testing.assert_close(weights(theirs[0]), weights(ours[0]), rtol=1e-5, atol=1e-6)
    steps = {name: x for name, x in remembered(theirs[0]).items() if name.startswith("step/")}
    assert steps and steps == {name: x for name, x in remembered(ours[0]).items() if name in steps}


def freeze(model: nn.Module) -> float:
    """Held-out numbers whose second computation freezes layer b, and whose fourth thaws it."""
    model.evaluations = getattr(model, "evaluations", 0) + 1  # type: ignore[assignment, operator]
    model.b.requires_grad_(model.evaluations not in (2, 3))  # type: ignore[union-attr, operator]
    return 0.0


@pytest.mark.parametrize("every", [1, 3])
def test_an_evaluation_freezes_and_thaws_parameters_as_under_ddp(every: int) -> None:
    e = experiment(2, 12, task=toy(evaluate=freeze), eval_every=every)
    theirs, ours = run(e.set("strategy", TorchFSDP())), run(e)
    assert all(p.requires_grad for s in theirs for p in s.model.parameters())
    torch.testing.assert_close(weights(theirs[0]), weights(ours[0]), rtol=1e-5, atol=1e-6)


class Grows(Net):
    """Its first forward adds a module without parameters and an attribute, in front of other modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "extra"):
            extra = nn.Dropout(0.0)
            extra.calls = 0  # type: ignore[assignment]
            self._modules = {"extra": extra, **self._modules}
        self.extra.calls += 1  # type: ignore[operator, union-attr]
        return super().forward(self.extra(x))


def test_a_forward_may_add_a_module_as_under_ddp() -> None:
    e = experiment(2, 8, task=toy(model=partial(net, Grows)), eval_every=3)
    theirs = run(e.set("strategy", TorchFSDP()), Change(5, "strategy", "DDP"))
    ours = run(e)
    torch.testing.assert_close(weights(theirs[0]), weights(ours[0]), rtol=1e-5, atol=1e-6)
    calls = [s.model.get_submodule("extra").calls for s in (theirs[0], ours[0])]
    assert calls[0] == calls[1]
