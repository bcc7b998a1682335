"""Checks that an error's cause is never lost, whatever its `__str__` does, wherever the code formats errors."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from tests.ranks import ended, experiment, live, mse, toy
from tests.waiting import until
from workbench.cluster.api import launch
from workbench.cluster.engines import engine_server
from workbench.cluster.engines.engine_server import EngineServer
from workbench.cluster.processes.lab_place import ClusterError
from workbench.cluster.processes.supervised_thread import SupervisedThread
from workbench.cluster.run.rank_errors import RankError
from workbench.cluster.run.run_changes import Changes
from workbench.cluster.run.run_controller import RunController
from workbench.cluster.transport.output_capture import OutputCapture
from workbench.cluster.transport.row_subscriber import RowSubscriber
from workbench.experiment import Experiment
from workbench.run import Run
from workbench.settings import KnobError
from workbench.settings.describe_error import MAX_TEXT_LENGTH, MAX_TRACEBACK_LENGTH, said, speaks, text_of, traceback_of


class Words(str):
    """A str subclass whose methods exit the process."""

    def __format__(self, how: str) -> str:
        raise SystemExit

    def __len__(self) -> int:
        raise SystemExit


class Evil(RuntimeError):
    """An error whose `__str__` acts by `how`."""

    def __init__(self, how: str = "exit") -> None:
        super().__init__(how)

    def __str__(self) -> str:
        match self.args[0]:
            case "exit":
                raise SystemExit(3)
            case "interrupt":
                raise KeyboardInterrupt
            case "no text":
                return 5  # type: ignore[return-value]
            case "long":
                return "head" + "x" * 100_000_000 + "tail"
            case "own text":
                return Words("mine")
            case "half a letter":
                return "a\ud800b"
        raise ValueError

    __repr__ = __str__


HOW = {
    "exit": "its text is not available: its __str__ raised SystemExit",
    "interrupt": "its text is not available: its __str__ raised KeyboardInterrupt",
    "no text": "its text is not available: its __str__ raised TypeError",
    "own text": "mine",
    "half a letter": "a\\ud800b",
}


@pytest.mark.parametrize("how", HOW)
def test_an_error_is_formatted_whatever_its_str_does(how: str) -> None:
    assert text_of(Evil(how)) == HOW[how] and type(text_of(Evil(how))) is str
    assert said(Evil(how)) == f"Evil: {HOW[how]}" and not speaks(Evil(how))
    assert said(ValueError()) == "ValueError" and speaks(ValueError("plain")) and not speaks(SystemExit("plain"))


def test_a_text_of_100_megabytes_keeps_its_start_and_end() -> None:
    text = text_of(Evil("long"))
    assert len(text) < 2 * MAX_TEXT_LENGTH + 100 and text.startswith("headxxx") and text.endswith("xxxtail")
    assert "99980008 characters omitted" in text
    try:
        raise Evil("long")
    except Evil as error:
        found = traceback_of(error)
    assert len(found) < MAX_TEXT_LENGTH + MAX_TRACEBACK_LENGTH + 100 and 'raise Evil("long")' in found


def test_the_name_of_a_class_is_read_without_its_metaclass() -> None:
    class Meta(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            raise SystemExit

    assert said(Meta("Odd", (RuntimeError,), {})("text")) == "Odd: text"


@pytest.mark.ranks
@pytest.mark.parametrize("how", [*HOW, "long"])
def test_a_rank_that_fails_names_the_cause(how: str) -> None:
    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        if threading.current_thread().name.startswith("rank 1"):
            raise Evil(how)
        return mse(model, pair)

    sessions = live(experiment(2, 4, task=toy(loss=loss)))
    ended(sessions)
    (cause,) = [s.error for s in sessions if s.error and not s.error["consequence"]]
    assert (cause["rank"], cause["type"], cause["op"]) == (1, "Evil", "forward")
    assert cause["text"] == HOW.get(how, cause["text"]) and "raise Evil(how)" in cause["traceback"]
    assert len(json.dumps(cause)) < 200_000 and sessions[1].phase == "failed"


@pytest.mark.ranks
def test_an_error_without_traceback_or_with_a_lost_peers_text_is_still_the_cause() -> None:
    class Stubborn(RuntimeError):
        def __setattr__(self, name: str, value: Any) -> None:
            if value is None:
                raise SystemExit
            super().__setattr__(name, value)

    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        if threading.current_thread().name.startswith("rank 1"):
            raise Stubborn("Connection closed by peer, and timed out")
        return mse(model, pair)

    sessions = live(experiment(2, 4, task=toy(loss=loss)))
    ended(sessions)
    found = RankError([{"t": 1.0 - s.rank.id, **s.error} for s in sessions if s.error])
    assert (found.rank, found.type, found.ranks, found.freed) == (1, "Stubborn", [1], [0])


def bench() -> EngineServer:
    """An engine's Bench without its sockets."""
    made = EngineServer.__new__(EngineServer)
    made.session, made.last_error, made.learned_classes = None, "", []
    return made


