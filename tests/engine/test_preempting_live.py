"""Sends SIGTERM to engines: training ranks leave a run that goes on; idle engines end at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harm import Patient
from tests.labs import BOUND, apart, endless, reached
from tests.waiting import until
from workbench.cluster.processes.lab_processes import end_processes
from workbench.lab import Lab, RankError
from workbench.record.checkpoints import Checkpoint
from workbench.record.process import alive
from workbench.run import Run, RunError
from workbench.settings import KnobError
from workbench.strategies import DDP, LocalSGD

pytestmark = pytest.mark.engine


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with apart(tmp_path_factory):
        with Lab(ranks=3, name="preempting") as made:
            yield made.wait(120)


def gone(lab: Lab, rank: int) -> bool:
    engine = lab.cluster.engines[rank]
    return not alive([engine.pid, engine.created])


def test_other_ranks_go_on_after_a_preemption_and_a_rank_dies_only_after_the_grace(lab: Lab) -> None:
    victim = 0  # rank 0 reports for all ranks
    run = lab.run(endless(strategy=LocalSGD(every=4), ranks=3))  # this run would end if a rank died
    reached(lab, 10)
    with pytest.raises(KnobError, match=r"grace=-1: must be a number in \[0, 3600\] seconds"):
        lab.preempt(victim, grace=-1)
    lab.preempt(victim, grace=600)
    assert until(lambda: gone(lab, victim), BOUND), "the engine ends by itself"
    assert until(lambda: run.details("members"), BOUND)
    said = run.details("members")[0][2]
    assert said["preempted"] == [victim] and f"rank {victim} was preempted and left; ranks" in said["text"]
    assert until(lambda: lab.members == tuple({0, 1, 2} - {victim}), BOUND)
    Patient(lab, None).goes_on("preemption")  # type: ignore[arg-type]
    assert f"rank {victim} is preempted: it leaves after the current step" in lab.notes and said["text"] in lab.notes
    assert not any("is lost" in note for note in lab.notes) and not run.details("error")
    lab.set("on_death", "go on").wait(BOUND)
    lab.freeze(1)
    lab.preempt(1, grace=0.1)
    assert until(lambda: lab.members == (2,), BOUND), lab.notes
    assert "rank 1 is lost" in run.details("members")[1][2]["text"]
    lab.stop()
    assert run.wait(BOUND).state == "stopped"
    assert {detail["rank"] for _, _, detail in run.details("error")} == {1}
    spans = run.spans
    last = spans[spans.lane == "step"].groupby("rank").step.max().to_dict()
    assert last[victim] == said["step"] - 1, "no step of it is lost"
    assert run.details("preempted")[0][2]["ranks"] == [victim]


def test_a_preempted_rank_is_replaced(lab: Lab) -> None:
    run = lab.run(endless(strategy=DDP(), ranks=2, on_death="replace"))
    reached(lab, 10)
    os.kill(lab.status[1]["pid"], signal.SIGTERM)
    assert until(lambda: lab.members == (0, 2), BOUND), lab.notes
    Patient(lab, None).goes_on("replacement")  # type: ignore[arg-type]
    lab.stop()
    assert run.wait(BOUND).state == "stopped" and not run.details("error")


def test_preempting_the_last_rank_ends_the_run_with_a_checkpoint(lab: Lab, tmp_path: Path) -> None:
    run = lab.run(endless(strategy=DDP(), ranks=1), out=tmp_path / "run")
    reached(lab, 10)
    lab.preempt(0)
    with pytest.raises(RankError, match="Preempted: rank 0 is preempted, and the run cannot go on: no rank is left"):
        run.wait(BOUND)
    assert until(lambda: gone(lab, 0), BOUND)
    assert run.state == "preempted" == Run.open(tmp_path / "run").state and lab.state == "idle"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    again = lab.run(endless(strategy=DDP(), ranks=1), resume=tmp_path / "run")
    reached(lab, run.details("error")[0][0] + 3)
    lab.stop()
    assert again.wait(BOUND).state == "stopped"


def test_an_idle_engine_ends_at_once_and_so_do_all_engines_when_the_lab_ends(lab: Lab) -> None:
    lab.run(endless(strategy=DDP(), ranks=2))
    reached(lab, 10)
    os.kill(lab.status[2]["pid"], signal.SIGTERM)
    assert until(lambda: gone(lab, 2), BOUND)
    assert not any("preempted" in note for note in lab.notes) and lab.members == (0, 1)
    owned = lab.cluster.processes
    assert owned is not None
    owned.close()
    end_processes(lab.cluster.place, patience=BOUND)
    codes = {what: child.wait(BOUND) for what, child in owned.started.items() if what.startswith("engine")}
    assert -signal.SIGKILL not in codes.values(), codes
    assert not any("preempted" in note for note in lab.notes)


def test_the_command_line_saves_a_checkpoint_stops_and_prints_how_to_resume(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out, begin = tmp_path / "run", [sys.executable, "-m", "workbench.cli", "run"]
    about = ["--ranks", "2", "--set", "pace=10", "--set", "eval_every=0"]
    with apart(tmp_path_factory):
        with subprocess.Popen([*begin, "digits", "--steps", "100000", *about, "--out", out], stderr=subprocess.PIPE,
                              text=True) as process:  # fmt: skip
            assert until(lambda: trained(out) > 5, 2 * BOUND)
            process.terminate()
            said = process.communicate(timeout=BOUND)[1]
        assert process.returncode == 143
        step = Checkpoint.open(out).step
        assert (f"workbench: ended by SIGTERM; a checkpoint before step {step} is kept: go on with workbench run "
                f"--resume {out} --out ..." in said)  # fmt: skip
        assert trained(out) >= step > 5 and Run.open(out).state == "stopped"
        again = [*begin, "--resume", out, "--steps", str(step + 5), "--out", tmp_path / "again"]
        subprocess.run(again, check=True, timeout=2 * BOUND)
    assert set(Run.open(tmp_path / "again").spans.step) == set(range(step, step + 5))


def trained(out: Path) -> int:
    """Returns the number of steps of a recorded run."""
    try:
        spans = Run.open(out).spans
    except RunError:
        return 0
    steps = spans[spans.lane == "step"].step
    return int(steps.max()) + 1 if len(steps) else 0
