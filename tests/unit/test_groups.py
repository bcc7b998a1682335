"""Tests groups of a mesh: verbs among some ranks, on both hosts, and the end of old groups."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from tests.ranks import ended, experiment, live, run
from tests.sim.virtual import comm
from workbench import simulate
from workbench.fabric import Fabric, Link
from workbench.host.placement.canonical_state import hash_model_state
from workbench.partitions import Pipeline
from workbench.rank import Mesh, Op, Rank, StrategyError
from workbench.settings import Change, KnobError, knob
from workbench.strategies import DDP, HierarchicalLocalSGD, Strategy, ZeRO1

pytestmark = pytest.mark.ranks
SEEN: dict[tuple[int, int], dict[str, Any]] = {}


class Grid(Strategy):
    """Arranges 4 ranks as 2 × 2, and writes each verb's answer in each dimension into SEEN."""

    lockstep: ClassVar[bool] = True

    def dims(self, size: int) -> tuple[tuple[str, int], ...]:
        return (("row", 2), ("column", size // 2))

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()
        me, found = torch.tensor([float(rank.id)]), {}
        for dim in ("row", "column"):
            group = rank.group(dim)
            found[dim] = (group.index, group.size)
            found[f"{dim} sum"] = (await group.all_reduce(me.clone(), "sum", "x")).tolist()
            found[f"{dim} mean"] = (await group.all_reduce(me.clone(), "mean", "x")).tolist()
            found[f"{dim} gathered"] = (await group.all_gather(me)).view(-1).tolist()
            found[f"{dim} first"] = (await group.broadcast(me.clone(), 0)).tolist()
            found[f"{dim} last"] = (await group.broadcast(me.clone(), group.size - 1)).tolist()
            halves = torch.arange(2.0 * group.size) + 10 * rank.id
            found[f"{dim} scattered"] = (await group.reduce_scatter(halves)).tolist()
            found[f"{dim} swapped"] = (await group.all_to_all(me.repeat(group.size, 1) + 0.5)).view(-1).tolist()
            other = (group.index + 1) % group.size
            await group.send(me, other, "note")
            data, source = await group.recv(me.clone(), other, "note")
            found[f"{dim} note"] = (data.tolist(), source)
            await group.send(me, other, "note")
            data, source = await group.recv(None, None, "note")
            found[f"{dim} note of anyone"] = (data.view(-1).tolist(), source)
        both = rank.group("row", "column")
        found["both"] = (both.index, both.size, (await both.all_reduce(me.clone())).tolist())
        SEEN[rank.id, rank.step] = found


def by_hand(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dim, mine in (("row", [rank % 2, rank % 2 + 2]), ("column", [rank - rank % 2, rank - rank % 2 + 1])):
        me, size = mine.index(rank), len(mine)
        other = mine[(me + 1) % size]
        total = float(sum(mine))
        halves = [[2.0 * me * size + 10 * total, (2 * me + 1) * size + 10 * total]]
        found |= {
            dim: (me, size),
            f"{dim} sum": [total],
            f"{dim} mean": [total / size],
            f"{dim} gathered": [float(r) for r in mine],
            f"{dim} first": [float(mine[0])],
            f"{dim} last": [float(mine[-1])],
            f"{dim} scattered": halves[0],
            f"{dim} swapped": [r + 0.5 for r in mine],
            f"{dim} note": ([float(other)], mine.index(other)),
            f"{dim} note of anyone": ([float(other)], mine.index(other)),
        }
    return found | {"both": (rank, 4, [6.0])}


@pytest.mark.parametrize("host", ["engine", "simulator"])
def test_every_verb_acts_within_the_group_only(host: str) -> None:
    SEEN.clear()
    e = experiment(4, 2, strategy=Grid())
    if host == "engine":
        run(e)
    else:
        simulate(e.set("pace", 5.0), real=True)
    assert set(SEEN) == {(r, s) for r in range(4) for s in range(2)}
    for (rank, _), found in SEEN.items():
        assert found == by_hand(rank)


def test_both_hosts_record_the_same_operations_with_the_groups_name() -> None:
    e = experiment(4, 2, strategy=Grid())
    real, virtual = run(e), simulate(e.set("pace", 5.0), real=True)
    for s in real:
        mine = s.record.comm()
        assert comm(virtual, s.rank.id) == mine
        assert (0, f"all_reduce x in row [{s.rank.id % 2}, {s.rank.id % 2 + 2}]", 4) in mine
    said = [json.loads(mark[3])["text"] for s in real for mark in s.record.noted("mesh")]
    assert said == ["ranks are arranged as row 2 × column 2"]


def test_a_change_at_every_step_of_a_mesh_acts_before_the_same_step_on_all_ranks() -> None:
    changes = [Change(step, "lr", 0.01 + 0.001 * step) for step in range(1, 9)]
    sessions = run(experiment(4, 10, strategy=HierarchicalLocalSGD(every=4, group=2)), *changes)
    assert len({hash_model_state(s.layout) for s in sessions[:2]}) == 1
    seen = [m[0] for m in sessions[0].record.noted("change")]
    assert seen == list(range(1, 9))


def test_a_change_during_group_steps_reaches_all_ranks_before_the_same_step() -> None:
    sessions = live(experiment(4, 0, pace=2.0, strategy=HierarchicalLocalSGD(every=3, group=2)))
    asked = 12
    try:
        for n in range(asked):
            sessions[0].request({"kind": "change", "id": str(n), "path": "lr", "value": 0.01 + n * 1e-3})
            deadline = time.monotonic() + 60
            while len(sessions[0].record.noted("change")) <= n and time.monotonic() < deadline:
                time.sleep(0.005)
    finally:
        sessions[0].request({"kind": "stop", "id": "end"})
        ended(sessions)
    assert len(sessions[0].record.noted("change")) == asked
    assert {s.phase for s in sessions} == {"stopped"} and len({s.rank.step for s in sessions}) == 1
    assert len({s.rank.lr for s in sessions}) == 1


def test_old_groups_end_with_their_wires_and_new_ones_open() -> None:
    kept: dict[int, Rank] = {}

    class Keeps(HierarchicalLocalSGD):
        async def step(self, rank: Rank, state: Any) -> None:
            if self.group == 2:
                kept.setdefault(rank.id, rank.group("within"))
            await super().step(rank, state)

    sessions = live(experiment(4, 12, strategy=Keeps(every=8, group=2)), (Change(4, "strategy.group", 4),))
    ended(sessions)
    for s in sessions:
        assert s.error is None
        spans = [(step, what.partition(" in ")[2]) for step, what, _ in s.record.comm() if " in " in what]
        first = f"within [{s.rank.id // 2 * 2}, {s.rank.id // 2 * 2 + 1}]"
        assert {what for step, what in spans if step < 4} == {first}
        assert {what for step, what in spans if step >= 4} == {"within [0, 1, 2, 3]"}
        assert not [w.tag for w in s.wires if first in w.tag]
        with pytest.raises(StrategyError, match="is out of date, because the ranks are now arranged as between 1"):
            kept[s.rank.id].all_reduce(torch.zeros(1))


@dataclass(frozen=True, kw_only=True)
class TwoLanes(Strategy):
    """Starts two slow children on an emulated Link, on one lane or on two."""

    other: str = knob("comm", choices=("comm", "beside"), doc="the second child's lane")

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()

        async def first() -> None:
            await rank.all_reduce(torch.ones(8), "sum", "first")
            ORDER.append((rank.id, "first over"))
            if self.other == "beside":
                assert BEGUN[rank.id].wait(60), "the child on the other lane has not begun"

        async def second() -> None:
            BEGUN[rank.id].set()
            ORDER.append((rank.id, "second begun"))
            await rank.all_reduce(torch.ones(8), "sum", "second")

        handles = [await rank.start(first(), name="first"), await rank.start(second(), lane=self.other, name="second")]
        for handle in handles:
            await rank.wait(handle)


ORDER: list[tuple[int, str]] = []
BEGUN: dict[int, threading.Event] = {}


@pytest.mark.parametrize("other", ["comm", "beside"])
def test_children_on_different_lanes_run_in_parallel_and_on_one_lane_in_turn(other: str) -> None:
    ORDER.clear()
    BEGUN.update({r: threading.Event() for r in range(2)})
    sessions = run(experiment(2, 1, strategy=TwoLanes(other=other), fabric=Fabric(link=Link(bandwidth=100.0))))
    assert len(ORDER) == 4
    lanes = {s.rank.id: [t.name for t in s.training.host.lanes] for s in sessions}
    assert all(names == ["comm"] + ["beside"] * (other == "beside") for names in lanes.values())
    if other == "comm":
        for r in range(2):
            mine = [what for rank, what in ORDER if rank == r]
            assert mine == ["first over", "second begun"]


def test_changes_arrive_while_all_children_run_on_another_lane() -> None:
    class Beside(DDP):
        async def step(self, rank: Rank, state: Any) -> None:
            await rank.forward()
            await rank.backward()
            await rank.update()

            async def child() -> None:
                await rank.all_reduce(torch.ones(1))

            await rank.wait(await rank.start(child(), lane="beside"))

    sessions = live(experiment(2, 0, strategy=Beside(), pace=2.0))
    sessions[0].request({"kind": "change", "id": "a", "path": "lr", "value": 0.015})
    deadline = time.monotonic() + 60
    while not sessions[0].record.noted("change") and time.monotonic() < deadline:
        time.sleep(0.01)
    sessions[0].request({"kind": "stop", "id": "end"})
    ended(sessions)
    assert len(sessions[0].record.noted("change")) == 1


def test_a_rank_that_fails_before_a_group_meets_frees_the_waiting_ranks() -> None:
    class Fails(Grid):
        async def step(self, rank: Rank, state: Any) -> None:
            if rank.id == 3:
                raise ValueError("not today")
            await rank.group("column").all_reduce(torch.ones(1))

    sessions = live(experiment(4, 2, strategy=Fails()))
    ended(sessions)
    causes = [s.error for s in sessions if s.error and not s.error["consequence"]]
    assert [(c["rank"], c["text"]) for c in causes] == [(3, "not today")]
    assert sessions[2].error is not None and sessions[2].error["consequence"]


def test_a_group_on_an_emulated_link_takes_the_simulators_time() -> None:
    e = experiment(
        4,
        6,
        strategy=HierarchicalLocalSGD(every=3, group=2),
        pace=3.0,
        fabric=Fabric(link=Link(bandwidth=20.0, latency=2.0)),
    )
    for s in run(e):
        real = {(r[0], r[2]): r[5] - r[4] for r in s.record if r[1] == "port"}
        done = simulate(e, real=True).spans
        mine = done[(done["rank"] == s.rank.id) & (done.lane == "port")]
        virtual = dict(zip(zip(mine.step, mine.name, strict=True), mine.t1 - mine.t0, strict=True))
        assert set(real) == set(virtual) and any(" in within" in name for _, name in real)
        for key, seconds in real.items():
            assert seconds == pytest.approx(virtual[key], rel=1e-6)


# -- the mesh itself --


def test_a_mesh_has_torchs_layout() -> None:
    shape, names = (2, 3, 4), ("a", "b", "c")
    grid = torch.arange(24).view(shape)
    mesh = Mesh(tuple(zip(names, shape, strict=True)), tuple(range(24)))
    for rank in range(24):
        where = [int(i) for i in (grid == rank).nonzero()[0]]
        assert mesh.coordinate(rank) == dict(zip(names, where, strict=True))
        for axis, name in enumerate(names):
            row = grid[tuple(slice(None) if k == axis else i for k, i in enumerate(where))]
            assert mesh.group((name,), rank).ranks == tuple(row.tolist())
        plane = grid[where[0]].flatten()
        assert mesh.group(("b", "c"), rank).ranks == tuple(plane.tolist())
        assert mesh.group(("c", "b"), rank) == mesh.group(("b", "c"), rank)
        assert mesh.group(("a",), rank).parallel == 12


def test_servers_are_outside_the_mesh() -> None:
    mesh = Mesh((("data", 2), ("stage", 2)), (1, 2, 4, 5))
    assert mesh.group(("stage",), 4).ranks == (4, 5) and mesh.group(("data",), 4).ranks == (1, 4)
    with pytest.raises(StrategyError, match="rank 3 is a server: it is not part of the mesh data 2 × stage 2"):
        mesh.group(("data",), 3)


@pytest.mark.parametrize(("made", "words"), [
    (lambda: Mesh((("data", 3), ("stage", 2)), (0, 1, 2, 3)), "mesh data 3 × stage 2: makes 6 ranks, but 4 train"),
    (lambda: Mesh((("data", 2), ("data", 2)), (0, 1, 2, 3)), "each dimension needs a name of its own"),
    (lambda: Rank(0, 4).group("stage"), r"group\('stage'\): the mesh is data 4; name one or more"),
    (lambda: Rank(0, 4).group(), r"group\(\): the mesh is data 4; name one"),
    (lambda: Rank(0, 4).group("data").send(torch.ones(1), 4), r"rank 4 of group data \[0, 1, 2, 3\]: there are 0 to 3"),
])  # fmt: skip
def test_invalid_groups_give_one_sentence(made: Any, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        made()


def test_a_strategy_whose_mesh_does_not_fit_is_refused_before_training() -> None:
    class Misfit(Grid):
        def dims(self, size: int) -> tuple[tuple[str, int], ...]:
            return (("row", 3), ("column", 3))

    words = "strategy=Misfit: mesh row 3 × column 3: makes 9 ranks, but 2 train; let the sizes of its dimensions"
    with pytest.raises(KnobError, match=words):
        experiment(2, 2, strategy=Misfit())
    ddp = experiment(2, 2)
    with pytest.raises(KnobError, match=words):  # also live: the run goes on
        ddp.set("strategy", Misfit())


def _arranged(dims: Any, **claims: Any) -> Any:
    return type("Own", (Grid,), {"dims": lambda self, size: dims, "__module__": __name__, **claims})()


@pytest.mark.parametrize(("dims", "words"), [
    ({"row": 2, "column": 2}, r"dims=\{'row': 2, 'column': 2\}: must be pairs of a name and a number of ranks, nei"),
    ((("row", -2), ("column", -2)), "must be pairs of a name and a number of ranks"),
    ((("row", 4), ("column", 0)), "must be pairs of a name and a number of ranks"),
    ((("row", 2), ("column", 2.0)), "must be pairs of a name and a number of ranks"),
    (((1, 2), (2, 2)), "must be pairs of a name and a number of ranks"),
    (("row", 4), "must be pairs of a name and a number of ranks"),
    (None, r"dims=None: must be pairs of a name .* such as \(\('between', 4\), \('within', 1\)\)"),
    ((), r"dims=\(\): must be pairs"),
    ((("a", 2), ("a", 2)), "mesh a 2 × a 2: each dimension needs a name of its own; 'a' occurs twice$"),
])  # fmt: skip
def test_an_invalid_mesh_is_refused_when_it_is_chosen(dims: Any, words: str) -> None:
    with pytest.raises(KnobError, match=r"strategy=Own: .*" + words):
        experiment(4, 2, strategy=_arranged(dims))


def test_a_dimension_that_the_partition_also_has_is_refused() -> None:
    mine = _arranged((("stage", 2),))
    words = r"strategy=Own: mesh stage 2 × stage 2: .*; 'stage' occurs twice, once in the partition: rename yours"
    with pytest.raises(KnobError, match=words):
        experiment(4, 2, strategy=mine, partition=Pipeline())


def test_shards_along_a_missing_dimension_are_refused_when_chosen() -> None:
    cls = type("Along", (ZeRO1,), {"shared_along": ("rows",), "__module__": __name__})
    with pytest.raises(
        KnobError, match=r"strategy=Along: shared_along has 'rows', and the dimensions of its mesh are data; use some"
    ):
        experiment(4, 2, strategy=cls())


@pytest.mark.parametrize("host", ["engine", "simulator"])
def test_a_missing_group_is_refused_with_the_existing_ones(host: str) -> None:
    async def step(self: Any, rank: Rank, state: Any) -> None:
        await rank.group("diagonal").all_reduce(torch.ones(1))

    e = experiment(4, 2, strategy=_arranged((("row", 2), ("column", 2)), step=step))
    words = r"group\('diagonal'\): the mesh is row 2 × column 2; name one or more of its dimensions"
    if host == "simulator":
        with pytest.raises(StrategyError, match=words):
            simulate(e.set("pace", 5.0), real=True)
        return
    sessions = live(e)
    ended(sessions)
    assert any(s.error and re.search(words, s.error["text"]) for s in sessions)


def test_a_mesh_may_have_any_number_of_dimensions() -> None:
    """5 dimensions on 24 simulated ranks; each gives the sum of its ranks' numbers."""
    dims = (("a", 2), ("b", 1), ("c", 3), ("d", 2), ("e", 2))
    found: dict[tuple[int, str], float] = {}

    async def step(self: Any, rank: Rank, state: Any) -> None:
        for names in [(name,) for name, _ in dims] + [("a", "c"), ("b", "d", "e")]:
            x = await rank.group(*names).all_reduce(torch.tensor([float(rank.id)]))
            found[rank.id, "+".join(names)] = float(x)

    simulate(experiment(24, 1, strategy=_arranged(dims, step=step), pace=1.0), real=True)
    grid = torch.arange(24.0).view([n for _, n in dims])
    for (rank, names), total in found.items():
        axes = [k for k, (name, _) in enumerate(dims) if name in names.split("+")]
        assert total == float(grid.sum(axes, keepdim=True).expand(grid.shape).reshape(-1)[rank])


def test_a_group_is_the_rank_except_for_index_and_size() -> None:
    whole = Rank(5, 8)
    whole.mesh = Mesh((("a", 2), ("b", 4)), tuple(range(8)))
    group = whole.group("b")
    whole.step, whole.lr = 7, 0.5
    assert (group.index, group.size, group.id, group.step, group.lr) == (1, 4, 5, 7, 0.5)
    assert group.memory is whole.memory and group.group("a").size == 2
    op = group.all_reduce(torch.ones(1))
    assert isinstance(op, Op) and op.group is not None and op.group.ranks == (4, 5, 6, 7)
