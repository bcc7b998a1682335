"""Tests BackupWorkers: counted and dropped gradients, step times, and live changes."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import batch, ended, experiment, fingerprint, live, mse, net, run, shipped, toy, weights
from tests.sim.virtual import comm, paced, rows, samples, seconds
from tests.unit.test_engine_apart import over, until
from workbench import simulate
from workbench.compressors import TopK
from workbench.fabric import Fault, Noisy, Slow
from workbench.host.placement.canonical_state import hash_model_state, list_optimizer_tensors
from workbench.run import Run
from workbench.settings import Change, KnobError, to_plain
from workbench.sim import Costs, Duration
from workbench.sim.rank.session import Session
from workbench.strategies import DDP, BackupWorkers, Strategy

pytestmark = pytest.mark.ranks

momentum = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
adam = partial(torch.optim.Adam, lr=0.01)
WIDE = (Noisy(spread=3.0, seed=4),)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Returns the virtual ranks of the test's latest simulation."""
    made: list[Session] = []
    init = Session.__init__

    def kept(self: Session, *args: Any) -> None:
        if made and made[-1].rank.index >= args[1]:
            made.clear()
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(Session, "__init__", kept)
    return made


def state(s: Any) -> tuple[int, int]:
    """Returns exact digests of a rank's parameters and optimizer state."""
    return hash_model_state(s.layout), fingerprint(list_optimizer_tensors(s.layout, s.optimizer))


def pushed(run: Run) -> dict[int, dict[int, bool]]:
    """Returns, by version and rank, whether the rank's gradient counted."""
    found = run.timeline.samples.rows()
    found = found[found.equal("name", "late")]
    out: dict[int, dict[int, bool]] = defaultdict(dict)
    for version, rank, value in zip(found.step.tolist(), found.rank.tolist(), found.value.tolist(), strict=True):
        assert rank not in out[version], "one gradient per rank and version"
        out[version][rank] = not value
    return out


@pytest.mark.parametrize("optimizer", [momentum, adam])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_without_backups_it_is_exactly_data_parallelism(ranks: int, optimizer: Any, sessions: list[Session]) -> None:
    both = []
    for strategy in (DDP(), BackupWorkers(backup=0)):
        simulate(paced(ranks, 12, strategy=strategy, task=toy(optimizer), faults=WIDE), real=True)
        (agreed,) = {state(s) for s in sessions}
        both.append(agreed)
    assert both[0] == both[1]


def test_without_backups_it_is_data_parallelism_on_the_engine() -> None:
    want = run(experiment(3, 12, strategy=DDP()))
    for s in run(experiment(3, 12, strategy=BackupWorkers())):
        torch.testing.assert_close(weights(s), weights(want[0]), rtol=1e-5, atol=1e-7)
        assert not [v for _, name, _, v in s.record.samples if name == "late" and v]


@pytest.mark.parametrize("last", [0, 2, 4])
@pytest.mark.parametrize("warmup", [0, 12])
@pytest.mark.parametrize("optimizer", [momentum, adam])
def test_with_one_rank_always_last_it_is_data_parallelism_of_the_other_ranks(
    last: int, optimizer: Any, warmup: int, sessions: list[Session]
) -> None:
    """Also while the learning rate rises: each missed mean is applied at the rate of its own step."""

    def others(rank: int, ranks: int, seed: int) -> list:
        return [batch(rank + (rank >= last), step, seed) for step in range(64)]

    simulate(paced(4, 15, strategy=DDP(), task=toy(optimizer, data=others)).set("lr_warmup", warmup), real=True)
    want = state(sessions[0])
    slow = (Slow(rank=last, factor=7.0),)
    e = paced(5, 15, strategy=BackupWorkers(backup=1), task=toy(optimizer), faults=slow, mbit=0)
    done = simulate(e.set("lr_warmup", warmup), real=True)
    assert {state(s) for s in sessions} == {want}, "the late rank, too, and to the bit"
    assert {s.rank.step for s in sessions} == {15}
    assert set(samples(done, "late", last)) == {1.0}
    assert len(rows(done, "step", last)) < 5 < len(rows(done, "step", (last + 1) % 5))
    assert "nan" not in str(done) and "missing" not in str(done), "a step passed over is no gap in the record"


