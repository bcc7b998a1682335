"""DABMD against its paper: unlike speeds, both mirror maps, several graphs, and the pooled gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.golden.dabmd import dabmd, exponential, metropolis
from tests.golden.driven import NEAR, Layers
from tests.golden.problem import LAYERS, NUMEL, SIZE, Problem, gradient
from workbench import simulate
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Slow
from workbench.settings import Change, KnobError
from workbench.strategies.dabmd import DABMD
from workbench.tasks import Task

pytestmark = pytest.mark.ranks

ROUNDS = 12
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def on_simplex(problem: Problem) -> Problem:
    """It begins above 0, each layer with a sum of its own."""
    rows = np.exp(problem.start.reshape(LAYERS, SIZE))
    problem.start = (rows / rows.sum(1, keepdims=True) * [[30.0], [80.0], [1.0], [200.0]]).reshape(NUMEL)
    return problem


def task(problem: Problem, seen: list[list[np.ndarray]]) -> Task:
    def data(rank: int, ranks: int, seed: int) -> list[Any]:
        who = torch.full((problem.x.shape[2],), rank)
        pairs = zip(problem.x[rank], problem.y[rank], strict=True)
        return [(torch.from_numpy(x), torch.from_numpy(y), who) for x, y in pairs]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, who = batch
        seen[int(who[0])].append(np.concatenate([p.detach().numpy().reshape(SIZE) for p in model.parameters()]))
        return (model(x) - y).square().sum(1).mean() / 2

    return Task(model=partial(Layers, problem.start), data=data, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1))


def rounds(problem: Problem, strategy: DABMD, lr: float, slow: float = 3.0,
           bucket_mb: float = 0.01) -> tuple[list[int], np.ndarray]:  # fmt: skip
    """How many batches each rank takes in a round, and (ROUNDS + 1, ranks, NUMEL) as each round finds the parameters.

    A batch takes 4.5 ms and on rank 1 `slow` times as long.
    """
    seen: list[list[np.ndarray]] = [[] for _ in range(problem.ranks)]
    faults = (Slow(rank=1, factor=slow),) if slow > 1 else ()
    e = Experiment(ranks=problem.ranks, steps=ROUNDS + 1, task=task(problem, seen), strategy=strategy,
                   bucket_mb=bucket_mb, eval_every=0, pace=5.0, lr=lr, fabric=Fabric(faults=faults))  # fmt: skip
    run = simulate(e.checked(), real=True)
    found = run.samples[run.samples["name"] == "batches"]
    took = [sorted(set(found[found["rank"] == r]["value"])) for r in range(problem.ranks)]
    assert all(len(one) == 1 for one in took), "the virtual clock is even"
    batches = [int(one[0]) for one in took]
    return batches, np.stack([np.stack(rows[::b][: ROUNDS + 1]) for rows, b in zip(seen, batches, strict=True)], axis=1)


@pytest.mark.parametrize("mirror", ["euclidean", "entropic"])
@pytest.mark.parametrize(("graph", "edges", "mixings", "weighted"), [
    ("ring", RING, 1, True), ("ring", RING, 3, True), ("chain", RING[:3], 2, True), ("chain", RING[:3], 1, False),
    ("complete", [*RING, (0, 2), (1, 3)], 1, True),
])  # fmt: skip
def test_it_is_its_papers_algorithm(mirror: str, graph: str, edges: Any, mixings: int, weighted: bool) -> None:
    problem = Problem(4) if mirror == "euclidean" else on_simplex(Problem(4))
    lr = 0.05
    chosen = DABMD(window=20.0, mirror=mirror, graph=graph, rounds=mixings, weighted=weighted)
    batches, got = rounds(problem, chosen, lr)
    assert batches == [4, 1, 4, 4], "13.5 ms once, or 4.5 ms four times, in 20 ms"
    want = dabmd(problem, lr, batches, [metropolis(4, edges)], mixings, mirror, weighted, ROUNDS)
    assert np.abs(want[-1] - want[0]).max() > 0.1
    assert np.abs(got - want).max() <= NEAR * np.abs(want).max()
    if mirror == "entropic":
        assert (got > 0).all()
        sums = got.reshape(*got.shape[:2], LAYERS, SIZE).sum(-1)
        np.testing.assert_allclose(sums, np.broadcast_to([30.0, 80.0, 1.0, 200.0], sums.shape), rtol=1e-12)


@pytest.mark.parametrize("mirror", ["euclidean", "entropic"])
def test_mixing_may_come_first_and_steps_may_shrink(mirror: str) -> None:
    problem = Problem(4) if mirror == "euclidean" else on_simplex(Problem(4))
    chosen = DABMD(window=20.0, mirror=mirror, rounds=2, order="mix, step", decay=0.5)
    batches, got = rounds(problem, chosen, 0.05)
    want = dabmd(problem, 0.05, batches, [metropolis(4, RING)], 2, mirror, True, ROUNDS, first=True, decay=0.5)
    assert np.abs(want[-1] - want[0]).max() > 0.05
    assert np.abs(got - want).max() <= NEAR * np.abs(want).max()


def test_on_a_complete_graph_it_steps_by_the_mean_gradient_of_all_examples() -> None:
    problem = Problem(3)
    batches, got = rounds(problem, DABMD(window=20.0, graph="complete"), 0.1)
    assert batches == [4, 1, 4]
    x = problem.start
    every = [gradient(problem.x[r, t], problem.y[r, t], x) for r in range(3) for t in range(batches[r])]
    np.testing.assert_allclose(got[1, 0], x - 0.1 * np.mean(every, axis=0), rtol=1e-12)
    _, plain = rounds(problem, DABMD(window=20.0, graph="complete", weighted=False), 0.1)
    assert np.abs(plain[1, 0] - got[1, 0]).max() > 1e-3, "unweighted, a slow rank counts for more than it has seen"


def test_on_a_graph_that_changes_every_mixing_goes_on_where_the_last_was() -> None:
    problem = Problem(5)
    batches, got = rounds(problem, DABMD(window=20.0, graph="exponential", rounds=2), 0.05)
    want = dabmd(problem, 0.05, batches, exponential(5), 2, "euclidean", True, ROUNDS)
    assert np.abs(got - want).max() <= NEAR * np.abs(want).max()


def test_each_parameter_keeps_its_sum_whatever_shares_its_bucket() -> None:
    problem, chosen = on_simplex(Problem(2)), DABMD(window=20.0, mirror="entropic", graph="complete")
    (_, apart), (_, joined) = (rounds(problem, chosen, 0.05, bucket_mb=size) for size in (0.01, 1.0))
    np.testing.assert_allclose(joined, apart, rtol=1e-12)


@pytest.mark.parametrize("batches", [1, 3, 5, 7, 11])
def test_a_batch_that_ends_at_the_deadline_is_in_time(batches: int) -> None:
    assert rounds(Problem(2), DABMD(window=4.5 * batches), 0.1)[0][0] == batches


def test_it_takes_the_first_batch_however_slow_and_no_more_than_it_is_allowed() -> None:
    assert rounds(Problem(2), DABMD(window=20.0, most=3), 0.1, slow=20.0)[0] == [3, 1]


def test_parameters_below_zero_are_refused_in_words_at_the_start_and_live() -> None:
    problem, seen = Problem(2), [[], []]
    e = Experiment(ranks=2, steps=4, task=task(problem, seen), eval_every=0, pace=5.0)
    with pytest.raises(KnobError, match=r"must all be above 0, and layers\.\d\.weight has -.*mirror='euclidean'"):
        simulate(e.set("strategy", DABMD(mirror="entropic")), real=True)
    run = simulate(e.set("strategy", DABMD()), changes=[Change(2, "strategy.mirror", "entropic")], real=True)
    (refused,) = run.details("refused")
    assert "must all be above 0" in refused[2]["reason"]
    alone = DABMD(mirror="entropic").refuses_values({"a": torch.ones(2), "b": torch.tensor([1.0, 0.0])})
    assert "must all be above 0, and b has 0" in (alone or ""), "0 has no logarithm"
