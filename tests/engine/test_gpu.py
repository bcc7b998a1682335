"""The engine on real GPUs: order, overlap, stop, late ranks and live switches. `make test-gpu` writes what it saw.

Ranks are threads of one process. Several share one GPU over gloo; NCCL takes one GPU per rank, so with one GPU only its
tests of one rank run.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import experiment, live, mse, toy
from tests.split import alone, near, small, spread, together
from tests.unit.test_tensor import parts
from tests.waiting import until
from workbench.engine.session import Session
from workbench.host.canonical import state_hash
from workbench.optimizers import SGD, AdamW
from workbench.partitions import Partition, Pipeline, Tensor
from workbench.partitions.schedules import ZeroBubble
from workbench.settings import Change
from workbench.tasks import Task

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="gpu: no NVIDIA GPU on this machine"),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="gpu: NCCL between ranks wants two GPUs")


def on_gpu(
    ranks: int, kind: str, *changes: Change, task: Task | None = None, steps: int = 12, **how: Any
) -> list[Session]:
    sessions = started(ranks, kind, *changes, task=task, steps=steps, **how)
    for s in sessions:
        assert s.join(120) and s.error is None, s.error
    return sessions


def started(ranks: int, kind: str, *changes: Change, task: Task | None, steps: int, **how: Any) -> list[Session]:
    devices = [f"cuda:{r}" if kind == "nccl" else "cuda:0" for r in range(ranks)]
    return live(experiment(ranks, steps, task=task or toy(), **how), changes, devices=devices, kind=kind)


TURNS = (Change(4, "strategy", "LocalSGD"), Change(8, "strategy", "DDP"), Change(9, "compressor", "TopK"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_share_a_gpu_over_gloo_and_agree(ranks: int) -> None:
    sessions = on_gpu(ranks, "gloo", *TURNS)
    assert len({state_hash(s.layout) for s in sessions}) == 1


def test_one_rank_runs_over_nccl() -> None:
    (session,) = on_gpu(1, "nccl")
    assert session.phase == "done" and next(session.model.parameters()).is_cuda


@two_gpus
def test_ranks_agree_over_nccl_through_live_switches() -> None:
    sessions = on_gpu(2, "nccl", *TURNS)
    assert len({state_hash(s.layout) for s in sessions}) == 1


SHARED_OUT = (Change(3, "strategy", "ZeRO2"), Change(6, "bucket_mb", 1.0), Change(9, "strategy", "ZeRO1"))


@pytest.mark.parametrize("kind", ["gloo", pytest.param("nccl", marks=two_gpus)])
def test_what_is_shared_out_trains_as_ddp_does(kind: str) -> None:
    """A bucket's memory is given back while the lane's stream may still read it: what it holds must be safe.

    A rank under ZeRO-3 waits for others inside of autograd, which has one thread for each GPU of a process: ranks that
    are threads of one take a GPU each.
    """
    e = {"task": toy(model=Deep), "steps": 19, "bucket_mb": 16.0, "optimizer": AdamW()}
    more: tuple[Change, ...] = (Change(15, "strategy", "ZeROOffload"),)
    if kind == "nccl":
        more = (Change(11, "strategy", "ZeRO3"), Change(13, "strategy", "ZeROInfinity"), *more)
    ours, plain = on_gpu(2, kind, *SHARED_OUT, *more, Change(17, "strategy", "DDP"), **e), on_gpu(2, kind, **e)
    for one, other in zip(ours, plain, strict=True):
        for x, y in zip(one.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


SPREAD = [Pipeline(micros=2), Pipeline(micros=4, schedule=ZeroBubble()), Tensor(), Tensor(sequence=True)]


@pytest.mark.parametrize("way", SPREAD, ids=["1F1B", "ZB-H1", "slices", "positions"])
@pytest.mark.parametrize("kind", ["gloo", pytest.param("nccl", marks=two_gpus)])
def test_a_replica_on_several_ranks_learns_what_one_process_learns(way: Partition, kind: str) -> None:
    """Also switched to live. Slices meet inside of autograd, so ranks that are threads take a GPU each."""
    if kind == "gloo" and way.slices > 1:
        pytest.skip("gpu: ranks of one process that compute together want two GPUs")
    e = {"task": small(parts=parts), "steps": 6, "optimizer": SGD(momentum=0.0), "lr": 0.1}
    want = alone(spread(2, partition=way), 1)
    sessions = on_gpu(2, kind, partition=way, **e)
    near({name: x.cpu() for name, x in together(sessions).items()}, want, 1e-4)
    switched = on_gpu(2, kind, Change(3, "partition", way), **e)
    assert not switched[0].record.noted("refused") and len(switched[0].record.noted("partition")) == 1


def late(seconds: float) -> Any:
    """The toy's loss, for which rank 1 is late once."""
    calls = {"n": 0}

    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        if threading.current_thread().name == "rank 1 training":
            calls["n"] += 1
            if calls["n"] == 4:
                time.sleep(seconds)
        return mse(model, pair)

    return loss


