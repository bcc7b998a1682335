"""Tests one rank on a real GPU, or several that share it over gloo: times, events, order.

`make test-gpu` writes the results. Ranks are threads of one process here. Autograd has one thread per GPU and process:
a rank that waits inside autograd would block ranks that share the thread. test_gpu_ranks.py tests such waits with
processes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import experiment, live, toy
from workbench.engine.rank.session import Session
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change
from workbench.tasks import Task

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="gpu: no NVIDIA GPU on this machine"),
]


def on_gpu(
    ranks: int, kind: str, *changes: Change, task: Task | None = None, steps: int = 12, **how: Any
) -> list[Session]:
    e = experiment(ranks, steps, task=task or toy(), **how)
    sessions = live(e, changes, devices=["cuda:0"] * ranks, kind=kind)
    for s in sessions:
        assert s.join(60) and s.error is None, s.error
    return sessions


TURNS = (Change(4, "strategy", "LocalSGD"), Change(8, "strategy", "DDP"), Change(9, "compressor", "TopK"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_share_a_gpu_over_gloo_and_agree(ranks: int) -> None:
    sessions = on_gpu(ranks, "gloo", *TURNS)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


def test_one_rank_runs_over_nccl() -> None:
    (session,) = on_gpu(1, "nccl")
    assert session.phase == "done" and next(session.model.parameters()).is_cuda


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


def overlap(rows: list[tuple], step: int) -> float | None:
    """Returns the share of collectives' time that lies within this step's backward."""
    backward = next((r for r in rows if r[:3] == (step, "compute", "backward")), None)
    comm = [r for r in rows if r[0] == step and r[1] == "comm"]
    if backward is None or not comm:
        return None
    whole = sum(r[5] - r[4] for r in comm)
    return sum(max(0.0, min(r[5], backward[5]) - max(r[4], backward[4])) for r in comm) / whole


def note(what: str, value: float) -> None:
    """Writes one number for docs/project/gpu.md."""
    if file := os.environ.get("WORKBENCH_GPU_NOTES"):
        with Path(file).open("a") as f:
            f.write(json.dumps({"what": what, "value": value}) + "\n")
