"""Laws over all strategies that the package folder contains."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product

import pytest
import torch

from tests.laws.claims import AT_NEED, CODED, SENT, SILENT, TURNED, WHEN, dense
from tests.laws.codecs import KINDS
from tests.laws.others import others
from tests.ranks import experiment, make_fitting, run, shipped, train_joined, weights
from tests.thinned import thinned
from workbench import simulate
from workbench.compressors import Compressor
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change, KnobError, knobs
from workbench.strategies import Strategy

ALL = shipped(Strategy)
pytestmark = pytest.mark.ranks
every = pytest.mark.parametrize("name", ALL)


def claiming(claim: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [n for n, cls in ALL.items() if getattr(cls, claim)])


@every
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_strategy_ends_and_the_ranks_agree_after_a_switch(name: str, ranks: int) -> None:
    steps = 4 if ranks == 8 else 9
    sessions = run(
        experiment(ranks, steps + 1, strategy=make_fitting(ALL[name], ranks)), Change(steps, "strategy", "DDP")
    )
    assert {s.phase for s in sessions} == {"done"}
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


@claiming("lockstep")
def test_lockstep_ranks_request_the_same_operations_in_the_same_order(name: str) -> None:
    sessions = run(experiment(3, 9, strategy=make_fitting(ALL[name], 3)))
    orders = [[(step, re.sub(r" to \d+$", "", what), n) for step, what, n in s.record.comm()] for s in sessions]
    if ALL[name].opaque:
        orders = [sorted(order) for order in orders]
    assert orders[0] == orders[1] == orders[2]
    assert orders[0] or name == "TorchDDP"  # on threads, torch exchanges unseen


@claiming("plain")
def test_one_rank_equals_a_single_process(name: str) -> None:
    (session,) = run(experiment(1, 10, strategy=make_fitting(ALL[name], 1)))
    torch.testing.assert_close(weights(session), train_joined(1, 10), rtol=1e-6, atol=1e-7)


@claiming("exact")
@pytest.mark.parametrize("ranks", [2, 4])
def test_exact_strategies_equal_one_process_on_the_joined_batch(name: str, ranks: int) -> None:
    for session in run(experiment(ranks, 10, strategy=ALL[name]())):
        torch.testing.assert_close(weights(session), train_joined(ranks, 10), rtol=1e-5, atol=1e-6)


@pytest.mark.long
@claiming("lockstep")
def test_every_live_knob_changes_operations_or_parameters(name: str) -> None:
    for k in knobs(ALL[name]):
        if not k.live or (name, k.name) in WHEN:
            continue
        beside, *told = TURNED.get((name, k.name), ({},))
        ranks = 4 if k.choices or told else 2  # any two ranks are neighbours in every graph
        chosen = experiment(ranks, 12, strategy=ALL[name](**beside))
        plain = run(chosen)[0]
        tried = told or others(chosen, f"strategy.{k.name}", k)
        assert any(differs(plain, chosen, Change(5, f"strategy.{k.name}", k.check(value))) for value in tried), (
            f"{k.name} from {k.default} to any of {tried} changed nothing; if it acts only beside other settings, or "
            f"at other values, say so in TURNED of tests/laws/claims.py"
        )


def differs(plain: Session, chosen: Experiment, change: Change) -> bool:
    """Whether a change affects the operations or the parameters."""
    changed = run(chosen, change)[0]
    return plain.record.comm() != changed.record.comm() or not torch.equal(weights(plain), weights(changed))


@pytest.mark.parametrize("name", [n for n, cls in ALL.items() if cls.lockstep and not cls.opaque])
def test_recorded_bytes_equal_the_formula(name: str) -> None:
    e = experiment(4, 8, strategy=ALL[name]())
    session = run(e)[0]
    sizes = [b.nbytes for b in session.layout.buckets]
    per_bucket = Counter(what for _, what, _ in session.record.comm())
    assert per_bucket, "nothing was exchanged"
    assert len(set(per_bucket.values())) == 1 or SENT.get(name) is not dense, "every bucket is exchanged equally often"
    sent = sum(n for step, _, n in session.record.comm() if step == 7)
    assert sent == (SENT[name](sizes) if name in SENT else from_sizes(e, 7))


def from_sizes(e: Experiment, step: int) -> int:
    """Returns the bytes that rank 0 sends in a step, from a simulation with sizes only."""
    spans = simulate(e.set("pace", 5.0), real=False).spans
    return int(spans[(spans["rank"] == 0) & (spans.step == step) & (spans.lane == "comm")].nbytes.sum())


@pytest.mark.parametrize("name", [n for n, cls in ALL.items() if not cls.lockstep])
def test_bytes_of_asynchronous_strategies_equal_the_formula_for_each_message(name: str) -> None:
    for session in run(experiment(4, 8, strategy=ALL[name](), pace=5.0)):  # so that backgrounds get their turn
        sizes = {b.name: b.nbytes for b in session.layout.buckets}
        carried = Counter()
        for _, what, sent in session.record.comm():
            bucket = re.search(r"bucket \d+", what)
            if bucket:
                verb, nbytes, some = what.split()[0], sizes[bucket[0]], re.search(r"\[(.+)\]", what)
                among = len(some[1].split(",")) if some else 4
                assert sent == traffic(verb, CODED[name](nbytes) if name in CODED else nbytes, among)[0], what
                carried[what] += 1
            else:
                assert sent <= 64, f"{what} is more than a heading"
        if session.rank.role == "trainer":  # a server may answer only with rows of tables
            assert bool(carried) != (name in SILENT), "nothing was exchanged, or more than nothing by a silent one"
        of_one = [carried]
        if name in AT_NEED:
            kinds = {re.sub(r"\d+", "", what, count=1) for what in carried}
            of_one = [{w: n for w, n in carried.items() if re.sub(r"\d+", "", w, count=1) == k} for k in kinds]
        for times in of_one:
            assert len(set(times.values())) <= 2, "every bucket travels equally often, but for the last round"


COMPRESSORS = shipped(Compressor)


def takes(name: str, compressor: str) -> bool:
    """Whether 2 ranks can train with this pair. A refusal must say what would work."""
    try:
        experiment(2, 9, strategy=ALL[name](), compressor=COMPRESSORS[compressor].usual())
    except KnobError as refusal:
        assert "use " in str(refusal), refusal
        return False
    return True


@every
def test_a_strategy_takes_dense_and_ddp_takes_every_compressor(name: str) -> None:
    taken = {compressor for compressor in COMPRESSORS if takes(name, compressor)}
    assert "Dense" in taken and (name != "DDP" or taken == set(COMPRESSORS))


RUN = [(c, n) for c, n in product(COMPRESSORS, ALL) if (c in KINDS or n in ("DDP", "LocalSGD")) and takes(n, c)]


@pytest.mark.parametrize(("compressor", "name"), thinned(RUN, of=4, long=32))
def test_a_pair_with_a_compressor_runs(name: str, compressor: str) -> None:
    sessions = run(experiment(2, 9, strategy=ALL[name](), compressor=COMPRESSORS[compressor].usual()))
    assert {s.phase for s in sessions} == {"done"}
    assert len({hash_model_state(s.layout) for s in sessions}) == 1 or ALL[name].periodic
