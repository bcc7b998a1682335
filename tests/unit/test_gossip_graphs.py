"""Tests gossip on pairings and custom graphs: refusals, speed of agreement, order and period."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import batch, ended, experiment, live, mse, net, run, toy, weights
from tests.sim.insides import parameters, simulated
from tests.sim.virtual import comm, paced, rows, samples, seconds, stack
from tests.unit.test_engine_control import until
from tests.unit.test_gossip import disagreement, matrix
from workbench import simulate
from workbench.fabric import Freeze
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, Gossip, LowPrecisionDecentralized, StochasticGradientPush
from workbench.strategies._graph import PAIRINGS, hops, mixing_round, partner, refused

pytestmark = pytest.mark.ranks

KITE = "0-1 1-2 2-0 2-3 3-4"
ONE_WAY = "1/2 1/2 0; 0 1/2 1/2; 1/2 0 1/2"  # doubly stochastic, not symmetric
TEXTS = [("0-1 1-2 2-3 3-0", 4), (KITE, 5), ("0-1, 0-2; 0-3", 4), (ONE_WAY, 3), ("0.8 0.2\n0.2 0.8", 2)]
sgd = partial(torch.optim.SGD, lr=0.1)


# custom graphs


@pytest.mark.parametrize(("text", "size"), TEXTS)
def test_a_custom_graph_is_doubly_stochastic_and_every_message_is_expected(text: str, size: int) -> None:
    for mix in (1.0, 0.3):
        w = matrix(text, size, mix=mix)
        torch.testing.assert_close(w.sum(0), torch.ones(size).double(), rtol=0, atol=1e-12)
        torch.testing.assert_close(w.sum(1), torch.ones(size).double(), rtol=0, atol=1e-12)
    sends = {(i, to) for i in range(size) for to in mixing_round(text, 1.0, size, i, 0).to}
    assert sends == {(j, i) for i in range(size) for j in range(size) if i != j and w[i, j] > 0}


def test_edges_get_metropolis_weights_and_rows_keep_their_values() -> None:
    third, quarter = 1 / 3, 1 / 4  # degrees 2, 2, 3, 2, 1
    want = [[5 / 12, third, quarter, 0, 0], [third, 5 / 12, quarter, 0, 0], [quarter, quarter, quarter, quarter, 0],
            [0, 0, quarter, 5 / 12, third], [0, 0, 0, third, 2 / 3]]  # fmt: skip
    torch.testing.assert_close(matrix(KITE, 5), torch.tensor(want).double(), rtol=0, atol=1e-7)
    torch.testing.assert_close(matrix("0-1 1-2 2-3 3-0", 4), matrix("ring", 4))
    assert matrix(ONE_WAY, 3).tolist() == [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]
    assert matrix(ONE_WAY, 3, mix=0.5).tolist() == [[0.75, 0.25, 0], [0, 0.75, 0.25], [0.25, 0, 0.75]]


@pytest.mark.parametrize(("text", "size"), TEXTS)
def test_hops_of_a_custom_graph_is_the_spreading_time_from_rank_0(text: str, size: int) -> None:
    know, rounds = {0}, 0
    while len(know) < size:
        know |= {to for i in know for to in mixing_round(text, 1.0, size, i, rounds).to}
        rounds += 1
    assert hops(text, size) == rounds == Gossip(edges=text, every=4).propagation(size) / 4


@pytest.mark.parametrize(("text", "size"), [("0-1 1-2 2-3 3-0", 4), (KITE, 5)])
def test_ranks_converge_by_a_custom_graphs_second_eigenvalue(text: str, size: int) -> None:
    """Learning stops at step 6. Once the faster modes have died out, each round multiplies by the factor."""
    factor = sorted(torch.linalg.eigvalsh(matrix(text, size)).abs().tolist())[-2]
    e = paced(size, 24, strategy=Gossip(edges=text), task=toy(partial(torch.optim.SGD, lr=0.3)), eval_every=1)
    run_, _ = simulated(e, Change(6, "lr", 1e-30))
    drift = np.array([samples(run_, "drift", r)[7:] for r in range(size)])
    total = np.sqrt((drift**2).sum(0))
    ratios = total[1:] / total[:-1]
    assert total[0] > 1e-3 and (ratios[:8] <= factor * 1.001).all()
    late = slice(0, 6) if size == 4 else slice(6, 12)  # above the resolution of float32
    np.testing.assert_allclose(ratios[late], factor, rtol=0.01)


WRONG = [
    ("0-1 2-3", 4, r"edges='0-1 2-3': not connected: no path leads from rank 0 to rank 2; add an edge such as 0-2"),
    ("0-1 1-4", 4, "no rank 4; there are ranks 0 to 3"),
    ("0-1 1-1 1-2", 3, "1-1 joins a rank to itself"),
    ("0-1 1>2 2-0", 3, "1>2 goes one way only; write 1-2, or use StochasticGradientPush"),
    ("0.5 0.5; 0.4 0.5", 2, "row 1 adds up to 0.9, column 0 adds up to 0.9; every row and every column .* to 1"),
    ("0.5 0.5 0; 0.5 0 0.5; 0.5 0 0.5", 3, "column 0 adds up to 1.5, column 1 adds up to 0.5"),
    ("1.5 -0.5; -0.5 1.5", 2, "row 0 has the weight -0.5; weights must be 0 or more"),
    ("1 0; 0 1", 2, "not connected"),
    ("0 1; 1 0", 2, "never agree; .* above 0 on the diagonal"),
    ("1/2 1/2; 1/2 1/2", 3, "2 rows of 2 weights; 3 ranks need 3 rows of 3 weights"),
    ("1/2 1/2; 1/2", 2, "2 rows of 1/2 weights; 2 ranks need"),
    ("a ring", 3, "must be edges such as '0-1 1-2 2-0', or p rows of p weights"),
    ("1/0 0; 0 1", 2, "must be edges such as"),
]


@pytest.mark.parametrize(("text", "ranks", "words"), WRONG)
def test_an_invalid_custom_graph_is_refused(text: str, ranks: int, words: str) -> None:
    with pytest.raises(KnobError, match=words):
        experiment(ranks, strategy=Gossip(edges=text))


def test_a_change_to_an_invalid_graph_is_refused_and_the_run_goes_on() -> None:
    wrong = [Change(2, "edges", "0-1"), Change(3, "graph", "shift_one"), Change(4, "edges", "0-1 1-2")]
    sessions = run(experiment(3, 7, strategy=Gossip()), *wrong)
    refusals = [json.loads(m[3])["reason"] for m in sessions[0].record.noted("refused")]
    assert len(refusals) == 2 and "to rank 2" in refusals[0] and "use 2 or 4 ranks" in refusals[1]
    partners = [{name for step, name, _ in s.record.comm() if step == 5} for s in sessions]
    assert [len({name.split(" to ")[1] for name in names}) for names in partners] == [1, 2, 1], "a chain now"


def test_a_pairing_needs_an_even_number_and_a_butterfly_a_power_of_two() -> None:
    with pytest.raises(KnobError, match=r"even number, not 5; use 4 or 6 ranks, or graph='exponential'"):
        experiment(5, strategy=Gossip(graph="shift_one"))
    with pytest.raises(KnobError, match="butterfly needs a power of two, not 6 ranks; use 4 ranks"):
        experiment(6, strategy=Gossip(graph="butterfly"))


# -- pairings


FIT = {"butterfly": [2, 4, 8, 16], "shift_one": [2, 4, 6, 8, 10, 12, 14, 16]}  # sizes


@pytest.mark.parametrize("graph", PAIRINGS)
def test_a_pairing_takes_exactly_the_sizes_that_it_can_pair_off(graph: str) -> None:
    assert [size for size in range(2, 17) if not refused(graph, size)] == FIT[graph]


@pytest.mark.parametrize(("graph", "size"), [(graph, size) for graph in PAIRINGS for size in FIT[graph]])
def test_partners_are_mutual_in_every_round(graph: str, size: int) -> None:
    for number in range(2 * size):
        pairs = [partner(graph, size, r, number) for r in range(size)]
        assert all(pairs[pairs[r]] == r != pairs[r] for r in range(size))
    met = {partner(graph, size, 0, number) for number in range(size)}
    assert len(met) == (size // 2 if graph == "shift_one" else (size - 1).bit_length())


@pytest.mark.parametrize("size", range(2, 17))
def test_receivers_of_one_peer_exponential_form_a_permutation(size: int) -> None:
    for number in range(6):
        to = [mixing_round("exponential", 1.0, size, r, number).to for r in range(size)]
        assert sorted(r for (r,) in to) == list(range(size)) and all(r != other for r, (other,) in enumerate(to))


@pytest.mark.parametrize(("size", "left"), [(2, 0.0), (4, 0.0), (6, 0.25), (8, 0.3536)])
def test_shift_one_shrinks_disagreement_as_expected_after_all_pairs(size: int, left: float) -> None:
    product = torch.eye(size, dtype=torch.float64)
    for number in range(size // 2):
        product = matrix("shift_one", size, number) @ product
    assert disagreement(product) == pytest.approx(left, abs=1e-4)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_after_a_butterfly_all_ranks_are_bit_identical(size: int) -> None:
    turns = size.bit_length() - 1
    e = paced(size, 6 + turns, strategy=Gossip(mix=0.0), task=toy(partial(torch.optim.SGD, lr=0.3)))
    plan = (Change(6, "lr", 1e-30), Change(6, "mix", 1.0), Change(6, "graph", "butterfly"))
    before = parameters(simulated(e.set("steps", 6))[1])
    assert len({tuple(row.tolist()) for row in before}) == size, "each on its own at first"
    _, sessions = simulated(e, *plan)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    torch.testing.assert_close(parameters(sessions)[0], before.mean(0), rtol=0, atol=1e-6)
    _, earlier = simulated(e.set("steps", 5 + turns), *plan)
    assert len({hash_model_state(s.layout) for s in earlier}) > 1, "not one round sooner"


# order of mixing and updating


class Plain:
    """D-PSGD as in the paper: all ranks' parameters in one process, mixed by the whole matrix."""

    def __init__(self, w: torch.Tensor, adapt_first: bool, momentum: float = 0.0) -> None:
        self.models = [net().double() for _ in w]
        self.w, self.adapt_first = w, adapt_first
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=momentum) for m in self.models]

    def step(self, step: int, mixes: bool = True) -> None:
        for r, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            double(model, batch(r, step, 0)).backward()
        if mixes and not self.adapt_first:
            self._mix()
        for optimizer in self.optimizers:
            optimizer.step()
        if mixes and self.adapt_first:
            self._mix()

    def _mix(self) -> None:
        with torch.no_grad():
            for same in zip(*(m.parameters() for m in self.models), strict=True):
                mixed = torch.einsum("ij,j...->i...", self.w, torch.stack([p.data for p in same]))
                for p, new in zip(same, mixed, strict=True):
                    p.copy_(new)

    def parameters(self) -> torch.Tensor:
        return torch.stack([torch.cat([p.data.reshape(-1) for _, p in sorted(m.named_parameters())])
                            for m in self.models])  # fmt: skip


