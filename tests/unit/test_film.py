"""Tests the data for replaying a recorded run, and the panel that exports and compares it."""

from __future__ import annotations

from pathlib import Path

from tests.unit import synthetic
from widgets.charts.feed import Feed
from widgets.charts.film import MAX_POINTS, make_film
from widgets.page.dashboard import Dashboard
from widgets.views.timeline import Timeline
from workbench.experiment import Experiment
from workbench.run import Run, simulate
from workbench.settings import Change
from workbench.strategies import LocalSGD


def test_a_film_has_the_ends_of_steps_and_the_times_of_settings() -> None:
    changes = [Change(30, "strategy", LocalSGD(every=8)), Change(60, "strategy.every", 4), Change(60, "lr", 0.1)]
    changes += [Change(60, "fabric.link.bandwidth", 100.0)]
    run = simulate(Experiment(ranks=2, steps=90, pace=10.0, eval_every=0), changes=changes)
    found = make_film(run)
    assert found is not None
    assert [step for _, step in found["steps"]] == list(range(90))
    ends, told = [t for t, _ in found["steps"]], found["settings"]
    assert ends == sorted(ends) and found["begin"] < ends[0]
    assert [step for _, step, _ in told] == [0, 30, 60]
    assert all(ends[step - 1] <= t <= ends[step] for t, step, _ in told[1:]), "a change acts before its step"
    first, then, last = ({name: (words, since) for name, words, since in settings} for *_, settings in told)
    assert first["strategy"] == ("DDP(accumulate=1)", None)
    assert then["strategy"] == ("LocalSGD(every=8, momentum=keep)", 30)
    assert last["strategy"] == ("LocalSGD(every=4, momentum=keep)", 60)
    assert last["lr"] == ("0.1", 60) and last["batch"][1] is None
    assert last["link.bandwidth"] == ("100.0", 60) and not {"fabric", "link.latency", "faults"} & set(last)


def test_a_setting_without_a_change_appears_once() -> None:
    changes = [Change(30, "strategy", LocalSGD(every=8)), Change(40, "strategy", LocalSGD(every=8)),
               Change(50, "strategy.every", 8), Change(60, "every", 4)]  # fmt: skip
    found = make_film(simulate(Experiment(ranks=2, steps=90, pace=10.0, eval_every=0), changes=changes))
    assert found is not None
    for *_, settings in found["settings"]:
        names = [name for name, *_ in settings]
        assert len(names) == len(set(names)) and not {"every", "strategy.every"} & set(names)
    told = {name: (words, since) for name, words, since in found["settings"][-1][2]}
    assert told["strategy"] == ("LocalSGD(every=4, momentum=keep)", 60)


def test_only_full_boards_of_ended_runs_have_a_film() -> None:
    run = synthetic.run(steps=3 * MAX_POINTS // 2, ranks=1)
    found = Feed(run).make_opening()[0]["film"]
    assert len(found["steps"]) == MAX_POINTS and found["steps"][-1][1] == 3 * MAX_POINTS // 2 - 1
    assert Feed(run, (Timeline,)).make_opening()[0]["film"] is None
    run.secret = "a riddle"
    assert Feed(run).make_opening()[0]["film"] is None, "settings would tell"
    run.secret, run.live = "", True
    assert Feed(run).make_opening()[0]["film"] is None
    assert make_film(Run({"ranks": 2})) is None


def test_the_panel_exports_and_compares_runs(tmp_path: Path) -> None:
    run, kept = synthetic.run(steps=60), synthetic.run(steps=60, seed=3)
    board = Dashboard(run)
    panel = board.files

    def press(button: object) -> str:
        button.click()  # type: ignore[attr-defined]
        assert panel.working is not None
        panel.working.join(60)
        return str(panel.said.value)

    panel.form.value, panel.out.value = "csv", str(tmp_path / "tables")
    assert press(panel.export) == f"<p>Wrote {tmp_path / 'tables'}.</p>"
    assert (tmp_path / "tables" / "spans.csv").exists()
    panel.other.value = str(tmp_path / "none")
    assert "there is no such run directory" in press(panel.compare) and run.beside is None
    panel.other.value = str(kept.save(tmp_path / "kept"))
    assert "is beside this run" in press(panel.compare) and len(run.beside.spans) == len(kept.spans)
    panel.other.value = ""
    press(panel.compare)
    assert run.beside is None
    board.close()
