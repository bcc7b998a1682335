"""Tests the campaign over strategies: resumed cells, ratios, and statements of the page."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench import cells, claims, source, strategies, strategies_page, words
from tests.bench.cells import FABRICS, SEEDS, STEPS, Cell, fabric, keep, kept, key, reached, read
from tests.bench.methods import FAST, LINK, METHODS, SLOW, STUMBLE, Method
from workbench import simulate
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link, Slow
from workbench.sim import AlphaBeta, Costs, Duration
from workbench.strategies import DDP, LocalSGD
from workbench.tasks import Digits

pytestmark = pytest.mark.ranks
WIRE = AlphaBeta(1e-4, 1e-9)
COSTS = Costs(forward=(Duration(0.004, 0.1), Duration(0.005, 0.1)), backward=0.008, update=0.002, wire=WIRE)
TINY = Digits(width=4, hidden=16)


def tiny(**rest: Any) -> Cell:
    given = {"part": "table", "row": "LocalSGD(every=2)", "method": "LocalSGD", "knobs": {"every": 2}}
    given |= {"where": FAST, "seed": 0}
    return Cell(**{**given, "task": TINY, "steps": 6, "every": 3, **rest})


def test_a_cell_is_kept_and_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = tiny()
    assert kept(cell, COSTS, tmp_path) is None
    keep(cell, COSTS, cells.measured(cell, COSTS), tmp_path)
    before = (tmp_path / cell.path).read_text()
    held = kept(cell, COSTS, tmp_path)
    assert held is not None and held["found"]["curve"][-1][0] == 6
    assert strategies.campaign([cell], COSTS, time.time() + 60, tmp_path) == 0
    assert (tmp_path / cell.path).read_text() == before and not capsys.readouterr().out
    assert not list(tmp_path.glob("*.new"))


def test_a_cell_runs_again_if_anything_relevant_changes() -> None:
    cell, same = tiny(), tiny()
    assert key(cell, COSTS) == key(same, COSTS)
    others = [
        tiny(knobs={"every": 3}), tiny(steps=7), tiny(seed=1), tiny(rate=2.0), tiny(after=2), tiny(task=Digits()),
        tiny(fabric=fabric(LINK, 0)), tiny(method="DDP", knobs={}),
    ]  # fmt: skip
    keys = [key(cell, COSTS), key(cell, replace(COSTS, update=0.003)), *(key(other, COSTS) for other in others)]
    assert len(set(keys)) == len(keys)


def test_a_strategys_code_matters_but_its_prose_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    text = source.inspect.getsource(source.sys.modules["workbench.strategies.local_sgd"])
    hashes = []
    for changed in (
        text,
        text.replace('"""Local SGD:', '"""Said otherwise:'),
        text.replace("    every: int", '    kind: ClassVar[str] = "periodic"\n    every: int'),
        text.replace("from workbench.rank import", "from workbench.elsewhere import"),
        text.replace('doc="H: steps', 'doc="every so many steps'),
        text.replace("since += 1", "since += 2"),
    ):
        source.code.cache_clear()
        monkeypatch.setattr(source.inspect, "getsource", lambda _, changed=changed: changed)
        hashes.append(source.code(LocalSGD))
    source.code.cache_clear()
    assert len(set(hashes[:-1])) == 1 and hashes[-1] != hashes[0]
    assert 'doc="H: steps' in text


def test_a_campaign_out_of_time_starts_no_cell_and_reports_the_rest(tmp_path: Path) -> None:
    assert strategies.campaign([tiny(), tiny(seed=1)], COSTS, time.time() - 1, tmp_path) == 2
    assert not list(tmp_path.iterdir())


def test_the_numbers_of_a_cell_come_from_its_run() -> None:
    link = Fabric(link=Link(bandwidth=100.0))
    e = Experiment(task=TINY, strategy=LocalSGD(every=3), steps=6, eval_every=3, fabric=link)
    run = simulate(e, costs=Costs(forward=0.01, backward=0.02, update=0.01), real=True)
    f, p = read(run), 4
    dense = 2 * (p - 1) * f["model"] // p
    assert (
        f["bytes"] == pytest.approx(dense / 3) == f["busiest"]
        and f["largest"] == dense
        and f["synced"] == pytest.approx(1 / 3)
    )
    wire = dense * 8e-6 / 100
    assert f["samples_per_s"] == pytest.approx(4 * 6 * 32 / (6 * 0.04 + 2 * wire), rel=1e-4)
    assert f["compute"] == pytest.approx([0.01, 0.02, 0.01])
    assert [s for s, _, _ in f["curve"]] == [0, 3, 6] and f["curve"][1][1] == pytest.approx(0.12 + wire, rel=1e-4)
    assert 0 <= f["accuracy"] <= 1


def test_after_a_common_state_only_later_steps_count() -> None:
    cell = tiny(after=4, steps=8, every=8, rate=0.5)
    experiment, changes = cell.asked()
    assert experiment.strategy == DDP() and experiment.lr == TINY.lr
    assert {c.path: c.value for c in changes} == {"lr": TINY.lr / 2, "strategy": LocalSGD(every=2)}
    f = read(simulate(experiment, changes=changes, costs=COSTS, real=True), cell.after)
    assert f["synced"] == 0.5 and f["bytes"] == pytest.approx(0.5 * f["largest"])


def test_costs_survive_json() -> None:
    assert cells.costs_from_plain(json.loads(json.dumps(cells.costs_as_plain(COSTS)))) == COSTS


def test_the_time_to_a_loss_lies_between_two_evaluations() -> None:
    curve = [[0, 0.0, 4.0], [20, 2.0, 3.0], [40, 3.0, 3.5], [60, 5.0, 2.0]]
    assert reached(curve, 3.5) == 1.0 and reached(curve, 3.0) == 2.0 and reached(curve, 2.75) == pytest.approx(4.0)
    assert reached(curve, 1.0) is None


def test_there_are_four_fabrics() -> None:
    fast = Link(bandwidth=10_000.0, latency=0.05)
    assert fabric(FAST, 0) == Fabric(link=fast) and fabric(LINK, 0).link == Link(bandwidth=100.0, latency=5.0)
    assert fabric(SLOW, 0).link == fabric(STUMBLE, 0).link == fast
    (slow,) = fabric(SLOW, 0).faults
    assert isinstance(slow, Slow) and slow.factor == 2.0
    (stumble,) = fabric(STUMBLE, 2).faults
    assert (stumble.probability, stumble.factor, stumble.rank, stumble.seed) == (0.1, 5.0, -1, 2)


def test_a_plan_names_missing_methods_and_omits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    later = (Method(name="NotYetSGD", see="Nothing."), Method(name="LocalSGD", see="Wrong.", knobs=({"pace": 2},)))
    monkeypatch.setattr(claims, "methods", lambda: later)
    monkeypatch.setattr("tests.bench.methods.METHODS", (*later, *METHODS))
    planned, lacking = strategies.planned(["table"])
    assert {cell.row for cell in planned} == {"DDP"} and len(planned) == len(FABRICS) * len(SEEDS)
    assert "skipped NotYetSGD: there is no such strategy yet" in lacking
    assert any("LocalSGD(pace=2)" in line and "correct its entry" in line for line in lacking)


def test_every_cell_has_a_separate_file() -> None:
    planned, _ = strategies.planned()
    assert len({cell.path for cell in planned}) == len(planned) > 100
    assert {cell.part for cell in planned} >= {"table", "outer", "selsync", "gossip"}


# -- the page, from made-up cells --


def made_up(folder: Path, row: str, where: str, seed: int = 0, part: str = "table", **found: Any) -> None:
    """A cell that reaches 3.0 after STEPS / 2 steps and 2.5 at the end, at 100 steps a second."""
    curve = [[0, 0.0, 5.0], [STEPS // 2, 1.5, 3.0], [STEPS, 3.0, 2.5]]
    sent = {"bytes": 1e6, "busiest": 1e6, "largest": 1_000_000, "synced": 1.0, "model": 600_000}
    values = {"samples_per_s": 800.0, **sent, "compute": [0.003, 0.006, 0.001], "curve": curve, **found}
    about = {"part": part, "row": row, "where": where, "seed": seed, "method": row.split("(")[0], "key": ""}
    about |= {"commit": "abc1234", "date": "2026-11-21"}
    name = "".join(c if c.isalnum() else "-" for c in f"{part} {row} {where} {seed}")
    (folder / f"{name}.json").write_text(json.dumps({**about, "found": values}))


def test_times_end_at_an_evaluated_loss(tmp_path: Path) -> None:
    """Evaluations need not include the middle step."""
    middle = STEPS // 2
    for seed in SEEDS:
        curve = [[0, 0.0, 5.0], [middle - 10, 1.4, 3.2], [middle + 10, 1.6, 3.0 + seed], [STEPS, 3.0, 2.5]]
        made_up(tmp_path, "DDP", FAST, seed, curve=curve)
    assert claims.target(cells.Results.of(tmp_path)) == 4.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for where in FABRICS:
        for seed in SEEDS:
            made_up(tmp_path, "DDP", where, seed)
            quick = [[0, 0.0, 5.0], [STEPS // 2, 0.5, 3.0], [STEPS, 1.0, 2.55]]
            made_up(
                tmp_path,
                "LocalSGD(every=4)",
                where,
                seed,
                samples_per_s=2400.0,
                bytes=2.5e5,
                busiest=2.5e5,
                curve=quick,
            )
    return tmp_path


def row(page: str, heading: str, name: str) -> list[str]:
    """Returns the cells of a table's row under a heading."""
    section = page.split(f"## {heading}", 1)[1].split("\n## ", 1)[0]
    line = next(line for line in section.splitlines() if line.startswith(f"| {name}") or line.startswith(f"| [{name}]"))
    return [x.strip() for x in line.strip("|").split("|")]


