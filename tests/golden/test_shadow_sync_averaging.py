"""ShadowSync with averaging and with block momentum against their formulas, on the simulator and on real ranks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.golden.shadow_sync import averaged
from tests.golden.test_shadow_sync import LR, Scores, batches, begun, data, lookups
from tests.ranks import experiment, run, toy, weights
from tests.sim.virtual import samples
from workbench import simulate
from workbench.fabric import Fabric, Link, Slow
from workbench.rank import Bucket, Rank
from workbench.settings import Change
from workbench.strategies import ShadowSync, ShadowSyncBMUF, ShadowSyncMA, shadow_bmuf, shadow_ma
from workbench.strategies._shadow import Shadow, ranks_mean
from workbench.tasks import ClickThrough

pytestmark = pytest.mark.ranks

STEPS = 30  # before the switch


class Noted:
    """Records the events of the trainers' parameters, in a possible order.

    A coroutine records an event between two operations, while no other code uses its rank. A shadow may write during a
    forward. So the forward here first copies the parameters on which its gradient depends.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self._whose: dict[int, int] = {}
        self._writes = [threading.Lock() for _ in range(3)]
        self._synchronised = Shadow.synchronised
        for module in (shadow_ma, shadow_bmuf):
            patch.setattr(module, "ranks_mean", self._looks)
        self._meet, self._met_in = ShadowSync._meet, ShadowSync._met_in
        patch.setattr(ShadowSync, "_meet", lambda *args: self._noting("look", args[1].id, self._meet(*args)))
        patch.setattr(ShadowSync, "_met_in", lambda *args: self._noting("meet", args[3], self._met_in(*args)))
        patch.setattr(Shadow, "synchronised", lambda state, rank, step: self._corrected(state, rank, step))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        ids, wanted, who = batch
        self._whose[id(model.w)] = who
        with self._writes[who]:
            self.events.append(("forward", who))
            w = model.w.clone()
        return (torch.cat([model.a(ids[:, 0]), model.b(ids[:, 1])], 1) @ w - wanted).square().mean() / 2

    def optimizer(self, params: Any, lr: float = LR) -> torch.optim.Optimizer:
        noted = self

        class SGD(torch.optim.SGD):
            elementwise = True

            def step(self, closure: Any = None) -> Any:
                for param in self.param_groups[0]["params"]:
                    if id(param) in noted._whose:  # not a table's rows, which a server steps
                        noted.events.append(("update", noted._whose[id(param)]))
                return super().step(closure)

        return SGD(params, lr)

    async def _looks(self, rank: Rank, bucket: Bucket, piece_kb: float) -> Any:
        self.events.append(("look", rank.id))
        found = await ranks_mean(rank, bucket, piece_kb)
        self._writes[rank.id].acquire()
        return found

    async def _noting(self, what: str, who: int, then: Any) -> None:
        self.events.append((what, who))
        await then

    async def _corrected(self, state: Shadow, rank: Rank, step: int) -> None:
        self.events.append(("correct", rank.id))
        if self._writes[rank.id].locked():
            self._writes[rank.id].release()
        await self._synchronised(state, rank, step)


def with_rank(rank: int, ranks: int, seed: int) -> list[Any]:
    return [(*batch, rank) for batch in data(rank, ranks, seed)]


def rows_alone(spans: Any, heard: Any) -> list[int]:
    """Returns the ranks in `heard` that came for rows, not to meet the centre."""
    asked = {}
    for who in range(2):
        sent = spans[(spans["rank"] == who) & (spans.name == "send turn to 2")].sort_values("asked", kind="stable")
        asked[who] = iter(sent.nbytes)
    return [int(who) for who in heard if next(asked[int(who)]) != 32]


FORMS = [(ShadowSyncMA(alpha=0.6), (0.6, 0.0, 1.0)), (ShadowSyncBMUF(alpha=0.8, eta=0.6, zeta=0.7), (0.8, 0.6, 0.7))]
ELASTIC = ShadowSync(alpha=0.3), (0.3, 0.0, 0.0)  # ranks on threads do not record when they add an answer


