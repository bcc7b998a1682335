"""Kills ranks while new ranks join a lab's run: the survivors train on from trained values."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.labs import apart
from tests.waiting import until
from workbench import DDP, DiLoCo, Experiment, Lab, LocalSGD
from workbench.lab import RankError
from workbench.strategies import Strategy
from workbench.tasks import Digits

pytestmark = pytest.mark.engine
LIMIT = 90.0  # seconds
STRATEGIES: dict[str, Strategy] = {"DDP": DDP(), "LocalSGD": LocalSGD(), "DiLoCo": DiLoCo()}
MOMENTS = {"asked": 0.05, "joining": 0.4, "there": -1.0}  # seconds after the request; -1: once the lab has the members


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with apart(tmp_path_factory), Lab(ranks=4, name="joining") as made:
        yield made.wait(120)


@pytest.mark.parametrize(
    ("name", "ranks", "moment"),
    [("DDP", (0, 1), "there"),
     *(pytest.param(name, ranks, moment, marks=pytest.mark.long)
       for name, ranks, moment in [("DDP", (0,), "joining"), ("DDP", (3,), "there"), ("DDP", (0, 1), "joining"),
                                   ("LocalSGD", (0,), "there"), ("LocalSGD", (3,), "asked"),
                                   ("DiLoCo", (0, 1), "joining")])],
)  # fmt: skip
def test_survivors_of_a_join_train_on_from_trained_values(
    lab: Lab, name: str, ranks: tuple[int, ...], moment: str
) -> None:
    task = Digits(hidden=1024)
    run = lab.run(Experiment(ranks=2, task=task, on_death="go on", strategy=STRATEGIES[name], steps=0))
    assert until(lambda: (lab.status[0]["step"] or 0) >= 60, LIMIT)
    pids = {row["rank"]: row["pid"] for row in lab.status}
    asked = lab.resize(4)
    if (seconds := MOMENTS[moment]) < 0:
        assert until(lambda: len(lab.members) == 4, LIMIT)
        pids |= {row["rank"]: row["pid"] for row in lab.status}
    else:
        time.sleep(seconds)
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)

    def went_on() -> bool:
        answered = asked.applied_at is not None or asked.refused is not None
        return not lab.live or (answered and set(lab.members).isdisjoint(ranks) and _made_steps(run, 3))

    assert until(went_on, LIMIT), lab.notes
    if lab.live:
        lab.stop()
        run.wait(60)
        losses = run.samples[run.samples.name == "loss"].sort_values("t").value
        assert losses.tail(6).mean() < losses.iloc[0] / 3, "the survivors train from trained values"
    else:  # no survivor has the state
        assert len(ranks) == 2
        with pytest.raises(RankError, match="no rank that is left holds the trained state"):
            run.wait(60)


def _made_steps(run: object, count: int) -> bool:
    """Whether ranks have made `count` steps since the last change of members."""
    marks, spans = run.marks, run.spans  # type: ignore[attr-defined]
    since = marks[marks.name == "members"].t.max()
    return bool((spans[(spans.lane == "step") & (spans.t0 > since)].groupby("rank").size() >= count).all())


@pytest.mark.long
def test_a_run_whose_old_ranks_all_die_before_they_invite_the_new_ones_ends_in_seconds(lab: Lab) -> None:
    slow = Experiment(ranks=2, task=Digits(hidden=64), on_death="go on", steps=0, pace=6000.0)
    run = lab.run(slow)
    assert until(lambda: (lab.status[0]["step"] or 0) >= 1, LIMIT)
    old = [row["pid"] for row in lab.status]
    lab.resize(4)  # granted at the end of a step
    live = lab._live
    assert live is not None
    assert until(lambda: {rank: live.status.get(rank, {}).get("state") for rank in (2, 3)}
                 == {2: "waiting", 3: "waiting"}, LIMIT)  # fmt: skip
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError, match="no rank that is left holds the trained state"):
        run.wait(20)  # it does not wait 30 s for ranks that nobody invites


@pytest.mark.long
def test_a_stop_while_the_survivors_vote_ends_the_run_as_stopped(lab: Lab) -> None:
    run = lab.run(Experiment(ranks=3, task=Digits(hidden=64), on_death="go on", steps=0))
    assert until(lambda: (lab.status[0]["step"] or 0) >= 20, LIMIT)
    pids = {row["rank"]: row["pid"] for row in lab.status}
    os.kill(pids[1], signal.SIGSTOP)  # so that the vote waits for its report
    os.kill(pids[2], signal.SIGKILL)
    try:
        assert until(lambda: any("rank 2 is lost" in str(note) for note in lab.notes), LIMIT)
        time.sleep(0.5)
        assert lab.members == (0, 1, 2), "they vote"
        lab.stop()
        run.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the lab ends the engine of a rank that does not leave
            os.kill(pids[1], signal.SIGCONT)
    assert run.state == "stopped"
