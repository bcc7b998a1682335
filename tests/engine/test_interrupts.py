"""Interrupts a lab at chosen places that once broke it; `tests.interrupts` draws random places.

The ranks are light stand-ins, because the kernel's side is under test.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests import interrupts
from tests.labs import apart
from tests.waiting import until
from workbench import lab as lab_module
from workbench.cluster.api import launch
from workbench.cluster.engines import cluster as cluster_module
from workbench.cluster.engines.cluster import Cluster
from workbench.cluster.processes.lab_place import alive, list_places
from workbench.cluster.processes.uninterruptible import without_interrupts
from workbench.cluster.transport.curve_keys import CurveKeys
from workbench.cluster.transport.rpc_client import RpcClient
from workbench.experiment import Experiment
from workbench.lab import Lab

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with apart(tmp_path_factory) as patch:
        patch.setattr(launch, "SESSION_CLASS", "test_cluster_fake:FakeSession")
        patch.syspath_prepend(str(HERE))
        yield
        for lab in list(lab_module._labs.values()):
            lab.close()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(patch: pytest.MonkeyPatch, place: Any, name: str, first: bool) -> None:
    """Interrupts the kernel once in a call of `name` of `place`: before its work if `first`, else after it."""
    does = getattr(place, name)

    def once(*given: Any, **more: Any) -> Any:
        patch.setattr(place, name, does)
        if first:
            interrupt()
        found = does(*given, **more)
        if not first:
            interrupt()
        return found

    patch.setattr(place, name, once)


def processes(lab: Lab) -> list[Any]:
    return [p[:2] for p in lab.cluster.place.state["processes"]]


def nothing_left(noted: list[Any]) -> bool:
    guards = [p for p in psutil.Process().children() if p.is_running() and "guard.py" in " ".join(p.cmdline())]
    return not any(map(alive, noted)) and list_places() == [] and not guards


def trains(lab: Lab) -> bool:
    step = lab.status[0]["step"] or 0
    return until(lambda: lab.state == "running" and (lab.status[0]["step"] or 0) >= step + interrupts.STEPS)


@pytest.mark.engine
def test_a_close_that_is_interrupted_closes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(ranks=1, name="shut").wait(60)
    noted = processes(lab)
    interrupted(monkeypatch, cluster_module, "end_processes", first=True)
    with pytest.raises(KeyboardInterrupt):
        lab.close()
    assert lab.state == "closed" and nothing_left(noted)


@pytest.mark.engine
def test_the_next_close_completes_one_that_a_second_interrupt_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(ranks=1, name="shut").wait(60)
    noted, does = processes(lab), cluster_module.end_processes

    def twice(place: Any) -> None:
        monkeypatch.setattr(cluster_module, "end_processes", does)
        interrupt()
        interrupt()
        raise AssertionError("the second was not heard")

    monkeypatch.setattr(cluster_module, "end_processes", twice)
    with pytest.raises(KeyboardInterrupt):
        lab.close()
    lab.close()
    assert nothing_left(noted)


@pytest.mark.engine
def test_a_lab_trains_after_an_interrupt_of_its_opening_or_of_a_run_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted(monkeypatch, cluster_module, "start_guard", first=False)
    with pytest.raises(KeyboardInterrupt):
        Lab(ranks=1, name="made")
    lab = Lab(ranks=1, name="made").wait(60)
    assert len(list_places()) == 1, "there is one lab, and not half of another one"
    interrupted(monkeypatch, threading.Thread, "start", first=True)
    with pytest.raises(KeyboardInterrupt):
        lab.run(Experiment(steps=0))
    assert lab.live and trains(lab)
    noted = processes(lab)
    lab.close()
    assert nothing_left(noted)


@pytest.mark.engine
def test_an_interrupted_detach_or_attach_loses_neither_lab_nor_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(ranks=1, name="left").wait(60)
    assert lab.cluster.processes is not None
    children = list(lab.cluster.processes.started.values())
    run = lab.run(Experiment(steps=0))
    assert trains(lab)
    interrupted(monkeypatch, Cluster, "_release_client", first=True)
    with pytest.raises(KeyboardInterrupt):
        lab.detach()
    assert lab.state == "closed" and not run.live
    interrupted(monkeypatch, cluster_module, "start_guard", first=False)
    with pytest.raises(KeyboardInterrupt):
        Lab.attach("left")
    again = Lab.attach("left")
    assert not again.cluster.is_guest, "this kernel owns it"
    assert trains(again)
    noted = processes(again)
    again.close()
    assert nothing_left(noted)
    assert all(child.returncode is not None for child in children), "nor a zombie"


def test_an_interrupt_between_two_wire_locks_releases_both() -> None:
    line = RpcClient({}, CurveKeys.make_pair())
    first, second = threading.Lock(), threading.Lock()

    @contextmanager
    def taken() -> Iterator[None]:
        interrupt()
        with second:
            yield

    line._wires = {0: SimpleNamespace(lock=first), 1: SimpleNamespace(lock=taken())}  # type: ignore[dict-item]
    line._send_question = lambda *rest: None  # type: ignore[method-assign]
    line._answer_or_error = lambda *rest: None  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        line.ask_all("status")
    assert not first.locked() and not second.locked()
    line._wires = {}
    line.close()


def test_an_interrupt_waits_for_a_whole_block_but_a_second_one_does_not() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), without_interrupts():
        interrupt()
        done.append("once")
    with pytest.raises(KeyboardInterrupt), without_interrupts(), without_interrupts():
        interrupt()
        done.append("in both")
    with pytest.raises(KeyboardInterrupt), without_interrupts():
        interrupt()
        interrupt()
        done.append("twice")
    with pytest.raises(ValueError, match="its own"), without_interrupts():
        raise ValueError("its own")
    assert done == ["once", "in both"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    other = threading.Thread(target=lambda: without_interrupts().__enter__())
    other.start()
    other.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_round_of_interrupts_depends_only_on_its_seed() -> None:
    drawn = [interrupts.point_of(7, number)[0] for number in range(200)]
    assert drawn == [interrupts.point_of(7, number)[0] for number in range(200)]
    assert set(drawn) == set(interrupts.POINTS), "each is among two hundred"
    assert drawn != [interrupts.point_of(8, number)[0] for number in range(200)]
