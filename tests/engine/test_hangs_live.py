"""Tests ranks that hang on real engines: found, distinguished from slow ones, inspected and evicted.

The hang is a stopped process, an endless loop, or C code that never releases Python's interpreter.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from torch import nn

from tests.harm import Patient, kill_link
from tests.labs import apart
from tests.waiting import until
from workbench.cluster.processes.lab_place import ClusterError
from workbench.experiment import Experiment
from workbench.lab import Lab, RankError
from workbench.run import Run
from workbench.settings import KnobError
from workbench.strategies import DDP, LocalSGD, ZeRO3
from workbench.tasks import Task

pytestmark = pytest.mark.engine
BOUND = 120.0  # seconds, enough for a busy machine
AFTER = 3.0  # seconds without progress after which the lab reports a hang


def model() -> nn.Module:
    return nn.Linear(8, 2)


class Source:
    """An endless source of batches."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.randn(4, 8), torch.randint(0, 2, (4,))


def spins_for_ever(word: Path) -> None:
    while word.exists():
        pass


def held_in_c(word: Path) -> None:
    ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the interpreter, CDLL releases it


def task(word: Path) -> Task:
    """A task whose loss obeys the file `word` if it names this process: "spin", "hold", or seconds to sleep."""

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        import time

        time.sleep(0.02)
        said, _, pid = word.read_text().partition(" ") if word.exists() else ("", "", "0")
        if pid == str(os.getpid()):
            {"spin": spins_for_ever, "hold": held_in_c}.get(said, lambda word: time.sleep(float(said)))(word)
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    return Task(model=model, data=lambda rank, ranks, seed: Source(), loss=loss,
                optimizer=lambda params: torch.optim.SGD(params, lr=0.01))  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # as if this were a notebook
    with apart(tmp_path_factory):
        with Lab(ranks=4, name="hangs") as made:
            yield made.wait(120)
    cloudpickle.unregister_pickle_by_value(here)


@pytest.fixture
def word(tmp_path: Path) -> Path:
    return tmp_path / "word"


@pytest.fixture(autouse=True)
def _idle(lab: Lab, word: Path) -> Iterator[None]:
    yield
    word.unlink(missing_ok=True)
    if lab.live:
        lab.abort()
        assert until(lambda: not lab.live)


def running(lab: Lab, word: Path, **more: Any) -> Run:
    rest = {"steps": 0, "eval_every": 0, "hang_after": AFTER, "ranks": 4, **more}
    run = lab.run(Experiment(task=task(word), **rest).checked())
    assert until(lambda: at(lab) > 5, BOUND), (lab.notes, lab.status)
    return run


def tells(lab: Lab, word: Path, what: str) -> int:
    """Orders rank 2 to do `what`; returns its process id."""
    pid: int = lab.status[2]["pid"]
    draft = word.with_suffix(".draft")
    draft.write_text(f"{what} {pid}")
    draft.replace(word)
    return pid


def at(lab: Lab) -> int:
    """Returns the current step of the run."""
    return lab._live.step if lab._live is not None else 0


def gone_on(lab: Lab, run: Run, members: list[int]) -> None:
    """Waits until exactly these ranks make new steps."""
    assert until(lambda: [m for *_, m in run.details("members") if m.get("members") == members], BOUND), lab.notes
    step = at(lab)
    assert until(lambda: at(lab) > step + 3 or not lab.live, BOUND) and lab.live, lab.notes


