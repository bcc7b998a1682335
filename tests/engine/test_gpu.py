"""The engine on a GPU: several ranks on one with gloo, one rank with NCCL, compute timed by events."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import experiment, live, toy
from workbench.canonical import state_hash
from workbench.knobs import Change

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: no NVIDIA GPU on this machine"),
]


def on_gpu(ranks: int, kind: str, *changes: Change) -> list:
    sessions = live(experiment(ranks, 12, task=toy()), changes, device="cuda:0", kind=kind)
    for s in sessions:
        assert s.join(60) and s.error is None, s.error
    return sessions


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_share_a_gpu_over_gloo_and_agree(ranks: int) -> None:
    turns = (Change(4, "strategy", "LocalSGD"), Change(8, "strategy", "DDP"), Change(9, "compressor", "TopK"))
    sessions = on_gpu(ranks, "gloo", *turns)
    assert len({state_hash(s.layout) for s in sessions}) == 1


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
