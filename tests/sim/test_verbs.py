"""Tests every verb on the virtual clock, and the errors of deadlocks and mismatched operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.ranks import experiment
from tests.sim.virtual import paced, rows, samples, seconds, stack
from workbench import Deadlock, simulate
from workbench.fabric import Slow
from workbench.rank import Rank, StrategyError
from workbench.settings import Change
from workbench.sim import Mismatch
from workbench.sim.clock import fiber, world
from workbench.strategies import Strategy

pytestmark = pytest.mark.ranks

ROOM = 10_000  # elements of a message: 40 kB, 3.2 ms at 100 Mbit/s


@dataclass(frozen=True, kw_only=True)
class _Plain(Strategy):
    """Local training. Tests add operations before or after it."""

    async def train(self, rank: Rank) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()


def _blank(n: int = ROOM) -> torch.Tensor:
    return torch.empty(n, device="meta")


@dataclass(frozen=True, kw_only=True)
class RingPasser(_Plain):
    """Each rank sends a message to the next one."""

    async def step(self, rank: Rank, state: Any) -> None:
        await self.train(rank)
        await rank.send(_blank(), (rank.index + 1) % rank.size, "ring")
        _, source = await rank.recv(_blank(), (rank.index - 1) % rank.size, "ring")
        assert source == (rank.index - 1) % rank.size


def test_sends_that_cross_do_not_block_and_take_the_ports_time() -> None:
    run = simulate(paced(4, 3, strategy=RingPasser()))
    np.testing.assert_allclose(seconds(run), 10e-3 + 3.2e-3)
    sent = rows(run, "comm", 1)
    assert set(sent.name) == {"send ring to 2"} and set(sent.nbytes) == {4 * ROOM}


@dataclass(frozen=True, kw_only=True)
class CollectorOfAny(_Plain):
    """Rank 0 receives a message from every other rank, in the order of arrival."""

    async def step(self, rank: Rank, state: Any) -> None:
        await self.train(rank)
        if rank.index:
            await rank.send(_blank(), 0, "gift")
            return
        for place in range(rank.size - 1):
            _, source = await rank.recv(None, kind="gift")
            await rank.sample(f"place {place}", source)
        await rank.sample("clock", await rank.clock())


def test_messages_come_in_order_of_time_and_queue_at_the_receivers_port() -> None:
    run = simulate(paced(4, 1, strategy=CollectorOfAny(), faults=(Slow(rank=1, factor=1.5), Slow(rank=2, factor=1.1))))
    assert [samples(run, f"place {k}")[0] for k in range(3)] == [3, 2, 1]
    assert samples(run, "clock")[0] == pytest.approx(10e-3 + 3 * 3.2e-3)


@dataclass(frozen=True, kw_only=True)
class Beside(_Plain):
    """Averages in the background as often as possible while training goes on."""

    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"

    async def step(self, rank: Rank, state: Any) -> None:
        await self.train(rank)

    async def background(self, rank: Rank, state: Any) -> None:
        while await rank.again():
            for bucket in await rank.params():
                await rank.all_reduce(bucket.data, "sum", "shadow")


@pytest.mark.parametrize("changes", [(), (Change(4, "strategy", "DDP"),)])
def test_a_background_runs_beside_the_steps_and_ends_with_them_on_all_ranks(changes: tuple[Change, ...]) -> None:
    e = paced(3, 8, 10.0, strategy=Beside(), task=stack(), faults=(Slow(rank=1, factor=1.5),))
    run = simulate(e, changes=changes)
    assert run.state == "done"
    assert seconds(run, 0)[1] == pytest.approx(10e-3) and seconds(run, 1)[1] == pytest.approx(15e-3)
    counts = [len(rows(run, "comm", r, "all_reduce shadow")) for r in range(3)]
    assert counts[0] == counts[1] == counts[2] > 8
    assert len(rows(run, "switch", 0)) == len(changes)


@dataclass(frozen=True, kw_only=True)
class LastServes(_Plain):
    """The last rank does not train. It answers until no more messages can come."""

    lockstep: ClassVar[bool] = False
    exchanges: ClassVar[str] = "parameters"

    def trains(self, index: int, size: int) -> bool:
        return index < size - 1

    async def step(self, rank: Rank, state: Any) -> None:
        await self.train(rank)
        await rank.send(_blank(10), rank.size - 1, "push")
        await rank.recv(_blank(10), rank.size - 1, "pull")

    async def background(self, rank: Rank, state: Any) -> None:
        if rank.role == "server":
            while (came := await rank.recv(None, kind="push")) is not None:
                await rank.send(_blank(10), came[1], "pull")


@pytest.mark.parametrize("changes", [(), (Change(3, "strategy", "DDP"),)])
def test_a_server_answers_until_all_trainers_are_done(changes: tuple[Change, ...]) -> None:
    run = simulate(paced(4, 6, strategy=LastServes(), faults=(Slow(rank=2, factor=3.0),)), changes=changes)
    assert run.state == "done"
    assert seconds(run, 1)[0] == pytest.approx(10e-3, rel=0.01) and seconds(run, 2)[0] == pytest.approx(30e-3, rel=0.01)
    served = rows(run, "step", 3)
    assert len(served) == (3 if changes else 0) and len(rows(run, "step", 0)) == 6
    if changes:  # rank 0 called the meeting at its step 3; later ranks go on with the first rank's step
        assert set(served.name) == {"DDP"} and served.step.tolist() == [3, 4, 5]
        assert rows(run, "step", 2, "DDP").step.tolist() == [3, 4, 5]
        assert len(rows(run, "step", 2, "LastServes")) < 3


@dataclass(frozen=True, kw_only=True)
class ForeverListening(_Plain):
    """A strategy whose background waits for messages that no rank sends."""

    lockstep: ClassVar[bool] = False

    async def step(self, rank: Rank, state: Any) -> None:
        await self.train(rank)

    async def background(self, rank: Rank, state: Any) -> None:
        assert await rank.recv(None, kind="never") is None
        await rank.sample("told", 1.0)


def test_a_receiver_learns_that_no_more_messages_can_come() -> None:
    run = simulate(paced(2, 2, strategy=ForeverListening()))
    assert len(samples(run, "told")) == 2 and run.state == "done"


@dataclass(frozen=True, kw_only=True)
class UrgentLast(_Plain):
    """Starts three exchanges, the last one urgent. Rank 1 is late for each."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        handles = []
        for name, priority in (("first", 1), ("lazy", 1), ("urgent", 2)):
            handles.append(await rank.start(_exchange(rank, name), name=name, priority=priority))
        for handle in handles:
            await rank.wait(handle)
        await rank.backward()
        await rank.update()


