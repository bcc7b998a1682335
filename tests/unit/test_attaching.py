"""A kernel attaches, or begins another run, after some engines have died."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from workbench.cluster.api import launch
from workbench.cluster.processes.place import ClusterError
from workbench.cluster.transport.rpc_client import NoAnswer


class Engines:
    """Stands in for a cluster. answers: by rank the experiment, an error that it raises, or None if it died.

    generation: of the run that each engine has
    """

    generation = "g"

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked, self.rpc = answers, list[int](), self
        self.engines = [SimpleNamespace(rank=rank) for rank in range(len(answers))]

    def describe_death(self, rank: int) -> str | None:
        return None if self.answers[rank] is not None else "ended"

    def ask_rank(self, rank: int, what: str, timeout: float) -> tuple[Any, bytes]:
        self.asked.append(rank)
        if isinstance(answer := self.answers[rank], Exception):
            raise answer
        return {"of": rank, "generation": self.generation}, answer


@pytest.mark.parametrize(
    ("answers", "found", "asked"),
    [
        ((None, b"run"), 1, [1, 1]),
        ((NoAnswer("no answer"), b"run"), 1, [0, 1, 1]),
        ((ClusterError("rank 0: AttributeError"), b"run"), 1, [0, 1, 1]),
        ((b"", b"run"), 1, [0, 1, 1]),
    ],
    ids=["dead", "silent", "an error", "idle"],
)
def test_a_kernel_attaches_to_the_first_engine_that_has_the_run(
    answers: tuple[Any, ...], found: int, asked: list[int]
) -> None:
    engines: Any = Engines(*answers)
    job = {"of": found, "generation": "g"}
    assert launch._asked_of_any(engines, "g") == (job, b"run") and engines.asked == asked


def test_a_kernel_attaches_to_no_engine_that_still_has_the_run_before() -> None:
    engines: Any = Engines(b"run", b"run")
    assert launch._asked_of_any(engines, "another") == ({}, b"")


def test_engines_without_a_run_are_told_from_engines_that_do_not_answer() -> None:
    idle: Any = Engines(None, b"")
    assert launch._asked_of_any(idle, "g") == ({}, b"")
    silent: Any = Engines(None, NoAnswer("rank 1 does not answer"))
    with pytest.raises(NoAnswer, match="rank 1 does not answer"):
        launch._asked_of_any(silent, "g")
    dead: Any = Engines(None, None)
    with pytest.raises(ClusterError, match="all engines of the run have ended"):
        launch._asked_of_any(dead, "g")


def test_a_new_cluster_keeps_what_was_set_for_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.Cluster, "start_engines", lambda self: self)
    old = launch.Cluster("lab", 2, spare=1)
    old.error = RuntimeError("it never came up")
    old.renewal.ahead, old.spares.used = False, lambda: {1}
    monkeypatch.setattr(old, "close", lambda: None)
    new = launch.renew_cluster(old)
    assert new is not old and not new.renewal.ahead and new.spares.used() == {1} and new.spares.count == 1