def test_a_page_holds_ratios_to_ddp_of_the_same_fabric(folder: Path) -> None:
    page = strategies_page.text(folder)
    found = row(page, "100 Mbit/s, 5 ms", "LocalSGD(every=4)")
    assert found[1:] == ["3.00 (3.00 to 3.00)", "0.250", "3.00 (3.00 to 3.00)", "2.550 ± 0.000", "+2.0%"]
    assert row(page, "Fast", "DDP")[1:4] == ["1.00 (1.00 to 1.00)", "1.000", "1.00 (1.00 to 1.00)"]
    assert "The target loss is 3:" in page and "commit abc1234" in page


def test_a_page_lists_missing_and_refused_rows(folder: Path) -> None:
    made_up(folder, "ShadowMA", FAST)
    about = {"part": "table", "row": "Gossip(graph=ring)", "where": FAST, "seed": 0, "method": "Gossip", "key": ""}
    (folder / "refused.json").write_text(json.dumps({**about, "found": {"refused": "4 ranks make no circle"}}))
    page = strategies_page.text(folder)
    assert "Gossip(graph=ring): 4 ranks make no circle." in page
    assert "Not measured yet:" in page and "LocalSGD(every=20)" in page.split("Not measured yet:")[1]
    assert row(page, "Fast", "ShadowMA")[1] == "1.00 (1.00 to 1.00)"


