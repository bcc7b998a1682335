"""Tests preempted ranks on real ranks: they leave before their machine ends, and the other ranks keep all state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.test_resizing import Crowd, setting, total
from workbench.compressors import ErrorFeedback, TopK
from workbench.host.placement.canonical_state import hash_model_state
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.record.checkpoints import FOLDER, Checkpoint
from workbench.strategies import DDP, HSDP, AsyncServer, Gossip, HierarchicalLocalSGD, LocalSGD, Strategy, ZeRO3
from workbench.tasks import ByteGPT, Digits

pytestmark = pytest.mark.ranks


def left(crowd: Crowd, *members: int) -> None:
    """Waits until exactly these members train and have made three more steps."""
    crowd.until(lambda: [s.member for s in crowd.there] == list(members)
                and all(set(s.members) == set(members) for s in crowd.there))  # fmt: skip
    crowd.reach(crowd.first.rank.step + 3)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=4), Gossip(), AsyncServer(), ZeRO3()],
                         ids=lambda s: type(s).__name__)  # fmt: skip
def test_after_a_preemption_the_other_ranks_go_on_and_no_step_is_lost(strategy: Strategy, victim: int) -> None:
    with Crowd(setting(strategy, ranks=3)) as crowd:
        crowd.reach(4)
        crowd.every[victim].preempt()
        left(crowd, *({0, 1, 2} - {victim}))
        (said,) = crowd.said("members")
        assert said["preempted"] == said["gone"] == [victim] and not said["spare"]
        assert f"rank {victim} was preempted and left; ranks" in said["text"]
        assert crowd.said("preempted")[0]["ranks"] == [victim]
        gone = crowd.every[victim]
        assert gone.phase == "stopped" and gone.error is None
        if strategy.lockstep:
            assert gone.rank.step == said["step"], "who leaves has made each step that the others count"
        crowd.stopped()


def test_no_state_of_a_preempted_rank_is_lost() -> None:
    """The other ranks get the state that it held at the boundary: bit-identical parameters, and its residual."""
    e = setting(DDP(), ranks=3, compressor=ErrorFeedback(of=TopK(density=0.01)), eval_every=0)
    with Crowd(e) as crowd:
        crowd.reach(5)
        crowd.first.request({"kind": "pause", "id": "p"})
        crowd.paused()
        owed, before = total(crowd.there), hash_model_state(crowd.first.layout)
        crowd.every[1].preempt()
        crowd.until(lambda: len(crowd.there) == 2 and all(s.members == (0, 2) for s in crowd.there))
        crowd.paused()
        after = total(crowd.there)
        assert {hash_model_state(s.layout) for s in crowd.there} == {before}
        assert owed.keys() == after.keys() and float(sum(x.abs().sum() for x in owed.values())) > 0
        for name, x in owed.items():
            torch.testing.assert_close(after[name], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [Pipeline(), Tensor()], ids=lambda p: type(p).__name__)
def test_a_replica_without_a_rank_is_spread_over_fewer_ranks(way: Any) -> None:
    with Crowd(setting(DDP(), partition=way, task=ByteGPT())) as crowd:
        crowd.reach(2)
        crowd.every[1].preempt()
        left(crowd, 0)
        assert isinstance(crowd.first.experiment.partition, Whole)
        assert crowd.first.model is not None and crowd.said("members")[0]["preempted"] == [1]
        crowd.stopped()


@pytest.mark.parametrize("way", [Pipeline(), Tensor()], ids=lambda p: type(p).__name__)
def test_a_rank_that_is_not_needed_afterwards_leaves_too(way: Any) -> None:
    with Crowd(setting(DDP(), partition=way, task=ByteGPT(), ranks=4)) as crowd:
        crowd.reach(2)
        crowd.every[1].preempt()
        left(crowd, 0, 2)
        (said,) = crowd.said("members")
        assert said["gone"] == [1, 3] and said["spare"] == [3] and "rank 3 is not needed then" in said["text"]
        crowd.stopped()


def test_two_ranks_including_rank_0_are_preempted_at_once() -> None:
    with Crowd(setting(HSDP(group=2), ranks=4)) as crowd:
        crowd.reach(3)
        for s in crowd.every[:2]:
            s.preempt()
        left(crowd, 2, 3)
        assert {m for said in crowd.said("members") for m in said["preempted"]} == {0, 1}
        crowd.stopped()


def ends(crowd: Crowd) -> set[str]:
    for s in crowd.every:
        assert s.join(60)
    return {s.error["text"] for s in crowd.every if s.error and s.error["type"] == "Preempted"}


def test_preempting_the_last_ranks_keeps_a_checkpoint(tmp_path: Path) -> None:
    with Crowd(setting(DDP()), run_dir=tmp_path) as crowd:
        crowd.reach(3)
        crowd.first.request({"kind": "pause", "id": "p"})
        crowd.paused()
        for s in reversed(crowd.every):
            s.preempt()
        said = ends(crowd)
        (kept,) = [path for path in (tmp_path / FOLDER).iterdir() if path.name.startswith("step-")]
        checkpoint = Checkpoint.open(kept)
        assert any(f"a checkpoint before step {checkpoint.step} is kept; go on from it" in text for text in said), said
        assert any("no rank is left to go on" in text for text in said)


def test_if_too_few_ranks_are_left_the_run_ends_with_a_reason_and_a_checkpoint(tmp_path: Path) -> None:
    with Crowd(setting(HierarchicalLocalSGD(group=2)), run_dir=tmp_path) as crowd:
        crowd.reach(3)
        crowd.every[1].preempt()
        (said,) = ends(crowd)
        assert said.startswith("rank 1 is preempted, and the run cannot go on: 1 of 2 ranks are left")
        assert "is kept; go on from it with lab.run(resume=...)" in said
        assert all(s.error for s in crowd.every)


def test_without_a_run_directory_the_error_reports_no_checkpoint() -> None:
    with Crowd(setting(DDP(), ranks=1, task=Digits())) as crowd:
        crowd.reach(3)
        crowd.every[0].preempt()
        (said,) = ends(crowd)
        assert said == ("rank 0 is preempted, and the run cannot go on: no rank is left to go on; there is no run "
                        "directory to keep a checkpoint in")  # fmt: skip


def test_a_preempted_rank_that_waits_to_join_leaves_at_once() -> None:
    with Crowd(setting(DDP())) as crowd:
        crowd.reach(2)
        crowd.call(2)
        crowd.until(lambda: crowd.every[2].phase == "waiting")
        crowd.every[2].preempt()
        assert crowd.every[2].join(60) and not crowd.every[2].error
        crowd.reach(crowd.first.rank.step + 3)
        assert not crowd.said("members")
