"""A kernel attaches, or begins another run, after some engines have died."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.cluster.api import launch
from workbench.cluster.processes.place import ClusterError
from workbench.cluster.transport.line import Silence


class Engines:
    """Stands in for a cluster. answers: by rank the experiment, an error that it raises, or None if it died."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked, self.line = answers, list[int](), self

    def death(self, rank: int) -> str | None:
        return None if self.answers[rank] is not None else "ended"

    def ask(self, rank: int, what: str, timeout: float) -> tuple[Any, bytes]:
        self.asked.append(rank)
        if isinstance(answer := self.answers[rank], Exception):
            raise answer
        return {"of": rank}, answer


@pytest.mark.parametrize(
    ("answers", "found", "asked"),
    [
        ((None, b"run"), 1, [1, 1]),
        ((Silence("no answer"), b"run"), 1, [0, 1, 1]),
        ((ClusterError("rank 0: AttributeError"), b"run"), 1, [0, 1, 1]),
        ((b"", b"run"), 1, [0, 1, 1]),
    ],
    ids=["dead", "silent", "an error", "idle"],
)
def test_a_kernel_attaches_to_the_first_engine_that_has_the_run(
    answers: tuple[Any, ...], found: int, asked: list[int]
) -> None:
    engines: Any = Engines(*answers)
    assert launch._asked_of_any(engines, 2) == ({"of": found}, b"run") and engines.asked == asked


def test_engines_without_a_run_are_told_from_engines_that_do_not_answer() -> None:
    idle: Any = Engines(None, b"")
    assert launch._asked_of_any(idle, 2) == ({}, b"")
    silent: Any = Engines(None, Silence("rank 1 does not answer"))
    with pytest.raises(Silence, match="rank 1 does not answer"):
        launch._asked_of_any(silent, 2)
    dead: Any = Engines(None, None)
    with pytest.raises(ClusterError, match="all engines of the run have ended"):
        launch._asked_of_any(dead, 2)


def test_a_new_cluster_keeps_what_was_set_for_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.Cluster, "start", lambda self: self)
    old = launch.Cluster("lab", 2, spare=1)
    old.error = RuntimeError("it never came up")
    old.renewal.ahead, old.spares.used = False, lambda: {1}
    monkeypatch.setattr(old, "close", lambda: None)
    new = launch.renewed(old)
    assert new is not old and not new.renewal.ahead and new.spares.used() == {1} and new.spares.count == 1
