"""Tests runs that go back to a checkpoint: state, repetitions, and errors without a checkpoint."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kept import held
from tests.piped import piped
from tests.ranks import batch, ended, experiment, live, mse, toy
from tests.waiting import until
from workbench.cluster.run.alarm_monitor import AlarmMonitor
from workbench.compressors import ErrorFeedback, TopK
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.host.checkpoint.divergence import MAX_RETURNS
from workbench.host.checkpoint.restore import RestoredState
from workbench.optimizers import AdamW
from workbench.partitions import Pipeline
from workbench.settings import Change
from workbench.strategies import DiLoCo, LocalSGD, ZeRO3

SAVED = 4  # the step before which a checkpoint exists


class Bad:
    """A loss that is NaN on rank 1 at given steps, also when the data begin again."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def task(self, **more: Any) -> Any:
        def data(rank: int, ranks: int, seed: int) -> list[Any]:
            return [(*batch(rank, step, seed), rank == 1 and step in self.steps) for step in range(64)]

        def loss(model: torch.nn.Module, triple: Any) -> Tensor:
            return mse(model, triple[:2]) * (math.nan if triple[2] else 1.0)

        return toy(data=data, loss=loss, **more)


def rolling(steps: int = 16, bad: tuple[int, ...] = (6,), ranks: int = 2, **more: Any) -> Experiment:
    rest = {"task": Bad(*bad).task(), "on_nan": "roll back", "save_every": SAVED, "saves": 1, **more}
    return experiment(ranks, steps, **rest)


def said(sessions: list[Session], mark: str) -> list[dict[str, Any]]:
    return [json.loads(row[3]) for s in sessions for row in s.record.noted(mark)]


def waited(sessions: list[Session], condition: Any) -> None:
    met = until(condition)
    if not met:
        for s in sessions:
            s.abort()
    assert met, [s.status() for s in sessions]


def lived(e: Experiment, folder: Path, changes: tuple[Change, ...] = ()) -> list[Session]:
    folder.mkdir(parents=True, exist_ok=True)
    sessions = live(e, changes, run_dir=folder)
    ended(sessions)
    for s in sessions:
        assert s.error is None, s.error["traceback"]
    return sessions


SETTINGS = {
    "DDP": {},
    "AdamW": {"optimizer": AdamW()},
    "TopK": {"compressor": TopK.usual()},
    "LocalSGD": {"strategy": LocalSGD(every=3)},
    "DiLoCo": {"strategy": DiLoCo(every=2)},
    "ZeRO3": {"strategy": ZeRO3(), "optimizer": AdamW()},
}


@pytest.mark.ranks
@pytest.mark.parametrize("label", SETTINGS)
def test_all_ranks_restore_their_state_and_go_on(label: str, tmp_path: Path) -> None:
    sessions = lived(rolling(**SETTINGS[label]), tmp_path)
    (back,) = said(sessions, "rolled back")
    assert back["to"] == SAVED and 7 <= back["step"] <= 13 and "back to the checkpoint before step 4" in back["text"]
    assert [s.phase for s in sessions] == ["done"] * 2 and {s.rank.step for s in sessions} == {16}
    steps = [row[0] for row in sessions[0].record if row[1] == "step"]
    assert steps == list(range(16)), "the numbers of the steps go on"
    losses = [(step, v) for s in sessions for step, name, _, v in s.record.samples if name == "loss"]
    assert all(math.isfinite(v) for step, v in losses if step >= back["step"])
    assert all(bool(x.isfinite().all()) for rank in held(sessions) for x in rank.values())