@two_gpus
@pytest.mark.parametrize("seconds", [0.15, 2.0])
def test_a_late_rank_does_not_end_a_run_over_nccl(seconds: float) -> None:
    sessions = on_gpu(2, "nccl", task=toy(loss=late(seconds)))
    assert len({state_hash(s.layout) for s in sessions}) == 1


@two_gpus
def test_a_stop_frees_a_rank_whose_peer_does_not_come_over_nccl() -> None:
    go = threading.Event()
    calls = {"n": 0}

    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        calls["n"] += threading.current_thread().name == "rank 1 training"
        if calls["n"] == 4 and threading.current_thread().name == "rank 1 training":
            go.wait(60)
        return mse(model, pair)

    sessions = started(2, "nccl", task=toy(loss=loss), steps=50)
    assert until(lambda: calls["n"] == 4, 60)
    time.sleep(0.5)
    began = time.monotonic()
    for s in sessions:
        s.abort(asked=True)
    assert sessions[0].join(20) and sessions[0].phase == "stopped"
    took = time.monotonic() - began
    go.set()
    assert sessions[1].join(20) and sessions[1].phase == "stopped"
    note("seconds until a rank was freed from a collective that its peer never entered", took)


def test_compute_is_timed_by_events_within_its_step() -> None:
    session = on_gpu(2, "gloo")[0]
    for step in range(4, 12):
        whole = next(r for r in session.record if r[0] == step and r[1] == "step")
        inside = [r for r in session.record if r[0] == step and r[1] == "compute"]
        assert len(inside) == 3
        assert all(whole[4] - 1e-3 <= r[4] <= r[5] <= whole[5] + 1e-3 for r in inside)


def test_a_step_never_synchronises_the_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plainly = torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: calls.append(a) or plainly(*a))
    (session,) = on_gpu(1, "nccl")
    assert session.phase == "done" and not calls
    assert len(session.record.losses()) == 12


class Deep(nn.Module):
    """Enough matrices that backward outlasts the exchange of one bucket."""

    def __init__(self) -> None:
        super().__init__()
        middle = [nn.Linear(2048, 2048) for _ in range(16)]
        self.layers = nn.ModuleList([nn.Linear(8, 2048), *middle, nn.Linear(2048, 4)])
        rng = torch.Generator().manual_seed(0)  # ranks that are threads share torch's own
        for p in self.parameters():
            p.data.normal_(0.0, 0.02, generator=rng)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x.repeat(64, 1) if x.shape[1] == 8 else x))
        return self.layers[-1](x).view(64, -1, 4).mean(0)


@two_gpus
def test_collectives_overlap_with_backward_over_nccl() -> None:
    session = on_gpu(2, "nccl", task=toy(model=Deep), steps=20, bucket_mb=16.0)[0]
    shares = [share for step in range(5, 20) if (share := overlap(session.record, step)) is not None]
    note("share of the exchange's time that lies within backward (median of 15 steps)", statistics.median(shares))
    assert statistics.median(shares) > 0.3


def overlap(rows: list[tuple], step: int) -> float | None:
    """Of the time in which a collective was under way, the share that lies within this step's backward."""
    backward = next((r for r in rows if r[:3] == (step, "compute", "backward")), None)
    comm = [r for r in rows if r[0] == step and r[1] == "comm"]
    if backward is None or not comm:
        return None
    whole = sum(r[5] - r[4] for r in comm)
    return sum(max(0.0, min(r[5], backward[5]) - max(r[4], backward[4])) for r in comm) / whole


def note(what: str, value: float) -> None:
    """One number for docs/gpu.md."""
    if file := os.environ.get("WORKBENCH_GPU_NOTES"):
        with Path(file).open("a") as f:
            f.write(json.dumps({"what": what, "value": value}) + "\n")
