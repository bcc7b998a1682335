"""Checks that plain torch, real ranks and the simulator end with the same parameters of dynamic models."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.laws.dynamic_models import CASES, STEPS, Batch, Dynamic, average_gradients, batches, reference
from tests.ranks import experiment, make_fitting, run, shipped
from tests.thinned import thinned
from workbench import Checkpoint, simulate
from workbench.experiment import Experiment
from workbench.rank import StrategyError
from workbench.strategies import DDP, Strategy, TorchDDP

EXACT = {name: cls for name, cls in shipped(Strategy).items() if cls.exact}
RANKS = 2


def suits(case: Dynamic, name: str) -> bool:
    """Whether the strategy can train the model: only DDP accumulates."""
    follows_writes = name != "TorchFSDP" and not EXACT[name].offloads
    return (case.accumulate == 1 or name == "DDP") and (follows_writes or not case.writes)


PAIRS = [(case, name) for case, name in product(CASES, EXACT) if suits(CASES[case], name)]
# The simulator does not have torch's own exchange.
SIMULATED = [(case, name) for case, name in PAIRS if not EXACT[name].opaque]


def chosen(case: Dynamic, name: str, **rest: Any) -> Experiment:
    strategy = DDP(accumulate=case.accumulate) if case.accumulate > 1 else make_fitting(EXACT[name], RANKS)
    if name == "TorchDDP":
        strategy = TorchDDP(find_unused_parameters=case.find_unused)
    return experiment(RANKS, STEPS, **{"task": case.task(), "strategy": strategy, **rest})


def require_same(case: Dynamic, found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, **case.tolerance, msg=lambda said, name=name: f"{name}: {said}")


def ended(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "name"), thinned(PAIRS, of=16, long=8))
def test_real_ranks_end_with_the_parameters_of_plain_torch(case: str, name: str) -> None:
    right = reference(CASES[case], RANKS)
    for session in run(chosen(CASES[case], name), within=60.0):
        require_same(CASES[case], ended(session.model), right)


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "name"), thinned(SIMULATED, of=32, long=16))
def test_simulated_ranks_end_with_the_parameters_of_plain_torch(case: str, name: str, tmp_path: Path) -> None:
    e = chosen(CASES[case], name, save_every=STEPS, pace=5.0)
    simulate(e, real=True, checkpoints=tmp_path)
    (made,) = tmp_path.iterdir()
    require_same(CASES[case], ended(Checkpoint.open(made).model(CASES[case].task())), reference(CASES[case], RANKS))


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ZeRO3", "HSDP", "HpZ"])
def test_simulated_shards_keep_what_the_model_writes_into_parameters(name: str, tmp_path: Path) -> None:
    case = CASES["a parameter written in each forward"]
    simulate(chosen(case, name, save_every=STEPS, pace=5.0), real=True, checkpoints=tmp_path)
    (made,) = tmp_path.iterdir()
    require_same(case, ended(Checkpoint.open(made).model(case.task())), reference(case, RANKS))


@pytest.mark.ranks
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.writes])
@pytest.mark.parametrize("name", [name for name, cls in EXACT.items() if cls.offloads])
def test_both_hosts_refuse_writes_into_parameters_whose_copy_is_stepped(name: str, case: str) -> None:
    e = chosen(CASES[case], name, pace=2.0)
    said = "parameter .: the model has written into it, and the strategy updates a copy on the host or the disk"
    with pytest.raises(StrategyError, match=said):
        simulate(e, real=True)
    with pytest.raises(AssertionError, match=said):
        run(e, within=60.0)


def test_the_law_has_at_least_25_models() -> None:
    assert len(CASES) >= 25


def test_reference_leaves_a_parameter_that_no_rank_uses_where_it_began() -> None:
    case = CASES["unused for ever"]
    began, ended = dict(case.model().named_parameters()), reference(case, 2)
    assert torch.equal(began["b"], ended["b"])
    assert not torch.equal(began["a"], ended["a"])


def test_reference_counts_a_rank_that_did_not_use_a_parameter_as_zero() -> None:
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    used.grad = torch.full((2,), 4.0)
    average_gradients((used, unused))
    assert used.grad.tolist() == unused.grad.tolist() == [2.0, 2.0]


def test_ranks_are_given_different_batches() -> None:
    first, second = (batches(rank, 2, 0)[0] for rank in (0, 1))
    assert isinstance(first, Batch)
    assert not torch.equal(first.x, second.x)
