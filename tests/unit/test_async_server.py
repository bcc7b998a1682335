"""Tests AsyncServer: its results, the staleness of pushes, waiting, and its knobs."""

from __future__ import annotations

import json
import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

from tests.ranks import batch, ended, experiment, live, mse, placed, run, together, toy, weights
from tests.sim.insides import simulated
from tests.unit.test_engine_apart import SLOW, over, until
from workbench.compressors import TopK
from workbench.engine.rank.session import Session
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Rank
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, AsyncServer, LocalSGD, SyncServer

pytestmark = pytest.mark.ranks

sgd = partial(torch.optim.SGD, lr=0.05)


def staleness(sessions: list[Session]) -> list[list[int]]:
    """Returns the staleness of every push, by rank."""
    return [[int(v) for _, name, _, v in s.record.samples if name == "staleness"] for s in sessions]


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_a_synchronous_server_is_data_parallelism(servers: int) -> None:
    """Two trainers that push and fetch mean weights in every step equal DDP on two ranks."""
    chosen = SyncServer(servers=servers)
    sessions = run(experiment(2 + servers, 12, task=toy(sgd, data=two), strategy=chosen))
    want = weights(run(experiment(2, 12, task=toy(sgd, data=two), strategy=DDP()))[0])
    for s in sessions[:2]:
        torch.testing.assert_close(weights(s), want, rtol=1e-5, atol=1e-6)
    assert not [v for every in staleness(sessions) for v in every if v]


def two(rank: int, ranks: int, seed: int) -> list:
    """Gives a trainer the same data with and without servers."""
    return [batch(rank, step, seed) for step in range(64)]


def test_sums_are_data_parallelism_at_p_times_the_rate() -> None:
    chosen = experiment(3, 12, task=toy(sgd), strategy=SyncServer(weight="sum"))
    want = run(experiment(3, 12, task=toy(partial(torch.optim.SGD, lr=0.15)), strategy=DDP()))
    torch.testing.assert_close(weights(run(chosen)[1]), weights(want[1]), rtol=1e-5, atol=1e-6)


