"""Tests the GPU path without a GPU, on strict stand-ins for NCCL, streams and events."""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_nccl import made
from tests.gpu_order import Gpu, gpu_here, look_up
from tests.ranks import Rows, assemble, ended, experiment, live, mse, run, toy, weights
from tests.waiting import until
from workbench.compressors import PowerSGD, TopK
from workbench.engine import device
from workbench.engine.collectives import wire as collectives
from workbench.engine.collectives.lane import Lane
from workbench.engine.collectives.lane_wires import GroupWires
from workbench.engine.collectives.shaping import Clock, LinkShaper, PacedSleep, Port
from workbench.engine.collectives.stopwatch import make_stopwatch
from workbench.engine.collectives.wire import LeaveEvent, Wire, connect_store, host_store
from workbench.engine.compute.host import Host
from workbench.engine.control import peers
from workbench.engine.device.cuda import CudaChip
from workbench.engine.device.gloo import WAIT_SLICE
from workbench.engine.device.nccl import NcclGroup
from workbench.engine.rank.session import Session
from workbench.fabric import Fabric, Link
from workbench.rank import Op, StrategyError
from workbench.settings import Change
from workbench.strategies import KFAC, Gossip, LocalSGD, Newton, ShadowMA, ZeRO2, ZeRO3, ZeROInfinity, ZeROOffload

pytestmark = pytest.mark.ranks


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Gpu]]:
    """Yields the GPUs of the ranks that start in the test, in the order of their setup."""
    look_up()
    made_so_far: list[Gpu] = []

    def chip(name: str) -> CudaChip:
        made_so_far.append(Gpu(seed=len(made_so_far)))
        return CudaChip(name, api=made_so_far[-1])

    # tests/gpu_nccl.py counts as torch's code
    monkeypatch.setattr(collectives, "_TORCH", Path(__file__).parents[1])
    monkeypatch.setitem(device.CHIPS, "cpu", chip)
    monkeypatch.setitem(device.KINDS, "nccl", partial(NcclGroup, made=made))
    yield made_so_far


def on_gpus(wanted: Any, *changes: Change, kind: str = "nccl", within: float = 60.0) -> list[Session]:
    sessions = live(wanted, changes, kind=kind)
    for s in sessions:
        if not s.join(within):
            for other in sessions:
                other.abort()
            raise AssertionError(f"rank {s.rank.index} hangs: {s.status()}")
    for s in sessions:
        assert s.error is None, s.error["traceback"]
    assemble(sessions)
    return sessions


class Alone:
    """One rank without a session: connections, watch and lane."""

    def __init__(self, index: int, ranks: int, where: tuple[str, int], tag: str) -> None:
        self.index, self.rows = index, Rows()
        chip, leaving, clock = device.make_chip("cpu"), LeaveEvent(), Clock(time.time())
        chip.bind_thread()
        store = connect_store(*where, tag)
        self.control = Wire(store, index, ranks, "control", leaving)
        self.wire = Wire(store, index, ranks, "data", leaving, kind="nccl", is_peer_gone=self.control.has_lost_peer)
        self.group = self.wire.group
        self.watch = make_stopwatch(chip, clock, self.rows, self.wire.check_peers)
        port = Port(index, ranks, PacedSleep(clock), 0)
        line = GroupWires(self.wire, LinkShaper(port, None), self.control)
        self.lane = Lane("comm", port, self.watch, chip, {None: line}.__getitem__)

    def ones(self, n: int) -> torch.Tensor:
        return torch.ones(n, device="cpu")  # the stand-in treats it as memory of the chip

    def does(self, op: Op) -> Any:
        async def child() -> Any:
            return await op

        return self.lane.wait(self.lane.start(child(), op.verb))

    def close(self) -> None:
        self.group.gate.set()
        self.lane.close()
        self.wire.close()
        self.control.close()


def in_threads(body: Callable[[Alone], None], ranks: int = 2) -> None:
    """Runs `body` on each rank's thread. Raises its error."""
    kept, *where = host_store()
    tag, failed = uuid.uuid4().hex, []

    def go(index: int) -> None:
        try:
            rank = Alone(index, ranks, tuple(where), tag)
            try:
                body(rank)
            finally:
                rank.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=go, args=(r,), daemon=True) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    if failed:
        raise failed[0]
    del kept


async def added(x: torch.Tensor) -> torch.Tensor:
    return await Op("all_reduce", x, "sum", "")


async def copied(x: torch.Tensor) -> torch.Tensor:
    return await Op("all_reduce", x.clone(), "sum", "")


