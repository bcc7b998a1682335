"""Tests stochastic gradient push: conserved mass, convergence to the mean, messages in flight at a step's end."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import batch, ended, experiment, live, net, run, toy, weights
from tests.sim.insides import parameters, simulated
from tests.sim.virtual import comm, paced, samples, seconds, stack
from tests.unit.test_engine_control import until
from tests.unit.test_gossip_graphs import double, exact_task
from workbench import simulate
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change, KnobError
from workbench.strategies import StochasticGradientPush
from workbench.strategies._graph import PUSHES, push_hops, push_round

pytestmark = pytest.mark.ranks

UNEVEN = "0>1 1>2 2>3 3>0 0>2"  # rank 0 sends to two ranks, other ranks to one
SHARES = "0.5 0 0.3; 0.5 0.9 0; 0 0.1 0.7"  # columns add up to 1, rows to 0.8, 1.4 and 0.8
GRAPHS = [*((g, size) for g in PUSHES for size in range(1, 17)), (UNEVEN, 4), (SHARES, 3)]


def matrix(graph: str, size: int, number: int = 0) -> torch.Tensor:
    """Returns (size, size): the shares that each rank keeps and receives from each other rank in one round."""
    p = torch.zeros(size, size, dtype=torch.float64)
    for index in range(size):
        part = push_round(graph, size, index, number)
        p[index, index] = part.keeps
        for other, share in part.gives.items():
            p[other, index] = share
    return p


@pytest.mark.parametrize(("graph", "size"), GRAPHS)
def test_kept_and_sent_shares_sum_to_1_and_every_message_is_expected(graph: str, size: int) -> None:
    for number in range(5):
        p = matrix(graph, size, number)
        torch.testing.assert_close(p.sum(0), torch.ones(size).double(), rtol=0, atol=1e-12)
        assert bool((p.diagonal() > 0).all())
        for index in range(size):
            sources = [j for j in range(size) if j != index and p[index, j] > 0]
            assert list(push_round(graph, size, index, number).sources) == sources


@pytest.mark.parametrize(("graph", "size"), [(g, n) for g, n in GRAPHS if n > 1])
@pytest.mark.parametrize("late", [0, 1, 2, 4])
def test_hops_is_how_long_a_message_of_rank_0_travels_if_messages_are_late(graph: str, size: int, late: int) -> None:
    longest = 0
    for first in range(5):
        know, sent, number = {0}, [], first
        while len(know) < size:
            sent.append({to for i in know for to in push_round(graph, size, i, number).gives})
            know = know | (sent[-1 - late] if len(sent) > late else set())
            number += 1
        longest = max(longest, number - first)
    assert push_hops(graph, size, late) == longest


def push_weights(sessions: list[Any]) -> torch.Tensor:
    return torch.tensor([s.state.weight for s in sessions], dtype=torch.float64)


# -- against the plain rule


class Pushing:
    """Push-sum SGD in one process: numerators, weights and messages in flight, moved by the whole matrix."""

    def __init__(self, chosen: StochasticGradientPush, size: int) -> None:
        self.chosen, self.size, self.model = chosen, size, net().double()
        self.x = torch.stack([self.flat()] * size)
        self.w = torch.ones(size, dtype=torch.float64)
        self.under_way: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.buffers = torch.zeros_like(self.x)

    def flat(self) -> torch.Tensor:
        return torch.cat([p.data.reshape(-1) for _, p in sorted(self.model.named_parameters())])

    def gradient(self, at: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        named = sorted(self.model.named_parameters())
        with torch.no_grad():
            for (_, p), new in zip(named, at.split([p.numel() for _, p in named]), strict=True):
                p.copy_(new.view_as(p))
        self.model.zero_grad()
        double(self.model, batch(rank, step, 0)).backward()
        return torch.cat([p.grad.reshape(-1) for _, p in named])

    def step(self, step: int, lr: float = 0.1) -> None:
        z = self.z()
        for r in range(self.size):
            self.buffers[r] = 0.9 * self.buffers[r] + self.gradient(z[r], r, step)
            self.x[r] -= lr * self.buffers[r]
        if step % self.chosen.every == 0:
            p = matrix(self.chosen.edges or self.chosen.graph, self.size, step // self.chosen.every)
            away = p - torch.diag(p.diagonal())
            self.under_way.append((step, away @ self.x, away @ self.w))
            self.x, self.w = self.x * p.diagonal()[:, None], self.w * p.diagonal()
        while self.under_way and self.under_way[0][0] + self.chosen.overlap <= step:
            _, x, w = self.under_way.pop(0)
            self.x, self.w = self.x + x, self.w + w

    def z(self) -> torch.Tensor:
        return self.x / self.w[:, None]

    def mean(self) -> torch.Tensor:
        """Returns the sum of all numerators, on ranks and in flight, over the sum of all weights."""
        x = self.x.sum(0) + sum(x.sum(0) for _, x, _ in self.under_way)
        return x / (self.w.sum() + sum(w.sum() for _, _, w in self.under_way))


RULES = [(StochasticGradientPush(), 4), (StochasticGradientPush(graph="exponential"), 5),
         (StochasticGradientPush(graph="chain"), 4), (StochasticGradientPush(edges=UNEVEN, every=2), 4),
         (StochasticGradientPush(edges=SHARES, overlap=1), 3), (StochasticGradientPush(edges=UNEVEN, overlap=3), 4),
         (StochasticGradientPush(graph="chain", overlap=3, every=2), 3),
         (StochasticGradientPush(overlap=2), 8), (StochasticGradientPush(every=2), 4)]  # fmt: skip


@pytest.mark.parametrize(("chosen", "size"), RULES, ids=str)
def test_push_equals_the_papers_rule(chosen: StochasticGradientPush, size: int) -> None:
    e = paced(size, 11, strategy=chosen, task=exact_task(momentum=0.9))
    plain = Pushing(chosen, size)
    for step in range(11):
        plain.step(step)
    _, sessions = simulated(e)
    torch.testing.assert_close(torch.stack([weights(s) for s in sessions]), plain.z(), rtol=0, atol=1e-12)
    torch.testing.assert_close(push_weights(sessions), plain.w, rtol=0, atol=1e-12)
    engine = run(e.set("steps", 12).set("pace", 0.0), Change(11, "lr", 1e-30), Change(11, "strategy", "DDP"))
    for s in engine:
        torch.testing.assert_close(weights(s), plain.mean(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("text", "size"), [("chain", 4), (UNEVEN, 4), (SHARES, 3)])
def test_mass_is_conserved_and_z_converges_to_the_true_mean_but_x_does_not(text: str, size: int) -> None:
    chosen = StochasticGradientPush(graph=text) if text in PUSHES else StochasticGradientPush(edges=text)
    e, still = paced(size, 6, strategy=chosen, task=exact_task()), Change(6, "lr", 1e-30)
    (_, before), (_, after) = simulated(e), simulated(e.set("steps", 150), still)
    w0, w1 = push_weights(before), push_weights(after)
    x0, x1 = parameters(before) * w0[:, None], parameters(after) * w1[:, None]
    assert w0.sum() == pytest.approx(size, abs=1e-13) and w1.sum() == pytest.approx(size, abs=1e-12)
    torch.testing.assert_close(x1.sum(0), x0.sum(0), rtol=0, atol=1e-12)
    mean = x0.sum(0) / size
    assert (parameters(before) - mean).abs().max() > 1e-2, "they disagree at first"
    torch.testing.assert_close(parameters(after), mean.expand(size, -1), rtol=0, atol=1e-11)
    assert (x1 - mean).abs().max() > 0.05, "the numerators come to multiples of it"
    values, vectors = torch.linalg.eig(matrix(text, size))
    share = vectors[:, (values - 1).abs().argmin()].real
    torch.testing.assert_close(w1, size * share / share.sum(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("chosen", "size"), [(StochasticGradientPush(), 5), (StochasticGradientPush(graph="ring"), 3),
                                              (StochasticGradientPush(graph="complete"), 4)])  # fmt: skip
def test_on_regular_graphs_weights_stay_1(chosen: StochasticGradientPush, size: int) -> None:
    assert [s.state.weight for s in run(experiment(size, 12, strategy=chosen))] == [1.0] * size


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_a_switch_with_uneven_weights_gives_the_true_mean(overlap: int) -> None:
    chosen = StochasticGradientPush(edges=UNEVEN, overlap=overlap)
    e = paced(4, 8, strategy=chosen, task=exact_task(momentum=0.9))
    plain = Pushing(chosen, 4)
    for step in range(8):
        plain.step(step)
    assert (plain.z().mean(0) - plain.mean()).abs().max() > 1e-3, "the mean of the z is something else"
    _, sessions = simulated(e.set("steps", 9), Change(8, "lr", 1e-30), Change(8, "strategy", "DDP"))
    for s in sessions:
        torch.testing.assert_close(weights(s), plain.mean(), rtol=0, atol=1e-13)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


# -- knobs, bytes, errors


CHANGES = (Change(7, "bucket_mb", 0.03), Change(8, "overlap", 1), Change(10, "edges", "0>1 1>2 2>0"),
           Change(12, "bucket_mb", 0.01), Change(13, "every", 3), Change(17, "edges", ""), Change(18, "overlap", 0),
           Change(19, "graph", "chain"), Change(20, "strategy", "DDP"))  # fmt: skip


def test_live_changes_with_messages_in_flight_lose_nothing() -> None:
    """Without learning from step 6 on, later steps only move the same mass."""
    chosen = StochasticGradientPush(edges=SHARES, overlap=3)
    e = paced(3, 21, strategy=chosen, task=exact_task())
    plain = Pushing(chosen, 3)
    for step in range(6):
        plain.buffers.zero_()
        plain.step(step)
    still = Change(6, "lr", 1e-30)
    want = plain.mean()
    for sessions in (simulated(e, still, *CHANGES)[1], run(e.set("pace", 0.0), still, *CHANGES)):
        for s in sessions:
            torch.testing.assert_close(weights(s), want, rtol=0, atol=1e-12)


def test_a_change_applies_to_all_ranks_before_the_same_step_despite_late_messages() -> None:
    sessions = live(experiment(4, 0, pace=4.0, strategy=StochasticGradientPush(overlap=3, every=2)))
    try:
        for k, (path, value) in enumerate([("bucket_mb", 0.03), ("overlap", 0), ("every", 1), ("graph", "chain"),
                                           ("strategy", "LocalSGD")]):  # fmt: skip
            until(lambda k=k: all(s.rank.step > 5 * k + 2 for s in sessions))
            sessions[0].request({"kind": "change", "id": str(k), "path": path, "value": value})
            until(lambda k=k: len(sessions[0].record.noted("change")) > k)
        step = sessions[0].record.noted("change")[4][0]
        until(lambda: all(s.rank.step > step + 2 for s in sessions))
        for s in sessions:
            names = {r[0]: r[2] for r in s.record if r[1] == "step"}
            assert names[step - 1] == "StochasticGradientPush" and names[step] == "LocalSGD"
        sessions[0].request({"kind": "stop"})
        ended(sessions)
        assert {s.phase for s in sessions} == {"stopped"}
    finally:
        for s in sessions:
            s.abort()
            assert s.join(60)


def test_bytes_are_the_model_and_a_weight_per_receiver_and_round() -> None:
    chosen = StochasticGradientPush(edges=UNEVEN, every=3, overlap=2)
    run_ = simulate(paced(4, 12, strategy=chosen))
    nbytes = sum(run_.details("buckets")[-1][2]["nbytes"])
    for r, receivers in enumerate([2, 1, 1, 1]):
        by_step = Counter()
        for step, name, n in comm(run_, r):
            assert re.fullmatch(r"send (bucket \d+|weight) to \d", name)
            by_step[step] += n
        assert by_step == dict.fromkeys((0, 3, 6, 9), receivers * (nbytes + 8))


def test_an_overlap_hides_the_exchange_behind_the_next_step() -> None:
    """Ten buckets of 40 kB at 100 Mbit/s take 32 ms to send, next to 40 ms of compute."""

    def lasts(overlap: int) -> float:
        e = paced(4, 8, pace=40.0, mbit=100.0, task=stack(10, 100), strategy=StochasticGradientPush(overlap=overlap))
        return float(np.median(seconds(simulate(e))[3:]))

    assert lasts(0) == pytest.approx(0.040 + 0.032, rel=1e-4)
    assert lasts(1) == pytest.approx(0.040, rel=1e-4)


def test_it_learns_with_and_without_overlap() -> None:
    held = {}
    for overlap in (0, 2):
        e = paced(4, 60, strategy=StochasticGradientPush(overlap=overlap), eval_every=60)
        found = samples(simulate(e, real=True), "held_out")
        held[overlap] = found[-1] / found[0]
    assert held[0] < 0.5 and held[2] < 0.5


WRONG = [
    ("0>1 1>2", 3, r"not connected: no path leads from rank 1 to rank 0; add an edge such as 1-0"),
    ("0>1 1>5", 3, "no rank 5; there are ranks 0 to 2"),
    ("0.5 0.5; 0.4 0.5", 2, "column 0 adds up to 0.9; every column must add up to 1"),
    ("0 1; 1 0", 2, "rank 0 keeps no share of its value; give it a weight above 0 on the diagonal"),
    ("0>1>2", 3, "must be edges such as"),
]


@pytest.mark.parametrize(("text", "ranks", "words"), WRONG)
def test_an_invalid_graph_raises_knob_error(text: str, ranks: int, words: str) -> None:
    with pytest.raises(KnobError, match=words):
        experiment(ranks, strategy=StochasticGradientPush(edges=text))


def test_it_accepts_a_graph_that_gossip_refuses() -> None:
    uneven = partial(experiment, 3, 4, task=toy(), strategy=StochasticGradientPush(edges=SHARES))
    assert {s.phase for s in run(uneven())} == {"done"}
    with pytest.raises(KnobError, match=r"row 0 adds up to 0\.8"):
        uneven().set("strategy", {"Gossip": {"edges": SHARES}})
