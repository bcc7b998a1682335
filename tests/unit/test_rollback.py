"""Tests the state a rank returns to when a step cannot end: exactly the old one, with or without a copy."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import live, shipped
from workbench.experiment import Experiment
from workbench.host.elastic.recovery_sources import has_parts
from workbench.host.elastic.rollback import Rollback, has_final_update
from workbench.host.placement.optimizer_slots import read_slots
from workbench.strategies import DDP, LocalSGD, Strategy
from workbench.tasks import Digits


class Held:
    """A rank under way with the attributes that a Rollback reads."""

    def __init__(self, strategy: Strategy, on_death: str = "go on") -> None:
        from workbench.host.placement.parameter_layout import ParameterLayout
        from workbench.rank import Rank

        self.experiment = Experiment(task=Digits(), strategy=strategy, ranks=2, on_death=on_death).checked()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.layout = ParameterLayout(self.model, 1.0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.rank = Rank(0, 2)
        bucket = self.layout.list_params()[0]
        self.state = strategy.init(self.rank, self.layout.list_params())
        self.rank.memory.flat("residual", bucket).copy_(torch.randn(bucket.data.numel()))

    def use_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def train(self) -> None:
        self.model(torch.randn(8, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        found = {**self.model.state_dict(), **read_slots(self.layout, self.optimizer)}
        residual = self.rank.memory.buffers.get("residual", {})
        return {k: v.clone() for k, v in {**found, **{f"residual {k}": v for k, v in residual.items()}}.items()}


def spoil(run: Held) -> None:
    """Leaves the values that an interrupted exchange may leave behind."""
    run.train()
    for x in [*run.model.parameters(), *run.model.buffers(), *run.rank.memory.buffers["residual"].values()]:
        x.data.fill_(7)
    run.rank.memory.flat("made since", run.layout.list_params()[0]).fill_(1.0)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("steps", [0, 2], ids=["before the first step", "later"])
def test_an_interrupted_step_leaves_no_trace(steps: int) -> None:
    torch.manual_seed(3)
    run = Held(LocalSGD())
    rollback = Rollback(run)  # type: ignore[arg-type]
    for _ in range(steps):
        with rollback.guard_step():
            run.train()
    before = run.values()
    with pytest.raises(ConnectionError), rollback.guard_step():
        spoil(run)
        raise ConnectionError
    assert not same(run.values(), before)
    assert rollback.go_back() == 0
    assert same(run.values(), before)
    assert "made since" not in run.rank.memory.buffers
    assert rollback.go_back() == 0 and same(run.values(), before), "at a boundary there is nothing to take back"


def test_a_completed_step_is_kept() -> None:
    run = Held(LocalSGD())
    rollback = Rollback(run)  # type: ignore[arg-type]
    with rollback.guard_step():
        run.train()
    after = run.values()
    assert rollback.go_back() == 0 and same(run.values(), after)


def test_a_strategy_that_updates_last_keeps_its_update_without_a_copy() -> None:
    run = Held(DDP())
    rollback = Rollback(run)  # type: ignore[arg-type]
    model = sum(p.nbytes for p in run.model.parameters())
    with pytest.raises(ConnectionError), rollback.guard_step():
        rollback.note_update()
        run.train()
        raise ConnectionError
    after = run.values()
    assert rollback.go_back() == 1 and same(run.values(), after)
    assert rollback.nbytes == model, "the residual, and nothing else"


def test_before_the_last_update_only_the_residual_is_restored() -> None:
    run = Held(DDP())
    rollback = Rollback(run)  # type: ignore[arg-type]
    before = run.values()
    with pytest.raises(ConnectionError), rollback.guard_step():
        for x in run.rank.memory.buffers["residual"].values():
            x.fill_(9)
        raise ConnectionError
    assert rollback.go_back() == 0 and same(run.values(), before)


def test_an_interrupted_change_is_undone_under_every_strategy() -> None:
    run = Held(DDP())
    rollback = Rollback(run)  # type: ignore[arg-type]
    run.train()
    before, was, optimizer = run.values(), run.experiment, run.optimizer
    with pytest.raises(ConnectionError), rollback.guard_step(changes=True):
        run.experiment = run.experiment.set("bucket_mb", 0.01)
        run.layout.resize_buckets(0.01)
        spoil(run)
        run.use_optimizer(torch.optim.SGD(run.model.parameters(), 0.1))
        raise ConnectionError
    assert rollback.go_back() == 0
    assert run.experiment is was and run.optimizer is optimizer and len(run.layout.buckets) == 1
    assert same(run.values(), before)


def test_nothing_is_copied_if_the_run_ends_with_a_lost_rank() -> None:
    run = Held(LocalSGD(), on_death="end")
    rollback = Rollback(run)  # type: ignore[arg-type]
    with rollback.guard_step():
        run.train()
    assert rollback.nbytes == 0


LAST = [name for name, cls in sorted(shipped(Strategy).items()) if has_final_update(cls()) and not cls().opaque]


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAST)
def test_strategies_that_claim_to_update_last_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No parameter changes before the update of all parameters, and no exchange follows it."""
    from workbench.engine.compute.host import Host
    from workbench.engine.compute.pass_timer import PassTimer

    strategy = shipped(Strategy)[name]()
    e = Experiment(task=Digits(), strategy=strategy, ranks=2, steps=6, eval_every=0, on_death="go on").checked()
    assert not has_parts(e)
    broken: list[str] = []
    perform, closes, updated = Host.perform_op, PassTimer.close_step, threading.local()

    def watched(self: Any, op: Any) -> Any:
        model = self.parts.model
        versions = [p._version for p in model.parameters()]
        value = perform(self, op)
        if op.verb == "update":
            updated.here = True
        elif op.verb not in ("do", "drive", "stand"):
            if versions != [p._version for p in model.parameters()]:
                broken.append(f"{op.verb} writes parameters")
            if getattr(updated, "here", False) and op.verb in ("start", "wait", "send", "recv", "all_reduce"):
                broken.append(f"{op.verb} after the update")
        return value

    def closed(self: Any, alarm: Any) -> None:
        updated.here = False
        closes(self, alarm)

    monkeypatch.setattr(Host, "perform_op", watched)
    monkeypatch.setattr(PassTimer, "close_step", closed)
    sessions = live(e)
    assert all(s.join(100) for s in sessions) and [s.phase for s in sessions] == ["done"] * 2
    assert not broken