ADAMW = partial(torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"strategy": LocalSGD(every=3)},
        {"compressor": TopK(density=0.2)},
        {"compressor": PowerSGD(rank=2)},
        {"strategy": ZeRO2(), "bucket_mb": 0.01},
        {"strategy": ZeRO3(), "bucket_mb": 0.01},
        {"strategy": ZeROOffload(), "bucket_mb": 0.01},
        {"strategy": ZeROInfinity(), "bucket_mb": 0.01},
        {"strategy": ZeROOffload(delayed=True, delay_from=2), "bucket_mb": 0.01},
        {"strategy": KFAC(fraction=0.5, inverses_every=3)},
        {"strategy": Newton(iterations=3)},
    ],
    ids=["DDP", "LocalSGD", "TopK", "PowerSGD", "ZeRO2", "ZeRO3", "Offload", "Infinity", "delayed", "KFAC", "Newton"],
)
def test_the_engine_on_streams_and_nccl_is_bit_identical_to_a_cpu(how: Any, gpus: list[Gpu], monkeypatch: Any) -> None:
    wanted = experiment(2, 10, task=toy(ADAMW), **how)
    late = on_gpus(wanted)
    monkeypatch.undo()
    plain = run(wanted)
    for a, b in zip(late, plain, strict=True):
        assert torch.equal(weights(a), weights(b))
        assert a.record.losses() == pytest.approx(b.record.losses(), rel=1e-6)


TURNS = (Change(3, "strategy", "LocalSGD"), Change(6, "strategy", "DDP"), Change(7, "compressor", "TopK"))


def test_live_switches_with_a_wrapped_compressor_are_bit_identical(gpus: list[Gpu], monkeypatch: Any) -> None:
    late = on_gpus(experiment(2, 10), *TURNS)
    monkeypatch.undo()
    assert torch.equal(weights(late[0]), weights(run(experiment(2, 10), *TURNS)[0]))


def no_wait_of_the_lane(cuda: CudaChip, stream: Any = None, after: Any = None) -> Any:
    return cuda._use_stream(stream, None)