@pytest.mark.ranks
def test_going_back_is_bit_identical_to_a_run_from_the_checkpoint_on_the_next_data(tmp_path: Path) -> None:
    """The reference takes parameters and moments of the checkpoint, and the batches from the next step on."""
    went = lived(rolling(12, optimizer=AdamW(), saves=9), tmp_path / "went")
    at = said(went, "rolled back")[0]["step"]
    first = lived(experiment(2, SAVED, task=Bad().task(), optimizer=AdamW()), tmp_path / "first")
    model, optimizer = first[0].model, first[0].optimizer
    for step in range(at, 12):
        optimizer.zero_grad()
        total = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(2):
            grads = torch.autograd.grad(mse(model, batch(rank, step, 0)), list(model.parameters()))
            for t, g in zip(total, grads, strict=True):
                t += g
        for p, t in zip(model.parameters(), total, strict=True):
            p.grad = t / 2
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.allclose(held(went)[0][name], p, rtol=0, atol=1e-7), name


@pytest.mark.ranks
def test_going_back_restores_the_residual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owed, take = dict[int, dict[str, Tensor]](), RestoredState.restore_state

    async def taken(self: RestoredState, run: Any, anew: bool = True) -> None:
        await take(self, run, anew)
        owed[run.rank.id] = {n: x.clone() for n, x in run.rank.memory.buffers[ErrorFeedback.residual].items()}

    monkeypatch.setattr(RestoredState, "restore_state", taken)
    lived(rolling(compressor=TopK.usual()), tmp_path / "went")
    then = lived(experiment(2, SAVED, task=Bad().task(), compressor=TopK.usual()), tmp_path / "then")
    for s in then:
        kept = s.rank.memory.buffers[ErrorFeedback.residual]
        assert kept.keys() == owed[s.rank.id].keys() and any(x.any() for x in kept.values())
        assert all(torch.equal(owed[s.rank.id][name], x) for name, x in kept.items())


@pytest.mark.ranks
def test_the_stages_of_all_replicas_go_back_together(tmp_path: Path) -> None:
    e = piped(4, 0, partition=Pipeline(), save_every=SAVED, on_nan="roll back")
    (tmp_path / "run").mkdir()
    sessions = live(e, run_dir=tmp_path / "run")
    waited(sessions, lambda: sessions[0].rank.step > 6)
    sessions[0].request({"kind": "roll back", "id": "a", "step": sessions[0].rank.step})
    waited(sessions, lambda: said(sessions, "rolled back"))
    step = said(sessions, "rolled back")[0]["step"]
    waited(sessions, lambda: min(s.rank.step for s in sessions) > step + 3)
    sessions[0].request({"id": "stop", "kind": "stop"})
    ended(sessions)
    assert [s.error for s in sessions] == [None] * 4


@pytest.mark.ranks
def test_a_run_goes_back_to_the_same_checkpoint_a_few_times_and_then_pauses(tmp_path: Path) -> None:
    e = rolling(0, bad=tuple(range(6, 64)), save_every=0)
    sessions = live(e, run_dir=tmp_path)
    sessions[0].request({"kind": "checkpoint", "id": "one"})
    waited(sessions, lambda: sessions[0].phase == "paused")
    back = said(sessions, "rolled back")
    assert [b["times"] for b in back] == list(range(1, MAX_RETURNS + 1)) and back[-1]["text"].endswith(
        ", for the third time"
    )
    (cannot,) = said(sessions, "not rolled back")
    assert cannot["text"].endswith(f"did not help in {MAX_RETURNS} attempts")
    for s in sessions:
        s.abort()
    ended(sessions)


@pytest.mark.ranks
@pytest.mark.parametrize(("changes", "why"), [
    ((Change(0, "save_every", 0),), "there is no checkpoint yet; set save_every, or make one with lab.checkpoint()"),
    ((Change(5, "strategy", {"LocalSGD": {"every": 2}}),), "was made with another strategy"),
])  # fmt: skip
def test_without_a_fitting_checkpoint_the_run_pauses_with_a_reason(changes: Any, why: str, tmp_path: Path) -> None:
    sessions = live(rolling(0), changes, run_dir=tmp_path)
    waited(sessions, lambda: sessions[0].phase == "paused")
    (cannot,) = said(sessions, "not rolled back")
    assert why in cannot["text"] and cannot["text"].startswith("no rank went back at step ")
    for s in sessions:
        s.abort()
    ended(sessions)


