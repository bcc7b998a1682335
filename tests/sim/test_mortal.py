"""Tests crashes of virtual ranks against real ones: the survivors' agreement, the step where they resume, the
result.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import experiment, shipped, toy, weights
from tests.sim.insides import simulated
from tests.thinned import thinned
from tests.unit.test_crash import crash, crashed
from tests.unit.test_parts_lost import layers
from workbench import Run, simulate
from workbench.experiment import Experiment
from workbench.fabric import Crash, Fabric
from workbench.host.elastic.recovery_sources import has_parts
from workbench.partitions import Pipeline, Tensor
from workbench.partitions.schedules import GPipe
from workbench.settings import Change, KnobError
from workbench.sim.clock.world import CRASH_NOTICE_SECONDS
from workbench.sim.rank.generations import REPLACEMENT_SECONDS, VOTE_SECONDS
from workbench.sim.teach.laws import flat
from workbench.strategies import DDP, HSDP, AsyncServer, DiLoCo, LocalSGD, Strategy, ZeRO1, ZeRO3
from workbench.tasks import Digits

CLOCKED = ("DABMD", "LowPrecisionDecentralized")  # the clock decides how far the survivors have come
WITH_SOME = ("Gossip", "HierarchicalLocalSGD", "StochasticGradientPush")  # each step needs some other ranks
LOCKSTEP = [
    name for name, cls in sorted(shipped(Strategy).items())
    if cls.lockstep and not (cls.opaque or name in CLOCKED or has_parts(experiment(4, strategy=cls())))
]  # fmt: skip


def setting(strategy: Strategy, ranks: int = 4, steps: int = 14, **more: Any) -> Experiment:
    return experiment(ranks, steps, **{"strategy": strategy, "on_death": "go on", "pace": 2.0, "eval_every": 5, **more})


def members(run: Run) -> list[dict[str, Any]]:
    """Returns the record's marks about members."""
    return [{k: v for k, v in said.items() if k != "settings"} for _, _, said in run.details("members")]


def ends(run: Run) -> dict[int, str]:
    """Returns the final state by rank; key -1 has the run's state."""
    found = {said["rank"]: said["state"] for _, _, said in run.details("end")}
    return {**found, -1: run.details("state")[-1][2]["state"]}


def stepped(run: Run) -> dict[int, set[int]]:
    """Returns the steps that each rank made."""
    rows = run.timeline.spans.rows()
    rows = rows[rows.equal("lane", "step")]
    return {int(rank): {int(step) for step in rows.step[rows.rank == rank]} for rank in set(rows.rank)}


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "victim"), thinned(list(product(LOCKSTEP, (0, 2))), of=4, long=4))
def test_virtual_survivors_end_with_the_state_of_real_survivors(name: str, victim: int) -> None:
    """A rank that does not need the lost one may or may not end that step before it notices the loss.

    There the clock decides how far each rank is, and so which ranks can go on.
    """
    e = setting(shipped(Strategy)[name]())
    sessions, real = crashed(e, crash(6, victim))
    run, virtual = simulated(e, crash(6, victim))
    told = [{k: v for k, v in mark.items() if k != "settings"} for mark in real]
    if name in WITH_SOME and [mark["voted"] for mark in told] != [mark["voted"] for mark in members(run)]:
        for mark in (*members(run), *told):
            assert mark["step"] == max(step for _, step in mark["voted"]) and mark["step"] in (6, 7)
            assert victim in mark["gone"] and len(mark["members"]) == len(told[0]["members"])
        return
    assert members(run) == told
    state = ends(run)
    assert [state[s.member] for s in sessions] == [s.phase for s in sessions] and state[-1] == "done"
    there = {s.member: s for s in virtual}  # the last session with each number
    for s in sessions:
        if s.phase == "done":
            torch.testing.assert_close(weights(s), flat(there[s.member].model), rtol=1e-5, atol=2e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=4)], ids=str)
