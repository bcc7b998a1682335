"""Tests the command line: results, and one sentence with exit code 2 for an error. Starts no rank."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import workbench
from workbench.cli import app, setting
from workbench.entrypoints import jupyter
from workbench.entrypoints.demo import TOUR
from workbench.entrypoints.termination import Termination
from workbench.experiment import Experiment
from workbench.experiment.recipes import recipe
from workbench.run import Run, RunError, simulate
from workbench.settings import KnobError

RESUMED: list[Path] = []  # checkpoints that runs resume from


def say(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def refused(result: Result) -> str:
    """Returns the error text, after checking that it is one line without traceback, with exit code 2."""
    assert result.exit_code == 2
    assert result.exception is None or isinstance(result.exception, SystemExit)
    said = result.stderr.strip()
    assert said.startswith("workbench: ")
    assert len(said.splitlines()) == 1
    return said


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Experiment]:
    """Replaces Lab by a stand-in that starts nothing. Returns the experiments that it received."""
    found: list[Experiment] = []

    class Lab:
        def __init__(self, ranks: int, *, name: str) -> None:
            self.ranks = ranks
            self.cluster = types.SimpleNamespace(renewal=types.SimpleNamespace(starts_ahead=True))

        def run(self, experiment: Experiment, out: Path, resume: Path | None) -> Any:
            assert not self.cluster.renewal.starts_ahead, "no other run follows, so no engines are started for one"
            assert experiment.ranks == self.ranks
            found.append(experiment)
            assert (resume is None) == (not RESUMED) or resume == RESUMED[0]
            done = Run(experiment, path=out)
            done.timeline.marks.add([(0, 5, "state", 1.0, '{"state": "done"}')])
            return done

        def close(self) -> None:
            found.append(None)  # type: ignore[arg-type]

    monkeypatch.setitem(sys.modules, "workbench.lab", types.SimpleNamespace(Lab=Lab))
    return found


def test_run_sets_the_recipes_knobs_in_order_and_closes_the_lab(asked: list[Experiment], tmp_path: Path) -> None:
    turns = ["strategy=LocalSGD", "strategy.every=16", "compressor=TopK", "density=0.05"]
    words = [word for turn in turns for word in ("--set", turn)]
    done = say("run", "digits", *words, "--out", str(tmp_path / "r"), "--steps", "7", "--ranks", "2")
    assert done.exit_code == 0, done.output
    experiment, closed = asked
    assert (experiment.strategy.every, experiment.steps, experiment.ranks) == (16, 7, 2)
    assert experiment.compressor.of.density == 0.05
    assert closed is None


@pytest.mark.parametrize("error", [None, RunError("the disk is full"), TimeoutError()], ids=str)
def test_a_terminated_run_stops_after_its_checkpoint_is_written_or_failed(error: Exception | None) -> None:
    done: list[str] = []

    def wait(timeout: float) -> None:
        done.append("waited")
        if error:
            raise error

    lab = types.SimpleNamespace(checkpoint=lambda: types.SimpleNamespace(wait=wait), stop=lambda: done.append("stop"))
    Termination._stop_with_checkpoint(lab)  # type: ignore[arg-type]
    assert done == ["waited", "stop"]


def test_run_without_a_number_of_steps_ends(asked: list[Experiment], tmp_path: Path) -> None:
    assert say("run", "digits", "--out", str(tmp_path / "r")).exit_code == 0
    assert asked[0].steps == 200


def test_run_passes_arguments_to_a_script_prints_its_output_and_sets_no_end(
    asked: list[Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    said = '{"stream": "stdout", "text": "epoch 1\\n"}'
    monkeypatch.setattr(Run, "details", lambda run, name, rank=None: [(0, 0.0, json.loads(said))])
    done = say("run", "train.py", "--out", "r", "--ranks", "2", "--set", "strategy=DDP", "--", "--lr", "0.1")
    assert done.exit_code == 0, done.output
    assert "epoch 1\n" in done.output
    experiment = asked[0]
    assert (experiment.task.file, experiment.task.args, experiment.task.folder) == (
        "train.py", ("--lr", "0.1"), str(tmp_path))  # fmt: skip
    assert (experiment.steps, experiment.ranks, str(experiment.strategy)) == (0, 2, "DDP(accumulate=1)")


def test_run_resumes_a_checkpoint_with_new_settings(
    asked: list[Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = recipe("digits").set("ranks", 2).set("pace", 5.0).set("save_every", 1).set("lr", 0.003)
    simulate(replace(e, steps=1), real=True, checkpoints=tmp_path / "checkpoints")
    monkeypatch.setattr(f"{__name__}.RESUMED", [tmp_path])
    done = say("run", "--resume", str(tmp_path), "--out", str(tmp_path / "r"), "--steps", "9", "--set", "every=16",
               "--set", "strategy=LocalSGD", "--ranks", "3")  # fmt: skip
    assert done.exit_code == 0, done.output
    (experiment, _) = asked
    assert (experiment.lr, experiment.steps, experiment.ranks, experiment.strategy.every) == (0.003, 9, 3, 16)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ([], "name a recipe (digits), a script (train.py) or a checkpoint"),
        (
            ["digits", "--resume", "x"],
            "name a recipe (digits), a script (train.py) or a checkpoint",
        ),
        (["digits", "7", "--steps", "2"], "digits takes no arguments; only a script does: 7"),
        (["no/train.py"], "file='no/train.py': there is no such file"),
        (["--resume", "no/where"], "no/where: holds no complete checkpoint"),
        (["digit"], "recipe='digit': no such recipe; did you mean digits?"),
        (["digits", "--set", "strategy=LocalSDG"], "did you mean LocalSGD"),
        (["digits", "--set", "strategy=LocalSGD", "--set", "every=0"], "every=0: must be an integer in [1, 256] steps"),
        (["digits", "--set", "bucket_mb=wide"], "bucket_mb='wide': must be a number in [0.01, 1024] MB"),
        (["digits", "--set", "strategy"], "must be path=value, such as strategy.every=8"),
        (["digits", "--ranks", "0"], "ranks=0: must be an integer in [1, 64]"),
        (["digits", "--set", "strategy=TorchDDP", "--set", "compressor=TopK"], "use Dense with it"),
    ],
)
def test_invalid_runs_are_refused_in_a_sentence(
    asked: list[Experiment], words: list[str], answer: str, tmp_path: Path
) -> None:
    assert answer in refused(say("run", *words, "--out", str(tmp_path / "r")))
    assert asked == []


def test_a_run_does_not_overwrite_another(asked: list[Experiment], tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    assert "already exists" in refused(say("run", "digits", "--out", str(tmp_path)))


def test_a_value_is_json_or_a_word() -> None:
    assert setting("density=0.05") == ("density", 0.05)
    assert setting("to=bf16") == ("to", "bf16")
    assert setting('faults=[{"Slow": {"rank": 1}}]') == ("faults", [{"Slow": {"rank": 1}}])
    with pytest.raises(KnobError, match="must be path=value"):
        setting("=3")


def test_show_prints_a_recorded_run_and_writes_its_page(tmp_path: Path) -> None:
    path = Run(Experiment(), name="kept", epoch=1.0).save(tmp_path / "run")
    done = say("show", str(path))
    assert done.exit_code == 0, done.output
    assert "state" in done.output
    page = tmp_path / "page.html"
    assert say("show", str(path), "--out", str(page)).exit_code == 0
    assert "<html" in page.read_text().lower()


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_what_if_asks_about_a_recorded_run_on_a_named_network_and_over_ranks(tmp_path: Path) -> None:
    path = str(simulate(Experiment(ranks=2, steps=12, pace=20.0, eval_every=0)).save(tmp_path / "run"))
    one = say("what-if", path, "--network", "100 GbE", "--ranks", "4", "--set", "bucket_mb=2")
    assert one.exit_code == 0, one.output
    assert re.match(r"measured [\d.]+ ms per step; simulated ", one.stdout) and "\n- 100 GbE: alpha 14 us" in one.stdout
    rows = say("what-if", path, "--network", "400G InfiniBand", "--over").stdout.splitlines()
    told = [re.split("  +", row) for row in rows if not row.startswith("- ")]
    assert [ranks for ranks, *_ in told] == [f"{2**power:,}" for power in range(1, 13)]
    assert all(step.endswith(" ms") and computing.endswith("% of it") for _, step, computing, _ in told)
    some = say("what-if", path, "--ranks", "2", "--ranks", "64").stdout.splitlines()
    assert [row.split()[0] for row in some[:2]] == ["2", "64"] and some[2].startswith("- ")
    assert "did you mean 100 GbE?" in refused(say("what-if", path, "--network", "100GbE"))
    assert "ranks=5000" in refused(say("what-if", path, "--ranks", "5000"))
    none = str(Run(Experiment(), name="kept", epoch=1.0).save(tmp_path / "none"))
    assert "in no step all ranks computed the whole model" in refused(say("what-if", none))


def test_show_names_a_directory_that_is_missing_or_no_run(tmp_path: Path) -> None:
    assert "nowhere" in refused(say("show", str(tmp_path / "nowhere")))
    (tmp_path / "run.json").write_text("{")
    assert str(tmp_path) in refused(say("show", str(tmp_path)))


@pytest.mark.engine
def test_the_demo_trains_switches_live_and_writes_its_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workbench.cli", "demo", "--ranks", "2", "--seconds", "12", "--out", "demo.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {line[:20].strip(): line[20:].split() for line in done.stdout.splitlines() if "->" in line}
    assert list(rows) == [stop.title for stop in TOUR]
    sent = {title: float(row[3]) for title, row in rows.items()}
    assert sent["DDP, dense"] > 2 * sent["Local SGD, every 8"]
    assert sent["DDP, dense"] > 4 * sent["DDP, Top-k 1 %"]
    assert "<html" in (tmp_path / "demo.html").read_text().lower()


# JupyterLab


def test_a_port_in_use_gives_the_next_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < jupyter.find_free_port(port) < port + 50


def test_without_any_free_port_it_says_which_option_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jupyter, "range", lambda first, last: (), raising=False)
    with pytest.raises(RunError, match=r"port=8888: in use.*give --port"):
        jupyter.find_free_port(8888)


def test_the_token_is_kept_and_not_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def become(program: str, command: list[str], env: dict[str, str]) -> None:
        started.append((command, env))

    monkeypatch.delenv("JUPYTER_TOKEN", raising=False)
    monkeypatch.setattr(jupyter, "find_notebooks", lambda: tmp_path)
    monkeypatch.setattr(jupyter.os, "execve", become)
    jupyter.open_lab(8888, browser=False)
    (command, env), said = started[0], capsys.readouterr().out
    assert len(env["JUPYTER_TOKEN"]) == 48
    assert not any(env["JUPYTER_TOKEN"] in word for word in command)
    assert f"/lab/tree/{tmp_path.name}/{jupyter.FIRST}?token={env['JUPYTER_TOKEN']}" in said
    assert "--no-browser" in command
    assert not any("token=" in word or "disable_check" in word for word in command)


def test_jupyterlab_shows_no_dialog_over_the_page(tmp_path: Path) -> None:
    from jupyterlab.labapp import LabApp

    lab = LabApp()
    lab.parse_command_line(jupyter.make_command(tmp_path, 8888, opens=False)[3:])
    assert lab.news_url is None, "else it asks whether news may be fetched"


def test_installed_notebooks_are_copied_to_where_the_user_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = tmp_path / "data" / "share" / "training-workbench" / "notebooks"
    shared.mkdir(parents=True)
    (shared / jupyter.FIRST).write_text("{}")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(workbench, "__file__", str(tmp_path / "lib" / "workbench" / "__init__.py"))
    monkeypatch.setattr(jupyter.sysconfig, "get_path", lambda name: str(tmp_path / name))
    assert jupyter.find_notebooks() == tmp_path / "here" / "notebooks"
    assert (tmp_path / "here" / "notebooks" / jupyter.FIRST).exists()
    (shared / jupyter.FIRST).unlink()
    assert jupyter.find_notebooks() == tmp_path / "here" / "notebooks"


def test_a_clone_opens_its_own_notebooks_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert jupyter.find_notebooks() == Path(__file__).parents[2] / "notebooks"
    assert not list(tmp_path.iterdir())


def test_missing_notebooks_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workbench, "__file__", str(tmp_path / "lib" / "workbench" / "__init__.py"))
    monkeypatch.setattr(jupyter.sysconfig, "get_path", lambda name: str(tmp_path / name))
    with pytest.raises(RunError, match="found neither in"):
        jupyter.find_notebooks()


def test_settings_that_cannot_be_tried_are_refused_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def lab(*_: Any, **__: Any) -> Any:
        raise AssertionError("a lab was started")

    monkeypatch.setattr("workbench.entrypoints.tuning.Lab", lab)
    assert "must be a list of values to try" in refused(say("tune", "digits", "--try", "bucket_mb=0.05,1"))
    assert "colour" in refused(say("tune", "digits", "--try", "colour=[1]"))