def test_without_a_copy_a_step_can_be_undone_but_not_a_change() -> None:
    run = Held(DDP(), on_death="end")
    run.rank.memory.clear()
    rollback = Rollback(run)  # type: ignore[arg-type]
    assert rollback.is_free and not rollback.is_wanted
    before = run.values()
    with pytest.raises(ConnectionError), rollback.guard_step():
        raise ConnectionError
    assert rollback.go_back() == 0 and same(run.values(), before) and not rollback.open and rollback.nbytes == 0
    with rollback.guard_step(changes=True):
        assert rollback.open
    with pytest.raises(ConnectionError), rollback.guard_step(changes=True):
        raise ConnectionError
    assert rollback.open, "half a change cannot be taken back"


@pytest.mark.parametrize("strategy", [LocalSGD(), DDP()], ids=["writes between exchanges", "with a residual"])
def test_only_a_run_that_survives_losses_makes_the_needed_copy(strategy: Strategy) -> None:
    run = Held(strategy, on_death="end")
    rollback = Rollback(run)  # type: ignore[arg-type]
    assert not rollback.is_free and not rollback.is_wanted
    with rollback.guard_step():
        assert rollback.open
    assert not rollback.open
    run.experiment = run.experiment.set("on_hang", "evict")
    with rollback.guard_step():
        assert rollback.is_wanted and not rollback.open and rollback.nbytes
