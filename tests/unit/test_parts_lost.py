"""Loses a rank that held a part of the model: other ranks have the same part, or all go back to a checkpoint."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor as Values
from torch import nn

from tests.ranks import ended, gone_before_it_meets, live, net, run, shipped, toy
from workbench.compressors import ErrorFeedback, TopK
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.host.elastic import reassembling
from workbench.host.elastic.recovery_sources import has_parts
from workbench.host.elastic.reentry import Membership
from workbench.host.loop import generation
from workbench.host.placement.move_state import view_slice
from workbench.host.placement.optimizer_slots import read_slots
from workbench.host.placement.strided_slices import StridedSlice
from workbench.host.transfer.boundary import list_held_slices, make_boundary
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.partitions.schedules import GPipe, PipeDream2BW
from workbench.record.checkpoints import FOLDER, list_checkpoints
from workbench.settings import Change, to_plain
from workbench.strategies import DDP, HSDP, LocalSGD, Strategy, ZeRO1, ZeRO3
from workbench.tasks import ByteGPT, ClickThrough, Digits

pytestmark = pytest.mark.ranks

WAYS = [Pipeline(), Pipeline(schedule=GPipe()), Pipeline(schedule=PipeDream2BW()), Tensor()]


def layers() -> nn.Module:
    """Returns a sequential net with the same initial values in every thread."""
    return net(lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)))


class Put(NamedTuple):
    """A rank's state just after the model is complete again."""

    step: int
    params: dict[str, Values]
    slots: dict[str, Values]
    owed: dict[str, Values]


class Seen(dict[int, Put]):
    """The states by member."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        async def put_together(run: Any, came: Membership, *rest: Any) -> None:
            await reassembling.assemble_model(run, came, *rest)
            if run.rank.id in came.furthest:
                params = {place.name: place.param.detach().clone().view(-1) for place in run.layout.order}
                kept = {name: x.clone().view(-1) for name, x in read_slots(run.layout, run.optimizer).items()}
                owed = {name: x.clone() for name, x in run.rank.memory.buffers.get(ErrorFeedback.residual, {}).items()}
                self[run.session.member] = Put(came.step, params, kept, owed)

        patch.setattr(generation, "assemble_model", put_together)


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def alike(way: Any) -> Any:
    """Returns a task with the same initial values and data in every run."""
    return toy(model=layers) if way.depth > 1 else toy()


def setting(strategy: Strategy, **more: Any) -> Experiment:
    small = "partition" in more
    task = ByteGPT(width=32, context=16) if small else ClickThrough() if strategy.tables else Digits()
    rest = {"task": task, "ranks": 4, "steps": 12, "eval_every": 5, "on_death": "go on", "seed": 3, "diverged": 0.0}
    return Experiment(strategy=strategy, **{**rest, **more}).checked()


def saving(strategy: Strategy, way: Any, **more: Any) -> Experiment:
    return setting(strategy, partition=way, task=alike(way), save_every=5, bucket_mb=0.01, steps=60, pace=10.0, **more)


def lost(e: Experiment, *victims: int, at: int = 7, folder: Path | None = None,
         changes: tuple[Change, ...] = ()) -> tuple[list[Session], list[str]]:  # fmt: skip
    """Runs `e` and aborts the victims at about step `at`; returns (other ranks, texts of the record about it)."""
    sessions = live(e, changes, run_dir=folder)
    until = time.monotonic() + 150
    first = sessions[victims[0]]
    while (first.rank.step < at or (folder and not list_checkpoints(folder / FOLDER))) and not first.join(0.001):
        assert time.monotonic() < until
    for victim in victims:  # the victims are lost together, before the first loss is noticed
        sessions[victim]._must_leave = True
    for victim in victims:
        sessions[victim].abort()
    ended(sessions, 150)
    left = [s for s in sessions if s.member not in victims]
    return left, [json.loads(m[3])["text"] for s in left for m in s.record.noted("members")]


def went_on(left: list[Session], e: Experiment) -> list[Session]:
    """Returns the ranks that trained to the end; checks that they agree."""
    for s in left:
        assert s.error is None, s.error["traceback"]
    there = [s for s in left if s.phase != "stopped"]  # not needed
    assert {s.phase for s in there} == {"done"} and {s.rank.step for s in there} == {e.steps}
    assert len({s.members for s in there}) == 1
    return there


def held(there: list[Session], put: Put) -> Iterator[tuple[dict[str, Values], dict[str, tuple[StridedSlice, ...]]]]:
    """Yields each rank's state by name, with its place in the reassembled state."""
    sizes = {name: x.numel() for name, x in {**put.params, **put.slots}.items()}
    kept = {name: x.numel() == 1 < put.params[name.partition("/")[2]].numel() for name, x in put.slots.items()}
    for s in there:
        b = make_boundary(s.set_up_already, (0, 0), copied=False)
        yield b.state, dict(list_held_slices(b.place, b.size, sizes, kept, b.spread, b.cut, b.sharded))


