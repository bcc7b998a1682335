"""Kills engines of a lab whose run goes on; adds and removes ranks on the notebook's request."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import psutil
import pytest

from tests.campaign import agree
from tests.deaths import kill
from tests.harm import Patient, cut
from tests.labs import endless, reached, shared_lab
from tests.waiting import until
from workbench.fabric import Crash
from workbench.lab import Lab
from workbench.partitions import Partition, Pipeline, Tensor, Whole
from workbench.settings import KnobError
from workbench.strategies import DDP, HierarchicalLocalSGD, LocalSGD, Strategy, ZeRO1
from workbench.tasks import ByteGPT, Digits

pytestmark = pytest.mark.engine


lab = shared_lab(4, "outliving")


def test_ranks_come_and_go(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lab.run(endless(strategy=DDP(), ranks=2))
    reached(lab, 10)
    came = lab.resize(4).wait(90)
    assert lab.experiment.ranks == 4 and lab.changes[-1] is came and came.applied_at is not None
    assert lab.set("strategy", LocalSGD(every=4)).wait(60).applied_at is not None
    gone = lab.resize(3).wait(60)
    assert gone.applied_at is not None
    reached(lab, gone.applied_at + 5)
    assert lab._live is not None and lab._live.members == (0, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(lab.cluster, "processes", None)
        with pytest.raises(KnobError, match=r"3 ranks train, 1 engines .* another has started .*; take at most 4"):
            lab.resize(5)
    pid = lab.status[3]["pid"]
    again = lab.resize(4).wait(90)
    assert lab._live is not None and lab._live.members == (0, 1, 2, 4), "a number of its own"
    assert lab.status[3]["pid"] == pid, "and the engine of who has left, which is free again"
    assert again.applied_at is not None
    reached(lab, again.applied_at + 5)
    with pytest.raises(KnobError, match="must be an integer of at least 1"):
        lab.resize(0)
    lab.stop()
    assert run.wait(60).summary()["ranks"] == 2 and lab.state == "idle"
    spans = run.spans
    first = spans[spans.lane == "step"].groupby("rank").step.min().to_dict()
    assert set(first) == {0, 1, 2, 3, 4} and first[4] == again.applied_at and first[2] == first[3] == came.applied_at
    last = spans[spans.lane == "step"].groupby("rank").step.max().to_dict()
    assert last[3] < gone.applied_at < last[0] == last[1] == last[2] == last[4]


def test_a_refused_newcomer_leaves_and_its_engine_is_free_again(lab: Lab) -> None:
    run = lab.run(endless(strategy=HierarchicalLocalSGD(group=3), ranks=3))
    reached(lab, 10)
    with pytest.raises(KnobError, match="group=3 does not divide 4 ranks"):
        lab.resize(4).wait(60)
    assert lab._live is not None and until(lambda: lab._live.ending.awaited_ranks == {0, 1, 2})
    lab.set("strategy", DDP()).wait(60)
    engines = {row["pid"] for row in lab.status}
    (unwanted,) = lab._live.used_ranks - {0, 1, 2}
    assert until(lambda: lab._live.ending.final_states.get(unwanted)), "its session is over"
    assert lab.resize(4).wait(90).applied_at is not None and len(lab.members) == 4 and unwanted not in lab.members
    assert {row["pid"] for row in lab.status} == engines, "no other engine was started for it"
    lab.stop()
    assert run.wait(60).state == "stopped"


@pytest.mark.parametrize("way", [Whole(), Pipeline(micros=2)], ids=["whole", "in stages"])
def test_all_ranks_go_on_after_a_connection_between_two_is_cut(lab: Lab, way: Partition) -> None:
    task = ByteGPT(width=32, context=16) if way.size > 1 else Digits()
    run = lab.run(endless(task=task, strategy=DDP(), ranks=4, on_death="go on", partition=way))
    reached(lab, 10)
    patient = Patient(lab, Random(3))
    assert cut(patient).startswith("cut ") and until(lambda: run.details("members"))
    patient.goes_on("cut")
    assert any("a connection between ranks was lost; ranks 0, 1, 2, 3 went on from step" in note for note in lab.notes)
    lab.stop()
    assert run.wait(60).state == "stopped"


def test_survivors_go_on_without_rank_0_and_the_next_run_gets_new_engines(lab: Lab) -> None:
    run = lab.run(endless(strategy=DDP(), ranks=4, on_death="go on"))
    reached(lab, 10)
    found = kill(lab, 0)
    assert found.on is not None and "rank 0 is lost; ranks 1, 2, 3 went on from step" in found.said
    assert lab.set("bucket_mb", 0.05).wait(60).applied_at is not None, "another rank hears for all"
    second = kill(lab, 2)
    assert second.on is not None and "ranks 1, 3 went on" in second.said
    lab.pause()
    assert until(lambda: lab.state == "paused")
    lab.resume()
    lab.stop()
    run.wait(60)
    assert lab.state == "idle" and lab._live is not None and lab._live.error is None
    assert any("rank 0 is lost at step" in note and "SIGKILL" in note for note in lab.notes)
    died = {detail["rank"]: detail for _, _, detail in run.details("error")}
    assert set(died) == {0, 2} and all(d["type"] == "EngineDied" for d in died.values())
    assert lab.run(endless(strategy=DDP(), ranks=4).set("seed", 5)) is not run
    reached(lab, 3)
    lab.stop()
    assert lab._live.over.wait(60) and lab._live.state == "stopped"


def test_a_fault_crashes_an_engine(lab: Lab) -> None:
    run = lab.run(endless(strategy=DDP(), ranks=3, on_death="go on"))
    reached(lab, 10)
    pid = lab.status[0]["pid"]
    made = lab.set("faults", [Crash(rank=0)]).wait(60)
    assert made.applied_at is not None, "rank 0 crashes, and has said before that all have made the change"
    assert until(lambda: run.details("members"))
    ((_, _, said),) = run.details("members")
    assert said["gone"] == [0] and said["step"] == made.applied_at
    reached(lab, made.applied_at + 5)
    assert until(lambda: not psutil.pid_exists(pid)) and lab._live is not None and lab._live.members == (1, 2)
    lab.stop()
    assert run.wait(60).state == "stopped"
    assert [detail["text"] for _, _, detail in run.details("fault")] == ["crashed by an injected fault"]


@contextmanager
def unheard(lab: Lab, disk: bool) -> Iterator[None]:
    """In this block rank 0's messages are lost and the lab cannot read its disk; if `disk`, only until rank 0 is
    dead.
    """
    live = lab._live
    assert live is not None
    take, missed, remind = lab.cluster.on_batch, live.reorder_buffer._read_missing, live.reorder_buffer.take_count

    def unseen(kind: str, rank: int, start: int) -> Any:
        if rank == 0:
            raise OSError("its disk is on another machine")
        return missed(kind, rank, start)

    lab.cluster.on_batch = lambda batch: None if batch.rank == 0 else take(batch)
    live.reorder_buffer._read_missing = missed if disk else unseen
    live.reorder_buffer.take_count = lambda kind, rank, sent: None if rank == 0 else remind(kind, rank, sent)
    try:
        yield
    finally:
        lab.cluster.on_batch, live.reorder_buffer._read_missing, live.reorder_buffer.take_count = take, missed, remind


@pytest.mark.parametrize("disk", [True, False], ids=["on a disk that is seen", "nowhere"])
def test_a_change_is_confirmed_even_if_rank_0_died_before_reporting_it(lab: Lab, disk: bool) -> None:
    run = lab.run(endless(strategy=DDP(), ranks=3, on_death="go on"))
    reached(lab, 10)
    with unheard(lab, disk):
        asked = lab.set("bucket_mb", 0.05)
        made = lab.set("faults", [Crash(rank=0)]).wait(60)
        assert asked.wait(60).applied_at is not None and made.applied_at is not None
        assert until(lambda: lab._live is not None and lab._live.members == (1, 2))
        assert lab.set("bucket_mb", 0.1).wait(60).applied_at is not None
    assert lab.experiment.bucket_mb == 0.1 and lab.experiment.fabric.faults == (), "of a rank that is gone"
    lab.stop()
    assert run.wait(60).state == "stopped"
    assert [change.path for change in run.changes] == ["bucket_mb", "fabric.faults", "bucket_mb"], "each once, in order"
    assert [change.at_step for change in run.changes][:2] == [asked.applied_at, made.applied_at]


@pytest.mark.parametrize("disk", [True, False], ids=["on a disk that is seen", "nowhere"])
def test_a_resize_is_confirmed_even_if_rank_0_died_before_reporting_it(lab: Lab, disk: bool) -> None:
    run = lab.run(endless(strategy=DDP(), ranks=2, on_death="go on"))
    reached(lab, 10)
    with unheard(lab, disk):
        asked = lab.resize(3)
        (new,) = asked.joining
        assert until(lambda: lab._live.status.get(new, {}).get("state") == "running") and asked.applied_at is None
        os.kill(lab.status[0]["pid"], signal.SIGKILL)
        assert asked.wait(60).applied_at is not None
        assert until(lambda: lab._live is not None and lab._live.members == (1, new)), "who came is not sent away"
        assert lab.set("bucket_mb", 0.05).wait(60).applied_at is not None
        assert lab._live is not None and lab._live.members == (1, new)
        reached(lab, lab._live.step + 20)
    lab.stop()
    assert run.wait(60).state == "stopped"


def test_a_lost_rank_is_replaced(lab: Lab) -> None:
    """A new engine replaces a dead one, and as many ranks as before train with equal values."""
    run = lab.run(endless(strategy=DDP(), ranks=2, on_death="replace"))
    reached(lab, 10)
    engines = len(lab.wait().cluster.engines)
    found = kill(lab, 1)
    assert found.on is not None and "rank 1 is lost; rank 0 went on" in found.said
    assert until(lambda: len(lab._live.members) == 2, 90), lab.notes
    patient = Patient(lab, Random(1))
    patient.goes_on("replacement")
    agree(patient)
    assert len(lab.cluster.engines) in (engines, engines + 1)
    lab.stop()
    assert run.wait(60).state == "stopped"


@pytest.mark.parametrize(
    ("way", "strategy", "ranks", "taken"),
    [
        (Pipeline(micros=2), DDP(), 4, "with other ranks' copies of the lost parts, and rank 0 is not needed"),
        (Tensor(), DDP(), 4, "with other ranks' copies of the lost parts, and rank 0 is not needed"),
        (Whole(), ZeRO1(), 3, "went back to the checkpoint before step"),
    ],
    ids=["stages", "slices", "shards"],
)
def test_lost_ranks_with_shards_or_stages_are_replaced(lab: Lab, way: Partition, strategy: Strategy, ranks: int,
                                                       taken: str) -> None:  # fmt: skip
    """As many ranks as before train again: new ranks replace the dead one and the idle ones without work."""
    task = ByteGPT(width=32, context=16) if way.size > 1 else Digits()
    e = endless(task=task, strategy=strategy, ranks=ranks, on_death="replace", partition=way, save_every=5)
    run = lab.run(e)
    reached(lab, 10)
    assert until(lambda: run.details("saved"))
    found = kill(lab, 1)
    assert found.on is not None and taken in found.said
    assert until(lambda: len(lab._live.members) == ranks, 120), lab.notes
    Patient(lab, Random(1)).goes_on("replacement")
    assert lab.experiment.ranks == ranks and lab.experiment.partition == way and 1 not in lab._live.members
    lab.stop()
    assert run.wait(60).state == "stopped"
