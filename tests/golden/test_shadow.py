"""ShadowMA, ShadowBMUF and ShadowEASGD against their formulas, given when each rank steps, looks and is corrected."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.golden.driven import NEAR, Layers
from tests.golden.problem import LAYERS, SIZE, Problem
from tests.golden.shadow import Event, bmuf, easgd
from tests.ranks import placed, together
from workbench import simulate
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link, Slow
from workbench.rank import Bucket, Rank
from workbench.run import Run
from workbench.strategies import ShadowBMUF, ShadowEASGD, ShadowMA
from workbench.tasks import Task

pytestmark = pytest.mark.ranks

LR, STEPS = 0.05, 24


def trained(problem: Problem, strategy: Any, mbit: float = 60.0) -> tuple[list[list[np.ndarray]], Run]:
    """Returns the parameters at each rank's forwards, and the run. A step of rank 1 takes 1.5 times as long."""
    seen: list[list[np.ndarray]] = [[] for _ in range(problem.ranks)]

    def data(rank: int, ranks: int, seed: int) -> list[Any]:
        pairs = zip(problem.x[rank], problem.y[rank], strict=True)
        return [(torch.from_numpy(x), torch.from_numpy(y), rank) for x, y in pairs]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, rank = batch
        seen[rank].append(np.concatenate([p.detach().numpy().reshape(SIZE) for p in model.parameters()]))
        return (model(x) - y).square().sum(1).mean() / 2

    task = Task(model=partial(Layers, problem.start), data=data, loss=loss, optimizer=partial(torch.optim.SGD, lr=LR))
    fabric = Fabric(link=Link(bandwidth=mbit, latency=0.3), faults=(Slow(rank=1, factor=1.53),)[: problem.ranks - 1])
    e = Experiment(ranks=problem.ranks, steps=STEPS, task=task, strategy=strategy, eval_every=0, pace=5.0, bucket_mb=1,
                   fabric=fabric)  # fmt: skip
    return seen, simulate(e.checked(), real=True)


def happened(run: Run, looked: str) -> list[Event]:
    """Returns the events of a run. looked: how the name of a shadow's first transfer of copied parameters begins"""
    spans, samples, events = run.spans, run.samples, []
    for span in spans[spans.lane == "compute"].itertuples():
        if span.name == "forward":
            events.append(Event(span.t0, 1, "forward", span.rank))
        elif span.name == "update":
            events.append(Event(span.t0, 0, "update", span.rank))
    looks = spans[spans.name.str.startswith(looked) & (spans.lane == "comm")]
    events += [Event(span.asked, 5, "look", span.rank) for span in looks.itertuples()]
    gaps = samples[samples["name"] == "sync gap"]
    events += [Event(sample.t, 4, "correct", sample.rank) for sample in gaps.itertuples()]
    return events


def agree(got: list[list[np.ndarray]], want: list[list[np.ndarray]]) -> None:
    for rank, (mine, its) in enumerate(zip(got, want, strict=True)):
        assert len(mine) >= STEPS / 2 and np.abs(its[-1] - its[0]).max() > 0.1
        for step, (x, y) in enumerate(zip(mine, its, strict=True)):
            assert np.abs(x - y).max() <= NEAR * np.abs(y).max(), (rank, step)


@pytest.mark.parametrize(("alpha", "eta", "zeta"), [(1.0, 0.5, 1.0), (0.4, 0.8, 0.7), (0.7, 0.0, 1.0)])
def test_shadow_bmuf_applies_block_momentum_in_the_background(alpha: float, eta: float, zeta: float) -> None:
    problem = Problem(3)
    seen, run = trained(problem, ShadowBMUF(alpha=alpha, eta=eta, zeta=zeta))
    want = bmuf(problem, LR, alpha, eta, zeta, happened(run, "all_reduce shadow"))
    agree(seen, want)


def test_shadow_ma_is_shadow_bmuf_without_momentum() -> None:
    problem = Problem(3)
    seen, run = trained(problem, ShadowMA(alpha=0.7))
    agree(seen, bmuf(problem, LR, 0.7, 0.0, 1.0, happened(run, "all_reduce shadow")))