class Unpickled:
    def __reduce__(self) -> Any:
        return _raise, ("exit",)


def _raise(how: str) -> None:
    raise SystemExit(how)


@pytest.mark.parametrize("how", HOW)
def test_an_engines_connection_answers_with_the_error(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: EngineServer, blob: bytes) -> None:
        raise Evil(how)

    monkeypatch.setitem(EngineServer.HANDLERS, "hurry", fails)
    answer = json.loads(bench()._make_reply({"number": 3, "what": "hurry"}, b"")[0])
    assert answer == {"number": 3, "error": f"Evil: {HOW[how]}"}
    made = bench()
    made.report_rpc_error(Evil(how))
    assert made.last_error == f"Evil: {HOW[how]}"


def test_the_connection_answers_even_if_a_class_exits_while_unpickled() -> None:
    blob = cloudpickle.dumps(Unpickled())
    answer = json.loads(bench()._make_reply({"number": 3, "what": "learn"}, blob)[0])
    assert answer == {"number": 3, "error": "SystemExit: exit"}


def test_a_failed_start_is_reported_in_a_form_that_ipyparallel_can_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(job: Any, blob: bytes) -> None:
        raise Evil

    made = bench()
    made.begin_session = fails  # type: ignore[method-assign]
    monkeypatch.setattr(engine_server, "_server", made)
    with pytest.raises(RuntimeError, match="Evil: its text is not available: its __str__ raised SystemExit"):
        engine_server.begin_session({}, b"")


@pytest.mark.parametrize("error", [Evil("exit"), Evil("interrupt"), SystemExit(3)])
def test_a_waited_for_thread_survives_any_error(error: BaseException) -> None:
    over, looks, told = threading.Event(), [], []

    def look() -> None:
        looks.append(1)
        if len(looks) < 3:
            raise error

    it = SupervisedThread("steady", look, over, lambda e: told.append(said(e))).start()
    assert until(lambda: len(looks) > 3)
    over.set()
    assert it.join(60) and told == [said(error)] * 2


def following() -> RunController:
    return RunController(Run({}, live=True), Any, Changes(Experiment(ranks=2), []), "g")  # type: ignore[arg-type]


@pytest.mark.parametrize("how", HOW)
def test_a_run_ends_and_its_notes_have_the_cause(how: str) -> None:
    it = following()
    it.note_error(Evil(how))  # type: ignore[arg-type]
    it.end_run("failed", Evil(how))
    assert it.over.is_set() and it.notes[-1] == it.notes[0] == f"Evil: {HOW[how]}"


def test_a_value_that_cannot_be_pickled_is_reported_and_the_relay_goes_on() -> None:
    class Unsendable:
        def __reduce__(self) -> Any:
            raise Evil

    with pytest.raises(ClusterError, match="cannot be sent to the engines: Evil: its text is not available"):
        launch._pickle_experiment(Unsendable())
    relay = RowSubscriber.__new__(RowSubscriber)
    relay.errors = []
    relay._note_error(Evil())  # type: ignore[arg-type]
    assert relay.errors == [f"Evil: {HOW['exit']}"]


def test_a_model_that_fails_on_trial_is_refused_with_its_error() -> None:
    from tests.piped import batches, deep, held_out
    from workbench import simulate
    from workbench.partitions import Pipeline

    def loss(model: nn.Module, pair: Any) -> torch.Tensor:
        raise Evil

    task = toy(model=deep, data=batches, evaluate=held_out, loss=loss)
    with pytest.raises(KnobError, match="its text is not available: its __str__ raised SystemExit"):
        simulate(experiment(2, 2, task=task, partition=Pipeline(stages=2), pace=5.0), real=True)


def test_a_log_line_that_cannot_be_formatted_does_not_end_a_step() -> None:
    lines: list[tuple[str, str]] = []
    ends: list[str] = []

    def train() -> None:  # pytest's own handler would raise
        record = logging.LogRecord("user", logging.WARNING, "cell", 1, "%d examples", ("many",), None)
        captured._handler.emit(record)
        ends.append("well")

    with OutputCapture("rank ", lambda stream, text: lines.append((stream, text))) as captured:
        thread = threading.Thread(target=train, name="rank 0 training")
        thread.start()
        thread.join()
    assert ends == ["well"] and any("%d format" in text for _, text in lines)
