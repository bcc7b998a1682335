"""Injects a fault at each moment of a join: the old ranks must train on from their own state.

A moment is just before a joining or old rank waits: for a connection, a collective, or the progress of other ranks. A
test tries one moment after the other, until no moment is left.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.thinned import thinned
from tests.unit.test_resizing import Crowd, setting
from workbench.engine.collectives.wire import Aborted, Wire
from workbench.engine.control import membership
from workbench.engine.control.peers import Peers
from workbench.engine.rank import resizing
from workbench.engine.rank.session import Session
from workbench.host.elastic.generation_view import GenerationView
from workbench.host.elastic.leaving import StateBefore
from workbench.host.loop import generation
from workbench.host.placement.canonical_state import RankDisagreement, check_same
from workbench.host.placement.optimizer_slots import read_slots
from workbench.host.placement.placement import Placement
from workbench.host.placement.strided_slices import StridedSlice
from workbench.host.transfer import rank_state
from workbench.partitions import Pipeline, Tensor
from workbench.rank import Rank
from workbench.strategies import DDP, DiLoCo, LocalSGD, Strategy, TorchDDP, ZeRO1, ZeRO3
from workbench.tasks import ByteGPT, Digits

pytestmark = pytest.mark.ranks
OLD, NEW = (0, 1), (2, 3)
MOST = 400  # upper bound of the number of moments

Values = dict[str, torch.Tensor]


def dies(session: Session) -> None:
    """Shows peers a killed rank: its connections end, and it sends nothing more."""
    session._must_leave = True
    session.cut_connections()
    raise Aborted("killed by the test")


def is_cut_off(session: Session) -> None:
    session.cut_connections()


class Faults:
    """Makes `fault` happen to each of `victims` before its wait number `at` in a generation that forms.

    happened: victims that have met the fault
    """

    def __init__(self, patch: pytest.MonkeyPatch, victims: tuple[int, ...], fault: Callable[[Session], None]) -> None:
        self.victims, self.fault, self.at = victims, fault, 0
        self.crowd: Crowd | None = None
        self.happened: set[int] = set()
        self._counts: dict[int, int] = {}
        wait, opened, gather = Wire.wait, Peers.open_wire, membership.await_reports

        def waits(wire: Wire, work: Any) -> None:
            every = self.crowd.every if self.crowd else ()
            for session in [s for s in every if any(each is wire for each in s.wires)]:
                self._passes(session)
            wait(wire, work)

        def opens(peers: Peers, *args: Any, **more: Any) -> Wire:
            self._passes(peers.session)
            return opened(peers, *args, **more)

        def gathers(store: Any, what: str, place: int | None, processes: Any, look: Any, *more: Any) -> None:
            self._passes(look.args[0])
            gather(store, what, place, processes, look, *more)

        patch.setattr(Wire, "wait", waits)
        patch.setattr(Peers, "open_wire", opens)
        patch.setattr(membership, "await_reports", gathers)

    def begin(self, at: int, crowd: Crowd) -> None:
        self.at, self.crowd = at, crowd
        self.happened.clear()
        self._counts.clear()

    def _passes(self, session: Session) -> None:
        if session.forming is None or session.member not in self.victims or session.generation_number > 1:
            return
        self._counts[session.member] = number = self._counts.get(session.member, 0) + 1
        if number == self.at:
            self.happened.add(session.member)
            self.fault(session)


class Crowded(Crowd):
    """Two paused ranks that have trained.

    had: by rank, an old rank's state when all ranks had met for the join; now: the state that it has taken since
    """

    def __init__(self, patch: pytest.MonkeyPatch, faults: Faults, strategy: Strategy, **more: Any) -> None:
        super().__init__(setting(strategy, **{"on_death": "go on", "eval_every": 0, **more}))
        self.had: dict[int, Values] = {}
        self.now: dict[int, Values] = {}
        self._come, self._put = resizing.gather_state, generation.agree_on_state
        patch.setattr(resizing, "gather_state", self._comes)
        patch.setattr(generation, "agree_on_state", self._reenters)
        faults.crowd = None
        self.reach(4)
        self.first.request({"kind": "pause", "id": "p"})
        self.paused()

    async def _comes(self, run: Any, stay: tuple[int, ...]) -> None:
        await self._come(run, stay)
        self.had[run.session.member] = held(run)

    async def _reenters(self, run: Any, came: Any) -> None:
        await self._put(run, came)
        self.now[run.session.member] = held(run)

    def join(self) -> None:
        """Requests 2 more ranks, and waits until they train or the old ranks have settled to go on without them."""
        for _ in NEW:
            self.call(len(OLD + NEW))
        self.until(lambda: all(self.every[m].phase == "waiting" for m in NEW))
        self.first.request({"kind": "resize", "members": [*OLD, *NEW], "id": "r"})
        self.until(lambda: self.said("refused") or all(self.every[m].phase == "paused" for m in NEW))
        self.until(lambda: all(s.join(0) for s in self.every if s.member not in self.first.members))


def held(run: Any) -> Values:
    """Copies whole parameters and optimizer state, by name."""
    params = {place.name: place.param.detach() for place in run.layout.order}
    return {name: x.clone() for name, x in {**params, **read_slots(run.layout, run.optimizer)}.items()}


def play(patch: pytest.MonkeyPatch, victims: tuple[int, ...], fault: Any, at: int, strategy: Strategy,
         **more: Any) -> bool:  # fmt: skip
    """Plays a join with a fault at moment `at`, and checks ranks and state. Returns whether that moment exists."""
    with patch.context() as patched:
        faults = Faults(patched, victims, fault)
        with Crowded(patched, faults, strategy, **more) as crowd:
            faults.begin(at, crowd)
            crowd.join()
            lost = faults.happened if fault is dies else set()
            crowd.until(lambda: all(crowd.every[member].join(0) for member in lost))
            there = tuple(sorted(s.member for s in crowd.there))
            assert all(s.error is None for s in crowd.every), at
            if faults.happened and not (fault is is_cut_off and there == OLD + NEW):
                assert there == tuple(m for m in OLD if m not in lost), at
                refused = crowd.said("refused")
                assert [said["id"] for said in refused] == ["r"] and "ask again" in refused[0]["reason"], at
            else:
                assert there == OLD + NEW, at
            source = crowd.had[OLD[0]]
            for member in there:
                now = crowd.now[member]
                assert now.keys() == source.keys(), at
                for name, x in now.items():
                    torch.testing.assert_close(x, source[name], rtol=0, atol=0)
            crowd.first.request({"kind": "resume", "id": "go"})
            crowd.reach(crowd.first.rank.step + 2)
            # torch's DDP waits in C++, and gloo may take minutes to notice that an abort cut its sockets
            crowd.stopped()
            return bool(faults.happened)


VICTIMS = {"old": (0,), "other old": (1,), "new": (3,), "both": (0, 3)}
SMALL = Digits(hidden=16)
CASES: dict[str, dict[str, Any]] = {
    "DDP": {"strategy": DDP(), "task": SMALL},
    "LocalSGD": {"strategy": LocalSGD(every=3), "task": SMALL},
    "DiLoCo": {"strategy": DiLoCo(every=3), "task": SMALL},
    "TorchDDP": {"strategy": TorchDDP(), "task": SMALL},
    "ZeRO1": {"strategy": ZeRO1(), "task": SMALL},
    "ZeRO3": {"strategy": ZeRO3(), "task": SMALL},
    "Pipeline": {"strategy": DDP(), "partition": Pipeline(), "task": ByteGPT(width=32, context=16)},
    "Tensor": {"strategy": DDP(), "partition": Tensor(), "task": ByteGPT(width=32, context=16)},
}


FAULTS = {"dies": dies, "is cut off": is_cut_off}
PARTS = 6  # tests that share the moments of one case, in turn


@pytest.mark.parametrize(
    ("name", "who", "fault", "part"), thinned(product(CASES, VICTIMS, FAULTS, range(1, PARTS + 1)), of=96, long=48)
)
def test_old_ranks_keep_their_state_at_each_moment_of_a_join(
    name: str, who: str, fault: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(part, MOST, PARTS):
        if not play(monkeypatch, VICTIMS[who], FAULTS[fault], at, **CASES[name]):
            break
    assert PARTS < at < MOST - PARTS, "there were such moments, and the join ends"


@pytest.mark.parametrize("name", ["DDP", "ZeRO1"])
def test_losing_a_joining_rank_does_not_end_a_run_with_on_death_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(monkeypatch, (3,), dies, 9, **CASES[name], on_death="end")


def test_a_record_has_no_generation_that_did_not_form(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults(monkeypatch, (3,), dies)
    with Crowded(monkeypatch, faults, **CASES["DDP"], save_every=1) as crowd:
        faults.begin(12, crowd)
        crowd.join()
        marks = [json.loads(m[3]) for s in crowd.every for m in s.record.noted("members")]
        assert faults.happened and [said["members"] for said in marks] == [list(OLD)]
        assert not any(m[1] in ("mesh", "buckets", "roles") for m in crowd.every[3].record.marks)


def test_messages_name_ranks_by_their_number_in_the_run() -> None:
    with pytest.raises(RankDisagreement, match=r"^the parameters of rank 5, 7 differ from rank 4's$"):
        check_same([1, 2, 3], "the parameters", [4, 5, 7])
    rank = Rank(1, 3)
    assert rank.number() == 1
    rank.members = (0, 4, 5)
    assert (rank.number(), rank.number(2)) == (4, 5)
    with pytest.raises(RankDisagreement, match=r"^rank 4 has state of 3 elements for w and a part of 2$"):
        rank_state._join_pieces(
            {"w": torch.zeros(3)}, Placement({"w": 2}, {1: {"w": (StridedSlice(0, 2),)}}), rank, torch.zeros(0)
        )


def test_the_view_has_every_attribute_that_a_failed_generation_gives_back() -> None:
    run, to = MagicMock(), MagicMock()
    run.policy_runner = SimpleNamespace(run=run)
    settable = {name for cls in GenerationView.__mro__ for name in inspect.get_annotations(cls)}
    assert StateBefore(run, to).settings.keys() <= settable
