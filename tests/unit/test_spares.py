"""Tests the number of spare engines: enough, refilled after use, and never started without end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from workbench.cluster.engines import spare_engines as module
from workbench.cluster.engines.spare_engines import MAX_FAILURES, PAUSE_BETWEEN_STARTS, SpareEngines
from workbench.cluster.processes.lab_place import ClusterError
from workbench.lab import Lab
from workbench.settings import KnobError


class Engines:
    """A stub of a cluster with three engines, two of them in use, and its own clock."""

    closed = False

    def __init__(self) -> None:
        self.ranks, self.now = 2, 0.0
        self.engines = [SimpleNamespace(rank=rank, id=rank, process_key=rank) for rank in range(2)]
        self.dead: set[int] = set()
        self.used = {0, 1}
        self.warmed: list[int] = []
        self.cannot, self.fails = "", ""

    def describe_death(self, rank: int) -> str | None:
        return "is gone" if rank in self.dead else None

    def call(self, engine: int, function: Any, timeout: float) -> None:
        self.warmed.append(engine)

    def start_more_engines(self, _: object, count: int) -> list[int]:
        if self.fails:
            raise ClusterError(self.fails)
        first = len(self.engines)
        self.engines += [SimpleNamespace(rank=rank, id=rank, process_key=rank) for rank in range(first, first + count)]
        return list(range(first, first + count))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    monkeypatch.setattr(module, "start_more_engines", made.start_more_engines)
    monkeypatch.setattr(module, "find_start_obstacle", lambda cluster, count: made.cannot)
    monkeypatch.setattr(module.time, "monotonic", lambda: made.now)
    return made


def kept(engines: Engines, count: int) -> SpareEngines:
    made = SpareEngines(engines, count)  # type: ignore[arg-type]
    made.list_used_ranks = lambda: engines.used
    made.end_event.set()  # so that no look waits
    return made


def looks(spares: SpareEngines, times: int = 3) -> SpareEngines:
    for _ in range(times):
        spares._check_spares()
    return spares


def test_spare_engines_are_started_warmed_and_kept(engines: Engines) -> None:
    spares = looks(kept(engines, 2))
    assert spares.list_idle() == [2, 3] and engines.warmed == [2, 3]
    looks(spares)
    assert len(engines.engines) == 4, "enough are there"


def test_used_spares_are_replaced_after_a_while(engines: Engines) -> None:
    spares = looks(kept(engines, 1))
    engines.used.add(2)
    engines.now = PAUSE_BETWEEN_STARTS - 0.1
    assert looks(spares).list_idle() == [], "who comes in has the cores to itself"
    engines.now = 2 * PAUSE_BETWEEN_STARTS
    assert looks(spares).list_idle() == [3] and engines.warmed == [2, 3]


def test_idle_engines_of_a_lab_count_as_spares(engines: Engines) -> None:
    engines.used = {0}
    assert looks(kept(engines, 1)).list_idle() == [1] and not engines.warmed


def test_spares_that_keep_ending_are_not_started_for_ever(engines: Engines) -> None:
    spares = kept(engines, 1)
    for _ in range(20):
        looks(spares)
        engines.dead |= set(spares.list_idle())
        engines.now += 2 * PAUSE_BETWEEN_STARTS
    assert len(engines.engines) == 2 + MAX_FAILURES
    assert spares.trouble == ("spare=1: 0 spare engines are up, and the lab starts no more: "
                              f"{MAX_FAILURES} of them ended "
                              "before they were needed, or did not come up")  # fmt: skip


def test_the_reason_for_missing_spares_is_reported(engines: Engines) -> None:
    spares = kept(engines, 1)
    engines.fails = "engine 2 ended with exit code 1 before it was up."
    looks(spares)
    assert "the lab starts no more: engine 2 ended with exit code 1" in spares.trouble
    engines.fails = ""
    assert looks(spares).list_idle() == [2] and spares.trouble == ""
    engines.used.add(2)
    engines.cannot = "a lab has at most 64 engines"
    looks(spares)
    engines.now += 2 * PAUSE_BETWEEN_STARTS
    assert "a lab has at most 64 engines" in looks(spares).trouble


@pytest.mark.parametrize("given", [-1, 64, True, 1.0, "1"])
def test_an_invalid_number_of_spares_raises_knob_error(given: Any) -> None:
    with pytest.raises(KnobError, match=r"spare=.*: must be an integer in \[0, 63\] engines"):
        Lab(ranks=2, name="never made", spare=given)


def test_a_lab_on_foreign_engines_refuses_spares(tmp_path: Any) -> None:
    with pytest.raises(KnobError, match="spare=1: this lab starts no engines; start more where its cluster is"):
        Lab(ranks=2, name="never made", spare=1, profile="default")