def same(put: Put, there: list[Session], mean: bool = False) -> None:
    """Checks that the reassembled state equals that of a run that ended at that step, or its replicas' mean."""
    for name, x in {**put.params, **put.slots}.items():
        total, times = torch.zeros_like(x), torch.zeros(x.numel())
        for state, lies in held(there, put):
            at, values = 0, state.get(name)
            for s in lies.get(name, ()) if values is not None else ():
                into, count = (
                    view_slice(total, (StridedSlice(0, x.numel()),), s),
                    view_slice(times, (StridedSlice(0, x.numel()),), s),
                )
                came = values[at : at + s.element_count].view(s.times, s.length)
                into.copy_(into + came if mean else came)
                count.add_(1)
                at += s.element_count
        assert times.all(), name
        assert torch.equal(total / times if mean else total, x), name


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_reassembled_model_equals_the_replicas(way: Any, put: Seen) -> None:
    e = setting(DDP(), partition=way, task=alike(way), bucket_mb=0.01)
    left, texts = lost(e, 2)
    went_on(left, e)
    assert len(texts) == 1 and "with other ranks' copies of the lost parts" in texts[0]
    step = {p.step for p in put.values()}
    assert len(step) == 1 and len(put) == 2
    clean = run(replace(e, steps=step.pop()))
    for one in put.values():
        same(one, clean)


@pytest.mark.parametrize("way", [Pipeline(), Tensor()], ids=str)
@pytest.mark.parametrize("victims", [(0,), (1, 2)], ids="ranks {}".format)
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=4)], ids=lambda s: type(s).__name__)
def test_any_loss_among_two_replicas_is_survived(strategy: Strategy, victims: tuple[int, ...], way: Any) -> None:
    """Ranks 0 and 3 together have both parts."""
    e = setting(strategy, partition=way)
    left, texts = lost(e, *victims)
    there = went_on(left, e)
    assert len(there) == 2 and texts and "with other ranks' copies of the lost parts" in texts[-1]
    assert all(torch.isfinite(w).all() for s in there for w in s.layout.weights)


def test_residuals_of_slices_become_residuals_of_the_whole() -> None:
    e = setting(DDP(), partition=Tensor(), compressor=ErrorFeedback(of=TopK(density=0.02)))
    left, _ = lost(e, 1)
    there = went_on(left, e)
    for s in there:
        owed = s.rank.memory.buffers[ErrorFeedback.residual]
        assert all(owed[p.name].numel() == p.param.numel() for p in s.layout.order if p.name in owed) and owed


def test_under_hsdp_the_other_group_has_all_shards(put: Seen) -> None:
    e = setting(HSDP(), steps=16)
    left, texts = lost(e, 1)
    there = went_on(left, e)
    assert [s.member for s in there] == [2, 3] and "rank 0 is not needed" in texts[0]
    assert len(put) == 2 and all(torch.equal(put[2].params[name], x) for name, x in put[3].params.items())
    assert all(torch.equal(put[2].slots[name], x) for name, x in put[3].slots.items()) and put[2].slots


PARTS = [name for name, cls in sorted(shipped(Strategy).items()) if has_parts(setting(cls()))]


def test_strategies_that_shard_have_parts() -> None:
    assert {"HSDP", "HpZ", "ZeRO1", "ZeRO2", "ZeRO3"} <= set(PARTS)


@pytest.mark.parametrize("name", [name for name in PARTS if name != "HSDP"])
def test_all_ranks_load_the_checkpoint_if_no_other_rank_has_the_part(name: str, tmp_path: Path, put: Seen) -> None:
    e = setting(shipped(Strategy)[name](), steps=14, save_every=5)
    left, texts = lost(e, 1, at=8, folder=tmp_path)
    for s in left:
        assert s.error is None, s.error["traceback"]
    there = [s for s in left if s.phase != "stopped"]  # not needed
    assert {s.phase for s in there} == {"done"} and len(there) >= 2
    assert "went back to the checkpoint before step 5, because no other rank had the same parts" in texts[0]
    assert len(put) == len(there) and {p.step for p in put.values()} <= {5, 10}
    first = put[there[0].member]
    for other in put.values():
        assert all(torch.equal(first.params[n], x) for n, x in other.params.items())


@pytest.mark.parametrize(
    ("e", "victims"),
    [
        (saving(DDP(), Pipeline(), ranks=2), (1,)),
        (saving(DDP(), Tensor(), ranks=2), (0,)),
        (saving(LocalSGD(every=2), Pipeline()), (0, 2)),
        (saving(ZeRO1(), Whole()), (3,)),
        (saving(ZeRO3(), Whole()), (0,)),
    ],
    ids=["stages", "slices", "both first stages", "ZeRO1", "ZeRO3"],
)
def test_a_checkpoint_restores_the_state_bit_identically(
    e: Experiment, victims: tuple[int, ...], tmp_path: Path, put: Seen
) -> None:
    left, texts = lost(e, *victims, at=8, folder=tmp_path)
    there = went_on(left, e)
    step = next(iter(put.values())).step
    assert f"went back to the checkpoint before step {step}" in texts[-1]
    assert there[0].experiment.partition.size <= len(there)
    clean = run(replace(e, steps=step, save_every=0, pace=0.0))
    for one in put.values():
        same(one, clean, mean=e.strategy.periodic)


