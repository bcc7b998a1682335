"""Tests the gradient exchange against torch's, across live bucket sizes, with unusual models."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import nn

from tests.ranks import Net, batch, ended, experiment, live, mse, net, run, toy, weights
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change
from workbench.strategies import DDP, LocalSGD, TorchDDP

pytestmark = pytest.mark.ranks

adamw = partial(torch.optim.AdamW, lr=1e-2)


def test_two_ranks_are_bit_identical_to_torch_ddp() -> None:
    ours = run(experiment(2, 20, task=toy(adamw)))[0]
    torchs = run(experiment(2, 20, task=toy(adamw), strategy=TorchDDP()))[0]
    assert torch.equal(weights(ours), weights(torchs))


def test_torch_ddp_on_an_emulated_link_learns_the_same_and_is_recorded() -> None:
    linked = experiment(2, 8, task=toy(adamw), strategy=TorchDDP()).set("bandwidth", 50)
    sessions = run(linked, Change(6, "strategy", "LocalSGD"))
    plain = run(experiment(2, 8, task=toy(adamw), strategy=TorchDDP()), Change(6, "strategy", "LocalSGD"))
    torch.testing.assert_close(weights(sessions[0]), weights(plain[0]), rtol=1e-5, atol=1e-7)
    assert {name for step, name, _ in sessions[0].record.comm() if step < 6} >= {"all_reduce bucket 0"}
    assert [r for r in sessions[0].record if r[1] == "port" and r[0] < 6]


def test_bucket_size_changed_live_is_bit_identical_on_two_ranks() -> None:
    calm = run(experiment(2, 20, task=toy(adamw)))[0]
    turned = run(experiment(2, 20, task=toy(adamw)), Change(5, "bucket_mb", 0.02), Change(11, "bucket_mb", 1.0))[0]
    assert len({len([1 for s, *_ in turned.record.comm() if s == step]) for step in (4, 8, 15)}) > 1
    assert torch.equal(weights(calm), weights(turned))


def test_bucket_size_changed_live_stays_within_rounding_on_four_ranks() -> None:
    calm = run(experiment(4, 20, task=toy(adamw)))[0]
    turned = run(experiment(4, 20, task=toy(adamw)), Change(5, "bucket_mb", 0.02))[0]
    gap = (weights(calm) - weights(turned)).norm() / weights(calm).norm()
    assert gap < 1e-6


def test_accumulating_k_batches_equals_k_times_the_ranks() -> None:
    two = run(experiment(2, 6, strategy=DDP(accumulate=2), task=toy(model=net, data=_by_rank(2))))[0]
    four = run(experiment(4, 6, task=toy(model=net, data=_by_rank(1))))[0]
    torch.testing.assert_close(weights(two), weights(four), rtol=1e-5, atol=1e-6)


def _by_rank(micro: int) -> object:
    def data(rank: int, ranks: int, seed: int) -> list:
        return [batch(rank * micro + m, step, seed) for step in range(30) for m in range(micro)]

    return data


def test_the_first_bucket_goes_out_before_backward_ends() -> None:
    session = run(experiment(2, 8, pace=40.0))[0]
    for step in range(3, 8):
        backward = next(r for r in session.record if r[:3] == (step, "compute", "backward"))
        first = min(r[4] for r in session.record if r[0] == step and r[1] == "comm")
        assert first < backward[5]


class Unused(Net):
    """`alone` is unused, `frozen` does not learn, `b` is used twice without its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.alone = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.c(torch.tanh(self.a(x) @ self.b.weight @ self.b.weight)))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Mixed(Net):
    """One layer has another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.b = self.b.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)).double())).float())


@pytest.mark.parametrize("model", [Unused, Norm, Tied, Mixed])
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=2)], ids=str)
def test_odd_models_train_and_the_ranks_agree(model: type, strategy: object) -> None:
    sessions = run(experiment(2, 8, task=toy(model=partial(net, model)), strategy=strategy, eval_every=4))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    held_out = [v for _, name, _, v in sessions[0].record.samples if name == "held_out"]
    assert held_out[-1] < held_out[0]


def test_optimizer_groups_keep_the_ratio_of_their_rates() -> None:
    def two_groups(params: list) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.01}])

    sessions = run(experiment(2, 6, task=toy(two_groups)), Change(3, "lr", 0.2))
    assert [g["lr"] for g in sessions[0].optimizer.param_groups] == pytest.approx([0.2, 0.02])


def test_a_parameter_used_on_one_rank_only_hangs_no_rank() -> None:
    calls = {"n": 0}

    def loss(model: nn.Module, pair: tuple) -> torch.Tensor:
        calls["n"] += 1
        x, y = pair
        h = torch.tanh(model.a(x))
        return nn.functional.mse_loss(model.c(torch.tanh(model.b(h)) if calls["n"] % 2 else h), y)

    sessions = run(experiment(2, 10, task=toy(loss=loss)))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


def test_one_rank_with_another_model_is_named_before_training() -> None:
    made = iter(range(100))

    def model() -> nn.Module:
        return Net() if next(made) % 2 == 0 else Norm()

    sessions = _fail(experiment(2, 4, task=toy(model=model)))
    (text,) = {s.error["text"] for s in sessions if not s.error["consequence"]}
    assert "task.model() must return the same model on every rank" in text
    assert "exists on rank" in text or "where rank 1 has" in text


def test_a_parameter_of_another_shape_is_named_with_both_shapes_and_both_ranks() -> None:
    def model() -> nn.Module:
        mine = threading.current_thread().name.startswith("rank 2")
        return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 5 if mine else 4))

    sessions = _fail(experiment(3, 4, task=toy(model=model)))
    assert {s.error["text"] for s in sessions if not s.error["consequence"]} == {
        "parameter '1.weight' is float32 of shape (4, 64) on rank 0, float32 of shape (5, 64) on rank 2: "
        "task.model() must return the same model on every rank"
    }


def test_an_error_without_a_printable_text_is_still_the_cause() -> None:
    class Unspeakable(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no words")

    def loss(model: nn.Module, pair: tuple) -> torch.Tensor:
        if threading.current_thread().name.startswith("rank 1"):
            raise Unspeakable
        return mse(model, pair)

    sessions = _fail(experiment(2, 4, task=toy(loss=loss)))
    (cause,) = [s.error for s in sessions if s.error and not s.error["consequence"]]
    assert (cause["rank"], cause["type"], cause["op"]) == (1, "Unspeakable", "forward")
    assert cause["text"] == "its text is not available: its __str__ raised ValueError"
    assert "raise Unspeakable" in cause["traceback"]


def _fail(chosen: object) -> list:
    sessions = live(chosen)
    ended(sessions)
    return sessions


@pytest.mark.parametrize(("loss", "words"), [
    (lambda m, p: m(p[0]), "scalar"), (lambda m, p: 3.0, "scalar Tensor"),
    (lambda m, p: mse(m, p).detach(), "does not depend"), (lambda m, p: 1 / 0, "division"),
])  # fmt: skip
def test_an_invalid_loss_is_reported_with_rank_step_and_operation(loss: object, words: str) -> None:
    sessions = _fail(experiment(2, 4, task=toy(loss=loss)))
    causes = [s.error for s in sessions if not s.error["consequence"]]
    assert causes and words in causes[0]["text"]
    assert causes[0]["op"] == "forward" and causes[0]["step"] == 0


def test_ranks_of_one_host_meet_without_a_server_that_resolves_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's TCPStore looks up loopback's name in reverse; a lost DNS answer delayed a run by 5 s."""
    monkeypatch.setattr(torch.distributed, "TCPStore", None)
    sessions = run(experiment(3, 4))
    assert {s.phase for s in sessions} == {"done"}