def test_the_order_of_arrival_does_not_change_the_result(sessions: list[Session]) -> None:
    ends, orders = set(), set()
    for seed in range(4):
        e = paced(4, 10, strategy=BackupWorkers(), faults=(Noisy(spread=1.0, seed=seed),))
        done = simulate(e, real=True)
        ends |= {state(s) for s in sessions}
        orders.add(tuple(samples(done, "recv push", 0)))
    assert len(ends) == 1 and len(orders) == 4


@pytest.mark.parametrize("backup", [1, 2, 4])
def test_each_version_is_the_mean_of_the_first_gradients_made_with_it(backup: int, sessions: list[Session]) -> None:
    """One process replays which rank counted in which version: none twice, none in another version."""
    ranks, steps = 5, 25
    done = simulate(paced(ranks, steps, strategy=BackupWorkers(backup=backup), faults=WIDE, mbit=0), real=True)
    who = pushed(done)
    assert sorted(who) == list(range(steps)) and any(not all(counted.values()) for counted in who.values())
    model = net()
    optimizer = momentum(model.parameters())
    drawn: Counter = Counter()
    for version in range(steps):
        counted = sorted(r for r, good in who[version].items() if good)
        assert len(counted) == ranks - backup and len(who[version]) <= ranks
        optimizer.zero_grad()
        for r in sorted(who[version]):
            if who[version][r]:
                (mse(model, batch(r, drawn[r], 0)) / len(counted)).backward()
            drawn[r] += 1
        optimizer.step()
    want = torch.cat([p.detach().reshape(-1).double() for _, p in sorted(model.named_parameters())])
    for s in sessions:
        torch.testing.assert_close(weights(s), want, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]
        assert not s.state.means and not s.state.come and not s.state.wanting, "nothing is kept for nobody"


def test_ranks_of_the_engine_agree_whichever_was_late() -> None:
    e = experiment(4, 40, strategy=BackupWorkers(backup=1), pace=4.0, task=toy(adam), lr_warmup=30)
    ranks = run(e.set("faults", [Noisy(spread=3.0)]))
    assert len({state(s) for s in ranks}) == 1 and {s.rank.step for s in ranks} == {40}
    dropped = [[int(v) for _, name, _, v in s.record.samples if name == "late"] for s in ranks]
    assert sum(map(sum, dropped)) > 5
    assert sum(len(each) - sum(each) for each in dropped) == 3 * 40, "three of four gradients counted in each step"


# how long a step lasts


@dataclass(frozen=True, kw_only=True)
class Exponential(Fault):
    """Compute times are exponential with mean 1, drawn independently for each rank and step."""

    def stretch(self, rank: int, step: int, phase: str) -> float:
        return Random(f"{rank}/{step}").expovariate(1.0)


def closings(draw: Callable[[int, int], float], ranks: int, backup: int, steps: int) -> list[float]:
    """Returns when each version closes by the paper's rule: a late rank finishes its gradient, then starts the next."""
    heap = [(draw(r, 0), r, 0) for r in range(ranks)]
    heapq.heapify(heap)
    version, waiting, closed = 0, [], []  # type: tuple[int, list[int], list[float]]
    while version < steps:
        now, r, tag = heapq.heappop(heap)
        if tag < version:
            heapq.heappush(heap, (now + draw(r, version), r, version))
            continue
        waiting.append(r)
        if len(waiting) == ranks - backup:
            version += 1
            closed.append(now)
            for other in waiting:
                heapq.heappush(heap, (now + draw(other, version), other, version))
            waiting = []
    return closed


def expected(ranks: int, backup: int) -> float:
    """Returns a version's mean time with `backup` late ranks at its beginning and memoryless times."""
    need = ranks - backup
    left = {(a, late): 0.0 for a in range(ranks + 1) for late in range(backup + 1)}
    for a in reversed(range(need)):
        for late in range(backup + 1):
            busy = ranks - a
            then = (busy - late) * left[a + 1, late] + (late * left[a, late - 1] if late else 0.0)
            left[a, late] = (1.0 + then) / busy
    return left[0, backup]


def harmonic(n: int) -> float:
    return sum(1 / k for k in range(1, n + 1))


def drawn(rank: int, version: int) -> float:
    return Exponential().stretch(rank, version, "backward")


def timed(backup: int, steps: int, *changes: Change) -> tuple[Run, dict[int, float]]:
    """Returns a run with nothing but compute, and the time at which each version closed."""
    e = experiment(8, steps, strategy=BackupWorkers(backup=backup), bucket_mb=10.0).set("faults", [Exponential()])
    done = simulate(e, costs=Costs(backward=(Duration(1.0),)), changes=changes)
    who, steps_made = pushed(done), rows(done, "step")
    ends = zip(steps_made.step.tolist(), steps_made.rank.tolist(), steps_made.t1.tolist(), strict=True)
    return done, {step: t1 for step, rank, t1 in ends if who[step][rank]}


