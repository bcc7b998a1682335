"""Tests that replicas of one run may end their last steps at different times."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from tests.piped import batches, deep, held_out, loss, piped
from tests.ranks import run, toy
from workbench.engine.control import peers
from workbench.engine.device import gloo
from workbench.partitions import Partition, Pipeline, Whole
from workbench.strategies import HierarchicalLocalSGD, LocalSGD, Strategy

RANKS, STEPS, GRACE = 4, 6, 0.2
SLOW = 2 * GRACE  # additional seconds of each step of a slow rank


def slow_on(ranks: set[int]) -> Any:
    """A task with slower batches on some replicas."""
    rows = torch.cat([x for rank in ranks for x, _ in batches(rank, RANKS, 0)])

    def wait(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if (pair[0][0] == rows).all(dim=1).any():
            time.sleep(SLOW)
        return loss(model, pair)

    return toy(model=deep, data=batches, evaluate=held_out, loss=wait)


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "partition", "slow"), [
    (LocalSGD(every=100), Pipeline(micros=1), {1}),
    (HierarchicalLocalSGD(every=100, group=2), Whole(), {3}),
], ids=["pipeline", "groups"])  # fmt: skip
def test_a_replica_that_ends_first_does_not_end_other_replicas(
    strategy: Strategy, partition: Partition, slow: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "LATE_MESSAGE_SECONDS", GRACE)
    monkeypatch.setattr(gloo, "GONE_PEER_TIMEOUT", GRACE)
    sessions = run(piped(RANKS, STEPS, strategy=strategy, partition=partition, task=slow_on(slow)))
    assert [s.rank.step for s in sessions] == [STEPS] * RANKS
