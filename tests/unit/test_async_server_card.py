"""Tests AsyncServer against plain references: staleness, stability, server momentum, several servers."""

from __future__ import annotations

from functools import partial
from math import pi, sin
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import batch, experiment, run, toy, weights
from tests.sim.virtual import paced, rows, samples, seconds
from tests.unit.test_backup_workers import sessions as sessions
from workbench import simulate
from workbench.fabric import Noisy, Slow
from workbench.run import Run
from workbench.settings import Change
from workbench.sim.rank.session import Session
from workbench.strategies import DDP, AsyncServer, SyncServer

pytestmark = pytest.mark.ranks

CURVED = 2.0  # h of f(x) = h x^2 / 2


class Point(torch.nn.Module):
    """One number that begins at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))


def parabola(lr: float) -> Any:
    return toy(
        partial(torch.optim.SGD, lr=lr), model=Point, loss=lambda m, _: 0.5 * CURVED * (m.x**2).sum(), evaluate=None,
        data=lambda rank, ranks, seed: [torch.zeros(1)],
    )  # fmt: skip


def round_robin(ranks: int, steps: int, lr: float, weight: str) -> Run:
    """All ranks are equally fast, so their pushes come in turn."""
    e = paced(ranks, steps, strategy=AsyncServer(weight=weight), task=parabola(lr), lr=lr, mbit=0)
    return simulate(e, real=True)


def delayed(ranks: int, steps: int, rates: Any) -> np.ndarray:
    """Plain delayed gradient descent, x <- x - rate(k) h x[k - delay]. Returns the loss of each push."""
    xs = [1.0]
    for k in range(ranks * steps):
        xs.append(xs[-1] - rates(k) * CURVED * xs[max(0, k - ranks + 1)])
    return np.array([0.5 * CURVED * xs[max(0, k - ranks + 1)] ** 2 for k in range(ranks * steps)])


def losses(done: Run, ranks: int) -> np.ndarray:
    """Returns the losses by push, in turn."""
    return np.stack([samples(done, "loss", r) for r in range(ranks)], 1).reshape(-1)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_pushes_in_turn_are_stale_by_the_number_of_other_ranks(ranks: int) -> None:
    done = simulate(paced(ranks, 12, strategy=AsyncServer(), mbit=0))
    for r in range(ranks):
        assert samples(done, "staleness", r).tolist() == [r] + [ranks - 1] * 11


@pytest.mark.parametrize(("ranks", "edge"), [(1, 2.0), (2, 1.0), (4, 0.4450), (8, 0.2091)])
def test_with_a_constant_delay_it_is_stable_up_to_the_exact_edge(ranks: int, edge: float) -> None:
    delay, steps = ranks - 1, 240
    assert 2 * sin(pi / (2 * (2 * delay + 1))) == pytest.approx(edge, abs=1e-4)
    for times, grows in ((0.97, False), (1.03, True)):
        lr = times * 2 * sin(pi / (2 * (2 * delay + 1))) / CURVED
        seen = losses(round_robin(ranks, steps, lr, "sum"), ranks)
        np.testing.assert_allclose(seen[: 10 * ranks], delayed(ranks, 10, lambda k, lr=lr: lr), rtol=1e-9)
        early, late = seen[len(seen) // 10 : len(seen) // 4].max(), seen[-len(seen) // 10 :].max()
        assert late > 20 * early if grows else late < early / 20


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_staleness_weights_divide_the_rate_by_the_staleness(ranks: int) -> None:
    lr = 0.3
    seen = losses(round_robin(ranks, 30, lr, "staleness"), ranks)
    np.testing.assert_allclose(seen, delayed(ranks, 30, lambda k: lr / max(1, min(k, ranks - 1))), rtol=1e-9)
    other = losses(round_robin(ranks, 30, lr, "sum"), ranks)
    assert ranks == 2 or not np.allclose(seen, other)


def test_one_rank_is_the_plain_optimizer() -> None:
    (session,), (want,) = (run(experiment(1, 20, strategy=s)) for s in (AsyncServer(), DDP()))
    torch.testing.assert_close(weights(session), weights(want), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_the_version_is_the_number_of_pushes(servers: int, sessions: list[Session]) -> None:
    chosen = AsyncServer(servers=servers, push=2, fetch=3)
    simulate(paced(5, 20, strategy=chosen, faults=(Noisy(spread=2.0), Slow(rank=1, factor=3.0)), mbit=0))
    for server in chosen.serving(5):
        assert sessions[server].state.version == (5 - servers) * 10


def test_fast_ranks_do_not_wait_for_a_slow_one() -> None:
    def lasts(*faults: Any) -> list[float]:
        return seconds(simulate(paced(4, 30, strategy=AsyncServer(), faults=faults, mbit=0)), 0).tolist()

    assert lasts(Slow(rank=2, factor=5.0)) == pytest.approx(lasts(), rel=1e-9)


def test_a_rank_frozen_for_three_seconds_hangs_no_other_rank() -> None:
    e = paced(4, 400, strategy=AsyncServer(), mbit=0)
    done = simulate(e, changes=[Change(20, "faults", [{"Freeze": {"rank": 2, "seconds": 3.0}}])])
    assert done.state == "done" and len(rows(done, "step")) == 1600
    assert seconds(done, 0).max() < 0.011


# -- the server's optimizer, and several servers --


def heavy(lr: float, momentum: float) -> Any:
    return toy(partial(torch.optim.SGD, lr=lr, momentum=momentum), data=same_for_trainers)


def same_for_trainers(rank: int, ranks: int, seed: int) -> list:
    return [batch(rank, step, seed) for step in range(64)]


SERVER = {"server_lr": 0.5, "server_momentum": 0.9}


def test_the_servers_momentum_equals_momentum_sgd() -> None:
    """One rank makes plain steps, and the server makes momentum SGD of them at server_lr times its rate."""
    (session,) = run(experiment(1, 20, task=heavy(0.04, 0.0), strategy=AsyncServer(**SERVER)))
    (want,) = run(experiment(1, 20, task=heavy(0.02, 0.9), strategy=DDP()))
    torch.testing.assert_close(weights(session), weights(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("servers", [0, 2])
def test_a_synchronous_server_is_data_parallelism_with_its_momentum(servers: int) -> None:
    """The server makes one step for all pushes of a round. Includes new buckets, which servers deal out again."""
    chosen = SyncServer(servers=servers, **SERVER)
    ranks = run(experiment(3 + servers, 16, task=heavy(0.04, 0.0), strategy=chosen), Change(6, "bucket_mb", 1.0))
    want = weights(run(experiment(3, 16, task=heavy(0.02, 0.9), strategy=DDP()))[0])
    assert len(ranks[0].record.noted("change")) == 1 and len(ranks[0].layout.buckets) == 1
    for s in ranks[:3]:
        torch.testing.assert_close(weights(s), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_servers_hold_their_new_share_after_a_change_of_buckets(servers: int) -> None:
    """Without learning, new buckets move nothing. A part that a server never held would fall back."""
    e = paced(3 + servers, 40, strategy=AsyncServer(servers=servers), faults=(Noisy(spread=1.0),))
    still = [Change(15, "lr", 1e-12), Change(24, "bucket_mb", 1.0), Change(30, "bucket_mb", 0.01)]
    for changes in (still[:1], still):
        done = simulate(e.set("eval_every", 1), changes=changes, real=True)
        found = done.timeline.samples.rows()
        found = found[found.equal("name", "held_out")]
        held = dict(zip(found.step.tolist(), found.value.tolist(), strict=True))
        assert held[40] == pytest.approx(held[22], rel=1e-4) and held[22] < 0.8 * held[0]
        assert len(done.changes) == len(changes)


def test_staleness_keeps_counting_across_a_change_of_buckets() -> None:
    done = simulate(paced(5, 30, strategy=AsyncServer(servers=2), mbit=0), changes=[Change(12, "bucket_mb", 0.03)])
    for r in range(3):
        assert set(samples(done, "staleness", r)[2:]) <= {0, 1, 2}
