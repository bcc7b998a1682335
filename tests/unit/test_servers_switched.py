"""Makes random live changes among server strategies with stragglers: no hang, and no rank may differ."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from tests import torture
from tests.ranks import batch, ended, experiment, fingerprint, live, mse, run, toy
from tests.sim.test_replay import Asked, engines
from tests.sim.virtual import samples
from tests.unit.test_engine_apart import over, until
from workbench import simulate
from workbench.engine.rank.session import Session
from workbench.fabric import Fabric, Noisy, Slow
from workbench.host.placement.canonical_state import hash_model_state, list_optimizer_tensors
from workbench.settings import Change, to_plain
from workbench.strategies import (
    DDP,
    AsyncServer,
    BackupWorkers,
    BoundedStaleness,
    Gossip,
    LocalSGD,
    Strategy,
    SyncServer,
)

pytestmark = pytest.mark.ranks

AMONG = [*2 * (BackupWorkers, AsyncServer, BoundedStaleness), DDP, LocalSGD, Gossip]


def answered(ranks: list[Session]) -> int:
    return len(ranks[0].record.noted("change")) + len(ranks[0].record.noted("refused"))


def play(seed: int, turns: int, monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Changes everything that may change, as the torture does; returns the paused ranks under data parallelism."""
    shipped = torture.shipped
    monkeypatch.setattr(torture, "shipped", lambda family: AMONG if family is Strategy else shipped(family))
    rng = random.Random(seed)
    slow = Fabric(faults=(Slow(rank=rng.randrange(4), factor=3.0), Noisy(spread=2.0)))
    ranks = live(experiment(4, 0, strategy=BackupWorkers(backup=1), pace=3.0, fabric=slow, eval_every=5))
    asked = 0
    try:
        until(lambda: ranks[0].rank.step > 3, ranks)
        for burst in torture.sequence(seed, turns, 4):
            for what, value in burst:
                if what in ("pause", "step"):
                    pause(ranks, what, value)
                    continue
                plain = to_plain(value) if not isinstance(value, tuple) else [to_plain(v) for v in value]
                ranks[0].request({"kind": "change", "id": str(asked), "path": what, "value": plain})
                asked += 1
            until(lambda asked=asked: answered(ranks) >= asked, ranks)
            time.sleep(rng.uniform(0, 0.05))
        for path, value in (("compressor", "Dense"), ("faults", []), ("strategy", "DDP")):
            ranks[0].request({"kind": "change", "id": path, "path": path, "value": value})
            asked += 1
        until(lambda: answered(ranks) >= asked, ranks)
        ranks[0].request({"kind": "pause"})
        until(lambda: all(s.phase == "paused" for s in ranks), ranks)
        return ranks
    except BaseException:
        over(ranks)
        raise


def pause(ranks: list[Session], what: str, value: Any) -> None:
    ranks[0].request({"kind": "pause"} if what == "pause" else {"kind": "step", "n": value})
    until(lambda: all(s.phase == "paused" for s in ranks), ranks)
    ranks[0].request({"kind": "resume"})
    until(lambda: all(s.phase == "running" for s in ranks), ranks)


@pytest.mark.parametrize("seed", [2])
def test_random_live_changes_leave_ranks_equal(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = play(seed, 20, monkeypatch)
    try:
        assert type(ranks[0].experiment.strategy) is DDP
        assert len({s.rank.step for s in ranks}) == 1
        assert len({hash_model_state(s.layout) for s in ranks}) == 1
        assert len({fingerprint(list_optimizer_tensors(s.layout, s.optimizer)) for s in ranks}) == 1
        kinds = {r[2] for s in ranks for r in s.record if r[1] == "step"}
        assert len(kinds & {"BackupWorkers", "AsyncServer", "BoundedStaleness"}) >= 2
    finally:
        over(ranks)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("strategy", [BackupWorkers(backup=1), BoundedStaleness(bound=1)], ids=str)
def test_a_rank_that_fails_frees_those_that_wait_for_the_server(strategy: Strategy, rank: int) -> None:
    def loss(model: Any, pair: tuple) -> torch.Tensor:
        if torch.equal(pair[0], poison):
            raise ValueError("a bad example")
        return mse(model, pair)

    poison = batch(rank, 5, 0)[0]
    ranks = live(experiment(3, 0, task=toy(loss=loss), strategy=strategy, pace=4.0))
    ended(ranks)
    causes = [s.error for s in ranks if s.error and not s.error["consequence"]]
    assert [(e["rank"], e["text"]) for e in causes] == [(rank, "a bad example")]


@pytest.mark.parametrize("strategy", [BackupWorkers(backup=1), BoundedStaleness(bound=1), AsyncServer()], ids=str)
def test_ranks_with_different_amounts_of_data_all_finish(strategy: Strategy) -> None:
    uneven = toy(data=lambda rank, ranks, seed: [batch(rank, step, seed) for step in range(1 + 3 * rank)])
    ranks = run(experiment(3, 12, task=uneven, strategy=strategy))
    assert {(s.phase, s.rank.step) for s in ranks} == {("done", 12)}


CHANCE = [BackupWorkers(backup=1), BackupWorkers(backup=3), BoundedStaleness(bound=1), BoundedStaleness(bound=64)]


@pytest.mark.parametrize("strategy", CHANCE, ids=str)
def test_a_replay_of_the_engines_arrivals_gives_the_same_operations(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like the law for default settings: that order alone determines which rank is late and which ranks wait."""
    asked = Asked(monkeypatch, type(strategy))
    e = experiment(4, 20, strategy=strategy, pace=4.0).set("faults", [Slow(rank=1, factor=3.0), Noisy(spread=1.0)])
    ranks = run(e)
    engine = asked.taken()
    simulated = simulate(e, real=True, replay=engines(ranks))
    simulator = asked.taken()
    for who in engine:
        assert simulator[who] == engine[who], who
    for s in ranks:
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("meetings", [1, 2, 3])
def test_a_former_server_trains_from_the_others_step_after_any_number_of_meetings(meetings: int) -> None:
    rates = [Change(2 * k + 1, "lr", 0.01 + k / 1000) for k in range(meetings - 1)]
    e = experiment(3, 12, strategy=SyncServer(servers=1), eval_every=3)
    sessions = run(e, *rates, Change(7, "strategy", "DDP"))
    [(switched, *_)] = [m for m in sessions[0].record.noted("change") if '"strategy"' in m[3]]
    for s in sessions:
        steps = [r[0] for r in s.record if r[1] == "step" and r[2] == "DDP"]
        assert steps == list(range(switched, 12))
