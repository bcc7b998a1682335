"""Checks with real tensors that the shapes with data parallelism's arithmetic give DDP's numbers."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from tests.ranks import experiment, run, toy, weights
from tests.sim.test_shapes import LAYER, LAYERS, data, deep, exchange
from workbench import simulate
from workbench.fabric import Fabric, Link
from workbench.rank import Bucket, Rank
from workbench.settings import Change
from workbench.strategies import DDP, ByteScheduler

pytestmark = pytest.mark.ranks

SLOW = Fabric(link=Link(bandwidth=5.0))  # a bucket of 10 kB takes 16 ms


def numbers(run: Any, name: str) -> list[float]:
    """Returns a sample's values on rank 0, in order of time."""
    samples = run.samples
    return samples[(samples["name"] == name) & (samples["rank"] == 0)].sort_values("t")["value"].to_list()


def trained(strategy: Any, *changes: Change, steps: int = 8, **rest: Any) -> Any:
    wanted = experiment(2, steps, strategy=strategy, pace=50.0, fabric=SLOW, eval_every=steps - 1, **rest)
    return simulate(wanted, changes=changes, real=True)


def test_byte_scheduler_trains_as_ddp_does() -> None:
    assert numbers(trained(ByteScheduler()), "loss") == pytest.approx(numbers(trained(DDP()), "loss"), rel=1e-6)


@pytest.mark.parametrize("path", ["bucket_mb", "compressor", "lr"])
def test_no_exchange_is_in_flight_at_a_change(path: str) -> None:
    change = Change(4, path, {"bucket_mb": 1.0, "compressor": "Cast", "lr": 0.01}[path])
    scheduled, plain = (numbers(trained(s, change), "loss") for s in (ByteScheduler(), DDP()))
    assert scheduled == pytest.approx(plain, rel=1e-6)
    assert scheduled != pytest.approx(numbers(trained(ByteScheduler()), "loss"), rel=1e-9) or path == "bucket_mb"


def test_switching_from_byte_scheduler_to_ddp_gives_ddps_losses() -> None:
    scheduled, plain = (trained(s, Change(7, "strategy", "DDP")) for s in (ByteScheduler(), DDP(accumulate=1)))
    assert numbers(scheduled, "loss") == pytest.approx(numbers(plain, "loss"), rel=1e-6)
    assert len(scheduled.details("change")) == 1


class LateByOne(DDP):
    """A DDP that waits for a step's exchange when the next step begins, so that it crosses a step's end."""

    in_flight: ClassVar[bool] = True
    ended: ClassVar[list[int]] = []

    def init(self, rank: Rank, params: list[Bucket]) -> list[Any]:
        return []

    async def step(self, rank: Rank, state: Any) -> None:
        await self._drain(rank, state)
        await rank.forward()
        async for bucket in rank.backward(1 / rank.size):
            state.append(await rank.start(rank.compressor.reduce(rank, bucket, rank.memory), name=bucket.name))

    async def leave(self, rank: Rank, state: Any) -> None:
        if rank.index == 0 and state:
            self.ended.append(rank.step)
        await self._drain(rank, state)

    async def _drain(self, rank: Rank, state: Any) -> None:
        if state:
            for handle in state:
                await rank.wait(handle)
            await rank.update()
            state.clear()


def test_the_engine_completes_exchanges_in_flight_before_a_change() -> None:
    LateByOne.ended.clear()
    changes = (Change(3, "bucket_mb", 1.0), Change(5, "lr", 0.1), Change(8, "strategy", "DDP"))
    late, plain = (run(experiment(2, 9, strategy=s), *changes) for s in (LateByOne(), DDP()))
    torch.testing.assert_close(weights(late[0]), weights(plain[0]), rtol=1e-6, atol=1e-7)
    assert torch.equal(weights(late[0]), weights(late[1]))
    assert LateByOne.ended == [3, 5, 8], "the order of gradients is known before the first step"


class WaitsAtOnce(DDP):
    """A DDP without overlap: it waits for each bucket inside backward."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        async for bucket in rank.backward(1 / rank.size):
            await rank.wait(await rank.start(rank.compressor.reduce(rank, bucket, rank.memory), name=bucket.name))
        await rank.update()


def test_waiting_inside_backward_delays_the_rest_of_it_on_both_hosts() -> None:
    layers = {"task": toy(model=deep, data=data, evaluate=None), "bucket_mb": LAYER / 1e6}
    wanted = experiment(2, 4, strategy=WaitsAtOnce(), pace=30.0, fabric=exchange(10.0), **layers)
    simulated = simulate(wanted).spans.query("lane == 'step' and rank == 0")
    session = run(wanted)[0]
    closed_form = 0.030 + LAYERS * 0.010
    assert (simulated["t1"] - simulated["t0"]).to_list() == pytest.approx([closed_form] * 4)
    lasted = [row[5] - row[4] for row in session.record if row[1] == "step"]
    assert min(lasted) > closed_form - 1e-4
