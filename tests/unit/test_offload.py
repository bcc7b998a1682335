"""Tests ZeRO-Offload and ZeRO-Infinity: state on host or disk gives the same steps as on the device."""

from __future__ import annotations

import errno
import inspect
import os
import threading
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.agree import crosses_alike, spans_alike
from tests.ranks import ended, experiment, live, run, toy, weights
from tests.unit import test_zero_3
from tests.unit.test_zero_3 import batches, seen
from workbench import simulate
from workbench.engine.rank.session import Session
from workbench.fabric import Fabric, Link
from workbench.host.memory.scratch_file import ScratchFile
from workbench.optimizers import SGD, AdamW
from workbench.rank import Bucket, Rank, StrategyError
from workbench.settings import Change
from workbench.strategies import ZeRO2, ZeRO3, ZeROInfinity, ZeROOffload
from workbench.strategies._sharded import Outstanding
from workbench.strategies.offload.verbs import fetch, offload

pytestmark = pytest.mark.ranks


class Many(test_zero_3.Many):
    """The same model with a zero gradient for unread parameters, so that each has optimizer state."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.0 * self.unread[0])


many = partial(test_zero_3.many, model=Many)
NUMEL = sum(p.numel() for p in Many().parameters() if p.requires_grad)
ALL = [ZeROOffload(), ZeROInfinity(on="host"), ZeROInfinity(on="disk")]


def same(ours: list[Session], plain: list[Session]) -> bool:
    """Whether all ranks have bit-identical parameters in both runs."""
    return all(torch.equal(weights(one), weights(other)) for one, other in zip(ours, plain, strict=True))


def moved(session: Session, step: int) -> dict[str, int]:
    """Returns the bytes moved to or from host or disk in a step, by Span name without the bucket."""
    found: dict[str, int] = defaultdict(int)
    for at, lane, name, *_, nbytes in session.record:
        if lane == "offload" and at == step:
            found[" ".join(word for word in name.split() if not word.isdigit())] += nbytes
    return dict(found)


@pytest.mark.parametrize("strategy", ALL, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_offloaded_shards_train_as_shards_on_the_device(strategy: Any, ranks: int) -> None:
    e = many(ranks, eval_every=4)
    ours, plain = run(e.set("strategy", strategy)), run(e.set("strategy", ZeRO2()))
    assert same(ours, plain)
    found, wanted = (seen(one[0], "held_out") for one in (ours, plain))  # ZeRO2 evaluates the ranks' mean,
    assert len(found) == 4 and found == pytest.approx(wanted, rel=1e-6 if ranks == 3 else 0.0, abs=0.0)  # (w+w+w)/3


@pytest.mark.parametrize("strategy", ALL, ids=str)
@pytest.mark.parametrize("rest", [{"optimizer": SGD(momentum=0.9)}, {"clip": 0.05}], ids=["momentum", "clip"])
def test_offloaded_shards_train_the_same_with_momentum_and_clipping(strategy: Any, rest: dict[str, Any]) -> None:
    """ZeRO2 cuts the buckets in another order in its first step than a norm summed by bucket; ZeRO3 does not."""
    e, plain = many(2, **rest), ZeRO3() if isinstance(strategy, ZeRO3) else ZeRO2()
    assert same(run(e.set("strategy", strategy)), run(e.set("strategy", plain)))


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_any_change_first_brings_all_state_back_to_the_device(strategy: Any) -> None:
    e = many(2, 14)
    always = [Change(2, "bucket_mb", 0.03), Change(3, "optimizer", AdamW(beta1=0.8)), Change(9, "lr", 3e-3)]
    others = [Change(5, "strategy", ZeRO3()), Change(6, "strategy", strategy), Change(7, "strategy", ZeROInfinity()),
              Change(8, "strategy", ZeROOffload()), Change(11, "strategy", strategy)]  # fmt: skip
    ours = run(e.set("strategy", strategy), *sorted([*always, *others], key=lambda change: change.at_step))
    assert [s.record.noted("refused") for s in ours] == [[], []]
    assert same(ours, run(e.set("strategy", ZeRO2()), *always))


@pytest.mark.parametrize("ranks", [1, 2])
def test_buckets_can_be_resized_at_the_boundary_at_which_the_optimizer_changes(ranks: int) -> None:
    e = many(ranks, 8).set("optimizer", SGD(momentum=0.9)).set("strategy", ZeRO2())
    changes = Change(4, "optimizer", AdamW()), Change(4, "bucket_mb", 0.03)
    ours = run(e, Change(2, "strategy", ZeROInfinity(on="disk")), *changes)
    assert ours[0].experiment.bucket_mb == 0.03 and same(ours, run(e, *changes))


def test_offloaded_memory_and_moved_bytes_match_the_papers() -> None:
    """Adam in fp32: 4 Psi / p bytes of Psi parameters down and up; with a disk 12 Psi / p each way for the update."""
    offload, infinity = (run(many(2, strategy=strategy)) for strategy in (ZeROOffload(), ZeROInfinity()))
    shard = sum(4 * -(-bucket.data.numel() // 2) for bucket in offload[0].layout.list_params())
    assert moved(offload[0], 6) == {
        "offload gradients to host": shard, "fetch parameters to device": shard, "update": 0,
    }  # fmt: skip
    down = moved(infinity[0], 6)
    counters = 4 * len(list(Many().parameters()))  # Adam's counters, stored with every piece of a parameter
    assert down["offload gradients to host"] == shard
    assert shard <= down["fetch parameters to device"] <= 2 * shard  # forward and backward, but the last layers stay
    assert down["fetch parameters to host"] == down["offload parameters to disk"] == shard
    assert 2 * shard < down["fetch optimizer state to host"] == down["offload optimizer state to disk"]
    assert down["fetch optimizer state to host"] < 2 * shard + counters
    for session, where, most in ((offload[0], "host", 4), (infinity[0], "disk", 3)):
        assert seen(session, "memory optimizer state")[-1] == 0
        assert most * shard < max(seen(session, f"memory on {where}")) < most * shard + counters
    assert max(seen(infinity[0], "memory on host")) < 2 * shard  # gradients, and the state for the next updates
    assert seen(offload[0], "memory parameters")[-1] > 4 * NUMEL > 2 * seen(infinity[0], "memory parameters")[-1]


class Recurrence:
    """The delayed parameter update on one process: gradients belong to parameters one update older."""

    def __init__(self, begin: int, ranks: int) -> None:
        self.model, self.begin = Many(), begin
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01)
        self.data = [batches(rank, ranks, 0) for rank in range(ranks)]

    def trained(self, steps: int) -> torch.Tensor:
        trained, waiting = [p for p in self.model.parameters() if p.requires_grad], None
        for step in range(steps):
            grads = [torch.zeros_like(p) for p in trained]
            for rank in self.data:
                x, y = rank[step % len(rank)]
                loss = nn.functional.mse_loss(self.model(x), y)
                found = torch.autograd.grad(loss, trained, allow_unused=True)
                for total, grad in zip(grads, found, strict=True):
                    total += (torch.zeros_like(total) if grad is None else grad) / len(self.data)
            if waiting is not None:
                self._step(trained, waiting)
            waiting = grads
            if step < self.begin:
                self._step(trained, waiting)
                waiting = None
        self._step(trained, waiting)
        return torch.cat([p.detach().reshape(-1) for p in trained])

    def _step(self, trained: list[Any], grads: Any) -> None:
        for p, grad in zip(trained, grads or [], strict=True):
            p.grad = grad
        self.optimizer.step()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("begin", [1, 3])
def test_a_delayed_update_is_the_recurrence_with_gradients_one_update_older(ranks: int, begin: int) -> None:
    strategy = ZeROOffload(delayed=True, delay_from=begin)
    ours = run(many(ranks, 9, strategy=strategy, optimizer=AdamW(weight_decay=0.01)))
    for session in ours:
        named = dict(session.model.named_parameters())
        own = torch.cat([p.detach().reshape(-1) for p in named.values() if p.requires_grad])
        torch.testing.assert_close(own, Recurrence(begin, ranks).trained(9), atol=2e-7, rtol=1e-5)


def test_a_delayed_update_is_the_same_in_every_run_and_on_both_clocks() -> None:
    """The host steps during a backward that refills the same buckets."""
    e = many(2, 20, strategy=ZeROOffload(delayed=True, delay_from=1), pace=4.0, eval_every=1)
    first, second = (seen(run(e)[0], "held_out") for _ in range(2))
    rows = simulate(e, real=True).timeline.samples.rows()
    assert first == second == rows.value[rows.equal("name", "held_out")].tolist()


def test_a_delayed_update_uses_the_learning_rate_of_its_own_step() -> None:
    """The update ends in the next step, which has another rate."""
    strategy = ZeROOffload(delayed=True, delay_from=0)
    e = many(1, 8, strategy=strategy, lr_warmup=8, optimizer=SGD(momentum=0.0))
    plain = many(1, 8, strategy=ZeRO2(), lr_warmup=8, optimizer=SGD(momentum=0.0))
    rates = [[value for _, name, _, value in run(one)[0].record.samples if name == "lr"] for one in (e, plain)]
    assert rates[0] == rates[1]
    slow = run(e.set("pace", 10.0))
    assert same(slow, run(e))


@pytest.mark.parametrize("strategy", ALL, ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_engine_and_both_simulators_move_the_same(strategy: Any, ranks: int) -> None:
    e = many(ranks, 8, strategy=strategy, pace=5.0, eval_every=4, fabric=Fabric(host=0.5, disk=0.2))
    sessions = run(e)
    real, sizes = simulate(e, real=True), simulate(e, real=False)
    spans_alike(real, sizes)
    crosses_alike(real, sessions)
    spans = real.timeline.spans.rows()
    for rank, session in enumerate(sessions):
        here = (spans.rank == rank) & spans.equal("lane", "offload")
        one = sorted(zip(spans.step[here], spans.name[here], spans.nbytes[here], strict=True))
        assert one == sorted((at, name, n) for at, lane, name, *_, n in session.record if lane == "offload")
        for where in ("host", "disk"):
            rows = sizes.timeline.samples.rows()
            rows = rows[(rows.rank == rank) & rows.equal("name", f"memory on {where}")]
            assert [max(rows.value, default=0)] == pytest.approx([max(seen(session, f"memory on {where}"), default=0)],
                                                                 rel=0.35)  # fmt: skip


def test_emulated_host_and_disk_rates_are_kept() -> None:
    fabric = Fabric(host=0.02, disk=0.01)
    session = run(many(1, 4, strategy=ZeROInfinity(), fabric=fabric))[0]
    spans = [(name, t1 - t0, n) for _, lane, name, _, t0, t1, n in session.record if lane == "offload" and n]
    assert len(spans) > 50
    for name, seconds, nbytes in spans:
        rate = 0.02 if name.endswith("to device") or "gradients" in name else 0.01
        assert seconds >= nbytes * 1e-9 / rate


@pytest.mark.parametrize("knob", ["prefetch", "outstanding"])
def test_prefetches_and_outstanding_transfers_hide_behind_compute(knob: str) -> None:
    """On the virtual clock, where disk, host and network are slow."""
    fabric = Fabric(disk=2.0, host=0.1, link=Link(bandwidth=100.0))
    e = many(2, 8, strategy=ZeROInfinity(), pace=40.0, fabric=fabric)
    least = simulate(e.set(f"strategy.{knob}", 0 if knob == "prefetch" else 1), real=False).summary()["step_s"]
    more = simulate(e.set(f"strategy.{knob}", 3), real=False).summary()["step_s"]
    assert more < least


def test_state_goes_to_host_or_disk_as_chosen() -> None:
    found = [run(many(2, 6, strategy=ZeROInfinity(on=on)))[0] for on in ("host", "disk")]
    assert seen(found[0], "memory on disk") == [] and max(seen(found[1], "memory on disk")) > 0
    assert max(seen(found[0], "memory on host")) > max(seen(found[1], "memory on host"))


# -- the file --


def test_the_file_returns_written_tensors_and_reuses_space() -> None:
    scratch = ScratchFile()
    rng = torch.Generator().manual_seed(0)
    things = [torch.randn(1000, generator=rng), torch.tensor(3.0), torch.randn(7, 9, generator=rng).bfloat16(),
              torch.randn(8, 6, generator=rng).t(), torch.zeros(0), torch.arange(5)]  # fmt: skip
    places = [scratch.write_tensors([x]) for x in things]
    all_at_once = scratch.write_tensors(things)
    for found in ([scratch.read_tensors(place)[0] for place in places], scratch.read_tensors(all_at_once)):
        for x, read in zip(things, found, strict=True):
            assert torch.equal(read, x) and read.dtype == x.dtype and read.shape == x.shape
    scratch.free_extent(places[0])
    assert scratch.write_tensors([torch.ones(1000)]).at == places[0].at
    assert torch.equal(scratch.read_tensors(places[2])[0], things[2])


def test_partial_reads_and_writes_lose_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:37], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: read(fd, [into[0][:41]], at))
    scratch, x = ScratchFile(), torch.randn(500)
    assert torch.equal(scratch.read_tensors(scratch.write_tensors([x]))[0], x)


def test_a_full_disk_fails_the_run_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    sessions = live(many(2, strategy=ZeROInfinity()))
    ended(sessions)  # without waiting for each other, which would take ten minutes
    assert {s.phase for s in sessions} == {"failed"}
    assert any("No space left" in s.error["text"] for s in sessions if s.error)


@pytest.mark.parametrize("reads", [20, 37, 38, 39, 40, 45, 60])
def test_a_disk_error_on_one_rank_fails_the_run_at_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    """Ranks must not go on with collectives that no longer match, in any state of waiting."""
    read, count = os.preadv, [0]

    def broken(fd: int, into: Any, at: int) -> int:
        if threading.current_thread().name == "rank 0 fetch":
            count[0] += 1
            if count[0] >= reads:
                raise OSError(errno.EIO, "broken disk")
        return read(fd, into, at)

    monkeypatch.setattr(os, "preadv", broken)
    sessions = live(many(2, 8, strategy=ZeROInfinity(prefetch=3)))
    ended(sessions)
    assert count[0] >= reads and {s.phase for s in sessions} == {"failed"}
    assert "broken disk" in sessions[0].error["text"]


def test_a_child_that_cannot_start_is_closed() -> None:
    class FailingRank:
        async def start(self, child: Any, lane: str, name: str) -> str:
            child.close()
            return name

        async def wait(self, handle: str) -> None:
            raise OSError(handle)

    async def nothing() -> None: ...

    async def start_two() -> None:
        going = Outstanding(FailingRank(), 1)  # type: ignore[arg-type]
        await going.start(nothing(), "first")
        await going.start(second, "second")

    second = nothing()
    with pytest.raises(OSError, match="first"):
        start_two().send(None)
    assert inspect.getcoroutinestate(second) == inspect.CORO_CLOSED


def opened(fd: str) -> str:
    """Returns the file of a descriptor of this process; "" if it is closed again."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="a file without a name is found by Linux's /proc")
