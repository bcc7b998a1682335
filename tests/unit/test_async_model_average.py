"""Tests Bagua's asynchronous model average: its timing, its corrections, and that no rank waits."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import batch, ended, experiment, live, run, toy, weights
from tests.sim.insides import parameters, simulated
from tests.sim.virtual import comm, paced, rows, seconds, stack
from tests.unit.test_engine_apart import Heap, over, until
from tests.unit.test_gossip_graphs import double, exact_task
from workbench import simulate
from workbench.fabric import Freeze, Noisy, Slow
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, AsyncModelAverage, LocalSGD

pytestmark = pytest.mark.ranks

AT_ONCE = AsyncModelAverage(every_ms=0.0)
ALONE = LocalSGD(every=256)  # never in these few steps


def averagings(run_: Any, rank: int = 0) -> np.ndarray:
    """Returns when each average began and ended on a rank: (n, 2)."""
    found = rows(run_, "comm", rank)
    first, last = "all_reduce average bucket 0", max(n for n in found.name if "average" in n)
    return np.stack([found.t0[found.equal("name", first)], found.t1[found.equal("name", last)]], 1)


@pytest.mark.parametrize("every_ms", [0.0, 80.0])
def test_on_a_link_five_times_slower_than_compute_it_costs_no_time(every_ms: float) -> None:
    """Averaging 10 buckets takes 5 x 20 ms. A step takes as long as one without exchange."""
    mbit = 1.5 * 10 * 40_000 * 8e-6 / 0.100
    e = paced(4, 40, 20.0, mbit, task=stack(10, 100), faults=(Noisy(spread=0.2),))
    alone, beside = (simulate(e.set("strategy", s)) for s in (ALONE, AsyncModelAverage(every_ms=every_ms)))
    for r in range(4):
        assert seconds(beside, r).sum() <= 1.05 * seconds(alone, r).sum()
        assert seconds(beside, r).max() <= 1.05 * seconds(alone, r).max()
    lasted = averagings(beside)
    np.testing.assert_allclose(lasted[:, 1] - lasted[:, 0], 0.100, rtol=0.01)
    assert len(lasted) >= (7 if every_ms == 0 else 4)
    ddp = simulate(e.set("strategy", DDP()))
    assert seconds(ddp)[1:].min() > 5 * 0.020


@pytest.mark.parametrize("every_ms", [0.0, 50.0, 200.0])
def test_the_pause_between_two_averages_follows_the_clock(every_ms: float) -> None:
    """An average begins at most once per step, so one step of the slowest rank may be added."""
    e = paced(3, 100, 10.0, 100.0, strategy=AsyncModelAverage(every_ms=every_ms), faults=(Slow(rank=1, factor=2.0),))
    found = averagings(simulate(e))
    rest = found[1:, 0] - found[:-1, 1]
    assert len(found) > 4 and rest.min() >= every_ms * 1e-3 and rest.max() <= every_ms * 1e-3 + 0.021
    assert found[0, 0] < 0.021, "the first one comes at once"


def test_the_engine_pauses_by_the_wall_clock_and_a_stop_does_not_wait() -> None:
    sessions = run(experiment(3, 40, strategy=AsyncModelAverage(every_ms=40.0), pace=5.0))
    rounds = sorted(r[4:6] for r in sessions[0].record if r[2] == "all_reduce average bucket 0")
    rest = [later[0] - sooner[1] for sooner, later in pairwise(rounds)]
    assert len(rest) >= 2 and min(rest) >= 0.040
    late = live(experiment(3, 0, strategy=AsyncModelAverage(every_ms=600000.0), pace=5.0))
    try:
        until(lambda: late[0].rank.step > 4, late)
    finally:
        over(late)


def test_every_average_sends_the_bytes_of_one_all_reduce() -> None:
    run_ = simulate(paced(4, 30, strategy=AsyncModelAverage(every_ms=60.0)))
    sizes = {f"all_reduce average bucket {k}": n for k, n in enumerate(run_.details("buckets")[-1][2]["nbytes"])}
    carried: dict[str, int] = defaultdict(int)
    for _, name, sent in comm(run_, 0):
        assert sent == 2 * 3 * sizes[name] // 4
        carried[name] += 1
    assert carried == dict.fromkeys(sizes, len(averagings(run_))) and len(averagings(run_)) >= 4


# -- what it computes


def test_averages_do_not_move_the_sum_of_all_parameters() -> None:
    """Each rank's gradient is a constant, independent of the parameters; on both hosts."""

    def data(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
        return [torch.tensor(float(rank + 1))]

    task = toy(partial(torch.optim.SGD, lr=0.001), model=Heap, loss=lambda m, pull: m(pull), data=data, evaluate=None)
    steps = 80
    e = experiment(3, steps, task=task, strategy=AT_ONCE, bucket_mb=0.4)
    engine = run(e.set("pace", 5.0))  # so that rounds find time during the steps on a busy machine
    assert sum(name == "all_reduce average bucket 0" for _, name, _ in engine[0].record.comm()) >= 2
    for sessions in (engine, simulated(e.set("pace", 2.0).set("bandwidth", 1000.0))[1]):
        pending = [s.state for s in sessions]
        found = parameters(sessions).sum(0)
        for memory in pending:
            found += torch.cat([memory.flat("correction", b).double() for b in sessions[0].layout.params()])
        moved = -0.001 * steps * (1 + 2 + 3)
        want = torch.cat([torch.full((150_000,), moved), torch.full((90_000,), 2 * moved)]).double()
        torch.testing.assert_close(found.sort().values, want.sort().values, rtol=1e-4, atol=0)


def test_corrections_wait_for_the_gradient_and_follow_the_rule() -> None:
    """Compares with the rule in one process, at the simulator's times: a link of 2.5 steps, equal ranks."""
    e = paced(3, 12, 10.0, 1000.0, strategy=AT_ONCE, task=exact_task())
    nbytes = sum(simulate(e).details("buckets")[-1][2]["nbytes"])
    e = e.set("bandwidth", 2 * 2 / 3 * nbytes * 8e-6 / 0.025)
    run_, sessions = simulated(e)
    began = rows(run_, "compute", 0, "update").t0  # a correction is added just before the update
    x = parameters(simulated(e.set("steps", 1))[1])
    _, alone = simulated(e.set("strategy", ALONE).set("steps", 1))
    torch.testing.assert_close(x, parameters(alone), rtol=0, atol=0)
    plain = _Plain(x)
    buckets = [b.data.numel() for b in sessions[0].layout.params()]
    times = rows(run_, "comm", 0)
    ends = [times.t1[times.equal("name", f"all_reduce average bucket {k}")] for k in range(len(buckets))]
    starts = times.t0[times.equal("name", "all_reduce average bucket 0")]
    for step in range(1, 12):
        plain.advance(began[step - 1], began[step], starts, ends, buckets)
        plain.update(step)
    torch.testing.assert_close(parameters(sessions), plain.x, rtol=0, atol=1e-12)
    assert plain.added >= 2 * len(buckets), "averagings came in between"


class _Plain:
    """The rule in one process: snapshots at the starts of averages, corrections by bucket at their ends."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.correction, self.added = x, torch.zeros_like(x), 0
        self.snapshot = x
        e = paced(3, 1, strategy=ALONE, task=exact_task())
        _, self.sessions = simulated(e)

    def advance(self, since: float, until: float, starts: np.ndarray, ends: list[np.ndarray], sizes: list[int]) -> None:
        """Applies the background's events from the update at `since` to the update at `until`."""
        told = [(float(t), -1) for t in starts] + [(float(t), k) for k, every in enumerate(ends) for t in every]
        edges = np.cumsum([0, *sizes])
        self.snapshot_or_correct([what for t, what in sorted(told) if since <= t < until], edges)
        self.gradients_at = self.x.clone()
        self.x = self.x + self.correction
        self.correction = torch.zeros_like(self.x)

    def snapshot_or_correct(self, events: list[int], edges: np.ndarray) -> None:
        for what in events:
            if what < 0:
                self.snapshot = self.x + self.correction
            else:
                cut = slice(int(edges[what]), int(edges[what + 1]))
                self.correction[:, cut] += self.snapshot[:, cut].mean(0) - self.snapshot[:, cut]
                self.added += 1

    def update(self, step: int) -> None:
        for r, s in enumerate(self.sessions):
            at = 0
            for b in s.layout.params():
                b.data.copy_(self.gradients_at[r, at : at + b.data.numel()])
                at += b.data.numel()
            s.model.zero_grad()
            with torch.enable_grad():
                double(s.model, batch(r, step, 0)).backward()
            pieces = {name: p.grad.reshape(-1) for name, p in s.model.named_parameters()}
            self.x[r] -= 0.1 * torch.cat([pieces[part.name] for b in s.layout.params() for part in b.parts])


def test_without_averages_ranks_train_alone() -> None:
    """The first average comes after the first step and removes the ranks' differences. No other follows."""
    e = paced(3, 10, strategy=AsyncModelAverage(every_ms=600000.0))
    assert len(averagings(simulate(e))) == 1
    spread = [parameters(simulated(e.set("steps", n))[1]).std(0).max() for n in (2, 10)]
    assert spread[1] > 2 * spread[0] > 0


def test_without_learning_an_average_makes_the_ranks_equal() -> None:
    e = paced(3, 16, 10.0, strategy=AT_ONCE, task=toy(partial(torch.optim.SGD, lr=0.3)))
    _, before = simulated(e.set("steps", 6))
    found = parameters(simulated(e, Change(6, "lr", 1e-30))[1])
    assert parameters(before).std(0).max() > 1e-3
    torch.testing.assert_close(found, found.mean(0).expand(3, -1), rtol=0, atol=1e-6)


# live switches, and pauses


WARM = AsyncModelAverage(every_ms=20.0, warmup=12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_its_warm_up_is_data_parallelism(ranks: int) -> None:
    e = paced(ranks, 12, strategy=WARM, task=exact_task(momentum=0.9))
    want = parameters(simulated(e.set("strategy", "DDP"))[1])[0].sort().values
    for sessions in (simulated(e)[1], run(e.set("pace", 0.0))):
        assert len({hash_model_state(s.layout) for s in sessions}) == 1
        torch.testing.assert_close(parameters(sessions)[0].sort().values, want, rtol=0, atol=1e-12)


def test_only_the_warm_up_sends_gradients() -> None:
    run_, sessions = simulated(paced(4, 30, strategy=WARM, faults=(Slow(rank=1, factor=2.0),)), real=False)
    sizes = [b.nbytes for b in sessions[0].layout.buckets]
    for r in range(4):
        sent = [sum(n for at, name, n in comm(run_, r) if at == step and "send" in name) for step in range(30)]
        assert sent == [2 * 3 * sum(sizes) // 4] * 12 + [0] * 18
    first = averagings(run_)[0, 0]
    assert max(rows(run_, "step", 0).t1[11], rows(run_, "step", 1).t1[10]) <= first, "not before the warm-up is over"
    lasted = [seconds(run_, r) for r in range(4)]
    assert lasted[0][5] == pytest.approx(lasted[1][5]) and lasted[0][20] < 0.55 * lasted[1][20], "then nobody waits"


@pytest.mark.parametrize("at", [1, 5, 10, 11, 12, 13, 20])
def test_a_change_in_or_after_the_warm_up_reaches_all(at: int) -> None:
    """Tests steps around the end of the common step, planned on both hosts."""
    plan = (Change(at, "lr", 0.01), Change(at + 1, "bucket_mb", 0.02), Change(at + 2, "strategy", "DDP"),
            Change(at + 4, "strategy", {"AsyncModelAverage": {"warmup": 18}}))  # fmt: skip
    e = paced(3, 30, pace=2.0, strategy=WARM, faults=(Slow(rank=1, factor=2.0),))
    run_, _ = simulated(e, *plan)
    assert run_.state == "done" and len(run_.changes) == 4
    sessions = run(e, *plan)
    assert {s.phase for s in sessions} == {"done"} and len(sessions[0].record.noted("change")) == 4
    for s in sessions:
        steps = [r[0] for r in s.record if r[1] == "step"]
        assert steps == sorted(set(steps)), "no step twice"


@pytest.mark.parametrize("warmup", [3, 40, 10**6])
def test_a_change_at_any_moment_of_the_warm_up_does_not_hang(warmup: int) -> None:
    sessions = live(experiment(3, 0, strategy=AsyncModelAverage(every_ms=5.0, warmup=warmup), pace=2.0))
    try:
        for k in range(8):
            sessions[0].request({"kind": "change", "id": str(k), "path": "lr", "value": 0.01 + 0.001 * k})
            until(lambda k=k: len(sessions[0].record.noted("change")) > k, sessions)
        sessions[0].request({"kind": "pause"})
        until(lambda: all(s.phase == "paused" for s in sessions), sessions)
        sessions[0].request({"kind": "change", "id": "out", "path": "strategy", "value": "DDP"})
        sessions[0].request({"kind": "resume"})
        until(lambda: all(s.experiment.strategy == DDP() for s in sessions), sessions)
        sessions[0].request({"kind": "stop"})
        ended(sessions)
        assert {s.phase for s in sessions} == {"stopped"}
    finally:
        over(sessions)


def test_leaving_applies_pending_corrections() -> None:
    """Left at any moment, the parameters are the mean of the ranks' corrected parameters."""
    still = [Change(6, "lr", 1e-30), Change(9, "strategy", "DDP")]
    e = paced(3, 6, strategy=AT_ONCE, task=exact_task())
    _, before = simulated(e)
    want = torch.stack([weights(s) for s in before]).mean(0)
    _, sessions = simulated(e.set("steps", 10), *still)
    for s in sessions:
        torch.testing.assert_close(weights(s), want, rtol=0, atol=1e-12)


def test_a_paused_rank_delays_no_other_rank() -> None:
    """On the virtual clock the other ranks' steps keep their time. On the engine all ranks reach the end."""
    e = paced(3, 60, 10.0, 20.0, strategy=AsyncModelAverage(every_ms=20.0))
    still = simulate(e, changes=[Change(10, "faults", [Freeze(rank=2, seconds=3.0)])])
    assert seconds(still, 0)[12:].max() == seconds(still, 1)[12:].max() == pytest.approx(0.010)
    assert rows(still, "step", 0).t1.max() < 1.0 < 3.0 < rows(still, "step", 2).t1.max()
    freeze = Change(10, "faults", [{"Freeze": {"rank": 2, "seconds": 0.5}}])
    sessions = run(experiment(3, 40, strategy=AsyncModelAverage(every_ms=10.0), pace=3.0, eval_every=10), freeze)
    assert {s.phase for s in sessions} == {"done"}


def test_a_live_change_of_every_ms_changes_how_often_ranks_average() -> None:
    sessions = run(experiment(3, 60, strategy=AT_ONCE, pace=4.0), Change(30, "every_ms", 60000.0))
    at = [step for step, name, _ in sessions[0].record.comm() if name == "all_reduce average bucket 0"]
    changed = sessions[0].record.noted("change")[0][0]
    assert len([s for s in at if s < changed]) >= 2 and len([s for s in at if s > changed + 1]) <= 1


def test_a_negative_every_ms_is_refused() -> None:
    with pytest.raises(KnobError, match=r"every_ms=-1: must be a number in \[0, 600000\] ms"):
        experiment(2, strategy=AsyncModelAverage(every_ms=-1))