@pytest.mark.parametrize("backup", [0, 1, 2, 3])
def test_versions_close_by_the_papers_rule(backup: int) -> None:
    _, closed = timed(backup, 60)
    assert sorted(closed) == list(range(60))
    assert [closed[v] for v in range(60)] == pytest.approx(closings(drawn, 8, backup, 60), abs=1e-9)


@pytest.mark.parametrize(("backup", "together", "on"), [(0, 2.718, 2.718), (1, 1.718, 1.933), (2, 1.218, 1.534)])
def test_a_step_lasts_as_long_as_the_nth_gradient_takes(backup: int, together: float, on: float) -> None:
    """H_p - H_b if all ranks begin together, as in the textbook; longer if late ranks first finish their gradient."""
    assert harmonic(8) - harmonic(backup) == pytest.approx(together, abs=1e-3)
    assert expected(8, backup) == pytest.approx(on, abs=1e-3) and on >= together
    mean = closings(drawn, 8, backup, 10_000)[-1] / 10_000
    assert mean == pytest.approx(on, rel=0.02)


@pytest.mark.parametrize("backup", [0, 1, 2])
def test_steps_after_a_meeting_take_the_textbooks_time(backup: int) -> None:
    steps, need = 60, 8 - backup
    done, closed = timed(backup, steps, *(Change(k, "lr", 0.01 + k % 2 / 100) for k in range(steps)))
    began: dict[int, list[float]] = defaultdict(list)
    made = rows(done, "step")
    for step, t0 in zip(made.step.tolist(), made.t0.tolist(), strict=True):
        began[step].append(t0)
    met = [v for v in closed if len(began[v]) == 8 and len(set(began[v])) == 1]
    assert len(met) > steps / 3
    lasted = [closed[v] - began[v][0] for v in met]
    assert lasted == pytest.approx([sorted(drawn(r, v) for r in range(8))[need - 1] for v in met], abs=1e-9)
    many = np.sort(np.random.default_rng(3).exponential(size=(40_000, 8)), 1)[:, need - 1]
    assert many.mean() == pytest.approx(harmonic(8) - harmonic(backup), rel=0.02)


def test_fast_ranks_do_not_wait_for_a_slow_one() -> None:
    """With one rank 4 times slower and one backup, the other ranks keep their pace."""

    def pace(*faults: Fault) -> list[float]:
        done = simulate(paced(4, 20, strategy=BackupWorkers(backup=1), mbit=0, faults=faults))
        return seconds(done, 0).tolist()

    assert pace(Slow(rank=3, factor=4.0)) == pytest.approx(pace(), rel=1e-9)
    waiting = seconds(simulate(paced(4, 20, strategy=BackupWorkers(), mbit=0, faults=(Slow(rank=3, factor=4.0),))), 0)
    assert waiting.mean() > 3 * np.mean(pace())


@pytest.mark.parametrize("backup", [0, 1])
def test_a_rank_frozen_for_three_seconds_hangs_no_other_rank(backup: int) -> None:
    e = paced(4, 500, strategy=BackupWorkers(backup=backup), mbit=0)
    done = simulate(e, changes=[Change(20, "faults", [{"Freeze": {"rank": 2, "seconds": 3.0}}])])
    assert done.state == "done"
    made = rows(done, "step", 0)
    longest = float((made.t1 - made.t0).max())
    assert (longest < 0.011) if backup else (longest > 3.0)
    late = rows(done, "step", 2)
    jump = np.diff(late.step).max()
    assert jump > 290 if backup else jump == 1
    assert len(rows(done, "update", 2)) == 0 and len(rows(done, "compute", 2, "update")) == 500, "it missed no mean"


def test_bytes_are_one_model_per_gradient_and_one_per_version_and_rank() -> None:
    done = simulate(paced(5, 30, strategy=BackupWorkers(backup=2), faults=WIDE, mbit=0))
    model = 4 * sum(p.numel() for p in net().parameters())
    gradients = Counter(r for ranks in pushed(done).values() for r in ranks)
    assert min(gradients.values()) < 30, "some were late"
    for r in range(1, 5):
        assert sum(n for _, _, n in comm(done, r)) == gradients[r] * (model + 8)
    answers = sum(gradients[r] for r in range(1, 5))
    assert sum(n for _, _, n in comm(done, 0)) == 4 * 30 * model + answers * 16