def test_freed_space_of_the_file_is_reused() -> None:
    scratch, before = ScratchFile(), set(os.listdir("/proc/self/fd"))
    scratch.free_extent(scratch.write_tensors([torch.ones(1)]))
    (its,) = {fd for fd in os.listdir("/proc/self/fd") if fd not in before and opened(fd)}
    for n in (100, 1000, 10):
        places = [scratch.write_tensors([torch.ones(n)]) for _ in range(5)]
        assert os.fstat(int(its)).st_size == 5 * -(-4 * n // 16) * 16
        for place in places:
            scratch.free_extent(place)
        assert os.fstat(int(its)).st_size == 0


def test_an_empty_parameter_group_and_a_scalar_parameter_can_be_offloaded() -> None:
    def own(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": []}, {"params": list(params)}], lr=3e-3)

    task = toy(model=Many, data=batches, evaluate=None, optimizer=own)
    e = experiment(2, 8, task=task, bucket_mb=0.01)
    plain = run(e.set("strategy", ZeRO2()))
    for strategy in ALL:
        assert same(run(e.set("strategy", strategy)), plain)


# -- invalid requests --


class Hasty(ZeROOffload):
    """Steps on the host without offloading first."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        bucket: Bucket = (await rank.params())[0]
        await rank.update(bucket, on="host")


def test_a_host_step_without_offload_raises_an_error() -> None:
    sessions = live(many(1, strategy=Hasty()))
    ended(sessions)
    assert sessions[0].error and "on the device: call `offload` first" in sessions[0].error["text"]


def test_an_unknown_place_or_kind_of_state_raises_strategy_error() -> None:
    bucket = Bucket(0, torch.zeros(2), (), 0)
    for verb, what, to in ((offload, "weights", "host"), (fetch, "gradients", "disk")):
        with pytest.raises(StrategyError, match="'parameters', 'gradients', 'optimizer state', and go to 'host' or"):
            verb(Rank(0, 1), bucket, what, to)