def test_methods_with_ddps_steps_are_not_listed_as_missing(folder: Path) -> None:
    section = strategies_page.text(folder).split("## Fast network\n", 1)[1].split("\n## ", 1)[0]
    lacking = next(line for line in section.splitlines() if line.startswith("Not measured yet:"))
    assert "ZeRO1" not in lacking and "SelSync" in lacking
    assert "because each step equals DDP's: " in section and "ZeRO1" in section


def test_a_loss_that_was_never_reached_is_reported(folder: Path) -> None:
    never = [[0, 0.0, 5.0], [STEPS, 1.0, 3.5]]
    for seed in SEEDS:
        made_up(folder, "ShadowMA", SLOW, seed, curve=never)
    page = strategies_page.text(folder)
    assert row(page, "One rank 2x slow", "ShadowMA")[3] == f"not reached in {STEPS} steps"


def test_a_claim_without_evidence_has_a_reason(folder: Path) -> None:
    for where in FABRICS:
        for seed in SEEDS:
            made_up(folder, "LowPrecisionDecentralized", where, seed)
    said = row(strategies_page.text(folder), "Papers' claims, untuned", "LowPrecisionDecentralized")
    assert (
        "Times DDP's samples/s, at 100 Mbit/s, 5 ms: 1.00 with +0.0% loss. The claim does NOT show. Latency" in said[2]
    )
    said = row(strategies_page.text(folder), "Papers' claims, untuned", "LocalSGD")
    assert "LocalSGD(every=4): at best 3.00 times DDP's speed to the target loss" in said[2]
    assert "3.00 with +2.0% loss. The claim shows." in said[2]
    assert "LocalSGD(every=20): not in these tables; tuned, above" in said[2]
    assert "KFAC: not measured yet" in row(strategies_page.text(folder), "Papers' claims, untuned", "KFAC")[2]