def double(model: torch.nn.Module, pair: Any) -> torch.Tensor:
    return mse(model, (pair[0].double(), pair[1].double()))


def exact_task(momentum: float = 0.0) -> Any:
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    return toy(optimizer, model=lambda: net().double(), loss=double, evaluate=None)


@pytest.mark.parametrize("order", ["combine-then-adapt", "adapt-then-combine"])
@pytest.mark.parametrize(("text", "every"), [("1/2 1/4 1/4; 1/4 1/2 1/4; 1/4 1/4 1/2", 1), ("0-1 1-2", 3)])
def test_gossip_follows_the_papers_rule(order: str, text: str, every: int) -> None:
    chosen = Gossip(edges=text, order=order, every=every)
    e = paced(3, 10, strategy=chosen, task=exact_task(momentum=0.9))
    plain = Plain(matrix(text, 3), adapt_first=order == "adapt-then-combine", momentum=0.9)
    for step in range(10):
        plain.step(step, mixes=step % every == 0)
    for sessions in (simulated(e)[1], run(e.set("pace", 0))):
        found = torch.stack([weights(s) for s in sessions])
        torch.testing.assert_close(found, plain.parameters(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", ["combine-then-adapt", "adapt-then-combine"])
@pytest.mark.parametrize("text", [KITE, "1/2 0 1/2 0 0; 0 1/2 0 0 1/2; 1/2 0 0 1/2 0; 0 1/2 0 1/2 0; 0 0 1/2 0 1/2"])
def test_the_mean_moves_by_the_mean_of_the_gradients_only(order: str, text: str) -> None:
    e = paced(5, 7, strategy=Gossip(edges=text, order=order), task=exact_task())
    (_, before), (_, after) = simulated(e), simulated(e.set("steps", 8))
    pulled = []
    for r, s in enumerate(before):
        s.model.zero_grad()
        with torch.enable_grad():
            double(s.model, batch(r, 7, 0)).backward()
        pulled.append(torch.cat([p.grad.reshape(-1) for _, p in sorted(s.model.named_parameters())]))
    moved = torch.stack([weights(s) for s in after]).mean(0) - torch.stack([weights(s) for s in before]).mean(0)
    torch.testing.assert_close(moved, -0.1 * torch.stack(pulled).mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_updating_first_on_the_complete_graph_is_data_parallelism_with_sgd(momentum: float) -> None:
    task = toy(partial(torch.optim.SGD, lr=0.1, momentum=momentum))
    chosen = Gossip(graph="complete", order="adapt-then-combine")
    sessions = run(experiment(4, 12, task=task, strategy=chosen))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1, "shares are added up in rank order"
    want = weights(run(experiment(4, 12, task=task, strategy=DDP()))[0])
    torch.testing.assert_close(weights(sessions[0]), want, rtol=1e-5, atol=1e-6)
    mixed = run(experiment(4, 12, task=task, strategy=Gossip(graph="complete")))
    assert len({hash_model_state(s.layout) for s in mixed}) == 4, "mixing first leaves the ranks a gradient apart"


# periods, and changes that reach all ranks


def test_bytes_are_neighbours_times_rounds() -> None:
    run_ = simulate(paced(4, 12, strategy=Gossip(edges="0-1 0-2 0-3", every=4)))
    nbytes = sum(run_.details("buckets")[-1][2]["nbytes"])
    sent = [sum(n for step, _, n in comm(run_, r) if step % 4 == 0) for r in range(4)]
    assert sent == [3 * 3 * nbytes, 3 * nbytes, 3 * nbytes, 3 * nbytes]
    assert not [1 for r in range(4) for step, _, _ in comm(run_, r) if step % 4]


def test_with_rare_rounds_a_change_acts_before_the_same_step_on_all() -> None:
    sessions = live(experiment(5, 0, pace=5.0, strategy=Gossip(edges="0-1 1-2 2-3 3-4", every=3)))
    try:
        for k, (path, value) in enumerate([("every", 2), ("order", "adapt-then-combine"), ("graph", "complete"),
                                           ("edges", ""), ("strategy", "DDP")]):  # fmt: skip
            until(lambda: all(s.rank.step > 3 for s in sessions))
            sessions[0].request({"kind": "change", "id": str(k), "path": path, "value": value})
            until(lambda k=k: len(sessions[0].record.noted("change")) > k)
        step = sessions[0].record.noted("change")[4][0]
        until(lambda: all(s.rank.step > step + 2 for s in sessions))
        for s in sessions:
            names = {r[0]: r[2] for r in s.record if r[1] == "step"}
            assert names[step - 1] == "Gossip" and names[step] == "DDP"
        sessions[0].request({"kind": "stop"})
        ended(sessions)
        assert {s.phase for s in sessions} == {"stopped"}
    finally:
        for s in sessions:
            s.abort()
            assert s.join(60)


WAITING = [Gossip(), Gossip(graph="shift_one", order="adapt-then-combine"), StochasticGradientPush(overlap=2),
           LowPrecisionDecentralized()]  # fmt: skip


@pytest.mark.parametrize("strategy", WAITING, ids=str)
def test_ranks_wait_for_a_paused_rank_and_all_reach_the_end(strategy: Any) -> None:
    e = paced(4, 12, strategy=strategy)
    run_ = simulate(e, changes=[Change(5, "faults", [Freeze(rank=1, seconds=3.0)])])
    assert run_.state == "done" and len(rows(run_, "step")) == 48
    ends = [rows(run_, "step", r).t1 for r in range(4)]
    assert all(4.0 > end[-1] > 3.0 > end[4] for end in ends)


# gains and costs


def lasts(strategy: Any, **link: float) -> float:
    """Returns the seconds of a step with 1 ms of compute and one bucket of 0.32 MB, on 8 ranks."""
    run_ = simulate(paced(8, 4, pace=1.0, strategy=strategy, task=stack(8, 100), bucket_mb=1.0, **link))
    assert len(rows(run_, "step")) == 32
    return float(seconds(run_)[-1])


def test_gossip_is_faster_with_high_latency_and_the_ring_slower_with_low_bandwidth() -> None:
    """Compares with data parallelism by closed forms: 2 (p-1) messages in sequence against one or two."""
    late, n = {"latency": 20.0, "mbit": 0.0}, 8 * 100 * 100 * 4
    ddp, ring, one = (lasts(s, **late) for s in (DDP(), Gossip(), Gossip(graph="exponential")))
    assert ddp == pytest.approx(0.001 + 14 * 0.020)
    assert ring == pytest.approx(0.0001 + 2 * 0.020) and one == pytest.approx(0.0001 + 0.020)
    narrow = {"latency": 0.0, "mbit": 10.0}
    ddp, ring, one = (lasts(s, **narrow) for s in (DDP(), Gossip(), Gossip(graph="exponential")))
    wire = n * 8e-6 / 10.0
    assert ddp == pytest.approx(0.001 + 2 * 7 / 8 * wire)
    assert ring == pytest.approx(0.0001 + 2 * wire) and ring > 1.1 * ddp
    assert one == pytest.approx(0.0001 + wire) and one < 0.6 * ddp, "one partner sends half as much"
    every = lasts(Gossip(graph="complete"), **narrow)
    assert every > 3.9 * ddp
