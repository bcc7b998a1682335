"""Checks that both hosts name a batch without rows and an optimizer that needs a closure."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ranks import batch, experiment, live, run, toy
from tests.unit.test_not_finite import came, following
from workbench import simulate
from workbench.experiment.non_finite_rules import NO_ROWS
from workbench.host.observe.non_finite import has_no_rows
from workbench.settings import KnobError


def no_rows(rank: int, ranks: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Returns data in which rank 1's first batch is empty."""
    drawn = [batch(rank, step, seed) for step in range(64)]
    if rank == 1:
        drawn[0] = (drawn[0][0][:0], drawn[0][1][:0])
    return drawn


def test_both_hosts_report_a_batch_without_rows() -> None:
    e = experiment(2, 3, task=toy(data=no_rows), pace=2.0)
    (simulated_, *_) = [detail for _, _, detail in simulate(e, real=True).details("nan")]
    assert (simulated_["rank"], simulated_["why"]) == (1, NO_ROWS)
    sessions = run(replace(e, on_nan="skip"))
    said = [json.loads(mark[3]) for s in sessions for mark in s.record.noted("nan")]
    assert NO_ROWS in [one["why"] for one in said]


def test_the_error_of_an_empty_batch_suggests_at_least_one_row() -> None:
    it = following("stop", False)
    came(it, 1, 0, 1.0, "nan", loss="nan", layer="", why=NO_ROWS)
    text = it.ending.unwatched_error["text"]
    assert "the loss is nan (the batch has no rows)" in text and "give every rank at least 1 row" in text
    assert "learning rate" not in text


def test_a_batch_without_rows_is_found_however_it_is_nested() -> None:
    assert has_no_rows({"x": [torch.zeros(0, 3)]})
    assert not has_no_rows([torch.zeros(1, 0), torch.tensor(1.0), "text"])


def test_both_hosts_refuse_an_optimizer_that_needs_a_closure() -> None:
    e = experiment(2, 3, task=toy(optimizer=torch.optim.LBFGS), pace=2.0)
    with pytest.raises(KnobError, match=r"optimizer=LBFGS: it computes the loss several times") as refusal:
        simulate(e, real=True)
    for session in live(e):
        assert session.join(60.0) and session.error is not None
        assert str(refusal.value) in session.error["text"]