def gone(lab: Lab, pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_dead_link_is_reported_by_its_two_ranks_and_either_can_be_evicted(lab: Lab, word: Path) -> None:
    """All ranks wait in the same collective and answer the lab. Their stacks do not show the dead link."""
    run = running(lab, word, strategy=DDP())
    assert kill_link(Patient(lab, Random(0)), 1, 2) >= 2
    said = "rank 1 waits for rank 2, and rank 2 for rank 1: no data has crossed the link between them for "
    assert until(lambda: any(said in n for n in lab.notes), BOUND), (lab.notes, lab.status)
    assert until(lambda: run.details("hang"), BOUND) and run.details("hang")[0][-1]["ranks"] == [1, 2]
    assert said in run.holdup
    lab.evict(2)
    gone_on(lab, run, [0, 1, 3])


@pytest.mark.slow
def test_an_engine_that_was_stopped_for_over_half_a_minute_works_again(lab: Lab, word: Path) -> None:
    """After a machine slept or a debugger stopped it, the controller must not drop an engine whose process still
    runs.
    """
    run = running(lab, word, strategy=DDP(), ranks=2)
    os.kill(pid := lab.status[1]["pid"], signal.SIGSTOP)
    try:
        time.sleep(45)
        assert lab.live and not lab.cluster.health.describe_death(1)
    finally:
        os.kill(pid, signal.SIGCONT)
    step = at(lab)
    assert until(lambda: at(lab) > step + 3 or not lab.live, BOUND) and lab.live, lab.notes
    assert lab.cluster.call(lab.cluster.engines[1].id, os.getpid) == pid, "cells reach it, too"
    assert not run.details("members")


def test_no_cell_waits_for_an_engine_that_died_while_nothing_ran() -> None:
    with Lab(ranks=2, name="idle") as lab:
        lab.wait(120)
        os.kill(lab.status[1]["pid"], signal.SIGKILL)
        assert until(lambda: lab.cluster.client.ids == [0])


def test_an_endless_loop_is_reported_with_its_stack_and_its_rank_is_evicted_by_hand(lab: Lab, word: Path) -> None:
    run = running(lab, word, strategy=DDP())
    pid = tells(lab, word, "spin")
    assert until(lambda: any("rank 2 has been in forward of step " in n for n in lab.notes), BOUND), lab.status
    note = next(n for n in lab.notes if "rank 2 has been in forward of step " in n)
    assert "; 0, 1, 3 wait in all_reduce" in note
    shown = lab.stacks()
    assert set(shown) == {0, 1, 2, 3} and "spins_for_ever" in shown[2] and 'thread "rank 2 training"' in shown[2]
    assert shown[2].startswith("in forward of step ") and "spins_for_ever" not in shown[0] + shown[1] + shown[3]
    assert "wire.py" in shown[0] and "rank 3: in " in str(shown)
    assert until(lambda: run.details("hang"), BOUND)
    said = [detail for *_, detail in run.details("hang")]
    assert said[0]["ranks"] == [2] and "rank 2 has been in forward" in said[0]["text"]
    with pytest.raises(KnobError, match=r"rank=7: must be one of those that train now: 0, 1, 2, 3"):
        lab.evict(7)
    with pytest.raises(KnobError, match="leave at least one"):
        lab.evict(0, 1, 2, 3)
    lab.evict(2)
    gone_on(lab, run, [0, 1, 3])
    assert gone(lab, pid), "what hangs is ended"
    assert [detail["text"] for *_, detail in run.details("evicted")] == ["rank 2 put out: as asked"]
    put_out = "was put out: as asked"  # the kernel may see the engine's end only after the survivors have gone on
    assert until(lambda: any("rank 2 is lost at step" in n and put_out in n for n in lab.notes), BOUND), lab.notes
    lab.stop()
    run.wait(60)
    assert lab.state == "idle" and lab._live.error is None


def test_a_stopped_process_is_recognised_and_evicted_by_policy(lab: Lab, word: Path) -> None:
    run = running(lab, word, strategy=LocalSGD(every=4))
    assert lab.set("on_hang", "evict").wait(60).applied_at is not None
    reached = at(lab) + 3  # a rank keeps a state to return to from the next boundary on
    assert until(lambda: at(lab) > reached, BOUND)
    pid = lab.status[0]["pid"]
    lab.freeze(0)
    assert until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    assert f"its process (pid {pid}) is stopped" in lab.stacks()[0]
    gone_on(lab, run, [1, 2, 3])
    assert gone(lab, pid)
    text = next(detail["text"] for *_, detail in run.details("evicted"))
    assert "rank 0 has said nothing for " in text and f"(its process (pid {pid}) is stopped" in text
    assert [detail["text"] for *_, detail in run.details("asked")] == ["rank 0 was frozen, as asked"]
    assert lab.set("lr", 0.02).wait(60).applied_at is not None, "another rank hears for all"


def test_code_that_keeps_the_interpreter_shows_its_stack_and_an_idle_engine_takes_its_place(
    lab: Lab, word: Path
) -> None:
    run = running(lab, word, strategy=DDP(), ranks=3, on_hang="replace", hang_after=10.0)
    tells(lab, word, "hold")
    assert until(lambda: "rank 2 has said nothing" in lab.run_now.holdup, BOUND), lab.status
    shown = lab.stacks()[2]
    assert "its code lets no other thread run" in shown and "in held_in_c" in shown
    gone_on(lab, run, [0, 1])
    gone_on(lab, run, [0, 1, 3])


def test_a_slow_rank_is_not_evicted(lab: Lab, word: Path) -> None:
    run = running(lab, word, strategy=DDP(), hang_after=2.0)
    tells(lab, word, "1.0")
    step = at(lab)
    assert until(lambda: at(lab) > step + 3, BOUND)
    assert lab.set("on_hang", "evict").wait(60).applied_at is not None
    tells(lab, word, "3.0")  # longer than `hang_after`, but less than five times a normal step
    step = at(lab)
    assert until(lambda: at(lab) > step + 2, BOUND)
    assert not run.details("evicted") and not run.details("hang") and not lab.notes


def test_the_run_ends_by_policy_if_the_other_ranks_cannot_go_on(lab: Lab, word: Path) -> None:
    running(lab, word, strategy=ZeRO3())
    pid = lab.status[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(
            ClusterError,
            match=r"other ranks cannot go on without it: .* under ZeRO3 .* keep no state of the last step boundary",
        ):
            lab.evict(1)
        assert not gone(lab, pid)
    finally:
        os.kill(pid, signal.SIGCONT)
    run = lab._live.run
    assert lab.set("on_hang", "evict").wait(60).applied_at is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankError, match=r"rank 1, step .*was put out: rank 1 has said nothing for "):
        run.wait(BOUND)
    assert gone(lab, pid)
