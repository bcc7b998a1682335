"""Tests that a silent engine or a failing lab does not keep resources from being released."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from workbench import lab as lab_module
from workbench.cluster.engines.cluster import Cluster


def cluster(monkeypatch: pytest.MonkeyPatch, silent: int, done: list[Any]) -> Cluster:
    """Three engines of a foreign cluster; engine `silent` does not answer. done: the released resources."""
    made = Cluster("lab", 3, connection="somewhere")
    made.engines = [SimpleNamespace(id=10 + r, rank=r) for r in range(3)]
    made.place = SimpleNamespace(state={"owner": [1, 0.0]}, remove_folder=lambda: None)
    made.health = SimpleNamespace(describe_controller_death=lambda: None, describe_death=lambda rank: None)
    made._ready.set()

    def call(engine: int, function: Any, *rest: Any, timeout: float = 60.0) -> None:
        if engine == 10 + silent:
            raise TimeoutError("no answer")
        done.append(engine)

    monkeypatch.setattr(made, "call", call)
    monkeypatch.setattr(made, "_end_processes", lambda: done.append("all else"))
    return made


@pytest.mark.parametrize("silent", range(3))
def test_a_silent_engine_does_not_prevent_releasing_the_rest(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    cluster(monkeypatch, silent, done).close()
    assert done == [10 + r for r in range(3) if r != silent] + ["all else"]


def test_a_failing_lab_does_not_prevent_closing_other_labs(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def close(name: str) -> None:
        closed.append(name)
        del labs[name]
        if name == "two":
            raise RuntimeError("two does not close")

    labs = {n: SimpleNamespace(close=lambda n=n: close(n)) for n in ("one", "two", "three")}
    monkeypatch.setattr(lab_module, "_labs", labs)
    with pytest.raises(RuntimeError, match="two does not close"):
        lab_module._close_all()
    assert closed == ["one", "two", "three"]
