"""Tests Wavelet: two waves give one gradient, and store at most 1.5 times one wave's activations for backward."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import batch, experiment, net, run, toy, weights
from tests.sim.virtual import rows
from workbench import simulate
from workbench.host.passes.piecewise import PiecewisePass
from workbench.rank import Rank, StrategyError
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, Strategy, Wavelet
from workbench.tasks import Learner

pytestmark = pytest.mark.ranks

LAYERS, WIDTH, EXAMPLES = 12, 32, 64
WAVE = 4 * EXAMPLES * WIDTH * LAYERS  # bytes: tanh stores its output, which the next layer stores as its input


def deep() -> nn.Module:
    """Returns a model whose parts store equal amounts."""
    parts = [nn.Sequential(nn.Linear(8 if k == 0 else WIDTH, WIDTH), nn.Tanh()) for k in range(LAYERS)]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 4))


class Watched:
    """Counts the tensors other than parameters that autograd stores for backward, when stored and when freed."""

    def __init__(self, model: nn.Module) -> None:
        self.own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.times, self.nbytes, self.now, self.most = Counter[int](), {}, 0, 0

    def keep(self, x: torch.Tensor) -> Any:
        where = x.untyped_storage().data_ptr()
        return x if where in self.own else Held(self, x, where)


class Held:
    def __init__(self, by: Watched, x: torch.Tensor, where: int) -> None:
        self.by, self.x, self.where, self.nbytes = by, x, where, x.untyped_storage().nbytes()
        by.now += 0 if by.times[where] else self.nbytes
        by.times[where] += 1
        by.most = max(by.most, by.now)

    def __del__(self) -> None:
        self.by.times[self.where] -= 1
        self.by.now -= 0 if self.by.times[self.where] else self.nbytes


class Two(Strategy):
    """Runs the forward pass of both batches, then both backward passes, as DDP would not."""

    async def step(self, rank: Rank, state: Any) -> None:
        for micro in (0, 1):
            await rank.forward(micro=micro)
        for micro in (0, 1):
            await rank.backward(micro=micro)
        await rank.update()


def data(rank: int, ranks: int, seed: int) -> list[Any]:
    return [batch(rank, step, seed, EXAMPLES) for step in range(8)]


def kept(strategy: Strategy) -> int:
    """Returns the most bytes stored at once according to our own hooks, on one rank, without the record."""
    watched: dict[int, Watched] = {}

    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        seen = watched.setdefault(id(model), Watched(model))
        with torch.autograd.graph.saved_tensors_hooks(seen.keep, lambda held: getattr(held, "x", held)):
            return nn.functional.mse_loss(model(pair[0]), pair[1])

    task = toy(model=partial(net, deep), data=data, loss=loss)
    simulate(experiment(1, 3, strategy=strategy, task=task, pace=5.0), real=True)
    return max(one.most for one in watched.values())


def recorded(strategy: Strategy) -> float:
    """Returns the maximum in the record of a real rank."""
    (session,) = run(experiment(1, 3, strategy=strategy, task=toy(model=partial(net, deep), data=data)))
    return max(v for _, name, _, v in session.record.samples if name == "memory activations")


def test_two_waves_store_at_most_one_and_a_half_times_the_activations_of_one() -> None:
    one, wavelet, two = kept(DDP()), kept(Wavelet(pieces=16)), kept(Two())
    assert WAVE <= one < 1.1 * WAVE and two > 1.9 * one
    assert one < wavelet <= 1.5 * one, wavelet / one
    ratios = [recorded(s) / recorded(DDP()) for s in (Wavelet(pieces=16), Two())]
    assert ratios[0] <= 1.5 and ratios[1] > 1.9, ratios


@pytest.mark.parametrize("pieces", [1, 3, 16])
@pytest.mark.parametrize("ranks", [1, 3])
def test_two_waves_train_like_one_accumulated_gradient(ranks: int, pieces: int) -> None:
    task = toy(model=partial(net, deep))
    wavelet, plain = (
        run(experiment(ranks, 6, strategy=s, task=task)) for s in (Wavelet(pieces=pieces), DDP(accumulate=2))
    )
    for mine, other in zip(wavelet, plain, strict=True):
        torch.testing.assert_close(weights(mine), weights(other), rtol=1e-5, atol=1e-7)
        assert mine.record.losses() == pytest.approx(other.record.losses(), rel=1e-5)
    assert Counter(n for _, _, n in wavelet[0].record.comm()) == Counter(n for _, _, n in plain[0].record.comm())


@pytest.mark.parametrize("real", [True, False])
def test_the_second_wave_starts_when_the_first_goes_backward_and_then_alternates(real: bool) -> None:
    task = toy(model=partial(net, deep))
    done = simulate(experiment(2, 2, strategy=Wavelet(pieces=4, lead=2), task=task, pace=100.0), real=real)
    rows = done.spans[(done.spans["rank"] == 0) & (done.spans["step"] == 0) & (done.spans["lane"] == "compute")]
    names = rows.sort_values("t0")["name"].to_list()
    assert names[:4] == [f"forward 0.{k}" for k in range(4)]
    assert names[4:12] == ["backward 0.3", "backward 0.2", "forward 1.0", "backward 0.1", "forward 1.1", "backward 0.0",
                           "forward 1.2", "forward 1.3"]  # fmt: skip
    assert names[12:] == ["backward", "update"]
    assert float((rows["t1"] - rows["t0"]).sum()) == pytest.approx(0.1 * (2 * 0.9 + 0.1)), "two batches, one update"


def test_each_piece_takes_its_share_of_the_pace() -> None:
    unequal = partial(net, lambda: nn.Sequential(nn.Linear(8, 24, bias=False), nn.Linear(24, 4, bias=False)))
    found = rows(simulate(experiment(1, 2, strategy=Wavelet(), task=toy(model=unequal), pace=30.0)), "compute", 0)
    lasted = dict(zip(map(str, found.name), found.t1 - found.t0, strict=True))
    for phase in ("forward 0", "forward 1", "backward 0"):
        assert lasted[f"{phase}.0"] == pytest.approx(2 * lasted[f"{phase}.1"], rel=0.02), "192 weights and 96"


def test_a_model_without_declared_parts_is_run_as_one_piece() -> None:
    (session,) = run(experiment(1, 3, strategy=Wavelet()))
    names = [r[2] for r in session.record if r[1] == "compute" and r[0] == 1]
    assert [n for n in names if n != "update"] == ["forward 0", "backward 0", "forward 1", "backward"]


def test_wavelet_can_be_entered_changed_and_left_live() -> None:
    task = toy(model=partial(net, deep))
    wanted = [(2, "strategy", "Wavelet"), (4, "strategy.pieces", 3), (6, "compressor", "TopK"), (8, "strategy", "DDP")]
    sessions = run(experiment(3, 10, strategy=DDP(), task=task), *(Change(*change) for change in wanted))
    assert len(sessions[0].record.noted("change")) == 4 and not sessions[0].record.noted("refused")
    assert all(torch.equal(weights(s), weights(sessions[0])) for s in sessions)


def twice(model: nn.Module, pair: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(pair[0]), pair[1]) + model(2 * pair[0]).square().mean()


@pytest.mark.parametrize(("task", "words"), [
    (toy(model=partial(net, deep), loss=twice), "the loss calls the model 2 times.* call model once"),
    (toy(parts=lambda model: [model.a, model.b, model.c]), "the parts, one after the other, give the loss"),
    (toy(parts=lambda model: [model.c, model.a]), "the model fails part by part: "),
])  # fmt: skip
def test_a_model_unequal_to_its_parts_is_refused_at_start_and_live(task: Any, words: str) -> None:
    e = experiment(2, 4, strategy=Wavelet(), task=task, pace=1.0)
    with pytest.raises(KnobError, match=f"strategy=Wavelet: .*{words}"):
        simulate(e, real=True)
    first, _ = run(e.set("strategy", "DDP"), Change(2, "strategy", "Wavelet"))
    [refused] = first.record.noted("refused")
    assert re.search(words, json.loads(refused[3])["reason"])
    assert simulate(e.set("pieces", 1), real=True).experiment.strategy.pieces == 1, "whole it may be passed"


def learner() -> Learner:
    task = toy(model=partial(net, partial(nn.Sequential, nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Linear(6, 4))))
    return task.build()


def test_tied_parameters_and_in_place_layers_get_autograds_gradients() -> None:
    made = learner()
    model = made.model()
    hidden = [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)]
    tied = nn.Sequential(*hidden, nn.Linear(8, 4))
    tied[2].weight = tied[0].weight
    for some in (model, tied):
        some.zero_grad()
        pair = batch(0, 0, 0)
        made.loss(some, pair).backward()
        want = [p.grad.clone() for p in some.parameters() if p.grad is not None]
        some.zero_grad()
        waves = PiecewisePass(some, made)
        for piece in range(3):
            waves.piece_forward(lambda pair=pair: pair, 0, piece, 3, True)
        for piece in (2, 1, 0):
            waves.piece_backward(0, piece, 3, 1.0)
        for mine, other in zip((p.grad for p in some.parameters()), want, strict=True):
            torch.testing.assert_close(mine, other)


class Adds(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += super().forward(x)
        return x


def test_a_piece_that_modifies_its_input_is_an_explained_error() -> None:
    made = learner()
    waves = PiecewisePass(nn.Sequential(nn.Linear(8, 8), Adds(8, 8), nn.Linear(8, 4)), made)
    waves.piece_forward(lambda: batch(0, 0, 0), 0, 0, 3, True)
    with pytest.raises(StrategyError, match="piece 1 of 3 writes into its input: compute x = x"):
        waves.piece_forward(lambda: batch(0, 0, 0), 0, 1, 3, True)


def test_pieces_in_the_wrong_order_are_an_explained_error() -> None:
    made = learner()
    waves = PiecewisePass(made.model(), made)
    waves.piece_forward(lambda: batch(0, 0, 0), 0, 0, 3, True)
    with pytest.raises(StrategyError, match="batch 0 cannot go backward through piece 2 of 3 now"):
        waves.piece_backward(0, 2, 3, 1.0)
    with pytest.raises(StrategyError, match="starts another forward before its backward has ended"):
        waves.piece_forward(lambda: batch(0, 0, 0), 0, 0, 3, True)
    with pytest.raises(StrategyError, match="batch 1 has not begun its forward"):
        waves.piece_forward(lambda: batch(0, 0, 0), 1, 1, 3, True)
