"""TEASQ-Fed against its server's formulas, given the order of arrivals; and what its messages leave of that."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.golden.driven import NEAR, Layers
from tests.golden.problem import SIZE, Problem
from tests.golden.teasq_fed import Knobs, teasq_fed
from tests.ranks import experiment
from workbench import simulate
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link, Slow
from workbench.run import Run
from workbench.settings import Change
from workbench.strategies.teasq_fed import TEASQFed
from workbench.tasks import Task

pytestmark = pytest.mark.ranks

PLAIN = TEASQFed(density=1.0, bits=32)


def trained(problem: Problem, strategy: TEASQFed, ranks: int, lr: float, steps: int = 8) -> tuple[np.ndarray, Run]:
    """The model that DDP begins with when it takes over, the same on all ranks, and the record."""
    began: dict[int, np.ndarray] = {}

    def data(rank: int, ranks: int, seed: int) -> list[Any]:
        who = torch.tensor([rank, ranks])
        pairs = zip(problem.x[rank], problem.y[rank], strict=True)
        return [(torch.from_numpy(x), torch.from_numpy(y), who) for x, y in pairs]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, (rank, of) = batch
        if int(of) != problem.ranks or strategy.clients == 1:
            now = np.concatenate([p.detach().numpy().reshape(SIZE) for p in model.parameters()])
            began.setdefault(int(rank), now)
        return (model(x) - y).square().sum(1).mean() / 2

    task = Task(model=partial(Layers, problem.start), data=data, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1))
    fabric = Fabric(link=Link(bandwidth=1000.0), faults=(Slow(rank=1, factor=3.5),) if ranks > 1 else ())
    e = Experiment(ranks=ranks, steps=steps, task=task, strategy=strategy, eval_every=0, pace=5.0, lr=lr, fabric=fabric)
    run = simulate(e.checked(), changes=[Change(steps - 1, "strategy", "DDP")], real=True)
    assert len(began) == ranks and all(np.array_equal(one, began[0]) for one in began.values())
    return began[0], run


def sampled(run: Run, name: str) -> list[int]:
    found = run.samples[(run.samples["name"] == name) & (run.samples["rank"] == 0)]
    return found.sort_values("t", kind="stable")["value"].astype(int).to_list()


@pytest.mark.parametrize(("ranks", "knobs"), [
    (3, Knobs(clients=2, share=1.0, cache=2, local=3, mixing=0.8, staleness=0.5, proximal=0.0)),
    (3, Knobs(clients=2, share=1.0, cache=1, local=2, mixing=0.6, staleness=1.0, proximal=0.1)),  # this is FedAsync
    (4, Knobs(clients=2, share=0.25, cache=3, local=2, mixing=0.5, staleness=2.0, proximal=0.5)),  # two at work
    (3, Knobs(clients=3, share=0.1, cache=4, local=1, mixing=1.0, staleness=0.0, proximal=5.0)),  # one at work
])  # fmt: skip
def test_given_the_order_of_arrivals_it_is_its_papers_server(ranks: int, knobs: Knobs) -> None:
    problem, lr = Problem(ranks * knobs.clients), 0.05
    got, run = trained(problem, replace(PLAIN, **knobs._asdict()), ranks, lr)
    want, stale, most = teasq_fed(problem, lr, knobs, sampled(run, "recv client"))
    assert np.abs(want - problem.start).max() > 0.1
    assert np.abs(got - want).max() <= NEAR * np.abs(want).max(), "Dense crosses as it is, in float64"
    early = len(stale) % knobs.cache
    said = f"the server mixed in {early} update{'s' * (early > 1)} without waiting for {knobs.cache}"
    assert [d["text"] for _, _, d in run.details("left")] == [said] * (early > 0)
    assert sampled(run, "staleness") == stale and len(stale) > 12
    assert max(sampled(run, "active")) == most
    assert knobs.cache > 3 or max(stale) > 0, "somebody is late"


def test_an_update_counts_for_as_much_as_it_was_trained_on() -> None:
    knobs = Knobs(clients=2, share=1.0, cache=3, local=10, mixing=0.8, staleness=0.5, proximal=0.1)
    problem, chosen = Problem(6), replace(PLAIN, **knobs._asdict(), deadline=12.0, weighted=True)
    got, run = trained(problem, chosen, 3, 0.05)
    order = sampled(run, "recv client")
    want, _, _ = teasq_fed(problem, 0.05, knobs, order, {0: 3, 1: 1, 2: 3})
    assert np.abs(got - want).max() <= NEAR * np.abs(want).max()
    plain, again = trained(problem, replace(chosen, weighted=False), 3, 0.05)
    assert sampled(again, "recv client") == order and np.abs(plain - got).max() > 1e-3


def test_what_crosses_is_a_fraction_of_the_model_and_what_is_left_out_comes_later() -> None:
    problem = Problem(6)
    want, dense = trained(problem, PLAIN, 3, 0.05)
    got, run = trained(problem, TEASQFed(), 3, 0.05)
    spans = [r.spans[(r.spans.lane == "comm") & r.spans.name.str.contains("update|model")] for r in (run, dense)]
    sent = [int(one.nbytes.sum()) for one in spans]
    assert sent[0] < sent[1] / 5, "float64: a quarter of 8 bytes became 4 + 1 and a norm for 64"
    moved = np.linalg.norm(want - problem.start)
    assert 0.3 * moved < np.linalg.norm(got - problem.start), "it moves, though most entries are left out"
    assert (got - problem.start) @ (want - problem.start) > 0.5 * moved * np.linalg.norm(got - problem.start)


def test_its_bytes_are_known_from_sizes_alone() -> None:
    e = experiment(3, 6, strategy=TEASQFed(relax=2), pace=5.0)
    sent = []
    for real in (True, False):
        spans = simulate(e, real=real).spans
        spans = spans[spans.lane.isin(["comm", "background"])]
        sent.append(sorted(zip(spans["rank"], spans.name, spans.nbytes, strict=True)))
    buckets, headings = 2 * 2, 3  # each way; ask, task and push
    assert sent[0] == sent[1] and len(sent[0]) == 2 * 6 * (buckets + headings), "rank 0 tells itself for nothing"


def test_after_so_many_mixings_twice_as_many_entries_cross() -> None:
    problem = Problem(2)
    _, run = trained(problem, TEASQFed(clients=1, cache=1, density=0.1, bits=32, relax=3), 2, 0.05, steps=12)
    spans = run.spans[(run.spans.lane == "comm") & run.spans.name.str.contains("update") & (run.spans["rank"] == 1)]
    sizes = spans.sort_values("asked").nbytes.to_list()
    pair, number = 12, 8  # bytes of an entry with its index, and of one where all cross
    assert sizes[:2] == [256 * pair, 512 * pair] and sizes[-1] == 2560 * number


def test_alone_without_a_pull_it_is_the_optimizer() -> None:
    problem = Problem(1)
    alone = replace(PLAIN, clients=1, cache=1, local=1, mixing=1.0, proximal=0.0)
    task = trained_alone(problem, alone)
    x = problem.start.copy()
    for step in range(9):
        np.testing.assert_allclose(task[step], x, rtol=1e-9, atol=1e-12)
        x = x - 0.05 * problem.grad(0, step, x)


def trained_alone(problem: Problem, strategy: TEASQFed) -> list[np.ndarray]:
    """The parameters as each forward finds them."""
    seen: list[np.ndarray] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(np.concatenate([p.detach().numpy().reshape(SIZE) for p in model.parameters()]))
        return (model(batch[0]) - batch[1]).square().sum(1).mean() / 2

    def data(rank: int, ranks: int, seed: int) -> list[Any]:
        return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in zip(problem.x[0], problem.y[0], strict=True)]

    task = Task(model=partial(Layers, problem.start), data=data, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.05))
    simulate(Experiment(ranks=1, steps=9, task=task, strategy=strategy, eval_every=0, pace=5.0).checked(), real=True)
    return seen


def test_a_deadline_ends_a_slow_clients_task() -> None:
    """A batch takes 5 ms with its update, and 17.5 ms on rank 1: after 12 ms three of them have begun, or one."""
    _, run = trained(Problem(4), replace(PLAIN, local=10, deadline=12.0), 2, 0.05)
    rows = run.samples[run.samples["name"] == "batches"]
    assert [sorted(set(rows[rows["rank"] == r]["value"])) for r in range(2)] == [[3.0], [1.0]]
