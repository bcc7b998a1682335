"""Tests the exchange of used parameters: flags ("hands") and agreement; ranks are threads of one process."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.laws.dynamic_models import CASES, WIDTH, Batch, Dynamic, freeze_b, layers, pull, reference, through, two
from tests.ranks import experiment, run
from workbench.compressors import TopK
from workbench.engine.control.unused_flags import UnusedFlags
from workbench.host.sharding.parameter_usage import restrict_optimizer
from workbench.settings import Change
from workbench.sim.clock.world import UnusedFlags as VirtualFlags
from workbench.strategies import DDP, ByteScheduler, LocalSGD, ZeRO1

SGD = partial(torch.optim.SGD, lr=0.1)


def test_other_ranks_see_a_raised_hand_only_in_its_step(tmp_path: Path) -> None:
    one, other = (UnusedFlags(tmp_path / "hands", place, 2) for place in range(2))
    assert not other.raised_in(0, range(2), None)
    one.raise_in(3, 1)
    assert other.raised_in(3, range(2), None) and not other.raised_in(4, range(2), None)
    assert not other.raised_in(3, [1], None) and not other.raised_in(2, range(2), None)
    one.close()
    other.close()


def test_a_raised_hand_counts_from_its_first_bucket_on(tmp_path: Path) -> None:
    virtual: dict[int, tuple[int, int]] = {}
    for hands in (UnusedFlags(tmp_path / "hands", 0, 1), VirtualFlags(virtual, 0)):
        hands.raise_in(3, 2)
        hands.raise_in(3, 5)
        assert [hands.raised_in(3, [0], bucket) for bucket in (0, 1, 2, 5, None)] == [False, False, True, True, True]
        hands.raise_in(3, 0)
        assert hands.raised_in(3, [0], 0) and not hands.raised_in(4, [0], None)
        hands.raise_in(4, 7)
        assert not hands.raised_in(3, [0], None) and not hands.raised_in(4, [0], 6) and hands.raised_in(4, [0], 7)
        hands.close()


def test_only_hides_the_other_parameters_of_an_optimizer_for_a_while() -> None:
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([a, b], lr=1.0)
    with restrict_optimizer(optimizer, [b]):
        assert optimizer.param_groups[0]["params"] == [b]
    assert optimizer.param_groups[0]["params"] == [a, b]


@pytest.mark.ranks
def test_an_unused_parameter_stays_unchanged_under_a_compressor() -> None:
    case = CASES["unused for ever"]
    began = dict(case.model().named_parameters())["b"]
    for session in run(experiment(2, 6, task=case.task(), compressor=TopK.usual())):
        assert torch.equal(session.model.b, began)


@pytest.mark.ranks
def test_ranks_only_exchange_used_parameters_in_steps_with_an_unused_one() -> None:
    for name, steps in (("all used", []), ("unused later", [3, 4, 5])):
        session = run(experiment(2, 6, task=CASES[name].task()))[0]
        assert [step for step, what, _ in session.record.comm() if what == "all_reduce used"] == steps


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), ZeRO1()], ids=str)
def test_a_parameter_that_one_rank_unfreezes_is_trained_on_all_ranks(strategy: DDP | ZeRO1) -> None:
    def rule(model: object, batch: object) -> torch.Tensor:
        model.b.requires_grad_(batch.rank == 1 and batch.index >= 2)  # type: ignore[attr-defined]
        return pull(model.a, batch) + pull(model.b, batch)  # type: ignore[attr-defined,arg-type]

    case = Dynamic(two, rule, SGD, freeze_b)
    right = reference(case, 2)
    for session in run(experiment(2, 6, task=case.task(), strategy=strategy)):
        torch.testing.assert_close(session.model.b.detach(), right["b"])


@pytest.mark.ranks
def test_a_parameter_unused_under_ddp_is_trained_by_the_next_strategy() -> None:
    case = CASES["used later"]
    sessions = run(experiment(2, 6, task=case.task()), Change(2, "strategy", LocalSGD(every=1)))
    moved = sessions[0].model.b.detach()
    assert not torch.equal(moved, dict(case.model().named_parameters())["b"])
    assert torch.equal(moved, sessions[1].model.b)


@pytest.mark.ranks
def test_an_update_by_bucket_agrees_with_a_rank_whose_backward_still_runs() -> None:
    """Rank 0 lacks the gradient of b, the last bucket, and its backward sleeps after the other buckets are under way.

    Rank 1 completes their exchange first, because its forward reads them before b.
    """

    def rule(model: Any, batch: Batch) -> Tensor:
        start = torch.zeros(1, requires_grad=True)
        asleep = start.clone()  # the first node of the graph is the last of the backward
        if batch.rank == 0:
            asleep.register_hook(lambda grad: time.sleep(0.2))
        loss = asleep.sum() + pull(model.a, batch) + through(model, batch)
        return loss + pull(model.b, batch) if batch.rank == 1 else loss

    case = Dynamic(lambda: {"a": torch.zeros(WIDTH, WIDTH), "b": torch.zeros(WIDTH, WIDTH), **layers()}, rule, SGD)
    right = reference(case, 2)
    for session in run(experiment(2, 6, task=case.task(), strategy=ByteScheduler()), within=30.0):
        assert [what for _, what, _ in session.record.comm()].count("all_reduce used") == 6  # once for each backward
        for name, p in session.model.named_parameters():
            torch.testing.assert_close(p.detach(), right[name])