async def _exchange(rank: Rank, name: str) -> None:
    await rank.all_reduce(_blank(), "sum", name)


def test_an_urgent_exchange_overtakes_waiting_ones_in_the_same_order_on_all_ranks() -> None:
    run = simulate(paced(3, 3, strategy=UrgentLast(), faults=(Slow(rank=1, factor=1.5),)))
    for rank in range(3):
        names = [n.removeprefix("all_reduce ") for n in rows(run, "comm", rank).name]
        assert names == ["first", "urgent", "lazy"] * 3


@dataclass(frozen=True, kw_only=True)
class BucketByBucket(_Plain):
    """Runs forward and update bucket by bucket."""

    async def step(self, rank: Rank, state: Any) -> None:
        forward, seen = rank.forward(), []
        async for bucket in forward:
            seen.append(bucket.index)
        await rank.sample("order", float(seen == sorted(seen, reverse=True)))
        async for bucket in rank.backward():
            await rank.update(bucket)


@pytest.mark.parametrize("real", [False, True])
def test_forward_and_update_bucket_by_bucket_take_as_long_as_whole(real: bool) -> None:
    run = simulate(paced(2, 3, strategy=BucketByBucket(), task=stack()), real=real)
    assert samples(run, "order").all()
    np.testing.assert_allclose(seconds(run), 10e-3, rtol=0.06)


@dataclass(frozen=True, kw_only=True)
class ThreeHands(_Plain):
    """Three workers on each rank, each with its own exchange."""

    workers: ClassVar[int] = 3

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.sample("worker", rank.worker)
        await rank.all_reduce(_blank(), "sum", f"worker {rank.worker}")


def test_workers_of_a_rank_run_side_by_side_and_share_its_port() -> None:
    run = simulate(paced(2, 2, strategy=ThreeHands()))
    assert sorted(samples(run, "worker", 0)) == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(seconds(run), 3e-3 + 3 * 3.2e-3)


@dataclass(frozen=True, kw_only=True)
class OneSkips(_Plain):
    """The last rank skips the second exchange of step 2."""

    async def step(self, rank: Rank, state: Any) -> None:
        await self.train(rank)
        await rank.all_reduce(_blank(), "sum", "all")
        if rank.step != 2 or rank.index < rank.size - 1:
            await rank.all_reduce(_blank(), "sum", "most")


def test_a_deadlock_names_the_waiting_ranks_the_operation_and_the_missing_rank() -> None:
    with pytest.raises(Deadlock) as said:
        simulate(paced(3, 3, strategy=OneSkips()))
    assert "ranks 0, 1 wait in all_reduce most (step 2, lane 'comm') for rank 2" in str(said.value)
    assert "rank 2: finished all 3 steps" in str(said.value)


def test_a_mismatch_of_operations_names_both_ranks() -> None:
    with pytest.raises(Mismatch, match=r"all_reduce most of 40000 bytes in step 2.*but rank \d requested all_red"):
        simulate(paced(3, 4, strategy=OneSkips(), eval_every=0).set("strategy", OtherSizes()))


@dataclass(frozen=True, kw_only=True)
class OtherSizes(OneSkips):
    """Like OneSkips, but the skipped exchange has another size than the next one."""

    async def step(self, rank: Rank, state: Any) -> None:
        await self.train(rank)
        await rank.all_reduce(_blank(7), "sum", "all")
        if rank.step != 2 or rank.index < rank.size - 1:
            await rank.all_reduce(_blank(), "sum", "most")