def test_numbers_outside_a_papers_claim_do_not_confirm_it(folder: Path) -> None:
    for seed in SEEDS:
        quick = {"samples_per_s": 8000.0, "bytes": 9e4, "curve": [[0, 0.0, 5.0], [STEPS, 1.0, 2.8]]}
        made_up(folder, "ShadowMA", LINK, seed, **quick)
        made_up(folder, "LocalSGD(every=20)", LINK, seed, bytes=5e4)
        made_up(folder, "EASGD(every=4)", LINK, seed, samples_per_s=8000.0)
    page = strategies_page.text(folder)
    said = row(page, "Papers' claims, untuned", "ShadowMA")[2]
    assert "10.00 with +12.0% loss; ShadowMA ends at loss 2.800 with 9% of the bytes; LocalSGD(every=20)" in said
    assert (
        "LocalSGD(every=20) ends at loss 2.500 with 5% of the bytes. The paper's claim is how throughput grows" in said
    )
    easgd = row(page, "Papers' claims, untuned", "EASGD")
    assert "Zhang et al., 2015" in easgd[1] and easgd[2].endswith("10.00 with +0.0% loss.")
    assert not any("show" in words.replace("shows up", "") for words in (said, easgd[2]))


def test_rows_with_another_rate_are_marked_everywhere(folder: Path) -> None:
    for where in FABRICS:
        made_up(folder, "Hogwild", where)
        made_up(folder, "BoundedStaleness(bound=3)", where)
    page = strategies_page.text(folder)
    for name in ("Hogwild", "BoundedStaleness(bound=3)"):
        assert row(page, "Fast", name)[0].endswith(", at 0.25 times the learning rate")
        said = row(page, "Papers' claims, untuned", name.partition("(")[0])[2]
        assert said.startswith(f"{name}, at 0.25 times the learning rate: ")
    assert row(page, "Stragglers", "BoundedStaleness(bound=3)")[0].endswith("at 0.25 times the learning rate")
    assert "at 0.25" not in row(page, "Fast", "LocalSGD(every=4)")[0]


