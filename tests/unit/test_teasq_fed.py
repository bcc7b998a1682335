"""Tests TEASQ-Fed on real ranks: clients with their own data, equal state at both ends, live switches."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
import torch

from tests.ranks import batch, experiment, run
from tests.sim.virtual import samples
from workbench import simulate
from workbench.fabric import Slow
from workbench.host.memory.batches import BatchReader
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import StrategyError
from workbench.settings import Change
from workbench.strategies import TEASQFed
from workbench.tasks import Digits

pytestmark = pytest.mark.ranks


def test_the_servers_copy_of_a_rank_is_bit_identical() -> None:
    sessions = run(experiment(3, 6, strategy=TEASQFed(), pace=2.0).set("faults", (Slow(rank=1, factor=3.0),)))
    server = sessions[0].state.memory
    for rank, session in enumerate(sessions):
        for bucket in session.layout.list_params():
            held = session.state.memory.flat("known", bucket)
            assert torch.equal(held, server.flat(f"sent {rank}", bucket)) and bool(held.any())
    assert sessions[0].state.version == 3 * 6 // 2 and sessions[0].state.running == 0


def test_it_is_changed_and_switched_off_live() -> None:
    wanted = [(3, "strategy.density", 0.5), (6, "strategy.clients", 3), (9, "bucket_mb", 0.02), (12, "strategy", "DDP")]
    sessions = run(experiment(3, 15, strategy=TEASQFed(local=1)), *(Change(*change) for change in wanted))
    assert not sessions[0].record.noted("refused") and len(sessions[0].record.noted("change")) == 4
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    for s in sessions:
        drawn = s.training.batches.next_batch()[0]
        assert any(torch.equal(drawn, batch(s.rank.id, k, 0)[0]) for k in range(64)), "its own data again"


def test_clients_have_disjoint_shares_of_the_data_and_continue_in_them() -> None:
    def data(rank: int, ranks: int, batch: int, seed: int) -> list[tuple[int, int, int]]:
        return [(rank, ranks, k) for k in range(3)]

    batches = BatchReader(data, 1, 2, "cpu")
    batches.restart_reading(4, 0, 0)
    got = [batches.next_batch()]
    for client in (0, 1, 0, 1):
        batches.select_client(client, 2)
        got.append(batches.next_batch())
    batches.select_client(0, 1)
    got.append(batches.next_batch())
    assert got == [(1, 2, 0), (2, 4, 0), (3, 4, 0), (2, 4, 1), (3, 4, 1), (1, 2, 1)]
    with pytest.raises(StrategyError, match="client 2 of 2: there are 0 to 1"):
        batches.select_client(2, 2)


def test_it_learns_from_clients_with_different_digits() -> None:
    task = Digits(width=8, hidden=32, shards="dirichlet", alpha=0.1)
    chosen = TEASQFed(clients=2, local=8, cache=2)
    e = experiment(2, 48, task=task, strategy=chosen, bucket_mb=1.0, lr=3e-3, eval_every=48, pace=5.0)
    first, last = samples(simulate(e, real=True), "held_out", 0)  # real ranks under load drift apart
    assert last < 1.0 < 2.2 < first, "of log(10) = 2.3, though each client sees but a few digits"


@pytest.mark.parametrize(("share", "clients", "ranks"), [(0.1, 3, 10), (0.07, 10, 10), (0.25, 2, 6), (0.01, 2, 4)])
def test_no_more_clients_work_at_once_than_the_share_allows(share: float, clients: int, ranks: int) -> None:
    """0.1 * 3 * 10 is above 3 in floating point."""
    chosen = TEASQFed(share=share, clients=clients, local=1)
    run = simulate(experiment(ranks, 6, strategy=chosen, pace=5.0))
    assert max(samples(run, "active", 0)) == ceil(Fraction(str(share)) * clients * ranks)
