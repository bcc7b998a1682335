"""Checks that both hosts receive the same operations if the simulator replays the recorded order of arrivals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Coroutine, Generator
from typing import Any

import numpy as np
import pytest
import torch

from tests.laws.claims import SILENT
from tests.ranks import experiment, run, shipped
from tests.sim.virtual import samples
from workbench import simulate
from workbench.fabric import Slow
from workbench.rank import Op, Rank
from workbench.record.timeline import Timeline
from workbench.run import Run
from workbench.settings import Change, KnobError
from workbench.strategies import AsyncServer, Strategy, SyncServer

pytestmark = pytest.mark.ranks

APART = {n: cls for n, cls in shipped(Strategy).items() if not cls.lockstep}
SLOW = [Slow(rank=1, factor=3.0)]


class Asked:
    """Records every operation that a strategy requests, in order, by rank and by coroutine.

    values: whether to record the whole numbers in arguments, in addition to their count
    """

    def __init__(self, patch: pytest.MonkeyPatch, cls: type[Strategy], values: bool = False) -> None:
        self.values = values
        self.of: dict[tuple[int, str], list[str]] = defaultdict(list)
        for name in ("step", "background"):
            patch.setattr(cls, name, self._noting(name, getattr(cls, name)))

    def _noting(self, name: str, plain: Any) -> Any:
        def made(strategy: Strategy, rank: Rank, state: Any) -> Any:
            return self._through(plain(strategy, rank, state), self.of[rank.index, name])

        return made

    def _through(self, coro: Coroutine[Op, Any, Any], log: list[str]) -> Generator[Op, Any, Any]:
        answer, error = None, None
        while True:
            try:
                op = coro.send(answer) if error is None else coro.throw(error)
            except StopIteration as stop:
                return stop.value
            values = self.values and op.verb != "recv"  # no rank has written the buffer that receives the message
            log.append(f"{op.verb} {', '.join(_told(x, values) for x in op.args)}")
            answer, error = None, None
            try:
                answer = yield op
            except BaseException as thrown:
                error = thrown

    def taken(self) -> dict[tuple[int, str], list[str]]:
        """Returns the operations recorded so far and clears the record."""
        out = dict(self.of)
        self.of.clear()
        return out


def _told(x: Any, values: bool) -> str:
    if isinstance(x, list):
        return f"[{', '.join(_told(each, values) for each in x)}]"
    if isinstance(x, torch.Tensor):
        whole = values and not x.is_floating_point() and not x.is_meta
        return f"{tuple(x.shape)} {x.dtype}{f' {x.tolist()}' if whole else ''}"
    return "child" if isinstance(x, Coroutine) else str(x)


def engines(sessions: list[Any]) -> Run:
    """Returns the engine's record as a Run."""
    tl = Timeline()
    for s in sessions:
        for table, found in ((tl.spans, s.record), (tl.samples, s.record.samples), (tl.marks, s.record.marks)):
            table.add([(s.rank.index, *row) for row in found])
    return Run(sessions[0].experiment, timeline=tl)


@pytest.mark.parametrize("tensors", ["sizes", "real"])
@pytest.mark.parametrize("name", APART)
def test_a_replay_of_the_engines_arrivals_gives_the_same_operations(
    name: str, tensors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch, APART[name], values=tensors == "real")
    e = experiment(4, 16, strategy=APART[name](), pace=4.0).set("faults", SLOW)
    sessions = run(e)
    engine = asked.taken()
    assert sum(map(len, engine.values())) > 4 * 16 * (2 if name in SILENT else 4), "a silent one only computes"
    simulated = simulate(e, real=tensors == "real", replay=engines(sessions))
    simulator = asked.taken()
    assert simulator.keys() == engine.keys()
    for who in engine:
        assert simulator[who] == engine[who], who
    if tensors == "real" and APART[name] is AsyncServer:  # AsyncServer's losses follow from the order of arrivals alone
        for s in sessions:
            losses = samples(simulated, "loss", s.rank.index)
            np.testing.assert_allclose(losses, s.record.losses(), rtol=1e-4, atol=1e-6)


def test_without_the_record_the_virtual_clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the test above can fail: with another slow rank, the operations differ."""
    asked = Asked(monkeypatch, AsyncServer)
    e = experiment(4, 16, strategy=AsyncServer(), pace=4.0).set("faults", SLOW)
    recorded = simulate(e)
    first = asked.taken()
    other = e.set("faults", [Slow(rank=3, factor=3.0)])
    simulate(other)
    assert asked.taken() != first
    simulate(other, replay=recorded)
    assert asked.taken() == first


def test_a_server_takes_the_next_recorded_message_after_its_senders_have_paused() -> None:
    """At a change the server waits for the next message. Without it, a strategy with two requests a round hangs."""
    e = experiment(3, 24, strategy=SyncServer(servers=1), pace=4.0).set("faults", SLOW)
    changes = [Change(5, "lr", 0.01), Change(9, "fabric.faults", [Slow(rank=0, factor=3.0)]), Change(15, "lr", 0.02)]
    recorded = simulate(e, changes=changes)
    again = simulate(e, changes=changes, replay=recorded)
    asked, told = (samples(one, "recv ask", 2).tolist() for one in (recorded, again))
    assert asked == told and len(asked) == 2 * 24


@pytest.mark.parametrize("name", [n for n, cls in APART.items() if cls.background is not Strategy.background])
def test_backgrounds_go_on_after_the_end_of_the_record(name: str) -> None:
    e = experiment(4, 8, strategy=APART[name](), pace=4.0)
    recorded = simulate(e)
    longer = simulate(e.set("steps", 24), replay=recorded)
    for rank in range(4):
        rounds, before = (samples(r, "again", rank).tolist() for r in (longer, recorded))
        assert rounds[: len(before) - 1] == before[:-1], "within the record both are the same"
        assert sum(rounds) >= 2 * sum(before)


def test_a_replay_needs_as_many_ranks() -> None:
    e = experiment(2, 4, strategy=AsyncServer(), pace=4.0)
    with pytest.raises(KnobError, match="the run to replay had 3; take as many"):
        simulate(e, replay=Run(experiment(3, 4)))
