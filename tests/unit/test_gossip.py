"""Tests gossip: matrices, speed of agreement, partners, and changes that reach all ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.ranks import batch, ended, experiment, live, mse, run, toy, weights
from tests.unit.test_engine_control import until
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, Gossip
from workbench.strategies._graph import GRAPHS, bits, hops, mixing_round, neighbours, refused

pytestmark = pytest.mark.ranks

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16]
POWERS, EVEN = {1, 2, 4, 8, 16}, {1, 2, 4, 6, 8, 12, 16}
FIT = {"hypercube": POWERS, "butterfly": POWERS, "shift_one": EVEN, "torus": {1, 4, 6, 8, 9, 12, 16}}  # sizes
CASES = [(graph, size) for graph in GRAPHS for size in SIZES if size in FIT.get(graph, SIZES)]


def matrix(graph: str, size: int, number: int = 0, mix: float = 1.0) -> torch.Tensor:
    """Returns the weights of every rank's sources in one round: (size, size)."""
    w = torch.zeros(size, size, dtype=torch.float64)
    for index in range(size):
        for source, share in mixing_round(graph, mix, size, index, number).shares.items():
            w[index, source] = share
    return w


def disagreement(w: torch.Tensor) -> float:
    """Returns the factor by which the distance from the mean shrinks, from the worst start."""
    return float(torch.linalg.matrix_norm(w - 1.0 / len(w), 2))


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_takes_exactly_the_sizes_that_it_can_connect(graph: str) -> None:
    assert [size for size in SIZES if not refused(graph, size)] == sorted(FIT.get(graph, SIZES))


@pytest.mark.parametrize(("graph", "size"), CASES)
def test_matrices_are_doubly_stochastic_and_every_message_is_expected(graph: str, size: int) -> None:
    product = torch.eye(size, dtype=torch.float64)
    for number in range(bits(size)):
        w = matrix(graph, size, number, mix=0.7)
        torch.testing.assert_close(w.sum(0), torch.ones(size).double())
        torch.testing.assert_close(w.sum(1), torch.ones(size).double())
        assert bool((w >= 0).all())
        product = matrix(graph, size, number) @ product
        sends = {(i, to) for i in range(size) for to in mixing_round(graph, 1.0, size, i, number).to}
        expects = {(s, i) for i in range(size) for s in mixing_round(graph, 1.0, size, i, number).shares if s != i}
        assert sends == expects
    assert disagreement(product) < 1 - 1e-9, "connected"


def test_on_a_chain_the_larger_degree_of_the_two_counts() -> None:
    """Ends have one neighbour and other ranks two. With the smaller degree an end would take 1/2."""
    want = [[2, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 2]]
    torch.testing.assert_close(matrix("chain", 4), torch.tensor(want).double() / 3, rtol=0, atol=1e-15)
    two = torch.tensor([[2, 1, 0], [1, 1, 1], [0, 1, 2]]).double() / 3
    torch.testing.assert_close(matrix("chain", 3, mix=0.5), (torch.eye(3).double() + two) / 2, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("graph", "size", "rounds", "left"), [
    ("ring", 2, 1, 0.0), ("ring", 3, 1, 0.0), ("ring", 4, 1, 1 / 3), ("ring", 5, 1, 0.5393), ("ring", 8, 1, 0.8047),
    ("complete", 7, 1, 0.0), ("exponential", 4, 2, 0.0), ("exponential", 8, 3, 0.0), ("hypercube", 8, 1, 0.5),
])  # fmt: skip
def test_disagreement_shrinks_by_the_tables_factor(graph: str, size: int, rounds: int, left: float) -> None:
    product = torch.eye(size, dtype=torch.float64)
    for number in range(rounds):
        product = matrix(graph, size, number) @ product
    assert disagreement(product) == pytest.approx(left, abs=1e-4)


@pytest.mark.parametrize(("graph", "size"), CASES)
def test_hops_is_the_longest_spreading_time_from_rank_0(graph: str, size: int) -> None:
    longest = 0
    for first in range(bits(size)):
        know, number = {0}, first
        while len(know) < size:
            know |= {to for i in know for to in mixing_round(graph, 1.0, size, i, number).to}
            number += 1
        longest = max(longest, number - first)
    assert longest <= hops(graph, size) <= max(1, longest)


def test_impossible_graphs_are_refused_with_a_reason() -> None:
    with pytest.raises(KnobError, match="hypercube needs a power of two, not 6 ranks; use 4"):
        experiment(6, strategy=Gossip(graph="hypercube"))
    with pytest.raises(KnobError, match="rectangle"):
        experiment(7, strategy=Gossip(graph="torus"))


RATES = [("ring", 4, 1 / 3), ("hypercube", 4, 1 / 3), ("ring", 5, 0.5393)]


