"""Tests BoundedStaleness: ranks' distance, seen updates, cost, and live changes."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import ended, experiment, fingerprint, live, net, run, shipped, toy, weights
from tests.sim.virtual import comm, paced, rows, samples, seconds
from tests.unit.test_backup_workers import sessions as sessions
from tests.unit.test_engine_apart import over, until
from workbench import simulate
from workbench.compressors import TopK
from workbench.fabric import Noisy, Slow
from workbench.host.placement.canonical_state import hash_model_state, list_optimizer_tensors
from workbench.run import Run
from workbench.settings import Change, KnobError, to_plain
from workbench.sim.rank.session import Session
from workbench.strategies import DDP, AsyncServer, BoundedStaleness, Strategy

pytestmark = pytest.mark.ranks

plain = partial(torch.optim.SGD, lr=0.02)
momentum = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
LAST = (Slow(rank=1, factor=5.0),)


def apart(done: Run, ranks: int) -> list[int]:
    """Returns the lead of the first rank over the last in steps, after each step of any rank."""
    made = rows(done, "step")
    clocks, found = [0] * ranks, []
    for i in np.argsort(made.t1, kind="stable"):
        clocks[made.rank[i]] += 1
        found.append(max(clocks) - min(clocks))
    return found


@pytest.mark.parametrize("optimizer", [plain, momentum])
def test_with_bound_0_it_is_data_parallelism_at_p_times_the_rate(optimizer: Any) -> None:
    fast = partial(optimizer.func, **{**optimizer.keywords, "lr": 0.06})
    want = run(experiment(3, 12, task=toy(fast), strategy=DDP()))
    mine = run(experiment(3, 12, task=toy(optimizer), strategy=BoundedStaleness(bound=0)))
    for s, other in zip(mine, want, strict=True):
        np.testing.assert_allclose(s.record.losses(), other.record.losses(), rtol=1e-4, atol=1e-6)
    centre = mine[0].training.host.drive_coroutine(mine[0].experiment.strategy.known(mine[0].rank, mine[0].state))
    total = {part.name: bucket.data[part.start : part.stop] for bucket in centre for part in bucket.parts}
    flat = torch.cat([total[name].double() for name in sorted(total)])
    torch.testing.assert_close(flat, weights(want[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("bound", "eager"), [(0, False), (3, False), (3, True), (64, False)])
def test_one_rank_is_the_plain_optimizer(bound: int, eager: bool) -> None:
    (alone,) = run(experiment(1, 12, strategy=BoundedStaleness(bound=bound, eager=eager)))
    (want,) = run(experiment(1, 12, strategy=DDP()))
    torch.testing.assert_close(weights(alone), weights(want), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("bound", "most"), [(0, 1), (1, 2), (3, 4), (7, 8)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_leads_by_at_most_the_bound_plus_one(bound: int, most: int, ranks: int) -> None:
    done = simulate(paced(ranks, 60, strategy=BoundedStaleness(bound=bound), faults=LAST, mbit=0))
    leads = apart(done, ranks)
    assert max(leads) == most == bound + 1
    assert done.state == "done" and len(rows(done, "step")) == 60 * ranks


def test_the_engine_respects_the_bound() -> None:
    ranks = run(experiment(3, 40, strategy=BoundedStaleness(bound=2), pace=4.0).set("faults", LAST))
    ends = sorted((r[5], s.rank.index) for s in ranks for r in s.record if r[1] == "step")
    clocks, leads = [0] * 3, []
    for _, r in ends:
        clocks[r] += 1
        leads.append(max(clocks) - min(clocks))
    assert max(leads) == 3 and clocks == [40] * 3
    assert len([s for s in ranks if s.error]) == 0


def test_a_fast_rank_keeps_its_pace_until_the_bound() -> None:
    def lasts(bound: int, faults: tuple = LAST) -> np.ndarray:
        return seconds(simulate(paced(4, 40, strategy=BoundedStaleness(bound=bound), faults=faults, mbit=0)), 0)

    alone = lasts(64, ())
    np.testing.assert_allclose(lasts(64), alone, rtol=1e-9)
    for bound in (0, 1, 3, 10):
        mine = lasts(bound)
        free = bound + 1
        np.testing.assert_allclose(mine[:free], alone[:free], rtol=1e-9)
        assert mine[-10 - bound : -1 - bound].mean() == pytest.approx(5 * alone[0], rel=0.01), "then it waits for it"


def test_a_bound_hides_random_slowness_but_not_a_constant_straggler() -> None:
    def length(bound: int, *faults: Any) -> float:
        done = simulate(paced(4, 200, strategy=BoundedStaleness(bound=bound), faults=faults, mbit=0))
        return float(rows(done, "step").t1.max())

    noisy = (Noisy(spread=4.0),)
    assert length(8, *noisy) < 0.85 * length(0, *noisy)
    assert length(8, *LAST) > 0.99 * length(0, *LAST)


def test_a_rank_sees_every_required_update_once() -> None:
    """Each (rank, iteration) adds to one weight, so the weights show which updates are included."""
    ranks, steps, bound = 3, 8, 2
    seen: dict[tuple[int, int, int], int] = {}

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(ranks * steps, dtype=torch.float64))

    def loss(model: Counting, at: torch.Tensor) -> torch.Tensor:
        r, c = int(at[0]), int(at[1])
        for other in range(ranks):
            here = model.w.detach()[other * steps : (other + 1) * steps]
            assert set(here.tolist()) <= {0.0, 1.0}, "applied once or not at all"
            count = int(here.sum())
            assert bool((here[:count] == 1).all()), "in the order in which they were made"
            seen[r, c, other] = count
        return -model.w[r * steps + c]

    task = toy(
        partial(torch.optim.SGD, lr=1.0), model=Counting, loss=loss, evaluate=None,
        data=lambda rank, ranks, seed: [torch.tensor([rank, step]) for step in range(steps)],
    )  # fmt: skip
    for faults, eager in product((LAST, (Noisy(spread=3.0, seed=1),), ()), (False, True)):
        seen.clear()
        strategy = BoundedStaleness(bound=bound, eager=eager)
        e = paced(ranks, steps, lr=1.0, task=task, strategy=strategy, faults=faults)
        simulate(e, real=True)
        assert len(seen) == ranks * steps * ranks
        for (r, c, other), count in seen.items():
            assert count == c if other == r else count >= c - bound, "every update with clock <= c - s - 1, and its own"
        assert any(count < c for (_, c, _), count in seen.items())


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_it_fetches_only_when_its_copy_is_too_old(bound: int) -> None:
    """Each iteration pushes a model. One in s + 1 iterations fetches at best, and every one behind a slow rank."""
    model, steps = 4 * sum(p.numel() for p in net().parameters()), 48
    fetches = {}
    for factor in (1.02, 5.0):
        faults = (Slow(rank=1, factor=factor),)
        done = simulate(paced(4, steps, strategy=BoundedStaleness(bound=bound), faults=faults, mbit=0))
        found = done.timeline.samples.rows()
        found = found[found.equal("name", "ahead")]
        for r in range(4):
            told = dict(zip(found.step[found.rank == r].tolist(), found.value[found.rank == r].tolist(), strict=True))
            seen, want = 0, []
            for c in range(steps + 1):
                if c - bound > seen:
                    want.append(c)
                    seen = c - int(told.get(c, 0))
            assert sorted(told) == [c for c in want if c < steps], "the answer to the last push is not read"
            fetches[factor, r] = len(want)
            if r:
                assert sum(n for _, _, n in comm(done, r)) == steps * (model + 24)
        answers = sum(fetches[factor, r] for r in (1, 2, 3))
        assert sum(n for _, _, n in comm(done, 0)) == answers * (model + 8)
    assert fetches[1.02, 1] == steps // (bound + 1), "the last of all finds everybody's updates there"
    assert steps - 2 * bound <= fetches[5.0, 3] <= steps


@pytest.mark.parametrize("bound", [1, 3])
def test_eager_ranks_fetch_in_every_iteration_and_respect_the_bound(bound: int) -> None:
    model, steps = 4 * sum(p.numel() for p in net().parameters()), 40
    for faults in (LAST, (Noisy(spread=3.0, seed=1),), ()):
        behind = {}
        for eager in (False, True):
            strategy = BoundedStaleness(bound=bound, eager=eager)
            done = simulate(paced(4, steps, strategy=strategy, faults=faults, mbit=0))
            found = done.timeline.samples.rows()
            found = found[found.equal("name", "ahead")]
            assert max(apart(done, 4)) <= bound + 1 and found.value.max() <= bound
            ages = []
            for r in range(4):
                mine = found[found.rank == r]
                told, seen = dict(zip(mine.step.tolist(), mine.value.tolist(), strict=True)), 0
                for c in range(steps):
                    seen = c - int(told[c]) if c in told else seen
                    ages.append(c - seen)
                assert not eager or sorted(told) == list(range(1, steps))
            behind[eager] = float(np.mean(ages))
            if eager:
                assert sum(n for _, _, n in comm(done, 0)) == 3 * steps * (model + 8)
        assert behind[True] <= behind[False]
        assert behind[True] < 0.9 * behind[False] or faults == LAST, "behind one that is always slow all copies are old"


def test_without_a_bound_it_is_the_asynchronous_server_with_sums() -> None:
    def done(strategy: Strategy) -> Run:
        e = paced(4, 20, strategy=strategy, task=toy(plain), faults=(Noisy(spread=2.0),), mbit=0)
        return simulate(e, real=True)

    free, server = done(BoundedStaleness(bound=64)), done(AsyncServer(weight="sum"))
    for r in range(4):
        np.testing.assert_allclose(samples(free, "loss", r), samples(server, "loss", r), rtol=1e-4)
        assert seconds(free, r).tolist() == pytest.approx(seconds(server, r).tolist())
        assert len(samples(free, "ahead", r)) == 19


@pytest.mark.parametrize("bound", [0, 2, 64])
def test_a_rank_frozen_for_three_seconds_hangs_no_other_rank(bound: int) -> None:
    e = paced(4, 400, strategy=BoundedStaleness(bound=bound), mbit=0)
    done = simulate(e, changes=[Change(20, "faults", [{"Freeze": {"rank": 2, "seconds": 3.0}}])])
    assert done.state == "done" and len(rows(done, "step")) == 1600
    longest = float(seconds(done, 0).max())
    assert longest < 0.011 if bound == 64 else longest > 2.9


# -- live --


def test_the_bound_changes_live() -> None:
    e = paced(4, 120, strategy=BoundedStaleness(bound=1), faults=LAST, mbit=0)
    turns = [Change(30, "bound", 6), Change(60, "bound", 0), Change(70, "eager", True), Change(90, "bound", 64)]
    done = simulate(e, changes=turns)
    at = [c.at_step for c in done.changes if c.path == "bound"]
    assert len(done.changes) == 4 and done.state == "done"
    made = rows(done, "step")
    most: dict[int, int] = defaultdict(int)
    for lead, end in zip(apart(done, 4), np.sort(made.t1), strict=True):
        stay = sum(end > made.t0[made.step == a].min() for a in at)
        most[stay] = max(most[stay], lead)
    assert (most[0], most[1], most[2]) == (2, 7, 1) and most[3] > 8


@pytest.mark.parametrize(("bound", "slow"), [(0, 1), (2, 0), (64, 1)])
def test_orders_reach_all_ranks_while_some_wait(bound: int, slow: int) -> None:
    """Rank 0 names the step of the meeting, also if the other ranks are ahead of it by the bound."""
    e = experiment(3, 0, strategy=BoundedStaleness(bound=bound), pace=5.0)
    ranks = live(e.set("faults", [Slow(rank=slow, factor=5.0)]))
    try:
        until(lambda: ranks[0].rank.step > 6, ranks)
        again = to_plain(BoundedStaleness(bound=bound))
        turns = [("lr", 0.01), ("bucket_mb", 0.02), ("bound", 1), ("strategy", "DDP"), ("strategy", again),
                 ("bound", 64), ("bound", bound)]  # fmt: skip
        for k, (path, value) in enumerate(turns):
            ranks[0].request({"kind": "change", "id": str(k), "path": path, "value": value})
            until(lambda k=k: len(ranks[0].record.noted("change")) > k, ranks)
        begun = ranks[slow].rank.step
        until(lambda: ranks[slow].rank.step > begun + 3, ranks)
        ranks[0].request({"kind": "pause"})
        until(lambda: all(s.phase == "paused" for s in ranks), ranks)
        steps = [s.rank.step for s in ranks]
        assert len(set(steps)) == 1 or bound == 64
        ranks[0].request({"kind": "step", "n": 2})
        until(lambda: [s.rank.step for s in ranks] == [n + 2 for n in steps], ranks)
        ranks[0].request({"kind": "change", "id": "out", "path": "strategy", "value": "DDP"})
        until(lambda: len(ranks[0].record.noted("change")) > len(turns), ranks)
        assert len({hash_model_state(s.layout) for s in ranks}) == 1
        assert len({fingerprint(list_optimizer_tensors(s.layout, s.optimizer)) for s in ranks}) == 1
        ranks[0].request({"kind": "stop"})
        ended(ranks)
        assert {s.phase for s in ranks} == {"stopped"} and not ranks[0].record.noted("refused")
    finally:
        over(ranks)


def test_leaving_includes_every_update_once(sessions: list[Session]) -> None:
    """All gradients are equal everywhere: after the exit each update has counted once."""
    task = toy(partial(torch.optim.SGD, lr=0.5), model=lambda: net(Line), loss=lambda m, x: m.w.sum(), evaluate=None)
    for bound in (0, 2, 64):
        e = paced(3, 30, lr=0.5, strategy=BoundedStaleness(bound=bound), faults=LAST, task=task)
        done = simulate(e, changes=[Change(12, "strategy", "DDP")], real=True)
        made = rows(done, "step")
        updates = int((made.name == "BoundedStaleness").sum()) + int(made.rank.max() == 2) * len(
            {s for s, n in zip(made.step.tolist(), made.name.tolist(), strict=True) if n == "DDP"})  # fmt: skip
        start = float(weights_of(net(Line)).mean())
        for s in sessions:
            assert float(weights(s).mean()) == pytest.approx(start - 0.5 * updates, rel=1e-5)  # type: ignore[arg-type]


class Line(torch.nn.Module):
    """One number as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1, 1))


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


@pytest.mark.parametrize("other", [n for n, cls in shipped(Strategy).items() if not cls.opaque])
def test_live_switches_work_while_ranks_are_apart(other: str, sessions: list[Session]) -> None:
    e = paced(4, 50, strategy=BoundedStaleness(bound=1), faults=LAST)
    changes = [Change(9, "strategy", other), Change(18, "strategy", to_plain(BoundedStaleness(bound=5))),
               Change(30, "strategy", "DDP")]  # fmt: skip
    for real in (False, True):
        done = simulate(e, changes=changes, real=real)
        assert done.state == "done" and len(done.changes) == 3
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


def test_invalid_settings_are_refused_with_a_reason() -> None:
    with pytest.raises(KnobError, match="use Dense with it"):
        experiment(2, strategy=BoundedStaleness(), compressor=TopK.usual())
    with pytest.raises(KnobError, match=r"bound=65: must be an integer in \[0, 64\] iterations"):
        experiment(2, strategy=BoundedStaleness(bound=65))