@dataclass(frozen=True, kw_only=True)
class EachWaitsForTheNext(_Plain):
    """Every rank receives and no rank sends."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.recv(_blank(), (rank.index + 1) % rank.size, "word")


def test_ranks_that_all_receive_are_a_deadlock() -> None:
    with pytest.raises(Deadlock, match=r"rank 1 waits in recv 'word' \(step 0\) for a message from rank 0"):
        simulate(paced(2, 1, strategy=EachWaitsForTheNext()))


@dataclass(frozen=True, kw_only=True)
class WaitsOnItsOwnLane(_Plain):
    """A child that waits for a later child on the same lane."""

    async def step(self, rank: Rank, state: Any) -> None:
        async def outer() -> None:
            await rank.wait(await rank.start(_exchange(rank, "inner"), name="inner"))

        await rank.wait(await rank.start(outer(), name="outer"))


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_child_that_waits_on_its_own_lane_is_refused() -> None:
    with pytest.raises(StrategyError, match="waits for inner on its own lane"):
        simulate(paced(2, 1, strategy=WaitsOnItsOwnLane()))


@dataclass(frozen=True, kw_only=True)
class AsksAgainInStep(_Plain):
    """Uses a verb outside its place."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.again()


def test_again_belongs_in_a_background() -> None:
    with pytest.raises(StrategyError, match="background"):
        simulate(paced(2, 1, strategy=AsksAgainInStep()))


@dataclass(frozen=True, kw_only=True)
class ReadsValues(_Plain):
    """Reads values, which a simulation with sizes only lacks."""

    async def step(self, rank: Rank, state: Any) -> None:
        for bucket in await rank.params():
            await rank.sample("norm", float(bucket.data.norm()))


def test_reading_values_works_with_real_tensors_and_raises_strategy_error_without() -> None:
    assert (samples(simulate(paced(2, 1, strategy=ReadsValues()), real=True), "norm") > 0).all()
    with pytest.raises(StrategyError, match="real=True"):
        simulate(paced(2, 1, strategy=ReadsValues()))


@dataclass(frozen=True, kw_only=True)
class TripsOver(_Plain):
    """Fails on one rank, in one step."""

    async def step(self, rank: Rank, state: Any) -> None:
        await self.train(rank)
        await rank.all_reduce(_blank(), "sum", "all")
        if (rank.index, rank.step) == (1, 2):
            raise ZeroDivisionError("oh")


def test_an_error_is_annotated_with_its_rank_step_and_time() -> None:
    with pytest.raises(ZeroDivisionError) as said:
        simulate(paced(3, 4, strategy=TripsOver()))
    assert said.value.__notes__ == [n for n in said.value.__notes__ if "virtual rank 1 in step 2, step, at 0.0" in n]


@dataclass(frozen=True, kw_only=True)
class PingPonger(_Plain):
    """Two ranks exchange an empty message for ever, which takes no time on an unshaped link."""

    async def step(self, rank: Rank, state: Any) -> None:
        await self.train(rank)
        while rank.step == 1 and rank.index < 2:
            await rank.send(_blank(0), 1 - rank.index, "ping")
            await rank.recv(_blank(0), 1 - rank.index, "ping")


@dataclass(frozen=True, kw_only=True)
class LooksAtTheClock(_Plain):
    """Polls a clock for a deadline, but the clock stands still while it polls."""

    async def step(self, rank: Rank, state: Any) -> None:
        await self.train(rank)
        while rank.index == 2 and await rank.clock() < 1.0:
            pass


@dataclass(frozen=True, kw_only=True)
class HearsNothing(_Plain):
    """A server that keeps receiving after the end of messages."""

    lockstep: ClassVar[bool] = False

    def trains(self, index: int, size: int) -> bool:
        return index < size - 1

    async def step(self, rank: Rank, state: Any) -> None:
        await self.train(rank)

    async def background(self, rank: Rank, state: Any) -> None:
        while rank.role == "server":
            await rank.recv(_blank(), None, "order")


@pytest.mark.parametrize(("strategy", "at", "who"), [
    (PingPonger(), "0.020000 s", ["rank 0 in step 1 (step): send 'ping'", "rank 1 in step 1 (step): recv 'ping'"]),
    (LooksAtTheClock(), "0.010000 s", ["rank 2 in step 0 (step): clock", "let it wait for a message"]),
    (HearsNothing(), "0.030000 s", ["rank 2 in step 0 (background): recv 'order'"]),
], ids=["messages", "answers", "no more messages"])  # fmt: skip
def test_a_strategy_that_never_advances_time_raises_deadlock_with_its_ranks(
    strategy: Strategy, at: str, who: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((world, "MAX_EVENTS_AT_ONCE"), (fiber, "MAX_INSTANT_ANSWERS")):
        assert getattr(module, name) >= 500_000, "many, where it is meant"
        monkeypatch.setattr(module, name, 3_000)
    with pytest.raises(Deadlock, match=f"time stands still at {at}, but") as said:
        simulate(experiment(3, 3, strategy=strategy, pace=10.0))
    for words in who:
        assert words in str(said.value), str(said.value)
