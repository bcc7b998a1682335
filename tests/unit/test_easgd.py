"""Tests elastic averaging against the paper: conservation, contraction, and leaving."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import batch, experiment, mse, net, run, toy, weights
from tests.sim.virtual import begun, comm, paced, samples, seconds
from workbench import simulate
from workbench.compressors import TopK
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, EASGD, LocalSGD

pytestmark = pytest.mark.ranks

plain = partial(torch.optim.SGD, lr=0.05)
heavy = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
nesterov = partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True)


class Paper:
    """The paper's algorithm in one process, with the same old values in both lines."""

    def __init__(self, ranks: int, every: int, beta: float, optimizer: Any) -> None:
        self.every, self.alpha, self.done = every, beta / ranks, 0
        self.models = [net() for _ in range(ranks)]
        self.optimizers = [optimizer(m.parameters()) for m in self.models]
        self.centre = [p.detach().clone() for p in net().parameters()]

    def step(self) -> None:
        for r, model in enumerate(self.models):
            model.zero_grad()
            mse(model, batch(r, self.done, 0)).backward()
        self.done += 1
        if self.done % self.every == 0:
            self.exchange()
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def exchange(self) -> None:
        for k, centre in enumerate(self.centre):
            own = [list(m.parameters())[k] for m in self.models]
            pulls = [self.alpha * (x - centre) for x in own]
            for x, pull in zip(own, pulls, strict=True):
                x.sub_(pull)
            centre.add_(torch.stack(pulls).sum(0))

    @property
    def outcome(self) -> torch.Tensor:
        """Returns the centre in the order of tests.ranks.weights."""
        named = sorted(zip([n for n, _ in self.models[0].named_parameters()], self.centre, strict=True))
        return torch.cat([c.reshape(-1).double() for _, c in named])


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).double() for _, p in sorted(model.named_parameters())])


def centre(session: Any) -> torch.Tensor:
    """Returns a rank's copy of the centre in the order of tests.ranks.weights."""
    return torch.cat([x.double() for _, x in sorted(session.state.memory.buffers["centre"].items())])


@pytest.mark.parametrize(("ranks", "every", "beta", "optimizer"), [
    (4, 1, 0.9, plain), (3, 3, 0.9, heavy), (2, 4, 1.2, nesterov), (1, 2, 0.5, plain),
])  # fmt: skip
def test_easgd_is_the_papers_algorithm_on_both_hosts(ranks: int, every: int, beta: float, optimizer: Any) -> None:
    e = experiment(ranks, 13, strategy=EASGD(every=every, beta=beta), task=toy(optimizer))
    sessions, paper = run(e), Paper(ranks, every, beta, optimizer)
    for _ in range(13):
        paper.step()
    for s, model in zip(sessions, paper.models, strict=True):
        torch.testing.assert_close(weights(s), flat(model), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(centre(s), paper.outcome, rtol=1e-4, atol=1e-5)
        assert torch.equal(centre(s), centre(sessions[0]))
    simulated, sizes = simulate(e.set("pace", 5.0), real=True), simulate(e.set("pace", 5.0))
    for s in sessions:
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-4, atol=1e-5)
        assert comm(simulated, s.rank.index) == comm(sizes, s.rank.index) == begun(s.record)


def frozen(ranks: int, rounds: int, beta: float) -> list[Any]:
    """Returns ranks after 6 steps alone and `rounds` exchanges without learning."""
    e = experiment(ranks, 6 + rounds, strategy=EASGD(every=64, beta=beta), task=toy(plain), eval_every=1)
    return run(e, Change(6, "lr", 1e-30), Change(6, "strategy.every", 1))


@pytest.mark.parametrize(("ranks", "beta", "spread", "gap"), [
    (4, 0.9, 0.775, -0.125), (2, 0.9, 0.55, -0.35), (4, 0.4, 0.9, 0.5), (3, 0.75, 0.75, 0.0),
])  # fmt: skip
def test_an_exchange_contracts_the_spread_and_the_centres_distance_as_predicted(
    ranks: int, beta: float, spread: float, gap: float
) -> None:
    """beta = p / (p+1) reduces the distance to 0: then the centre is the mean."""
    sessions = frozen(ranks, 3, beta)
    for s in sessions:
        drift = [v for step, name, _, v in s.record.samples if name == "drift" and step >= 6]
        assert drift[0] > 1e-4
        np.testing.assert_allclose(np.divide(drift[1:], drift[:-1]), spread, rtol=1e-3)
    before, after = frozen(ranks, 0, beta), frozen(ranks, 1, beta)
    mean = [torch.stack([weights(s) for s in those]).mean(0) for those in (before, after)]
    away, left = centre(before[0]) - mean[0], centre(after[0]) - mean[1]
    assert away.norm() > 1e-3
    torch.testing.assert_close(left, gap * away, rtol=0, atol=1e-6)