FEEDBACK = ErrorFeedback(of=TopK(density=0.02))


@pytest.mark.parametrize(
    ("e", "victims"),
    [
        (saving(ZeRO1(), Whole(), compressor=FEEDBACK), (3,)),
        (saving(DDP(), Tensor(), ranks=2, compressor=FEEDBACK), (0,)),
        (saving(LocalSGD(every=2), Pipeline(), compressor=FEEDBACK), (0, 2)),
    ],
    ids=["ZeRO1", "slices", "both first stages"],
)
def test_a_checkpoint_restores_the_residuals(
    e: Experiment, victims: tuple[int, ...], tmp_path: Path, put: Seen
) -> None:
    """The ranks' total residual equals that of a run that ends at that step."""
    left, _ = lost(e, *victims, at=8, folder=tmp_path)
    went_on(left, e)
    step, owed = next(iter(put.values())).step, dict[str, Values]()
    for one in put.values():
        for name, x in one.owed.items():
            owed[name] = owed.get(name, 0.0) + x
    clean, total = run(replace(e, steps=step, save_every=0, pace=0.0)), dict[str, Values]()
    for s in clean:
        b = make_boundary(s.set_up_already, (0, 0), copied=False)
        for name, x in b.widen_memory(s.model, e.compressor)[ErrorFeedback.residual].items():
            total[name] = total.get(name, 0.0) + x
    assert owed.keys() == total.keys() and any(x.any() for x in total.values())
    for name, x in total.items():
        assert torch.allclose(owed[name], x, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("name", PARTS)
def test_without_a_checkpoint_the_run_fails_and_suggests_save_every(name: str) -> None:
    e = setting(shipped(Strategy)[name](), steps=0)
    left, texts = lost(e, *((1, 3) if name == "HSDP" else (1,)), at=5)
    assert [s.phase for s in left] == ["failed"] * len(left)
    assert texts and all(f"strategy={name}: no other rank has its" in t and "take save_every=100" in t for t in texts)


def test_a_single_replica_goes_on_in_fewer_stages(tmp_path: Path) -> None:
    task = ByteGPT(layers=3, width=32, context=16)
    e = setting(DDP(), partition=Pipeline(stages=3), ranks=3, save_every=4, task=task)
    left, texts = lost(e, 1, at=6, folder=tmp_path)
    there = went_on(left, e)
    assert there[0].experiment.partition == Pipeline(stages=2) and "a replica now takes 2 ranks" in texts[0]


def test_a_switch_of_partition_interrupted_by_a_loss_is_made_by_the_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 2 and 3 are lost during a switch to stages, which ranks 0 and 1 have begun."""
    from workbench.host.reconfigure import changes

    spread, sessions, broken = changes.repartition_state, list[Session](), list[int]()

    async def breaks(run: Any, *args: Any) -> Any:
        if run.session.member >= 2 and not broken:
            broken.append(run.session.member)
            for victim in sessions[2:]:
                victim._must_leave = True
            for victim in sessions[2:]:
                victim.abort()
        return await spread(run, *args)

    monkeypatch.setattr(changes, "repartition_state", breaks)
    e = setting(DDP(), partition=Whole())
    sessions += live(e, (Change(5, "partition", to_plain(Pipeline())),))
    ended(sessions, 150)
    there = went_on(sessions[:2], e)
    assert broken and [s.experiment.partition for s in there] == [Pipeline()] * 2
    made = [(row[0], json.loads(row[3])["path"]) for row in there[0].record.noted("change")]
    assert made == [(5, "partition")]


@pytest.mark.parametrize("way", [Pipeline(), Tensor()], ids=str)
def test_an_unneeded_rank_stays_until_the_new_generation_has_met(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is lost, so ranks 2 and 3 should go on without 0. Then 2 is lost, and only 0 has the same part."""
    gone_before_it_meets(monkeypatch, 2)
    e = setting(DDP(), partition=way)
    left, texts = lost(e, 1)
    there = went_on([s for s in left if s.member != 2], e)
    assert [s.member for s in there] == [0, 3] and all(s.members == (0, 3) for s in there)
    assert len(texts) == 1 and "ranks 1, 2 are lost; ranks 0, 3 went on from step" in texts[0]
    stood = r"ranks 0, 3|rank \d before step \d+, rank \d"
    assert re.search(rf"; progress: ({stood}) before step \d+$", texts[0])


def test_replicas_meet_again_if_one_is_lost_before_they_met(monkeypatch: pytest.MonkeyPatch) -> None:
    gone_before_it_meets(monkeypatch, 0)
    e = setting(DDP())
    left, texts = lost(e, 1)
    there = went_on([s for s in left if s.member], e)
    assert [s.member for s in there] == [2, 3] and "ranks 0, 1 are lost" in texts[-1]
