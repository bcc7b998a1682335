"""Tests what the figures of lessons show: messages by round, passes, coordinates, neighbours and values."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from widgets.lesson import (
    draw_collective,
    draw_graph,
    draw_lines,
    draw_memory,
    draw_mesh,
    draw_roofline,
    draw_schedule,
    list_rounds,
)
from widgets.teach.passes import time_passes
from workbench import Experiment, Gossip, recipe, simulate
from workbench.analysis import measure_memory
from workbench.fabric import Fabric, Link
from workbench.fabric.algorithms import (
    Auto,
    DoubleTree,
    HalvingDoubling,
    Hierarchical,
    Native,
    ParameterServer,
    Ring,
    TwoLevel,
)
from workbench.partitions import Pipeline, Tensor
from workbench.partitions.schedules import GPipe, Interleaved, OneFOneB, PipeDream, ZeroBubble
from workbench.settings import KnobError
from workbench.strategies import DABMD, LocalSGD, LowPrecisionDecentralized, StochasticGradientPush
from workbench.tasks import ByteGPT

SMALL = ByteGPT(layers=2, width=32, heads=4, context=32)


def arrows(figure: Any) -> list[tuple[int, int, int]]:
    """Returns (round, source, receiver) of each arrow of a drawn collective."""
    found = []
    for trace in figure.data:
        if trace.mode == "lines+markers":
            ends = zip(trace.x[::3], trace.y[::3], trace.y[1::3], strict=True)
            found += [(math.floor(x) + 1, source, to) for x, source, to in ends]
    return sorted(found)


def test_a_ring_of_4_has_6_rounds_of_4_messages_to_the_next_rank() -> None:
    figure = draw_collective(Ring(), 4)
    assert arrows(figure) == [(k, r, (r + 1) % 4) for k in range(1, 7) for r in range(4)]
    assert [trace.name for trace in figure.data][:2] == ["added by its receiver", "copied by its receiver"]
    assert [len(trace.x) // 3 for trace in figure.data][:2] == [12, 12]
    assert figure.data[2].text[:4] == ("0", "1", "2", "3"), "in the first round rank i sends part i"
    assert "6 rounds" in figure.layout.title.text and "1.5 times" in figure.layout.title.subtitle.text


@pytest.mark.parametrize(
    ("algorithm", "ranks", "rounds"),
    [(Ring(), 5, 8), (HalvingDoubling(), 8, 6), (HalvingDoubling(), 6, 6), (DoubleTree(pieces=1), 7, 9),
     (DoubleTree(pieces=1), 8, 10), (DoubleTree(pieces=1), 16, 14), (ParameterServer(), 4, 6),
     (ParameterServer(every=True), 4, 6), (Hierarchical(site=4), 8, 8), (TwoLevel(site=4), 8, 6), (Auto(), 4, 6)],
    ids=repr,
)  # fmt: skip
def test_rounds_are_those_of_the_algorithms_docstring(algorithm: Any, ranks: int, rounds: int) -> None:
    found = list_rounds(algorithm, ranks)
    assert len(found) == rounds
    for messages in found:
        assert len({m.source for m in messages}) == len({m.to for m in messages}) == len(messages)
    sent = sum(m.share for messages in found for m in messages)
    assert sent == pytest.approx(2 * (ranks - 1), rel=1e-3), "each algorithm here sends the fewest bytes in total"


@pytest.mark.parametrize("algorithm", [Ring(), ParameterServer(every=True), HalvingDoubling()], ids=repr)
def test_rounds_take_as_long_as_the_algorithm_says(algorithm: Any) -> None:
    fabric, nbytes = Fabric(link=Link(bandwidth=100, latency=5)), 1 << 20
    longest = [max(m.share for m in messages) for messages in list_rounds(algorithm, 8, fabric, nbytes)]
    seconds = sum(0.005 + share * nbytes * 8 / 100e6 for share in longest)
    assert seconds == pytest.approx(algorithm.seconds(fabric, range(8), nbytes), rel=1e-3)


def test_messages_to_another_site_are_drawn_apart() -> None:
    figure = draw_collective(Hierarchical(), 8, Fabric(site=4))
    named = {trace.name: trace for trace in figure.data if trace.name and "another site" in trace.name}
    for trace in named.values():
        assert all(abs(a - b) == 4 for a, b in zip(trace.y[::3], trace.y[1::3], strict=True))
    assert sorted(named) == ["added, to another site", "copied, to another site"]
    assert [shape.y0 for shape in figure.layout.shapes if shape.y0 == shape.y1] == [3.5]


def test_an_algorithm_without_messages_is_refused() -> None:
    with pytest.raises(KnobError, match=r"Native\(\): the backend's algorithm shows no messages; take Ring\(\)"):
        draw_collective(Native(), 4)
    with pytest.raises(KnobError, match="1 to 64 ranks"):
        draw_collective(Ring(), 65)


def bars(figure: Any) -> dict[str, list[tuple[int, float, float]]]:
    return {t.name: list(zip(t.y, t.base, t.x, strict=True)) for t in figure.data}


def test_a_pipeline_of_3_stages_begins_each_pass_when_its_input_is_there() -> None:
    found = bars(draw_schedule(GPipe(), 3, 2))
    assert found["forward"] == [(s, s + m, 1.0) for s in range(3) for m in range(2)]
    assert found["backward"] == [(s, 4 + 2 * (2 - s) + 2 * m, 2.0) for s in range(3) for m in range(2)]


@pytest.mark.parametrize(
    ("schedule", "idle"),
    [(GPipe(), 3 / 11), (OneFOneB(), 3 / 11), (Interleaved(), 3 / 19), (ZeroBubble(), 3 / 27)], ids=repr,
)  # fmt: skip
def test_the_idle_share_is_that_of_the_schedules_docstring(schedule: Any, idle: float) -> None:
    passes = time_passes(schedule, 4, 8)
    end = max(p.end for p in passes)
    assert 1 - sum(p.end - p.begin for p in passes) / 4 / end == pytest.approx(idle)
    assert f"idle: {idle:.0%}".replace("%", " %") in draw_schedule(schedule, 4, 8).layout.title.subtitle.text
    for stage in range(4):
        mine = [p for p in passes if p.stage == stage]
        assert all(a.end <= b.begin for a, b in pairwise(mine))
        assert [p.action for p in mine] == schedule.actions(stage, 4, 8)


def test_steps_follow_each_other_with_and_without_a_flush() -> None:
    flushed = time_passes(OneFOneB(), 2, 2, steps=2)
    first = [p for p in flushed if p.action.micro < 2]
    assert min(p.begin for p in flushed if p.action.micro >= 2) == max(p.end for p in first)
    never = time_passes(PipeDream(), 3, 1, steps=4)
    assert [str(p.action) for p in never if p.stage == 0] == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3".split()
    last = [p for p in never if p.stage == 2]
    assert all(a.end == b.begin for a, b in pairwise(last)), "the last stage never waits"


def test_a_schedule_refuses_numbers_that_it_cannot_order() -> None:
    with pytest.raises(KnobError, match="multiple of the number of stages"):
        draw_schedule(Interleaved(), 4, 6)


def test_a_mesh_has_each_rank_at_its_coordinates() -> None:
    e = Experiment(task=SMALL, ranks=8, batch=8, partition=Pipeline(stages=2, micros=2, of=Tensor(ways=2)))
    (trace,) = draw_mesh(e, along="data").data
    assert trace.hovertext[5] == "rank 5: data 1, stage 0, tensor 1"
    assert [t.partition("<br>")[2] for t in trace.text] == list("ABCDABCD")
    assert trace.y == (0, 0, 1, 1, 0, 0, 1, 1)
    assert [a.text for a in draw_mesh(e).layout.annotations] == ["data 0", "data 1"]
    assert draw_mesh({"data": 2, "tensor": 2}).layout.meta["alt"].endswith("A: ranks 0, 1; B: ranks 2, 3.")
    with pytest.raises(KnobError, match="along='rows'"):
        draw_mesh(e, along="rows")


def test_a_graph_has_the_lines_along_which_ranks_send() -> None:
    ring = draw_graph(Gossip(), 6)
    assert len(ring.layout.annotations) == 6 and {a.arrowhead for a in ring.layout.annotations} == {0}
    assert ring.data[0].hovertext[0] == "rank 0 sends to [1, 5]"
    away = draw_graph(Gossip(graph="exponential"), 8, number=2)
    assert away.data[0].hovertext[7] == "rank 7 sends to [3]"
    one_way = draw_graph(Gossip(graph="exponential"), 8, number=1)
    assert len(one_way.layout.annotations) == 8 and {a.arrowhead for a in one_way.layout.annotations} == {2}
    assert draw_graph({0: [1], 1: []}).data[0].hovertext == ("rank 0 sends to [1]", "rank 1 sends to []")
    with pytest.raises(KnobError, match="no graph of neighbours"):
        draw_graph(LocalSGD())
    with pytest.raises(KnobError, match="power of two"):
        draw_graph(Gossip(graph="hypercube"), 6)


@pytest.mark.parametrize(
    ("strategy", "receivers"),
    [(DABMD(), (1, 3)), (LowPrecisionDecentralized(), (1, 3)), (StochasticGradientPush(), (1,))], ids=repr,
)  # fmt: skip
def test_strategies_with_neighbours_name_their_receivers(strategy: Any, receivers: tuple[int, ...]) -> None:
    assert strategy.receivers(4, 0, 0) == receivers


def test_a_roofline_bends_where_bandwidth_meets_the_peak() -> None:
    figure = draw_roofline({"matmul": (10, 8e9)}, 5e10, {"memory": 1e10, "network": 1e8})
    memory, network, point = figure.data
    assert (memory.x[1], network.x[1]) == (5.0, 500.0) and memory.y[1:] == (5e10, 5e10)
    assert memory.y[0] == pytest.approx(1e10 * memory.x[0])
    assert (point.x, point.y, point.text) == ((10,), (8e9,), ("matmul",))
    assert "50 GFLOP/s" in figure.layout.title.subtitle.text


def test_memory_is_stacked_by_category() -> None:
    figure = draw_memory({"DDP": {"parameters": 4e6, "gradients": 4e6}, "ZeRO-3": {"parameters": 1e6}}, limit_mb=6)
    assert {t.name: t.x for t in figure.data} == {"parameters": (4e6, 1e6), "gradients": (4e6, 0)}
    assert figure.layout.shapes[0].x0 == 6e6 and figure.layout.barmode == "stack"
    assert len({(t.marker.color, t.marker.pattern.shape) for t in figure.data}) == 2
    with pytest.raises(KnobError, match="or a run that records memory"):
        draw_memory({"DDP": 3})


def test_memory_of_a_run_is_that_of_its_fullest_rank() -> None:
    run = simulate(recipe("first_run").set("steps", 3).set("pace", 100))
    most = max(measure_memory(run.timeline), key=lambda one: one.peak).most
    assert {t.name: t.x[0] for t in draw_memory({"DDP": run}).data} == most


def test_curves_keep_their_values_and_take_logarithmic_axes() -> None:
    figure = draw_lines(
        {"Ring": ([1, 100], [2, 3]), "tree": ([1, 100], [1, 9])}, "size (bytes)", "time (ms)", "Cost", "x"
    )
    assert [(t.name, t.x, t.y) for t in figure.data] == [("Ring", (1, 100), (2, 3)), ("tree", (1, 100), (1, 9))]
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", None)
    assert len({(t.line.dash, t.marker.symbol) for t in figure.data}) == 2
    with pytest.raises(KnobError, match="log='z'"):
        draw_lines({}, "x", "y", "none", log="z")


FIGURES = {
    "collective": draw_collective(Ring(), 4), "schedule": draw_schedule(OneFOneB()), "mesh": draw_mesh({"data": 4}),
    "graph": draw_graph(Gossip(), 4), "roofline": draw_roofline({}, 1e9, {"memory": 1e9}),
    "memory": draw_memory({"DDP": {"parameters": 1e6}}), "lines": draw_lines({"a": ([1], [2])}, "x", "y", "Curve"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_a_title_a_description_and_text_of_14_px(name: str) -> None:
    layout = FIGURES[name].layout
    assert layout.title.text and len(layout.meta["alt"]) > 20
    assert layout.font.size >= 14 and layout.paper_bgcolor == "#ffffff" and layout.font.color == "#1a1a1a"
    assert layout.height < 700 and "nan" not in str(FIGURES[name])
    named = [layout.xaxis.title.text, layout.yaxis.title.text]
    assert any(named) or name in ("graph", "memory"), "an axis with a unit"


def test_ticks_of_a_short_logarithmic_axis_show_whole_numbers() -> None:
    figure = draw_lines({"ring": ([2, 4, 8, 16, 32], [3.0, 5.0, 9.0, 17.0, 40.0])}, "ranks", "ms", "a ring", log="x")
    axis = figure.layout.xaxis
    assert {2, 5, 10, 20} <= set(axis.tickvals) and axis.tickformat == "~s"
    wide = draw_lines({"ring": ([1, 1000], [1.0, 2.0])}, "ranks", "ms", "a ring", log="x")
    assert wide.layout.xaxis.dtick == 1