@pytest.mark.parametrize("way", [Pipeline(), Pipeline(schedule=GPipe()), Tensor()], ids=str)
def test_a_partitioned_model_is_reassembled_bit_identically(way: Any, strategy: Strategy) -> None:
    """One of two replicas with two ranks is lost. Both hosts compute the same values before and after."""
    e = setting(strategy, task=toy(model=layers) if way.depth > 1 else toy(), partition=way)
    sessions, (real,) = crashed(e, crash(6, 1))
    run, virtual = simulated(e, crash(6, 1))
    (mark,) = members(run)
    assert mark["text"] == real["text"] and "with other ranks' copies of the lost parts" in mark["text"]
    there = {s.member: s for s in virtual}
    for s in sessions[2:]:
        here = {place.name: place.param for place in there[s.member].layout.order}
        assert here.keys() == {place.name for place in s.layout.order}
        assert all(torch.equal(place.param, here[place.name]) for place in s.layout.order)


@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=4), DiLoCo(), AsyncServer(), HSDP()], ids=str)
def test_a_crash_without_values_gives_the_same_members_and_steps(strategy: Strategy) -> None:
    e = setting(strategy, steps=100, pace=300.0, on_death="replace", task=Digits(), eval_every=20)
    real, sizes = (simulate(e, changes=[crash(5, 1)], real=real) for real in (True, False))
    assert members(real) == members(sizes) and ends(real) == ends(sizes) and stepped(real) == stepped(sizes)


@pytest.mark.parametrize("way", [Pipeline(), Tensor(), Pipeline(of=Tensor())], ids=str)
def test_a_crash_in_a_partition_without_values_gives_the_same_members_and_steps(way: Any) -> None:
    task = toy(model=layers) if way.depth > 1 else toy()
    e = setting(DDP(), ranks=2 * way.size, task=task, partition=way)
    real, sizes = (simulate(e, changes=[crash(5, 1)], real=real) for real in (True, False))
    assert members(real) == members(sizes) and stepped(real) == stepped(sizes) and ends(sizes)[-1] == "done"


def test_survivors_go_on_after_the_time_to_notice_and_to_vote() -> None:
    run = simulate(setting(DDP(), ranks=3), changes=[crash(5, 2)])
    rows = run.timeline.spans.rows()
    rows = rows[rows.equal("lane", "step")]
    assert rows.t0[rows.step == 5].min() - rows.t1[rows.step == 4].max() == pytest.approx(
        CRASH_NOTICE_SECONDS + VOTE_SECONDS
    )
    assert stepped(run) == {0: set(range(14)), 1: set(range(14)), 2: set(range(5))}


def test_survivors_of_local_sgd_notice_a_crash_at_the_next_sum() -> None:
    run = simulate(setting(LocalSGD(every=8), pace=1000.0, steps=12, eval_every=0), changes=[crash(2, 1)])
    ((step, t, _),) = run.details("members")
    assert step == 7 and t == pytest.approx(8.0 + VOTE_SECONDS), "they go on alone until step 7 has ended in a sum"


def test_with_on_death_end_a_crash_fails_the_run() -> None:
    run = simulate(setting(DDP(), on_death="end"), changes=[crash(5, 1)], real=True)
    assert ends(run) == dict.fromkeys((-1, 0, 1, 2, 3), "failed") and not members(run)
    ((step, _, said),) = run.details("error")
    assert step == 5 and said["rank"] == 1 and said["text"] == "rank 1 crashed before step 5"


def test_a_replacement_gets_a_new_rank_number() -> None:
    e = setting(DDP(), steps=100, pace=300.0, on_death="replace", task=Digits(), eval_every=0)
    run = simulate(e, changes=[crash(5, 1)], real=True)
    lost, came = run.details("members")
    assert lost[2]["members"] == [0, 2, 3] and came[2]["members"] == [0, 2, 3, 4] and came[2]["new"] == [4]
    assert came[1] - lost[1] == pytest.approx(REPLACEMENT_SECONDS, abs=0.7), (
        "before the next step that nobody has begun"
    )
    made = stepped(run)
    assert made[4] == set(range(came[0], 100)) and made[0] == set(range(100))
    losses = run.samples[run.samples.name == "loss"]
    late, early = losses[losses["rank"] == 4].value, losses[losses.step < 5].value
    assert late.mean() < early.mean(), "it has what the others have"