@pytest.mark.parametrize(("host", "strategy", "block"), [
    *(("simulator", *form) for form in [*FORMS, ELASTIC]), *(("engine", *form) for form in FORMS),
], ids=str)  # fmt: skip
def test_trainers_meet_during_steps_and_a_switch_keeps_the_common_model(
    host: str, strategy: Any, block: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic = isinstance(strategy, ShadowSync)
    noted = Noted(monkeypatch)
    fabric = Fabric(link=Link(bandwidth=1.0, latency=0.3), faults=(Slow(rank=1, factor=1.6),))
    task = toy(noted.optimizer, Scores, noted.loss, with_rank, None, lookups=lookups)
    e = experiment(3, STEPS + 1, task=task, pace=3.0, lr=LR, strategy=strategy, fabric=fabric)
    change = Change(STEPS, "strategy", "DDP")
    if host == "engine":
        sessions = run(e, change)
        found = [s.record.losses() for s in sessions[:2]]
        heard = [value for _, name, _, value in sessions[2].record.samples if name == "recv turn"]
        assert torch.equal(weights(sessions[0]), weights(sessions[1]))
        assert torch.equal(weights(sessions[0]), weights(sessions[2])), "the server has what trainers have"
    else:
        done = simulate(e, changes=[change], real=True)
        found, heard = [samples(done, "loss", r).tolist() for r in range(2)], samples(done, "recv turn", 2)
    together = [i for i, (what, who) in enumerate(noted.events) if (what, who) == ("forward", 2)]
    events = [event for event in noted.events[: together[0]] if event[1] < 2]
    while events[-1][0] == "forward":  # a trainer's first forward under DDP; every earlier forward has an update
        events.pop()
    looked_up = [int(who) for who in heard] if not elastic else rows_alone(done.spans, heard)
    want, first = averaged(begun(), LR, batches, block, events, looked_up, elastic)
    for mine, its in zip(found, want, strict=True):
        np.testing.assert_allclose(mine[: len(its)], its, rtol=1e-9)
    assert abs(found[0][len(want[0])] - first) <= 1e-9 * first
    rounds = sum(what == "correct" for what, _ in events) / 2
    assert rounds > 5 and abs(want[0][0] - want[0][-1]) > 1e-3


@pytest.mark.parametrize("kind", [ShadowSync, ShadowSyncMA, ShadowSyncBMUF])
def test_the_record_has_examples_per_second_the_gap_and_the_normalised_entropy(kind: Any) -> None:
    task = ClickThrough(fields=2, ids=50, width=2, hidden=4)  # 45 numbers in addition to the tables
    e = experiment(4, 40, task=task, batch=8, strategy=kind(workers=2), pace=10.0, eval_every=20,
                   fabric=Fabric(link=Link(bandwidth=0.1)))  # fmt: skip
    done = simulate(e, real=True)
    assert done.summary()["examples_per_second"] > 0
    assert len(samples(done, "held_out:normalised entropy", 0)) == 3
    assert [len(samples(done, "sync gap", r)) > 0 for r in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("kind", [ShadowSync, ShadowSyncMA, ShadowSyncBMUF])
def test_rows_wait_for_a_piece_of_the_round_and_not_for_all_of_it(kind: Any) -> None:
    task = ClickThrough(fields=1, ids=50, width=2, numbers=0, hidden=100)  # 10,000 of 10,401 numbers are one parameter
    link = Fabric(link=Link(bandwidth=8e-6 * 4 * 10401 * 4 / 3 / 0.1))  # a round lasts as long as ten steps
    last = []
    for piece_kb in (64.0, 1.0):
        e = experiment(4, 40, task=task, batch=2, strategy=kind(piece_kb=piece_kb), pace=10.0, fabric=link)
        done = simulate(e)
        last.append(done.spans[(done.spans.lane == "step") & (done.spans["rank"] < 3)].t1.max())
        sent = done.spans[done.spans.name.str.contains("(?:all_reduce|send) shadow")].nbytes.max()
        assert sent <= piece_kb * 1e3 * 4 / 3
    assert last[0] > 2.0 and last[1] < 0.7, "forty steps of 10 ms"