# -- live --

SLOW_FIRST = (Slow(rank=0, factor=6.0), Slow(rank=2, factor=3.0))


def test_all_ranks_apply_a_change_before_the_same_step_even_late_ones() -> None:
    """Rank 0 names the step, and is the slowest: other ranks are far ahead of it."""
    e = experiment(5, 0, strategy=BackupWorkers(backup=2), pace=5.0).set("faults", SLOW_FIRST)
    ranks = live(e)
    try:
        until(lambda: ranks[0].rank.step > 12, ranks)
        turns = [("bucket_mb", 0.02), ("strategy.backup", 1), ("lr", 0.01), ("strategy.backup", 2), ("strategy", "DDP"),
                 ("strategy", to_plain(BackupWorkers(backup=2))), ("lr", 0.02)]  # fmt: skip
        for k, (path, value) in enumerate(turns):
            ranks[0].request({"kind": "change", "id": str(k), "path": path, "value": value})
            until(lambda k=k: len(ranks[0].record.noted("change")) > k, ranks)
            step = ranks[0].record.noted("change")[k][0]
            until(lambda step=step: all(s.rank.step > step + 3 for s in ranks), ranks)
        ranks[0].request({"kind": "pause"})
        until(lambda: all(s.phase == "paused" for s in ranks), ranks)
        assert len({state(s) for s in ranks}) == 1 and len({s.rank.step for s in ranks}) == 1
        begun = ranks[0].rank.step
        ranks[0].request({"kind": "step", "n": 4})
        until(lambda: all(s.rank.step == begun + 4 and s.phase == "paused" for s in ranks), ranks)
        assert len({state(s) for s in ranks}) == 1
        ranks[0].request({"kind": "stop"})
        ended(ranks)
        assert {s.phase for s in ranks} == {"stopped"}
        changed = [m[0] for m in ranks[0].record.noted("change")]
        for s in ranks:
            assert set(changed) <= set(rows_of(s)), "every rank begins a step where a change acts"
        assert len(rows_of(ranks[0])) < 0.7 * len(rows_of(ranks[1])), "and yet rank 0 was far behind"
    finally:
        over(ranks)


def rows_of(s: Any) -> list[int]:
    """Returns the numbers of the steps that a rank made."""
    return [r[0] for r in s.record if r[1] == "step"]


def test_raising_backups_live_ends_the_waiting() -> None:
    e = paced(4, 40, strategy=BackupWorkers(), mbit=0, faults=(Slow(rank=3, factor=4.0),))
    done = simulate(e, changes=[Change(20, "strategy.backup", 1)])
    made = rows(done, "step", 1)
    lasted = made.t1 - made.t0
    assert lasted[made.step < 20].min() > 0.036 and lasted[made.step > 22].max() < 0.012
    assert not samples(done, "late", 1).any() and samples(done, "late", 3)[20:].any()


@pytest.mark.parametrize("other", [n for n, cls in shipped(Strategy).items() if not cls.opaque])
def test_live_switches_work_with_late_ranks(other: str, sessions: list[Session]) -> None:
    """Switches in and out of every other strategy. The simulator compares parameters at each switch."""
    e = paced(4, 40, strategy=BackupWorkers(backup=1), faults=WIDE)
    changes = [Change(9, "strategy", other), Change(18, "strategy", to_plain(BackupWorkers(backup=2))),
               Change(27, "strategy", "DDP")]  # fmt: skip
    for real in (False, True):
        done = simulate(e, changes=changes, real=real)
        assert done.state == "done" and len(done.changes) == 3
    assert len({state(s) for s in sessions}) == 1 and {s.rank.step for s in sessions} == {40}


def test_invalid_settings_are_refused_with_a_reason() -> None:
    with pytest.raises(KnobError, match="backup=2 ignores the gradients of all 2 ranks; use at most 1"):
        experiment(2, strategy=BackupWorkers(backup=2))
    with pytest.raises(KnobError, match="use Dense with it"):
        experiment(2, strategy=BackupWorkers(), compressor=TopK.usual())
    with pytest.raises(KnobError, match=r"an integer in \[0, 64\] ranks"):
        experiment(2, strategy=BackupWorkers(backup=-1))