@pytest.mark.parametrize(("graph", "ranks", "factor"), RATES)
def test_real_ranks_converge_by_the_second_eigenvalue(graph: str, ranks: int, factor: float) -> None:
    """Learning stops at step 6. Each later evaluation's drift shows one more round."""
    plain = toy(partial(torch.optim.SGD, lr=0.3))
    chosen = experiment(ranks, 11, task=plain, strategy=Gossip(graph=graph), eval_every=1)
    sessions = run(chosen, Change(6, "lr", 1e-30))
    drift = [[v for step, name, _, v in s.record.samples if name == "drift" and step >= 6] for s in sessions]
    total = torch.tensor(drift).double().square().sum(0).sqrt()
    assert total[0] > 1e-3, "they disagree at first"
    ratios = total[1:] / total[:-1]
    if (graph == "ring" and ranks == 4) or graph == "hypercube":
        torch.testing.assert_close(ratios, torch.full_like(ratios, factor), rtol=1e-2, atol=0)
    assert bool((ratios <= factor * 1.01).all())


def test_mixing_keeps_the_mean() -> None:
    def mean(*changes: Change) -> torch.Tensor:
        plain = toy(partial(torch.optim.SGD, lr=0.1))
        sessions = run(experiment(4, 9, task=plain, strategy=Gossip(graph="chain")), Change(3, "lr", 1e-30), *changes)
        return torch.stack([weights(s) for s in sessions]).mean(0)

    torch.testing.assert_close(mean(), mean(Change(4, "strategy.mix", 0.0)), rtol=0, atol=3e-7)


@pytest.mark.parametrize(("graph", "ranks"), [("ring", 5), ("chain", 4), ("exponential", 8), ("torus", 6)])
def test_ranks_connect_to_their_neighbours_only(graph: str, ranks: int) -> None:
    steps = 7
    sessions = run(experiment(ranks, steps, strategy=Gossip(graph=graph)))
    for r, s in enumerate(sessions):
        rounds = [set(mixing_round(graph, 1.0, ranks, r, k).to) for k in range(steps)]
        assert s.training.mailbox.connected_ranks == set().union(*rounds)
        if graph != "exponential":
            assert s.training.mailbox.connected_ranks == neighbours(graph, ranks, r)
        assert not [name for _, name, _ in s.record.comm() if "send" not in name], "no collective"


@pytest.mark.parametrize("graph", ["ring", "exponential", "chain"])
def test_a_change_acts_before_the_same_step_on_all_ranks(graph: str) -> None:
    sessions = live(experiment(5, 0, pace=10.0, strategy=Gossip(graph=graph)))
    try:
        for k, value in enumerate([0.01, 0.02, 0.03]):
            until(lambda k=k: all(s.rank.step > 5 * k + 2 for s in sessions))
            sessions[0].request({"kind": "change", "id": str(k), "path": "bucket_mb", "value": 0.01 + value})
            until(lambda k=k: len(sessions[0].record.noted("change")) > k)
        sessions[0].request({"kind": "change", "id": "out", "path": "strategy", "value": "DDP"})
        until(lambda: len(sessions[0].record.noted("change")) > 3)
        step = sessions[0].record.noted("change")[3][0]
        until(lambda: all(s.rank.step > step + 2 for s in sessions))
        for s in sessions:
            names = {r[0]: r[2] for r in s.record if r[1] == "step"}
            assert names[step - 1] == "Gossip" and names[step] == "DDP"
        sessions[0].request({"kind": "pause"})
        until(lambda: all(s.phase == "paused" for s in sessions))
        assert len({hash_model_state(s.layout) for s in sessions}) == 1
        sessions[0].request({"kind": "change", "id": "in", "path": "strategy", "value": "Gossip"})
        sessions[0].request({"kind": "step", "n": 3})
        until(lambda: all(s.phase == "paused" and not s.training.credit and s.rank.step > step + 4 for s in sessions))
        assert len({s.rank.step for s in sessions}) == 1
        sessions[0].request({"kind": "stop"})
        ended(sessions)
        assert {s.phase for s in sessions} == {"stopped"} and len({s.rank.step for s in sessions}) == 1
    finally:
        for s in sessions:
            s.abort()
            assert s.join(60)


def test_a_rank_that_fails_frees_its_neighbours() -> None:
    def loss(model: torch.nn.Module, pair: tuple) -> torch.Tensor:
        if torch.equal(pair[0], poison):
            raise ValueError("a bad example")
        return mse(model, pair)

    poison = batch(2, 6, 0)[0]
    sessions = live(experiment(5, 50, task=toy(loss=loss), strategy=Gossip()))
    ended(sessions)
    causes = [s.error for s in sessions if s.error and not s.error["consequence"]]
    assert [(e["rank"], e["step"], e["text"]) for e in causes] == [(2, 6, "a bad example")]


def test_switching_in_and_out_without_learning_changes_nothing() -> None:
    still = [Change(3, "lr", 1e-30), Change(4, "strategy", "Gossip"), Change(8, "strategy", "DDP")]
    stay = run(experiment(3, 10, strategy=DDP()), still[0])
    went = run(experiment(3, 10, strategy=DDP()), *still)
    torch.testing.assert_close(weights(went[0]), weights(stay[0]), rtol=1e-6, atol=1e-7)
