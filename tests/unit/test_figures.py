"""Tests the strategies' figures: well-formed, repeatable, with bars equal to the simulated spans."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench import figures
from tests.bench.methods import METHODS, SLOW_RANK, Method, found, method, methods
from tests.bench.svg import fitting, ticks, wrapped
from workbench.run import Run
from workbench.strategies import DDP

SVG = "{http://www.w3.org/2000/svg}"
Cover = dict[tuple[int, str], list[tuple[float, float]]]


def drawn(page: str) -> list[Cover]:
    """Returns each panel's time stretches (ms) under bars, by rank and kind."""
    panels: list[Cover] = []
    for group in ElementTree.fromstring(page).iter(f"{SVG}g"):
        scale = float(group.get("data-window", "")) / (figures.WIDTH - figures.RIGHT - figures.LEFT)
        panels.append(defaultdict(list))
        for rect in group.iter(f"{SVG}rect"):
            x, wide = float(rect.get("x", "")) - figures.LEFT, float(rect.get("width", ""))
            panels[-1][int(rect.get("data-rank", "")), rect.get("class", "")].append((x * scale, (x + wide) * scale))
    return panels


def joined(stretches: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the union of time stretches."""
    out: list[tuple[float, float]] = []
    for begin, end in sorted(stretches):
        if out and begin <= out[-1][1] + 0.02:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return [s for s in out if s[1] - s[0] > 0.02]


def simulated(run: Run, window: float) -> Cover:
    """Returns the same from a run's spans: a rank in a collective sends while its port is busy, and waits before."""
    spans = run.timeline.spans.rows()
    steps = spans[spans.equal("lane", "step") & (spans.step == figures.FIRST)]
    begin = float(steps.t0[steps.rank == min(steps.rank)][0])
    out: Cover = defaultdict(list)
    for rank, lane, name, t0, t1 in zip(spans.rank, spans.lane, spans.name, spans.t0, spans.t1, strict=True):
        kind = {"compute": name, "wait": "exposed", "port": "transfer"}.get(lane)
        kind = "transfer" if name.startswith("send ") else kind
        if kind:
            out[int(rank), kind].append((t0, t1))
        elif lane == "comm":
            out[int(rank), "collective"].append((t0, t1))
    cut = {
        key: joined([(max(0.0, (a - begin) * 1e3), min(window, (b - begin) * 1e3)) for a, b in each if b > begin])
        for key, each in out.items()
    }
    return {key: each for key, each in cut.items() if each}


@pytest.mark.parametrize("name", ["LocalSGD", "Gossip"])
def test_bars_are_the_simulated_spans(name: str) -> None:
    one = method(name)
    page = figures.figure(one)
    for cover, strategy in zip(drawn(page), (DDP(), one.strategy(one.shown)), strict=True):
        expected = simulated(figures.simulated(strategy, one), one.window)
        collectives = {rank: each for (rank, kind), each in expected.items() if kind == "collective"}
        found = {key: joined(each) for key, each in cover.items()}
        for rank, each in collectives.items():
            both = joined(found.get((rank, "waiting"), []) + found[rank, "transfer"])
            assert [x for s in both for x in s] == pytest.approx([x for s in each for x in s], abs=0.02)
        for key, each in expected.items():
            if key[1] != "collective":
                assert [x for s in found.pop(key) for x in s] == pytest.approx(
                    [x for s in each for x in s], abs=0.02
                ), key
        assert {kind for _, kind in found} <= {"waiting"}


def test_a_slow_rank_makes_other_ranks_wait_before_they_send() -> None:
    ddp, _ = drawn(figures.figure(method("AsyncServer")))
    waits = {rank for rank, kind in ddp if kind == "waiting"}
    assert waits == {0, 1, 3}
    assert all(end - begin > 5 for rank in waits for begin, end in joined(ddp[rank, "waiting"])[:1])


def test_a_figure_is_repeatable_self_contained_and_readable() -> None:
    one = method("ShadowMA")
    page = figures.figure(one)
    assert page == figures.figure(one)
    assert not re.search(r"href|src=|<script|<image|@import", page)
    root = ElementTree.fromstring(page)
    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert (
        title is not None and title.text == "ShadowMA compared with DDP" and desc is not None and desc.text == one.see
    )
    assert "prefers-color-scheme: dark" in page
    sizes = [float(x) for x in re.findall(r'font-size[:="]+([\d.]+)', page)]
    assert sizes and min(sizes) >= 14
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x", "")) <= width and 0 < float(text.get("y", "")) < height


def test_no_colour_is_the_only_sign_of_waiting() -> None:
    assert "fill:url(#stripes)" in figures.STYLE and "fill:url(#teeth)" in figures.STYLE
    assert all(f'id="{name}"' in figures.HATCHES for name in ("stripes", "teeth"))


@pytest.mark.parametrize("one", [m for m in METHODS if found(m.name)], ids=lambda m: m.name)
def test_every_entry_has_only_knobs_of_its_strategy(one: Method) -> None:
    for knobs in (*one.knobs, one.shown):
        strategy = one.strategy(knobs)
        assert all(getattr(strategy, k) == v for k, v in knobs.items())
    assert len(one.see) > 40 and one.see.endswith(".") and one.paper.endswith(".")


def test_entries_are_unique_and_name_existing_ranks() -> None:
    names = [m.name for m in methods()]
    assert len(set(names)) == len(names) and names[0] == "DDP"
    assert all(getattr(f, "rank", 0) < figures.RANKS for m in METHODS for f in m.faults)
    assert 0 < SLOW_RANK < figures.RANKS - 1


def test_missing_strategies_are_reported_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later = Method(name="NotYetSGD", see="Nothing to see.")
    monkeypatch.setattr(figures, "methods", lambda: (later, method("LocalSGD")))
    written = figures.write(tmp_path)
    assert [p.name for p in written] == ["LocalSGD.svg"]
    assert "no figure of NotYetSGD: there is no such strategy yet" in capsys.readouterr().out


def test_a_strategy_without_an_entry_is_drawn_with_its_usual_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tuple(m for m in METHODS if m.name != "ShadowMA")
    monkeypatch.setattr("tests.bench.methods.METHODS", listed)
    added = [m for m in methods() if m not in listed]
    assert "ShadowMA" in {m.name for m in added} and not {"TorchDDP", "DDP"} & {m.name for m in added}
    assert all(m.strategy(m.shown) == found(m.name).usual() and m.see for m in added)  # type: ignore[union-attr]


def test_a_panel_shows_batches_and_bytes() -> None:
    words = re.findall(r"([\d.]+) batches/s, ([\d.]+) MB sent per batch", figures.figure(method("DDP")))
    (plain, whole), (accumulated, part) = [(float(a), float(b)) for a, b in words]
    assert plain == pytest.approx(4 / 46.5e-3, abs=0.6) and whole == 1.5
    step = 4 * 27e-3 + 3e-3 + (9 + 4.5 + 30 - 27) * 1e-3  # out 30 ms after the first bucket is full
    assert accumulated == pytest.approx(16 / step, abs=0.6) and part == pytest.approx(1.5 / 4, abs=0.01)


def test_texts_are_fitted_and_ticks_are_round() -> None:
    assert fitting(("forward", "F"), 100) == "forward" and fitting(("forward", "F"), 20) == "F"
    assert fitting(("forward", "F"), 5) == ""
    assert ticks(300, 10) == [0, 50, 100, 150, 200, 250, 300] and ticks(120, 10)[1] == 20
    assert wrapped("a bb ccc", 40) == ["a bb", "ccc"]