def alone(push: int, fetch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns one trainer's weights after 12 steps with a server, and without one."""
    chosen = AsyncServer(servers=1, push=push, fetch=fetch)
    e = experiment(2, 12, task=toy(sgd, data=two), strategy=chosen, pace=5.0)
    _, sessions = simulated(e)
    return weights(sessions[0]), weights(run(experiment(1, 12, task=toy(sgd, data=two), strategy=DDP()))[0])


@pytest.mark.parametrize(("push", "fetch"), [(1, 1), (2, 3), (3, 2), (5, 1)])
def test_a_fetch_keeps_unpushed_moves(push: int, fetch: int) -> None:
    """With one trainer the server knows only that trainer's pushes, so a fetch changes nothing."""
    got, want = alone(push, fetch)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_leaving_between_two_pushes_shares_the_trainers_moves() -> None:
    """Unpushed moves count like pushes: half of each of 2 trainers' moves, not 1/3."""
    chosen, moves = AsyncServer(servers=1, push=4, fetch=4), torch.tensor([[4.0, 0.0], [2.0, -6.0], [0.0, 0.0]])
    start = torch.tensor([1.0, 10.0])
    ranks = [Rank(index, 3) for index in range(3)]
    buckets = [Bucket(0, start.clone(), tuple(placed((2,))), 0) for _ in ranks]
    states = [chosen.init(rank, [bucket]) for rank, bucket in zip(ranks, buckets, strict=True)]
    for rank, bucket, move in zip(ranks, buckets, moves, strict=True):
        bucket.data += move

        async def params(bucket: Bucket = bucket) -> list[Bucket]:
            return [bucket]

        rank.params = params  # type: ignore[method-assign]
    together([chosen.leave(rank, state) for rank, state in zip(ranks, states, strict=True)])
    for bucket in buckets:
        assert bucket.data.tolist() == (start + torch.tensor([3.0, -3.0])).tolist()


def test_fast_ranks_do_not_wait_for_a_slow_one_and_staleness_varies() -> None:
    """The slow rank's step lasts until each other rank has made 3, so it deadlocks if they wait."""
    sessions: list[Session] = []

    def loss(model: torch.nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if threading.current_thread().name.startswith("rank 1 "):
            until(lambda: len(sessions) == 4)
            due = min(3 * (sessions[1].rank.step + 1), 20)
            until(lambda: all(s.rank.step >= due for s in sessions if s is not sessions[1]))
        return mse(model, pair)

    sessions += live(experiment(4, 20, strategy=AsyncServer(), task=toy(loss=loss), pace=10.0))
    ended(sessions)
    assert {s.phase for s in sessions} == {"done"}, [s.error for s in sessions]
    every = staleness(sessions)
    assert [len(pushes) for pushes in every] == [20] * 4
    assert len(set(every[1])) > 1 and len({v for pushes in every for v in pushes}) > 3
    typical = [sorted(pushes[:6])[3] for pushes in every]  # the fast ranks are done after that
    assert typical[1] > max(typical[0], typical[2], typical[3]), "while the slow one computes, the others push"


def test_every_push_is_in_the_servers_version() -> None:
    sessions = run(experiment(3, 20, strategy=AsyncServer(push=2, fetch=5), pace=2.0).set("faults", SLOW))
    assert sessions[0].state.version == 3 * 10
    assert sum(map(len, staleness(sessions))) >= 3 * 9, "the answer to a last push may be left unread"


def asked(s: Session, first: int, stop: int) -> Counter:
    """Counts a rank's messages in steps [first, stop), by kind."""
    return Counter(" ".join(n.split()[1:-3]) for step, n, _ in s.record.comm() if first <= step < stop)


def test_live_changes_of_periods_change_how_often_ranks_send() -> None:
    chosen = experiment(3, 48, strategy=SyncServer(), bucket_mb=1.0)
    s = run(chosen, Change(12, "push", 4), Change(24, "fetch", 2))[1]
    assert asked(s, 0, 12)["push bucket"] == 12
    assert asked(s, 32, 48)["push bucket"] == 4
    assert fetched(s, 0, 12) == 12 and fetched(s, 32, 48) == 8


def fetched(s: Session, first: int, stop: int) -> int:
    """Counts how often a rank received the server's parameters in steps [first, stop)."""
    return sum(first <= r[0] < stop for r in s.record if r[2] == "recv fetch bucket 0 from 0")


def test_dedicated_servers_only_serve_and_share_the_buckets() -> None:
    sessions = run(experiment(5, 12, strategy=AsyncServer(servers=2), eval_every=4))
    assert [s.rank.role for s in sessions] == ["trainer"] * 3 + ["server"] * 2
    (mark,) = sessions[0].record.noted("roles")
    assert json.loads(mark[3]) == {"serve": [3, 4], "text": "3 of 5 ranks train; 2 serve"}
    for s in sessions[3:]:
        assert not [r for r in s.record if r[1] == "step"] and not s.record.losses()
        buckets = {name.split()[-3] for _, name, _ in s.record.comm() if "fetch" in name}
        assert buckets == {str(b.index) for b in s.layout.buckets[s.rank.index - 3 :: 2]}
    held_out = [v for _, name, _, v in sessions[0].record.samples if name == "held_out"]
    assert held_out[-1] < held_out[0]
    partners = [s.training.mailbox.connected_ranks for s in sessions[1:3]]
    assert all(found <= {0, 3, 4} for found in partners), "trainers talk to servers and rank 0's engine"


@pytest.mark.parametrize("optimizer", [partial(torch.optim.Adam, lr=1e-2), partial(torch.optim.SGD, lr=0.02)])
def test_servers_take_part_in_the_next_strategy(optimizer: Any) -> None:
    """A rank that never trained gets its optimizer state from a trainer."""
    chosen = experiment(4, 20, task=toy(optimizer), strategy=AsyncServer(servers=1))
    sessions = run(chosen, Change(8, "strategy", "DDP"), Change(12, "strategy", {"AsyncServer": {"servers": 2}}),
                   Change(16, "strategy", "DDP"))  # fmt: skip
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    assert len({s.rank.step for s in sessions}) == 1


def test_live_changes_of_servers_hand_over_the_centre() -> None:
    sessions = live(experiment(4, 0, strategy=AsyncServer(), pace=4.0))
    try:
        for k, (path, value) in enumerate([("servers", 2), ("push", 3), ("strategy", "SyncServer"), ("servers", 0)]):
            sessions[0].request({"kind": "change", "id": str(k), "path": path, "value": value})
            until(lambda k=k: len(sessions[0].record.noted("change")) > k, sessions)
            trainers = 4 - sessions[0].experiment.strategy.servers
            begun = [s.rank.step for s in sessions]
            until(lambda b=begun, n=trainers: all(s.rank.step > b[s.rank.index] + 6 for s in sessions[:n]), sessions)
        sessions[0].request({"kind": "change", "id": "x", "path": "servers", "value": 4})
        until(lambda: sessions[0].record.noted("refused"), sessions)
        assert "leaves none of 4 ranks to train" in sessions[0].record.noted("refused")[0][3]
    finally:
        over(sessions)


def test_leaving_keeps_unpushed_moves() -> None:
    """A synchronous server that is left between two pushes equals Local SGD left in the middle of a round."""
    chosen = SyncServer(push=2, fetch=2)
    sessions = run(experiment(3, 6, task=toy(sgd), strategy=chosen), Change(0, "strategy", "DDP"))
    (mark,) = sessions[0].record.noted("change")
    assert mark[0] == 3, "in the middle of a round"
    want = run(experiment(3, 6, task=toy(sgd), strategy=LocalSGD(every=2)), Change(3, "strategy", "DDP"))
    torch.testing.assert_close(weights(sessions[0]), weights(want[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("push", "fetch"), [(1, 1), (4, 4), (2, 3)])
def test_a_synchronous_server_applies_a_change_before_the_same_step_on_all_ranks(push: int, fetch: int) -> None:
    sessions = live(experiment(3, 0, strategy=SyncServer(servers=1, push=push, fetch=fetch), pace=2.0))
    try:
        for k in range(6):
            rate = 0.01 + 0.001 * k
            sessions[0].request({"kind": "change", "id": str(k), "path": "lr", "value": rate})
            until(lambda rate=rate: all(s.experiment.lr == rate for s in sessions), sessions)
        sessions[0].request({"kind": "stop"})
        ended(sessions)
        rates = [[(step, v) for step, name, _, v in s.record.samples if name == "lr"] for s in sessions[:2]]
        assert rates[0] == rates[1] and len(rates[0]) > 6
    finally:
        over(sessions)


def test_invalid_settings_are_refused_with_a_reason() -> None:
    with pytest.raises(KnobError, match="leaves none of 2 ranks to train; use at most 1"):
        experiment(2, strategy=AsyncServer(servers=2))
    with pytest.raises(KnobError, match="use Dense with it"):
        experiment(2, strategy=AsyncServer(), compressor=TopK.usual())