@pytest.mark.parametrize(("servers", "alpha"), [(1, 0.5), (1, 0.2), (0, 0.6)])
def test_shadow_easgd_meets_the_centre_one_rank_at_a_time(servers: int, alpha: float) -> None:
    problem = Problem(4 if servers else 3)
    seen, run = trained(problem, ShadowEASGD(servers=servers, alpha=alpha), mbit=200.0)
    server = problem.ranks - 1 if servers else 0
    answers = run.spans[run.spans.name.str.startswith("send centre ")].sort_values("asked", kind="stable")
    met = [int(name.split()[-1]) for name in answers.name]
    events = happened(run, f"send turn to {server}")
    events += [Event(t, 3, "meet", who) for t, who in zip(answers.asked, met, strict=True)]
    if not servers:  # rank 0 has the centre: it meets it after as many meetings of other ranks as there are such ranks
        own = answers.asked[problem.ranks - 2 :: problem.ranks - 1]
        events += [Event(t, 6 + k, what, 0) for t in own for k, what in enumerate(("look", "meet", "correct"))]
        met += [0] * len(own)
    want = easgd(problem, LR, alpha, events)
    agree(seen[: problem.ranks - servers], want[: problem.ranks - servers])
    assert len(set(met)) == problem.ranks - servers and len(met) > 12


def test_the_sync_gap_counts_the_steps_of_a_round() -> None:
    problem = Problem(3)
    gaps = []
    for mbit in (200.0, 5.0):
        _, run = trained(problem, ShadowMA(), mbit)
        samples = run.samples[(run.samples["name"] == "sync gap") & (run.samples["rank"] == 0)]["value"]
        assert STEPS - 8 <= samples.sum() <= STEPS
        gaps.append(samples.iloc[1:-1].median())
    assert gaps[0] < gaps[1] / 2


@pytest.mark.parametrize("strategy", [ShadowMA(), ShadowBMUF(), ShadowEASGD(servers=1)], ids=str)
def test_a_round_frees_its_buffers(strategy: Any) -> None:
    _, run = trained(Problem(3), strategy)
    held = run.samples[run.samples["name"] == "memory buffers in flight"]["value"]
    assert 0 < held.max() < 3 * 8 * LAYERS * SIZE, "a copy of the model, its mean, and a message"


def standing(strategy: Any, start: list[float], at: list[list[float]]) -> tuple[list[Rank], list[Bucket], list[Any]]:
    """Returns ranks that began at `start` and stand at `at`, with their states. Their backgrounds make one round."""
    ranks, buckets, states = [], [], []
    for index, own in enumerate(at):
        rank, bucket = Rank(index, len(at)), Bucket(0, torch.tensor(start), tuple(placed((len(start),))), 0)
        rank.role = "trainer" if strategy.trains(index, len(at)) else "server"
        rounds = iter([1, 0])

        async def params(bucket: Bucket = bucket) -> list[Bucket]:
            return [bucket]

        async def again(*_: Any, rounds: Any = rounds, **__: Any) -> int:
            return next(rounds)

        rank.params, rank.again = params, again  # type: ignore[method-assign, assignment]
        states.append(strategy.init(rank, [bucket]))
        bucket.data.copy_(torch.tensor(own))
        ranks.append(rank)
        buckets.append(bucket)
    return ranks, buckets, states


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_leaving_lets_all_trainers_meet_the_centre_once_more(servers: int) -> None:
    at = [[4.0, 0.0], [2.0, 6.0], *[[1.0, 1.0]] * servers]
    strategy = ShadowEASGD(servers=servers, alpha=0.25)
    ranks, buckets, states = standing(strategy, [1.0, 1.0], at)
    for _ in range(2):  # the second time all ranks are at the centre, and nothing moves
        together([strategy.leave(*each) for each in zip(ranks, states, strict=True)])
        assert [bucket.data.tolist() for bucket in buckets] == [[1.5, 1.5]] * len(at), "3/4 of 1 and 1/4 of 3"


@pytest.mark.parametrize(("strategy", "common"), [
    (ShadowMA(alpha=0.5), [3.0, 3.0]), (ShadowBMUF(alpha=0.5, zeta=0.5), [2.0, 2.0]),
    (ShadowEASGD(servers=1), [1.0, 1.0]),
], ids=str)  # fmt: skip
def test_evaluation_uses_the_common_model_and_no_replica(strategy: Any, common: list[float]) -> None:
    ranks, buckets, states = standing(strategy, [1.0, 1.0], [[4.0, 0.0], [2.0, 6.0]])
    if not isinstance(strategy, ShadowEASGD):
        together([strategy.background(*each) for each in zip(ranks, states, strict=True)])
    for known in together([strategy.known(*each) for each in zip(ranks, states, strict=True)]):
        assert [bucket.data.tolist() for bucket in known] == [common]
    assert buckets[0].data.tolist() != buckets[1].data.tolist()