MISTAKES = {
    "the lane's stream does not wait for the bucket": ("use_stream", no_wait_of_the_lane),
    "the compute stream does not wait for the lane": ("wait_in_stream", lambda cuda, event, value=None: None),
    "the host reads a number before its copy is there": ("has_reached", lambda cuda, event: True),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_order_is_found(mistake: str, gpus: list[Gpu], monkeypatch: Any) -> None:
    name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(CudaChip, name, wrong)
    sessions = live(experiment(2, 4, compressor=TopK(density=0.2)), kind="nccl")
    for s in sessions:
        assert s.join(60)
    assert any(s.error is not None and s.error["type"] == "OutOfOrder" for s in sessions)


def rank_one(what: Any) -> Any:
    """Returns the toy's loss, with an action of rank 1 first in its step 3."""
    calls = {"n": 0}

    def loss(model: Any, pair: Any) -> torch.Tensor:
        if threading.current_thread().name == "rank 1 training":
            calls["n"] += 1
            if calls["n"] == 4:
                what()
        return mse(model, pair)

    return loss


def test_reused_addresses_do_not_inherit_the_history_of_freed_memory() -> None:
    def go() -> None:
        gpu.set_device("cuda:0")
        try:
            for _ in range(50):
                torch.ones(1, device="cpu").add_(1)
            with gpu.stream(gpu.Stream()):
                assert {float(torch.tensor([1.0])[0]) for _ in range(50)} == {1.0}
        except BaseException as error:
            failed.append(error)

    gpu, failed = Gpu(), []
    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    assert not failed, failed


@pytest.mark.parametrize("seconds", [0.15, 2.0])
def test_a_late_rank_does_not_end_the_run(seconds: float, gpus: list[Gpu], monkeypatch: Any) -> None:
    late = on_gpus(experiment(2, 6, task=toy(loss=rank_one(lambda: time.sleep(seconds)))))
    monkeypatch.undo()
    assert torch.equal(weights(late[0]), weights(run(experiment(2, 6))[0]))


def test_a_wait_over_its_limit_ends_the_communicator_like_nccl(gpus: list[Gpu]) -> None:
    def body(rank: Any) -> None:
        rank.group.gate.clear()
        work = rank.wire.all_reduce(rank.ones(4))
        with pytest.raises(RuntimeError, match="timing out"):
            work.wait(WAIT_SLICE)
        assert rank.group.aborted

    in_threads(body, ranks=1)


def test_the_host_waits_neither_for_a_collective_nor_at_the_end_of_the_step(gpus: list[Gpu]) -> None:
    def body(rank: Any) -> None:
        rank.group.gate.clear()
        x = rank.ones(64)
        handle = rank.lane.start(added(x), "bucket")
        assert rank.lane.wait(handle) is x
        rank.watch.end_step()
        assert not rank.group.pending[-1].is_completed() and rank.lane.current_collective == "all_reduce bucket"
        assert not [r for r in rank.rows if r[1] == "comm"], "its end is not known yet"
        time.sleep(0.3)
        rank.group.gate.set()
        assert torch.equal(x, torch.full((64,), 2.0))  # the compute stream waits
        rank.watch.await_events()
        (span,) = [r for r in rank.rows if r[1] == "comm"]
        assert span[5] - span[4] > 0.3 and span[2] == "all_reduce bucket"
        assert rank.lane.current_collective == ""

    in_threads(body)


def test_on_an_emulated_link_the_lane_waits_until_the_data_is_there(gpus: list[Gpu]) -> None:
    def body(rank: Any) -> None:
        rank.lane.port.fabric = Fabric(link=Link(bandwidth=1.0))
        rank.group.gate.clear()
        there: list[float] = []
        threading.Timer(0.3, lambda: (there.append(rank.lane.clock.now()), rank.group.gate.set())).start()
        x = rank.ones(1250)  # 5000 bytes to send at 1 Mbit/s: 40 ms
        rank.lane.wait(rank.lane.start(added(x), "bucket"))
        assert rank.group.pending[-1].is_completed()
        (span,) = [r for r in rank.rows if r[1] == "comm"]
        assert span[5] > there[0] > span[4]

    in_threads(body)


def test_a_step_neither_synchronises_nor_reads_a_number_from_the_gpu(gpus: list[Gpu]) -> None:
    on_gpus(experiment(2, 6))
    few = [gpu.items for gpu in gpus]
    on_gpus(experiment(2, 12))
    many = [gpu.items for gpu in gpus[2:]]
    assert sorted(few) == sorted(many) and not any(gpu.syncs for gpu in gpus)


def test_times_of_compute_and_collectives_lie_within_their_step(gpus: list[Gpu]) -> None:
    session = on_gpus(experiment(2, 8))[0]
    rows = [r for r in session.record if r[1] in ("compute", "comm", "step", "wait")]
    for step in range(8):
        (whole,) = [r for r in rows if r[0] == step and r[1] == "step"]
        inside = [r for r in rows if r[0] == step and r[1] != "step"]
        assert [r[2] for r in inside if r[1] == "compute"] == ["forward", "backward", "update"]
        assert all(whole[4] <= r[4] <= r[5] <= whole[5] + 1e-9 for r in inside if r[1] != "comm")
        assert all(whole[4] <= r[4] <= r[5] for r in inside)
    assert len(session.record.losses()) == 8


def test_a_stop_frees_a_rank_whose_peer_does_not_come(gpus: list[Gpu]) -> None:
    go = threading.Event()
    sessions = live(experiment(2, 20, task=toy(loss=rank_one(lambda: go.wait(60)))), kind="nccl")
    assert until(lambda: sessions[1].rank.step == 3)
    time.sleep(0.3)
    for s in sessions:
        s.abort(asked=True)
    assert sessions[0].join(60) and sessions[0].phase == "stopped"
    go.set()
    assert sessions[1].join(60) and sessions[1].phase == "stopped"
    assert all(c.aborted for gpu in gpus for c in gpu.communicators)


def test_a_rank_notices_a_failed_peer_although_nccl_does_not(gpus: list[Gpu]) -> None:
    def fail() -> None:
        raise ValueError("no more")

    sessions = live(experiment(2, 20, task=toy(loss=rank_one(fail))), kind="nccl")
    ended(sessions)
    victim, culprit = sessions
    assert culprit.error["text"] == "no more" and not culprit.error["consequence"]
    assert victim.error["consequence"], victim.error


def test_a_background_and_the_step_never_have_two_communicators_on_one_gpu(gpus: list[Gpu]) -> None:
    on_gpus(experiment(2, 10, strategy=ShadowMA()))
    assert [len(gpu.communicators) for gpu in gpus] == [1, 1]


def test_arrivals_on_a_link_between_hosts_never_go_over_nccl(gpus: list[Gpu], monkeypatch: Any) -> None:
    monkeypatch.setattr(peers, "agree_on_time", lambda wire, clock: (False, 0.0))
    sessions = on_gpus(experiment(2, 4).set("bandwidth", 100))
    assert [r for r in sessions[0].record if r[1] == "port"]


def test_dtypes_unknown_to_nccl_travel_as_bytes_and_are_not_added(gpus: list[Gpu]) -> None:
    def body(rank: Any) -> None:
        me = rank.index
        for dtype in (torch.uint16, torch.int16, torch.bool, torch.float8_e4m3fn, torch.int64, torch.uint32):
            x = (rank.ones(6) * me).to(dtype)
            got = rank.does(Op("all_gather", x, ""))
            assert got.dtype == dtype and got.shape == (2, 6) and torch.equal(got[me].float(), x.float())
            got = rank.does(Op("all_to_all", x.view(2, 3), ""))
            assert [float(row[0].float()) for row in got] == [0.0, 1.0]
            assert torch.equal(rank.does(Op("broadcast", x, 1, "")).float(), torch.ones(6))
        assert torch.equal(rank.does(Op("all_reduce", rank.ones(3).long(), "sum", "")), torch.full((3,), 2))
        for dtype in (torch.uint16, torch.bool, torch.float8_e4m3fn):
            with pytest.raises(StrategyError, match="cannot sum this type; pass int32"):
                rank.does(Op("all_reduce", rank.ones(3).to(dtype), "sum", ""))

    in_threads(body)


def test_empty_rows_are_exchanged(gpus: list[Gpu]) -> None:
    def body(rank: Any) -> None:
        lengths = ((0, 3), (0, 0))
        rows = [rank.ones(n) for n in lengths[rank.index]]
        got = rank.does(Op("all_to_allv", rows, lengths, ""))
        assert [row.numel() for row in got] == [lengths[0][rank.index], 0]
        assert [row.numel() for row in rank.does(Op("all_to_allv", [rows[0][:0]] * 2, ((0, 0), (0, 0)), ""))] == [0, 0]

    in_threads(body)


def test_a_backward_on_autograds_thread_gives_the_same_result(gpus: list[Gpu], monkeypatch: Any) -> None:
    seen = []
    plainly, handed = torch.Tensor.backward, Host._resume_strategy

    def aside(loss: torch.Tensor, *args: Any) -> None:
        failed: list[BaseException] = []
        gpu = gpu_here()

        def go() -> None:
            try:
                gpu.set_device("cuda:0")  # as autograd does for its threads
                plainly(loss, *args)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    def noting(host: Host, bucket: Any) -> None:
        seen.append((torch.is_grad_enabled(), gpu_here().current_stream() is gpu_here().compute))
        handed(host, bucket)

    monkeypatch.setattr(torch.Tensor, "backward", aside)
    monkeypatch.setattr(Host, "_resume_strategy", noting)
    late = on_gpus(experiment(2, 5))
    monkeypatch.undo()
    assert set(seen) == {(False, True)}
    assert torch.equal(weights(late[0]), weights(run(experiment(2, 5))[0]))


def test_messages_of_ranks_on_gpus_equal_those_of_cpus(gpus: list[Gpu], monkeypatch: Any) -> None:
    copies = []
    plainly = CudaChip.copy_to_host
    monkeypatch.setattr(CudaChip, "copy_to_host", lambda cuda, x: copies.append(x.numel()) or plainly(cuda, x))
    late = on_gpus(experiment(2, 6, strategy=Gossip()))
    monkeypatch.undo()
    assert copies and torch.equal(weights(late[0]), weights(run(experiment(2, 6, strategy=Gossip()))[0]))


def test_a_childs_input_is_kept_until_the_gpu_has_read_it(gpus: list[Gpu]) -> None:
    def body(rank: Any) -> None:
        rank.group.gate.clear()
        x = rank.ones(64)
        gone = weakref.ref(x)
        handle = rank.lane.start(copied(x), "bucket")
        del x
        rank.lane.wait(handle)
        del handle
        assert gone() is not None, "freed while the lane has not read it"
        rank.group.gate.set()
        for _ in range(3):
            rank.does(Op("all_reduce", rank.ones(1), "sum", ""))
            rank.watch.await_events()
            time.sleep(0.05)
        assert gone() is None

    in_threads(body)


def test_slightly_different_sizes_share_one_size_of_memory(gpus: list[Gpu]) -> None:
    chip, like = CudaChip("cpu", api=Gpu()), torch.empty(0)
    rooms = [chip.make_empty(like, n) for n in range(1_000_000, 1_045_000, 7_001)]
    assert [r.numel() for r in rooms] == list(range(1_000_000, 1_045_000, 7_001))
    assert len({r.untyped_storage().nbytes() for r in rooms}) == 1
    for n in (0, 1, 7, 31, 12_345):
        assert n <= chip.make_empty(like, n).untyped_storage().nbytes() / 4 <= 1.125 * n + 1
