"""The laws of `make quick`, for every member: a small model on the simulator, without processes.

The tests find the members in their folders and check what they claim, without any name. Laws that need real ranks or
many steps are in test_strategies.py and test_compressors.py (`pytest -m ranks tests/laws -k NAME`).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from tests.laws.others import others
from tests.ranks import experiment, shipped
from tests.sim.virtual import comm, samples
from workbench import simulate
from workbench.compressors import Compressor, inside
from workbench.optimizers import Optimizer
from workbench.rank import Rank
from workbench.settings import knobs
from workbench.sim.teach import laws
from workbench.strategies import DDP, Strategy

STRATEGIES = {n: cls for n, cls in shipped(Strategy).items() if not cls.opaque}  # only the engine has opaque strategies
COMPRESSORS = shipped(Compressor)
FAMILIES = {"strategy": STRATEGIES, "compressor": COMPRESSORS, "optimizer": shipped(Optimizer)}
RANKS = 3


def claiming(claim: str, value: bool = True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [n for n, cls in STRATEGIES.items() if getattr(cls, claim) == value])


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_trains_and_the_ranks_agree_after_a_switch(name: str) -> None:
    assert laws.trains_and_is_left(STRATEGIES[name]) is None


@claiming("lockstep")
def test_lockstep_ranks_request_the_same_in_the_same_order_even_with_sizes_only(name: str) -> None:
    assert laws.asks_alike(STRATEGIES[name]) is None


@claiming("periodic", value=False)
def test_ranks_that_are_never_apart_are_equal_after_every_step(name: str) -> None:
    assert laws.never_apart(STRATEGIES[name]) is None or not STRATEGIES[name].lockstep


@claiming("exact")
def test_an_exact_strategy_equals_one_process_on_the_joined_batch(name: str) -> None:
    assert laws.one_process(STRATEGIES[name]) is None


@claiming("plain")
def test_a_plain_strategy_on_one_rank_equals_the_optimizer(name: str) -> None:
    assert laws.plain_alone(STRATEGIES[name]) is None


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("compressor", ["Dense", "TopK"])
def test_a_strategy_takes_a_compressor_or_refuses_it_with_a_reason(name: str, compressor: str) -> None:
    refused = laws.compresses_or_says_why_not(STRATEGIES[name], COMPRESSORS[compressor].usual())
    assert compressor != "Dense" or not refused


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_compressors_result_is_the_same_on_all_ranks(name: str) -> None:
    kept: set[str] = set()

    class Noting(DDP):
        """A DDP that records what compressors keep in memory."""

        async def step(self, rank: Rank, state: Any) -> None:
            await super().step(rank, state)
            kept.update(rank.memory.buffers, rank.memory.parts)

    done, found = laws.trained(Noting(), RANKS, 5, compressor=COMPRESSORS[name].usual())
    assert kept <= {named for one in inside(COMPRESSORS[name].usual()) for named in one.own}
    assert len(found) == RANKS and all(torch.equal(one, found[0]) for one in found)
    assert all(map(math.isfinite, samples(done, "loss", 0)))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_compressors_bytes_with_sizes_only_equal_those_with_tensors(name: str) -> None:
    e = experiment(RANKS, 4, compressor=COMPRESSORS[name](), pace=5.0)
    sent = {}
    for real in (True, False):
        sent[real] = Counter[int]()
        for step, _, nbytes in comm(simulate(e, real=real), 0):
            sent[real][step] += nbytes
    assert sent[False] and set(sent[False]) == set(sent[True])
    assert sent[False] == sent[True] or any(c.varies for c in inside(e.compressor)), "one that varies says so"


@pytest.mark.parametrize(("family", "name"), [(f, name) for f, every in FAMILIES.items() for name in every])
def test_every_knob_has_a_doc_and_another_allowed_value(family: str, name: str) -> None:
    chosen = experiment(4, 4, **{family: FAMILIES[family][name]()})
    for k in knobs(FAMILIES[family][name]):
        assert k.doc and k.doc == k.doc.strip(), k.name
        free = not k.live or k.kind is str or others(chosen, f"{family}.{k.name}", k)
        assert free, f"{k.name} can be nothing but {k.default}"