def test_shared_memory_is_not_compared_on_a_slow_network(folder: Path) -> None:
    early = [[0, 0.0, 5.0], [STEPS // 2, 0.1, 3.0], [STEPS, 0.2, 2.5]]
    late = [[0, 0.0, 5.0], [STEPS // 2, 1.0, 3.0], [STEPS, 2.0, 2.5]]
    for where in FABRICS:
        for seed in SEEDS:
            made_up(folder, "Hogwild", where, seed, curve=early if where == LINK else late)
    page = strategies_page.text(folder)
    assert row(page, "100 Mbit/s, 5 ms", "Hogwild")[1:4] == [strategies_page.NOT_COMPARABLE] * 3
    assert "at best 1.50 times DDP's speed to the target loss" in row(page, "Papers' claims, untuned", "Hogwild")[2]
    assert row(page, "Fast", "Hogwild")[3] == "1.50 (1.50 to 1.50)"


def test_a_seed_that_missed_the_loss_counts_as_slower(folder: Path) -> None:
    never = [[0, 0.0, 5.0], [STEPS, 1.0, 3.5]]
    early = [[0, 0.0, 5.0], [STEPS // 2, 1.0, 3.0], [STEPS, 2.0, 2.5]]
    for seed in SEEDS:
        made_up(folder, "ShadowMA", SLOW, seed, curve=never if seed == 0 else early)
        made_up(folder, "ShadowMA", STUMBLE, seed, curve=early if seed == 0 else never)
    page = strategies_page.text(folder)
    assert row(page, "One rank 2x slow", "ShadowMA")[3] == "1.50 (never to 1.50)"
    assert row(page, "Random 5x slowdowns", "ShadowMA")[3] == f"not reached in {STEPS} steps by 2 of 3 seeds"
    assert claims.speed([0.0, 1.0, 3.0]) == "1.00 (never to 3.00)", "the median of all three, not of two"


def test_missing_seeds_are_reported(folder: Path) -> None:
    made_up(folder, "ShadowMA", FAST)
    assert row(strategies_page.text(folder), "Fast", "ShadowMA")[4] == "2.500 (1 of 3 seeds)"
    assert words.spread([1.0, 2.0, 3.0]) == "2.000 ± 1.000"


def test_outer_momentum_is_compared_with_the_same_rounds_without_it(folder: Path) -> None:
    for seed in SEEDS:
        for rate, worse in ((1.0, 0.2), (2.0, 0.0), (4.0, 0.1)):
            where = f"rate {rate:g}"
            made_up(folder, "DDP", where, seed, "outer", curve=[[0, 0, 5.0], [9, 1, 2.0 + worse]])
            made_up(folder, "SlowMo(every=25)", where, seed, "outer", curve=[[0, 0, 5.0], [9, 1, 2.1 + worse]])
            made_up(folder, "LocalSGD(every=25)", where, seed, "outer", curve=[[0, 0, 5.0], [9, 1, 2.31 + worse]])
        made_up(folder, "SlowMo(every=12)", LINK, seed)
    page = strategies_page.text(folder)
    said = row(page, "Papers' claims, untuned", "SlowMo")[2]
    assert "LocalSGD's loss / loss of SlowMo(every=25), from a common state: 1.10. The claim shows." in said
    assert row(page, "Outer momentum from a common state", "LocalSGD(every=25)")[1:4] == [
        "0.006",
        "2.310 ± 0.000",
        "+15.5%",
    ]


def test_rows_from_a_common_state_use_their_best_rate_and_mark_shortfalls(folder: Path) -> None:
    for seed in SEEDS:
        for rate, loss in ((0.5, 2.4), (1.0, 2.0), (2.0, 2.2)):
            where, far = f"rate {rate:g}", [[0, 0, 5.0], [9, 1, loss + 0.1]]
            made_up(folder, "DDP", where, seed, "outer", curve=[[0, 0, 5.0], [9, 1, loss]])
            near = [[0, 0, 5.0], [9, 1, loss + 0.02]]
            made_up(folder, "DiLoCo(every=25)", where, seed, "outer", bytes=3e4, curve=near)
            made_up(folder, "SlowMo(every=25)", where, seed, "outer", bytes=6e4, curve=far)
            streaming = "StreamingDiLoCo(every=25, fragments=4)"
            made_up(folder, streaming, where, seed, "outer", bytes=4e3, largest=250_000)
    page = strategies_page.text(folder)
    assert row(page, "Outer momentum from a common state", "DiLoCo(every=25)")[1:5] == [
        "0.003",
        "2.020 ± 0.000",
        "+1.0%",
        "3.0%",
    ]
    assert "DiLoCo(every=25): +1.0% loss (goal: at most +2 %) with 3.0% of the bytes (goal: under 5 %)" in page
    assert (
        "SlowMo(every=25): +5.0% loss (goal: at most +2 %: NOT kept) with 6.0% of the bytes (goal: under 5 %: NOT kept)"
        in page
    )
    assert "are 0.25 of DiLoCo's (goal: under a third)" in page


def test_slow_ranks_selsync_and_gossip_are_judged_by_their_goals(folder: Path) -> None:
    late = [[0, 0.0, 5.0], [STEPS // 2, 1.48, 3.0], [STEPS, 3.0, 2.5]]
    early = [[0, 0.0, 5.0], [STEPS // 2, 1.0, 3.0], [STEPS, 2.0, 2.5]]
    for seed in SEEDS:
        made_up(folder, "AsyncServer", SLOW, seed, curve=early)
        made_up(folder, "BoundedStaleness(bound=3)", SLOW, seed, curve=late)
        made_up(folder, "BoundedStaleness(bound=3)", STUMBLE, seed, curve=late)
        made_up(folder, "DDP", "Digits", seed, "selsync", accuracy=0.97)
        made_up(folder, "SelSync(delta=0.3)", "Digits", seed, "selsync", accuracy=0.965, synced=0.4)
        made_up(folder, "SelSync(delta=1.0)", "Digits", seed, "selsync", accuracy=0.93, synced=0.2)
    for mbit, ms in claims.WIRES:
        for name in ("DDP", claims.RING, claims.EXPONENTIAL):
            pace = 1.0 / claims.modelled(name, mbit, ms, {"compute": [0.003, 0.006, 0.001], "model": 600_000})
            made_up(folder, name, f"{mbit:g} Mbit/s, {ms:g} ms", 0, "gossip", samples_per_s=pace)
    page = strategies_page.text(folder)
    slow = "Stragglers"
    assert row(page, slow, "AsyncServer")[2:4] == ["1.50 (1.50 to 1.50)", "faster"]
    lines = [line for line in page.split(slow)[1].splitlines() if "BoundedStaleness(bound=3)" in line]
    assert "faster: NOT kept" in lines[0] and "| no faster |" in lines[1]
    assert "Not measured yet: BackupWorkers" in page
    goal = "Goal: at most half of DDP's synchronisations, at most one point of accuracy lost."
    assert f"{goal} Kept by: SelSync(delta=0.3)." in page
    assert "The model names the wrong winner in these of 18 comparisons: none." in page
    ring = row(page, "Gossip: latency or bandwidth", "10 Mbit/s, 0 ms")
    assert float(ring[1]) < 1 and row(page, "Gossip: latency or bandwidth", "1000 Mbit/s, 20 ms")[1] > "1"


def test_real_ranks_are_compared_with_their_simulation(folder: Path) -> None:
    for name, took in (("TorchDDP", 0.2), ("LocalSGD(every=4)", 0.12)):
        about = {"part": "real", "row": name, "where": "paced", "seed": 0, "method": name, "key": ""}
        values = {"step_s": took, "simulated_s": 0.1, "pace": 100.0, "steps": 24, "link": LINK}
        (folder / f"real-{name}.json").write_text(json.dumps({**about, "found": values}))
    page = strategies_page.text(folder)
    assert row(page, "Real ranks against the simulator", "LocalSGD(every=4)") == [
        "LocalSGD(every=4)",
        "120 ms",
        "100 ms",
        "1.200",
        "1.67",
    ]
    assert "More than 10 % from the simulated step: TorchDDP (2.00), LocalSGD(every=4) (1.20)." in page


def test_the_page_begins_with_the_fastest_strategy_on_each_network(folder: Path) -> None:
    for seed in SEEDS:
        made_up(folder, "LocalSGD(every=4)", FAST, seed)
    head = strategies_page.text(folder).split("\n## ", 1)[0]
    assert "On the fast network, no strategy is clearly faster than DDP to the target loss." in head
    assert "At 100 Mbit/s, 5 ms, LocalSGD(every=4) is the fastest: 3.00 times DDP's speed to the target loss." in head
    assert "Machine: not recorded. No GPU was used." in head and len(head.strip().splitlines()) == 6


def test_a_page_without_data_reports_that_everywhere(tmp_path: Path) -> None:
    page = strategies_page.text(tmp_path)
    assert page.count("Not measured yet") >= len(FABRICS) + len(claims.PARTS)
    assert not np.any(["nan" in line.split() for line in page.splitlines()])