def test_the_sum_of_all_ranks_and_the_centre_is_conserved() -> None:
    sums = []
    for rounds in (0, 1, 5):
        sessions = frozen(4, rounds, 0.9)
        sums.append(torch.stack([*map(weights, sessions), centre(sessions[0])]).sum(0))
    torch.testing.assert_close(sums[1], sums[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(sums[2], sums[0], rtol=0, atol=2e-6)


def test_without_a_pull_every_rank_trains_alone() -> None:
    tied = run(experiment(3, 9, strategy=EASGD(every=2, beta=0.0), task=toy(heavy)))
    alone = run(experiment(3, 9, strategy=LocalSGD(every=64), task=toy(heavy)))
    for s, other in zip(tied, alone, strict=True):
        assert torch.equal(weights(s), weights(other))


@pytest.mark.parametrize("every", [1, 3])
def test_bytes_are_one_all_reduce_of_the_model_per_exchange(every: int) -> None:
    s = run(experiment(3, 10, strategy=EASGD(every=every)))[0]
    assert sorted({step for step, _, _ in s.record.comm()}) == list(range(every - 1, 10, every))
    sent = sum(n for _, _, n in s.record.comm())
    assert sent == 10 // every * sum(traffic("all_reduce", b.nbytes, 3)[0] for b in s.layout.buckets)


def test_a_pull_too_strong_to_settle_is_refused_with_a_reason() -> None:
    experiment(4, strategy=EASGD(beta=1.59))
    with pytest.raises(KnobError, match=r"beta=1.6 moves the centre of 4 ranks .* use less than 1.6, such as 0.8"):
        experiment(4, strategy=EASGD(beta=1.6))
    with pytest.raises(KnobError, match=r"use less than 1, such as 0\.5"):
        experiment(1).set("strategy", {"EASGD": {"beta": 1.0}})


def test_beyond_the_limit_ranks_diverge() -> None:
    """Otherwise the refusal would forbid a working value."""
    paper = Paper(4, 64, 1.7, plain)
    for _ in range(6):
        paper.step()
    gaps = []
    for _ in range(6):
        paper.exchange()
        gaps.append((paper.outcome - torch.stack([flat(m) for m in paper.models]).mean(0)).norm())
    assert all(b > a for a, b in pairwise(gaps))


@pytest.mark.parametrize("steps", [6, 7])
def test_leaving_continues_from_the_centre_after_a_last_exchange(steps: int) -> None:
    e = experiment(3, steps + 1, strategy=EASGD(every=3), task=toy(plain))
    sessions = run(e, Change(steps, "lr", 1e-30), Change(steps, "strategy", "DDP"))
    paper = Paper(3, 3, 0.9, plain)
    for _ in range(steps):
        paper.step()
    paper.exchange()
    for s in sessions:
        torch.testing.assert_close(weights(s), paper.outcome, rtol=1e-5, atol=1e-6)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


def test_a_switch_and_back_before_one_step_changes_nothing() -> None:
    stay = run(experiment(2, 8))
    went = run(experiment(2, 8), Change(4, "strategy", "EASGD"), Change(4, "strategy", "DDP"))
    assert isinstance(went[0].experiment.strategy, DDP)
    assert torch.equal(weights(stay[0]), weights(went[0]))


def test_the_centre_survives_new_buckets() -> None:
    e = experiment(2, 12, strategy=EASGD(every=2))
    calm, turned = run(e), run(e, Change(5, "bucket_mb", 0.03), Change(9, "bucket_mb", 1.0))
    for a, b in zip(calm, turned, strict=True):
        torch.testing.assert_close(weights(a), weights(b), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(centre(a), centre(b), rtol=1e-6, atol=1e-7)


def test_engine_and_simulator_send_the_same_across_every_kind_of_change() -> None:
    changes = (
        Change(3, "strategy.every", 2), Change(5, "bucket_mb", 0.02), Change(7, "strategy.beta", 0.5),
        Change(9, "compressor", {"TopK": {"density": 0.1}}), Change(13, "strategy", "DDP"),
        Change(15, "strategy", "EASGD"),
    )  # fmt: skip
    e = experiment(3, 20, strategy=EASGD(every=3), eval_every=5)
    sessions = run(e, *changes)
    simulated = simulate(e.set("pace", 5.0), changes=changes, real=True)
    for s in sessions:
        assert comm(simulated, s.rank.index) == begun(s.record)
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-3, atol=1e-5)


def test_compressed_pulls_leave_all_ranks_with_one_centre() -> None:
    sessions = run(experiment(3, 9, strategy=EASGD(every=2), compressor=TopK.usual()))
    assert all(torch.equal(centre(s), centre(sessions[0])) for s in sessions)


def test_the_exchange_hides_behind_forward_and_backward() -> None:
    """A connection that is busy for less time does not lengthen the step; Local SGD's average does."""
    e = paced(4, 8, pace=100.0, mbit=10.0, strategy=EASGD(every=4))
    lasts = seconds(simulate(e))
    exchange = sum(traffic("all_reduce", b, 4)[0] for b in [4 * 64 * 64, 4 * 8 * 64, 4 * 64 * 4]) * 8e-6 / 10
    assert 0.01 < exchange < 0.08, "long enough to be seen"
    assert lasts[3] == pytest.approx(lasts[2], rel=1e-6) and lasts[7] == pytest.approx(lasts[2], rel=1e-6)
    local = seconds(simulate(e.set("strategy", {"LocalSGD": {"every": 4}})))
    assert local[3] > local[2] + 0.9 * exchange
