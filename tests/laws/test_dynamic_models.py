"""The law of dynamic models: what its reference says of models that can be computed by hand."""

from __future__ import annotations

import torch

from tests.laws.dynamic_models import CASES, Batch, average_gradients, batches, reference


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
