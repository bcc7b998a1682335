"""Tests the exchange of used parameters: flags ("hands") and agreement; ranks are threads of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.laws.dynamic_models import CASES, Dynamic, freeze_b, pull, reference, two
from tests.ranks import experiment, run
from workbench.compressors import TopK
from workbench.engine.control.unused_flags import UnusedFlags
from workbench.host.sharding.parameter_usage import restrict_optimizer
from workbench.settings import Change
from workbench.strategies import DDP, LocalSGD, ZeRO1


def test_other_ranks_see_a_raised_hand_only_in_its_step(tmp_path: Path) -> None:
    one, other = (UnusedFlags(tmp_path / "hands", place, 2) for place in range(2))
    assert not other.raised_in(0, range(2))
    one.raise_in(3)
    assert other.raised_in(3, range(2)) and not other.raised_in(4, range(2)) and not other.raised_in(3, [1])
    one.close()
    other.close()


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

    case = Dynamic(two, rule, partial(torch.optim.SGD, lr=0.1), freeze_b)
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
