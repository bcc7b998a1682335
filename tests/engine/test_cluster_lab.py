"""Tests a lab on real engines with a light session: running, live changes, failures and records.

One cluster serves all tests of this file, because a start takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.labs import apart
from tests.waiting import until
from workbench.cluster.api import launch
from workbench.cluster.processes.lab_place import ClusterError, LabPlace, alive
from workbench.cluster.run.run_controller import RunController
from workbench.cluster.run.run_waiting import wait_for_stop
from workbench.cluster.transport.row_encoding import RowBatch
from workbench.compressors import Compressor
from workbench.experiment import Experiment
from workbench.lab import Lab, RankError
from workbench.settings import Change, KnobError

pytestmark = pytest.mark.engine
HERE = str(Path(__file__).parent)
RAISES, RAISES_EVERYWHERE, TALKS, NAN, BLOCKS, STUCK = 1, 2, 3, 4, 5, 6  # as in test_cluster_fake


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with apart(tmp_path_factory) as patch:
        patch.syspath_prepend(HERE)
        patch.setattr(launch, "SESSION_CLASS", "test_cluster_fake:FakeSession")
        made = Lab(ranks=2, name="shared")
        yield made.wait(90)
        place = made.cluster.place
        started = place.read_state()["processes"]
        made.close()
        assert not [p for p in started if alive(p[:2])]
        assert not place.path.exists()


@pytest.fixture(autouse=True)
def _idle(lab: Lab) -> Iterator[None]:
    yield
    if lab.live:
        lab.stop()
        assert until(lambda: not lab.live)


def test_a_run_returns_its_complete_record(lab: Lab) -> None:
    run = lab.run(Experiment(steps=30))
    asked = run.epoch
    assert run.live and lab.run() is run
    assert run.wait(60) is run
    assert (run.state, run.live, lab.state, run.missing) == ("done", False, "idle", 0)
    for rank in (0, 1):
        mine = run.spans[run.spans["rank"] == rank]
        assert list(mine["step"]) == list(range(30))
    assert len(type(run).open(run.path).spans) == len(run.spans)
    assert asked <= run.epoch == type(run).open(run.path).epoch
    assert run.path.parent == launch.runs_dir() and "DDP" in run.path.name


def test_the_same_lab_again_is_the_same_lab(lab: Lab) -> None:
    before = lab.cluster.place.read_state()["processes"]
    assert Lab(ranks=2, name="shared") is lab
    assert lab.cluster.place.read_state()["processes"] == before


def test_another_number_of_ranks_is_refused_while_a_run_is_live(lab: Lab) -> None:
    lab.run(Experiment())
    with pytest.raises(ClusterError, match="a run is live there; stop it first"):
        Lab(ranks=3, name="shared")
    assert lab.live


def test_a_live_change_reports_the_step_it_applied_at(lab: Lab) -> None:
    lab.run(Experiment())
    assert until(lambda: lab.state == "running")
    began = time.monotonic()
    change = lab.set("bucket_mb", 2.0)
    assert change.wait(60) is change and change.refused is None
    took = time.monotonic() - began
    assert lab.experiment.bucket_mb == 2.0
    assert change.applied_at > 0 and change in lab.changes
    assert 0 < change.seconds < took + 0.1, "no more than a person has waited"
    assert "applied at step" in repr(change)


def test_running_the_cell_again_gives_the_run_under_way(lab: Lab) -> None:
    run = lab.run(Experiment(steps=10_000))
    lab.set("bucket_mb", 2.0).wait(60)
    assert lab.run(Experiment(steps=10_000)) is run and lab.run() is run
    with pytest.raises(ClusterError, match="a run is live; set its knobs"):
        lab.run(Experiment(steps=20))


def test_live_changes_are_checked_against_pending_ones(lab: Lab) -> None:
    lab.run(Experiment())
    lab.set("strategy", "LocalSGD")
    assert lab.set("strategy.every", 16).wait(60).applied_at is not None
    assert lab.experiment.strategy.every == 16


def test_an_invalid_live_change_is_refused_at_once_and_the_run_goes_on(lab: Lab) -> None:
    lab.run(Experiment())
    asked = len(lab.changes)
    with pytest.raises(KnobError, match=r"bucket_mb=-1: must be a number in \[0.01, 1024\] MB"):
        lab.set("bucket_mb", -1)
    with pytest.raises(KnobError, match="cannot change while a run is live"):
        lab.set("ranks", 1)
    assert lab.live and len(lab.changes) == asked


def test_a_live_change_that_the_ranks_refuse_raises_their_reason(lab: Lab) -> None:
    lab.run(Experiment())
    change = lab.set("lr", 99.0)
    with pytest.raises(KnobError, match="does not like it"):
        change.wait(60)
    assert lab.experiment.lr != 99.0


def test_a_change_before_a_run_applies_to_the_next_run(lab: Lab) -> None:
    was = lab.experiment.batch
    assert lab.set("batch", 5).applied_at == 0
    assert lab.experiment.batch == 5
    lab.set("batch", was)


def test_planned_changes_are_checked_before_anything_starts(lab: Lab) -> None:
    with pytest.raises(KnobError, match="no such knob"):
        lab.run(Experiment(), changes=[Change(3, "sped", 1)])
    assert not lab.live


@dataclass(frozen=True, kw_only=True)
class Mine(Compressor):
    """A compressor that only this file has."""

    async def reduce(self, rank: Any, bucket: Any, memory: Any) -> None:
        return None


def test_a_class_of_the_notebook_reaches_the_engines_before_its_name(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mine, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Mine", Mine, raising=False)
    lab.run(Experiment())
    assert lab.set("compressor", Mine()).wait(60).applied_at is not None


def test_pause_step_and_resume(lab: Lab) -> None:
    lab.run(Experiment())
    assert until(lambda: lab.state == "running")
    lab.pause()
    assert until(lambda: lab.state == "paused")
    lab.resume()
    assert until(lambda: lab.state == "running")


def test_pause_without_a_run_raises_cluster_error(lab: Lab) -> None:
    with pytest.raises(ClusterError, match="there is no run to pause"):
        lab.pause()


def test_cells_and_orders_work_while_it_trains(lab: Lab, tmp_path: Path) -> None:
    run = lab.run(Experiment())
    assert until(lambda: lab.state == "running")
    wait = f"while not __import__('os').path.exists({str(tmp_path / 'go')!r}): __import__('time').sleep(0.05)"
    busy = lab.view.execute(f"print('from a cell', workbench_session.rank)\n{wait}", block=False)
    try:
        lab.set("bucket_mb", 3.0).wait(60)
        lab.stop()
        assert until(lambda: not lab.live) and not busy.ready()
    finally:
        (tmp_path / "go").touch()
    busy.get(60)
    assert busy.stdout[1].strip() == "from a cell 1"
    assert run.state == "stopped"


def test_stop_reaches_a_rank_that_is_blocked(lab: Lab) -> None:
    run = lab.run(Experiment(seed=BLOCKS))
    assert until(lambda: lab.status[0]["step"])
    lab.stop()
    assert until(lambda: not lab.live) and run.state == "stopped"
    assert not run.details("torn"), "it was told, and not made to leave"


def test_a_run_waits_for_the_one_before_it_that_was_asked_to_stop(lab: Lab) -> None:
    first = lab.run(Experiment(steps=10_000))
    assert until(lambda: lab.status[0]["step"])
    lab.stop()
    second = lab.run(Experiment(steps=20))
    assert first.state == "stopped" and second is not first
    lab.abort()
    third = lab.run()
    assert second.state == "stopped" and third is not second
    assert third.wait(60).state == "done" and third.made == 20


def test_a_stop_that_takes_too_long_names_the_run_and_suggests_abort(lab: Lab) -> None:
    run = lab.run(Experiment(steps=10_000))
    assert lab._live is not None
    with pytest.raises(ClusterError, match=rf"{run.name} was asked to stop .* 0.1 s: .* lab.abort\(\)"):
        wait_for_stop(lab._live, patience=0.1)
    assert lab.live


def test_output_and_logs_of_ranks_are_recorded_by_rank(lab: Lab) -> None:
    run = lab.run(Experiment(seed=TALKS, steps=20))
    run.wait(60)
    said = {(d["stream"], d["text"].split(" (")[0]) for _, _, d in run.details("log", rank=1)}
    assert {("stdout", "hello from 1"), ("stderr", "to stderr"), ("log", "WARNING user: a log line")} <= said
    assert any(stream == "warning" and "UserWarning: a warning" in text for stream, text in said)


def test_the_same_error_on_all_ranks_raises_one_rank_error(lab: Lab) -> None:
    run = lab.run(Experiment(seed=RAISES_EVERYWHERE))
    with pytest.raises(RankError, match="ranks 0, 1, step 5, forward: ValueError: shapes do not fit") as caught:
        run.wait(60)
    assert caught.value.ranks == [0, 1] and len(caught.value.all) == 2
    assert lab.state == "failed" and run.state == "failed"
    assert any("shapes do not fit" in note for note in lab.notes)


def test_an_error_of_one_rank_is_distinguished_from_its_consequences(lab: Lab) -> None:
    text = r"rank 1, step 5, forward: ValueError: only rank 1.*rank 0 was freed"
    with pytest.raises(RankError, match=text) as caught:
        lab.run(Experiment(seed=RAISES)).wait(60)
    assert (caught.value.rank, caught.value.step, caught.value.op) == (1, 5, "forward")


def test_a_nan_loss_pauses_the_run_and_names_rank_and_step(lab: Lab) -> None:
    lab.run(Experiment(seed=NAN), on_nan="pause")
    assert until(lambda: lab.state == "paused")
    assert any("rank 1's loss was nan at step 5" in note for note in lab.notes)


def test_a_nan_loss_pauses_the_run_while_a_dashboard_watches(lab: Lab) -> None:
    lab.watchers.append(lambda: True)
    try:
        lab.run(Experiment(seed=NAN))
        assert until(lambda: lab.state == "paused")
    finally:
        lab.watchers.pop()


@pytest.mark.parametrize("on_nan", [None, "stop"])
def test_a_nan_loss_without_a_watcher_ends_the_run_with_an_error(lab: Lab, on_nan: Any) -> None:
    run = lab.run(Experiment(seed=NAN), on_nan=on_nan)
    with pytest.raises(RankError, match="rank 1, step 5: FloatingPointError: the loss is nan, and the run was ended"):
        run.wait(60)
    assert (lab.state, run.state, type(run).open(run.path).state) == ("failed", "failed", "failed")


def test_an_unknown_on_nan_value_raises_knob_error_with_the_choices(lab: Lab) -> None:
    with pytest.raises(KnobError, match="on_nan='explode': must be one of auto, pause, stop, skip"):
        lab.run(Experiment(), on_nan="explode")
    assert not lab.live


def test_an_experiment_that_cannot_be_pickled_raises_an_error(lab: Lab) -> None:
    from workbench.tasks import Task

    lock = threading.Lock()
    task = Task(model=lambda: lock, data=lambda *a: [], loss=lambda m, b: 0, optimizer=lambda p: None)
    with pytest.raises(ClusterError, match="cannot be sent to the engines"):
        lab.run(Experiment(task=task)).wait(60)
    assert lab.state == "failed"


def test_interrupting_a_wait_stops_the_run(lab: Lab) -> None:
    run = lab.run(Experiment())
    assert until(lambda: lab.state == "running")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert run.wait(60) is run
    assert run.state == "stopped"


def test_an_interrupt_elsewhere_leaves_the_run_alone(lab: Lab) -> None:
    lab.run(Experiment())
    assert until(lambda: lab.state == "running")
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(5)
    time.sleep(0.5)
    assert lab.state == "running"


def test_more_ranks_than_engines_are_refused(lab: Lab) -> None:
    with pytest.raises(KnobError, match=r"ranks=3: must be an integer in \[1, 2\]"):
        lab.run(Experiment(ranks=3))
    with pytest.raises(KnobError, match=r"ranks=3"):
        lab.set("ranks", 3)
    assert not lab.live


def test_the_repr_of_a_lab_describes_it_in_one_line(lab: Lab) -> None:
    lab.run(replace(Experiment(), steps=0))
    assert until(lambda: lab.state == "running")
    assert repr(lab).startswith("Lab 'shared': 2 ranks on 2 CPU engines, running DDP(accumulate=1) at step ")
    assert {"rank", "pid", "device", "state", "step", "busy"} <= set(lab.status[1])


def test_listening_costs_next_to_nothing(lab: Lab) -> None:
    lab.run(Experiment(steps=100)).wait(60)
    relay = lab.cluster.row_subscriber
    assert relay.errors == []
    assert 0 < relay.seconds < 1.0


def test_clients_without_keys_can_neither_read_nor_command_the_engines(lab: Lab) -> None:
    import zmq

    from workbench.cluster.transport.curve_keys import CurveKeys

    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        CurveKeys.make_pair().connect_socket(stranger, lab.cluster.engines[0].rpc_address)
        stranger.send_multipart([b'{"number": 1, "what": "status"}', b""])
        assert not stranger.poll(700)


def test_an_engine_refuses_an_unknown_request_in_a_sentence(lab: Lab) -> None:
    with pytest.raises(ClusterError, match="no handler for 'fly': it has another version of the workbench"):
        lab.cluster.rpc.ask_rank(0, "fly")


def test_private_files_are_private(lab: Lab) -> None:
    place: LabPlace = lab.cluster.place
    assert place.path.stat().st_mode & 0o077 == 0 and place.file.stat().st_mode & 0o077 == 0


def test_ranks_resend_rows_if_the_kernel_cannot_see_their_disk(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = launch.begin_sessions
    unseen = {"run_dir": "/nowhere/at/all"}
    monkeypatch.setattr(
        launch, "begin_sessions", lambda at, job, *rest, **more: begin(at, {**job, **unseen}, *rest, **more)
    )
    take, came, lost = RunController.take_batch, [], []

    def loses(live: RunController, batch: RowBatch) -> None:
        """Loses every second message of spans, so the lab has to request the rows."""
        came.append(batch.kind)
        if batch.kind == "spans" and came.count("spans") % 2:
            lost.append(batch)
        else:
            take(live, batch)

    monkeypatch.setattr(RunController, "take_batch", loses)
    run = lab.run(Experiment(steps=100))
    run.wait(60)
    assert lost
    assert len(type(run).open(run.path).spans) == len(run.spans) == 200


def test_a_second_interrupt_abandons_a_stuck_rank_and_the_next_run_gets_new_engines(lab: Lab) -> None:
    run = lab.run(Experiment(seed=STUCK))
    assert until(lambda: lab.state == "running")
    pids = [row["pid"] for row in lab.status]
    for seconds in (0.5, 2.0):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run.wait(60)
    assert until(lambda: not lab.live) and lab.state == "idle"
    assert lab.run(Experiment(steps=3)).wait(60).state == "done"
    assert not set(pids) & {row["pid"] for row in lab.status}


def test_a_dead_engine_fails_the_run_and_the_next_run_gets_new_engines(lab: Lab) -> None:
    run = lab.run(Experiment())
    assert until(lambda: lab.state == "running")
    victim = lab.status[1]["pid"]
    psutil.Process(victim).kill()
    with pytest.raises(RankError, match=rf"rank 1, step \d+.*its engine \(pid {victim}\) ended with signal SIGKILL"):
        run.wait(60)
    assert lab.state == "failed" and run.state == "failed"
    assert [d["type"] for _, _, d in type(run).open(run.path).details("error", rank=1)] == ["EngineDied"]
    assert lab.view.client.ids == [0]
    again = lab.run(Experiment(steps=5))
    assert again.wait(60).state == "done" and victim not in [s["pid"] for s in lab.status]
