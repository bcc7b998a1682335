"""Tests BetweenSites against explicit sums: whole inside a site, compressed between sites."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, weights
from tests.sim.virtual import comm
from workbench import simulate
from workbench.compressors import DGC, BetweenSites, Dense, ErrorFeedback, TopK
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Memory
from workbench.settings import KnobError


def drawn(p: int, n: int = 200) -> torch.Tensor:
    return torch.randn(p, n, generator=torch.Generator().manual_seed(3))


def largest(x: torch.Tensor, k: int) -> torch.Tensor:
    keep = torch.zeros_like(x)
    places = x.abs().topk(k).indices
    keep[places] = x[places]
    return keep


@pytest.mark.parametrize(("p", "site"), [(4, 2), (5, 2), (6, 3), (3, 2), (7, 3)])
def test_each_sites_sum_is_compressed_once(p: int, site: int) -> None:
    g = drawn(p)
    found = exchange(BetweenSites(of=TopK(density=0.05), site=site), g, placed((200,)), [Memory(r) for r in range(p)])
    by_hand = sum(largest(g[at : at + site].sum(0), 10) for at in range(0, p, site))
    torch.testing.assert_close(found, by_hand.double(), rtol=1e-5, atol=1e-5)


def test_on_one_site_nothing_is_compressed() -> None:
    g = drawn(4)
    found = exchange(BetweenSites(site=4), g, placed((200,)), [Memory(r) for r in range(4)])
    torch.testing.assert_close(found, g.sum(0).double(), rtol=1e-5, atol=1e-5)


def test_a_sites_residual_is_on_its_first_rank_and_nothing_is_lost() -> None:
    g, memories, sent = drawn(5), [Memory(r) for r in range(5)], torch.zeros(200, dtype=torch.float64)
    feeding = ErrorFeedback(of=BetweenSites(of=TopK(density=0.05), site=2))
    for _ in range(6):
        sent += exchange(feeding, g, placed((200,)), memories)
    residuals = [m.buffers["residual"]["p0"].double() for m in memories]
    torch.testing.assert_close(sent + sum(residuals), 6 * g.sum(0).double(), rtol=1e-4, atol=1e-4)
    assert [bool(r.any()) for r in residuals] == [True, False, True, False, True]


@pytest.mark.ranks
def test_real_ranks_and_virtual_ranks_exchange_the_same_in_the_same_groups() -> None:
    e = experiment(4, 4, compressor=ErrorFeedback(of=BetweenSites()), pace=3.0,
                   fabric=Fabric(link=Link(bandwidth=80.0), site=2, between_bandwidth=8.0))  # fmt: skip
    virtual, sessions = simulate(e, real=True), run(e)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    for s in sessions:
        assert sorted(comm(virtual, s.rank.id)) == sorted(s.record.comm())
    names = [name for _, name, _ in sessions[1].record.comm()]
    assert names and all("in site of 2 [0, 1]" in name for name in names)
    assert any("in leaders of sites of 2 [0, 2]" in name for _, name, _ in sessions[0].record.comm())


@pytest.mark.ranks
def test_uncompressed_between_sites_it_equals_dense() -> None:
    plain, sites = (run(experiment(4, 6, compressor=c))[0] for c in (Dense(), BetweenSites(of=Dense())))
    torch.testing.assert_close(weights(sites), weights(plain), rtol=1e-5, atol=1e-6)


def test_codecs_with_momentum_are_refused_between_sites() -> None:
    with pytest.raises(KnobError, match="the sum of a site has none; use TopK"):
        Experiment().set("compressor", BetweenSites(of=DGC()))