@pytest.mark.ranks
def test_no_spoiled_checkpoint_replaces_a_good_one(tmp_path: Path) -> None:
    """The gradient of the step before a checkpoint has the NaN, so the checkpoint would contain it."""

    def loss(model: torch.nn.Module, triple: Any) -> Tensor:
        found = mse(model, triple[:2])
        return found + (found * 0).sqrt() * 0 if triple[2] else found  # a good loss with a gradient that is NaN

    e = rolling(0, task=toy(data=Bad(7).task().data, loss=loss), save_every=0)
    sessions = live(e, run_dir=tmp_path)
    for steps, at, mark in ((5, 5, "saved"), (3, 8, "not saved")):
        sessions[0].request({"kind": "step", "id": mark, "n": steps})
        waited(sessions, lambda at=at: sessions[0].rank.step == at and sessions[0].phase == "paused")
        sessions[0].request({"kind": "checkpoint", "id": f"at {at}"})
        waited(sessions, lambda mark=mark: said(sessions, mark))
    assert said(sessions, "not saved")[0]["text"].endswith("weight is not finite")
    sessions[0].request({"kind": "resume", "id": "on"})
    waited(sessions, lambda: said(sessions, "rolled back"))
    assert said(sessions, "rolled back")[0]["to"] == 5
    waited(sessions, lambda: min(s.rank.step for s in sessions) > 20)
    sessions[0].request({"kind": "stop", "id": "stop"})
    ended(sessions)
    assert all(bool(x.isfinite().all()) for rank in held(sessions) for x in rank.values())


# -- the lab


class Asked:
    """The part of a Live that an Alarm needs."""

    def __init__(self, watched: bool) -> None:
        self.notes: list[str] = []
        self.commands: list[dict[str, Any]] = []
        self.ended, self.step = False, 9
        self.changes = type("C", (), {"experiment": Experiment(on_nan="roll back")})()
        self.ending = type("E", (), {"unwatched_error": None})()
        self.watched = lambda: watched
        self.over = threading.Event()

    def queue_command(self, what: str, request: dict[str, Any]) -> None:
        self.commands.append(request)

    def request_stop(self) -> None:
        self.ended = True


def test_the_lab_orders_ranks_back_and_reports_the_outcome() -> None:
    it = Asked(watched=True)
    alarm = AlarmMonitor(it)  # type: ignore[arg-type]
    alarm.take_alarm("nan", 1, 6, 2.0, {"loss": "nan"})
    assert it.commands == [{"id": "nan", "kind": "roll back", "step": 6}]
    assert it.notes == ["rank 1's loss was nan at step 6, before any other's; the ranks go back to a checkpoint"]
    alarm.take_rollback(3.0, {"text": "all ranks went back", "to": 4})
    assert it.notes[-1] == "all ranks went back" and not it.ended
    alarm.take_alarm("nan", 0, 7, 2.5, {"loss": "nan"})
    assert len(it.commands) == 1, "what was met before is settled"
    alarm.take_alarm("nan", 0, 9, 4.0, {"loss": "nan"})
    assert it.commands[-1]["step"] == 9


@pytest.mark.parametrize("watched", [True, False])
def test_a_run_that_cannot_go_back_pauses_if_watched_and_ends_otherwise(watched: bool) -> None:
    it = Asked(watched)
    alarm = AlarmMonitor(it)  # type: ignore[arg-type]
    alarm.take_alarm("nan", 1, 6, 2.0, {"loss": "nan"})
    alarm.take_rollback(3.0, {"text": "no rank went back at step 7: there is no checkpoint yet"})
    assert it.ended is not watched and (it.ending.unwatched_error is None) is watched
    assert it.notes[-1].endswith("the run pauses" if watched else "nobody watches, so the run ends")