def test_survivors_go_back_to_a_checkpoint_if_a_shard_is_lost(tmp_path: Path) -> None:
    e = setting(ZeRO1(), save_every=4)
    run = simulate(e, changes=[crash(6, 1)], real=True, checkpoints=tmp_path / "kept")
    (mark,) = members(run)
    assert mark["step"] == 4 and "went back to the checkpoint before step 4" in mark["text"]
    assert ends(run) == {-1: "done", 0: "done", 1: "failed", 2: "done", 3: "done"}
    assert stepped(run)[0] == set(range(14))


@pytest.mark.parametrize("real", [True, False], ids=["values", "sizes"])
def test_a_lost_shard_without_a_checkpoint_fails_the_run_with_the_reason(real: bool) -> None:
    run = simulate(setting(ZeRO3()), changes=[crash(6, 1)], real=real)
    (mark,) = members(run)
    assert "cannot go on without it: strategy=ZeRO3: no other rank has its shard" in mark["text"]
    assert ends(run) == dict.fromkeys((-1, 0, 1, 2, 3), "failed")


def test_several_crashes_in_turn_and_at_once() -> None:
    changes = [crash(at, 0) for at in (3, 6, 9)]
    run = simulate(setting(DDP()), changes=changes, real=True)
    assert [mark["members"] for mark in members(run)] == [[1, 2, 3], [2, 3], [3]], "places are counted anew"
    assert ends(run)[3] == ends(run)[-1] == "done"
    faults = tuple(Crash(rank=r) for r in range(3))
    run = simulate(setting(DDP(), ranks=3, fabric=Fabric(faults=faults)))
    assert ends(run) == dict.fromkeys((-1, 0, 1, 2), "failed") and stepped(run) == {}


def test_invalid_crash_settings_raise_knob_error() -> None:
    with pytest.raises(KnobError, match=r"fabric.faults: ranks with faults differ from the other ranks"):
        simulate(setting(DDP(), fabric=Fabric(faults=(Crash(rank=1),))), alike=True)
    e = setting(DDP(), ranks=2)
    with pytest.raises(KnobError, match="replay: a fault crashes a rank, and a replay cannot lose ranks"):
        simulate(e, changes=[crash(3, 1)], replay=simulate(e))


@pytest.mark.parametrize(("second", "pace", "went_on"), [
    (7, (), (1.5, 2.4)), (14, (), (1.5, 3.8)), (7, (Change(10, "pace", 6_000),), (1.5, 2.4)),
])  # fmt: skip
def test_a_second_crash_before_the_first_replacement_joins(
    second: int, pace: Any, went_on: tuple[float, float]
) -> None:
    """The clock does not jump ahead to newcomers, and two newcomers at one boundary join together."""
    e = Experiment(ranks=4, steps=60, pace=200, strategy=DDP(), on_death="replace", eval_every=0)
    changes = [Change(5, "fabric.faults", [Crash(rank=1)]), Change(second, "fabric.faults", [Crash(rank=0)]), *pace]
    run = simulate(e, changes=changes)
    said = [(t, m) for _, t, m in run.details("members")]
    assert [t for t, m in said if m["gone"]] == pytest.approx(went_on, abs=0.05)
    assert run.state == "done" and len(said[-1][1]["members"]) == 4


def test_a_rank_can_crash_at_the_boundary_at_which_new_ranks_join() -> None:
    """The generation ends at that boundary. A crash planned in it must not be lost."""
    e = Experiment(ranks=4, steps=30, pace=1000, strategy=DDP(), on_death="replace", eval_every=0)
    first = Change(5, "fabric.faults", [Crash(rank=1)])
    comes = next(s for s, _, m in simulate(e, changes=[first]).details("members") if m.get("new"))
    run = simulate(e, changes=[first, Change(comes, "fabric.faults", [Crash(rank=0)])])
    assert [m["gone"] for *_, m in run.details("members") if m["gone"]] == [[1], [0]]
