"""Checks that both hosts run the same functions for a step and a change, as docs/project/one_step.md states."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.piped import piped
from tests.ranks import experiment, run
from tests.sim.insides import simulated
from workbench import Change, Fabric, Link, Pipeline, Whole
from workbench.engine.rank.training import RankTraining as Real
from workbench.fabric import Slow
from workbench.host.loop.rank_loop import RankLoop
from workbench.host.reconfigure import changes
from workbench.sim.rank.session import Session as Virtual


@pytest.mark.parametrize(
    "rule",
    [
        "train_from_start",
        "check_ended",
        "make_due_changes",
        "make_step",
        "execute_change",
        "is_asynchronous",
        "due_count",
    ],
)
def test_both_hosts_inherit_the_same_rules(rule: str) -> None:
    """A host may add something before or after with `super()`, but has no version of its own."""
    for host in (Real, Virtual):
        own = vars(host).get(rule)
        assert issubclass(host, RankLoop)
        assert own is None or "super" in own.__code__.co_names or "__class__" in own.__code__.co_freevars


# The rules of a rank's loop and their only place: the file, and the functions that both hosts run.
RULES = {
    "a life": (
        "host/loop/rank_loop.py",
        "place_state train_from_start make_due_changes make_step evaluate_model mark_buckets",
    ),
    "a change": (
        "host/reconfigure/changes.py",
        "execute_change apply_experiment _switch_strategy take_role arrange_mesh mark_idle_faults",
    ),
    "who waits for a meeting": ("host/loop/asynchronous.py", "is_idle"),
    "a hand-over": ("host/transfer/handover.py", "consolidate_state spread_state require_agreement"),
    "may it be switched": ("host/reconfigure/validation.py", "require_trainable"),
    "a switch of partition": ("host/transfer/repartition.py", "repartition_state"),
    "what is moved": ("host/placement/move_state.py", "move_state"),
    "what compression left unsent": ("host/transfer/residual.py", "change_compressor"),
    "the learning rate": ("host/core/learning_rate.py", "compute_rate change_factor"),
    "clipping": ("host/placement/canonical_state.py", "clip_gradients"),
    "a loss that is no number": ("host/observe/non_finite.py", "check_forward check_step_loss"),
    "evaluation": ("host/observe/held_out_numbers.py", "compute_numbers compute_distance"),
    "memory": ("host/memory/memory_account.py", "begin_step note_forward measure_backward end_step"),
    "a pipeline's messages": ("host/passes/pipelining.py", "run_batch"),
    "a pipeline's evaluation": ("host/passes/pipelining.py", "evaluate_pipeline _send_output _receive_output"),
    "measuring": ("host/observe/compression_error.py", "measure_step"),
    "a pace": ("fabric/pace.py", "lasts"),
    "faults": ("fabric/load.py", "stretch choke"),
    "a port": ("fabric/load.py", "port_seconds"),
    "a message at ports": ("fabric/load.py", "message_seconds leaves comes"),
}


def ran(act: Callable[[], object]) -> set[tuple[str, str]]:
    """Returns (file below workbench/, function) of all functions that `act` runs, also on new threads."""
    seen: set[Any] = set()

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {(code.co_filename.rpartition("workbench/")[2], code.co_name) for code in seen}


@pytest.mark.ranks
def test_every_rule_has_one_place_and_both_hosts_run_it() -> None:
    fabric = Fabric(link=Link(bandwidth=1000.0), faults=(Slow(rank=1, factor=1.1),))
    e = piped(4, 11, eval_every=4, clip=1.0, lr_warmup=3, measure_every=2, pace=2.0, fabric=fabric)
    changes = [  # AsyncServer is last, because there a rank on a busy machine may pass all remaining steps
        Change(2, "compressor", "TopK"),
        Change(3, "compressor", "Dense"),
        Change(3, "partition", Pipeline()),
        Change(5, "partition", Whole()),
        Change(6, "strategy", "Gossip"),
        Change(8, "strategy", "LocalSGD"),
        Change(9, "strategy", "AsyncServer"),
    ]
    real, virtual = ran(lambda: run(e, *changes)), ran(lambda: simulated(e, *changes))
    both = real & virtual
    assert {rule: file for rule, (file, names) in RULES.items() if {(file, n) for n in names.split()} - both} == {}


def test_both_hosts_make_a_change_by_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    plain = changes.execute_change

    async def obey(host: object, change: Change) -> None:
        seen.append((type(host).__module__, change.path))
        await plain(host, change)  # type: ignore[arg-type]

    monkeypatch.setattr(changes, "execute_change", obey)
    e, change = experiment(1, 3, pace=1.0), Change(1, "lr", 0.5)
    run(e, change)
    simulated(e, change)
    assert seen == [("workbench.engine.rank.training", "lr"), ("workbench.sim.rank.session", "lr")]
