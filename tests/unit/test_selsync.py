"""Tests selective synchronisation: its trigger, the bytes and averages of a synchronisation, shared examples."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.ranks import Net, batch, ended, experiment, live, mse, net, run, toy, weights
from tests.sim.virtual import begun, comm, paced, rows, samples
from workbench import simulate
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import StrategyError
from workbench.settings import Change
from workbench.strategies import LocalSGD, SelSync
from workbench.tasks import Task

pytestmark = pytest.mark.ranks

plain = partial(torch.optim.SGD, lr=0.05)
heavy = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
FLAG = "all_reduce gradient change"


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).double() for _, p in sorted(model.named_parameters())])


def noted(session: Any, name: str) -> list[float]:
    return [v for _, n, _, v in session.record.samples if n == name]


def synchronised(session: Any) -> list[int]:
    """Returns the steps that sent more than the flag."""
    return sorted({step for step, what, _ in session.record.comm() if what != FLAG and step < session.experiment.steps})


def by_step(asked: list[tuple[int, str, int]]) -> list[tuple[int, str, int]]:
    """Sorts by step: without links, the next step's messages begin when this step's exchange ends."""
    return sorted(asked, key=lambda row: row[0])


def smooth(values: list[float], window: int, smoothing: float) -> float:
    total = weight = 0.0
    for age, value in enumerate(reversed(values[-window:])):
        total += (1 - smoothing) ** age * value
        weight += (1 - smoothing) ** age
    return total / weight


def reference(ranks: int, steps: int, s: SelSync, optimizer: Any) -> tuple[list[nn.Module], list[int]]:
    """Runs the algorithm in one process; returns the ranks' models and the synchronised steps."""
    models = [net() for _ in range(ranks)]
    optimizers = [optimizer(m.parameters()) for m in models]
    norms: list[list[float]] = [[] for _ in models]
    means: list[list[float]] = [[] for _ in models]
    changes: list[list[float]] = [[] for _ in models]
    done = []
    for step in range(steps):
        due = False
        for r, model in enumerate(models):
            model.zero_grad()
            mse(model, batch(r, step, 0)).backward()
            norms[r].append(sum(float(p.grad.norm()) for p in model.parameters()))
            means[r].append(smooth(norms[r], s.norm_window, s.smoothing))
            if step:
                changes[r].append(abs(means[r][-1] - means[r][-2]) / means[r][-2])
            due = due or step < s.window or smooth(changes[r], s.window, s.smoothing) >= s.delta
        if due and s.aggregate == "gradients":
            _mean([[p.grad for p in m.parameters()] for m in models])
        for o in optimizers:
            o.step()
        if due and s.aggregate == "parameters":
            _mean([list(m.parameters()) for m in models])
        if due:
            done.append(step)
    return models, done


@torch.no_grad()
def _mean(of: list[list[torch.Tensor]]) -> None:
    for same in zip(*of, strict=True):
        mean = torch.stack(list(same)).mean(0)
        for x in same:
            x.copy_(mean)


@pytest.mark.parametrize(("ranks", "strategy", "optimizer"), [
    (3, SelSync(window=2, delta=0.7), heavy), (2, SelSync(window=3, delta=0.65, aggregate="gradients"), plain),
    (4, SelSync(window=3, norm_window=5, delta=0.2, smoothing=0.3), plain),
])  # fmt: skip
def test_both_hosts_equal_the_plain_loop(ranks: int, strategy: SelSync, optimizer: Any) -> None:
    e = experiment(ranks, 24, strategy=strategy, task=toy(optimizer))
    sessions, (models, done) = run(e), reference(ranks, 24, strategy, optimizer)
    assert strategy.window + 2 < len(done) < 20, "some steps beyond the first synchronise, and some do not"
    simulated = simulate(e.set("pace", 5.0), real=True)
    for s, model in zip(sessions, models, strict=True):
        assert synchronised(s) == done
        assert noted(s, "synchronised") == [float(k in done) for k in range(24)]
        torch.testing.assert_close(weights(s), flat(model), rtol=1e-4, atol=1e-5)
        assert by_step(comm(simulated, s.rank.index)) == by_step(begun(s.record))
        for name in ("loss", "gradient change", "synchronised"):
            np.testing.assert_allclose(samples(simulated, name, s.rank.index), noted(s, name), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_averaging_gradients_in_every_step_equals_data_parallelism(ranks: int) -> None:
    want = run(experiment(ranks, 8))[0]
    for s in run(experiment(ranks, 8, strategy=SelSync(delta=0.0, window=1, aggregate="gradients"))):
        torch.testing.assert_close(weights(s), weights(want), rtol=1e-5, atol=1e-6)


def test_averaging_parameters_in_every_step_equals_local_sgd_with_every_1() -> None:
    want = run(experiment(3, 8, strategy=LocalSGD(every=1)))[0]
    for s in run(experiment(3, 8, strategy=SelSync(delta=0.0, window=1))):
        torch.testing.assert_close(weights(s), weights(want), rtol=1e-5, atol=1e-6)


def test_with_a_large_threshold_only_the_flags_are_sent_once_the_window_is_full() -> None:
    sessions = run(experiment(3, 12, strategy=SelSync(delta=1e6, window=4)))
    for s in sessions:
        assert synchronised(s) == [0, 1, 2, 3]
        assert [n for _, what, n in s.record.comm() if what == FLAG] == [traffic("all_reduce", 8, 3)[0]] * 12
    assert len({hash_model_state(s.layout) for s in sessions}) == 3


@pytest.mark.parametrize("aggregate", ["parameters", "gradients"])
def test_bytes_are_a_flag_per_step_and_the_model_per_synchronisation(aggregate: str) -> None:
    s = run(experiment(4, 20, strategy=SelSync(delta=0.7, window=2, aggregate=aggregate)))[0]
    model = sum(traffic("all_reduce", b.nbytes, 4)[0] for b in s.layout.buckets)
    syncs = int(sum(noted(s, "synchronised")))
    assert 3 < syncs < 20
    assert sum(n for _, _, n in s.record.comm()) == 20 * traffic("all_reduce", 8, 4)[0] + syncs * model


def test_one_rank_with_a_spike_makes_all_synchronise() -> None:
    def data(rank: int, ranks: int, seed: int) -> list:
        pairs = [batch(0, 0, seed)] * 40
        if rank == 2:
            pairs[7] = (pairs[7][0] * 10, pairs[7][1] * 100)
        return pairs

    still = partial(torch.optim.SGD, lr=1e-6)
    sessions = run(experiment(4, 14, strategy=SelSync(delta=2.0, window=1), task=toy(still, data=data)))
    for s in sessions:
        assert synchronised(s) == [0, 7]
        high = [k + 1 for k, v in enumerate(noted(s, "gradient change")) if v >= 2.0]
        assert high == ([7] if s.rank.index == 2 else [])


def test_ranks_are_equal_only_after_parameters_are_averaged() -> None:
    e = experiment(3, 20, strategy=SelSync(delta=0.7, window=2), task=toy(plain), eval_every=1)
    s = run(e)[0]
    apart = [v > 1e-6 for step, name, _, v in s.record.samples if name == "drift" and step > 0]
    assert apart == [not v for v in noted(s, "synchronised")]
    assert any(apart)


def test_decisions_do_not_depend_on_the_losss_scale() -> None:
    def scaled(c: float) -> Any:
        return run(experiment(3, 20, strategy=SelSync(delta=0.7, window=2), task=toy(
            partial(torch.optim.SGD, lr=0.05 / c), loss=lambda model, pair: c * mse(model, pair)
        )))[1]  # fmt: skip

    one, other = scaled(1.0), scaled(1024.0)
    assert noted(one, "gradient change") == noted(other, "gradient change")
    assert synchronised(one) == synchronised(other)


class Slope(nn.Module):
    """A model whose gradient is always the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)


def told(norms: list[float], strategy: SelSync) -> tuple[list[float], list[float]]:
    """Returns (smoothed change, whether it synchronised) by step, for ranks with these gradient norms."""
    task = Task(
        model=Slope, data=lambda rank, ranks, seed: [torch.tensor([[v]]) for v in norms],
        loss=lambda model, x: model(x).mean(), optimizer=partial(torch.optim.SGD, lr=1e-3),
    )  # fmt: skip
    r = simulate(paced(2, len(norms), task=task, strategy=strategy, eval_every=0), real=True)
    return samples(r, "gradient change", 0).tolist(), samples(r, "synchronised", 0).tolist()


def test_a_jump_triggers_in_the_computed_step() -> None:
    jump = [1.0] * 10 + [5.0] * 8
    changes, sync = told(jump, SelSync(delta=1.0, window=4, smoothing=0.5))
    np.testing.assert_allclose(changes[9:14], [4 / 1.875, 2 / 1.875, 1 / 1.875, 0.5 / 1.875, 0], atol=1e-6)
    assert [k for k, v in enumerate(sync) if v] == [0, 1, 2, 3, 10, 11]

    spike = [1.0] * 10 + [5.0] + [1.0] * 7
    changes, sync = told(spike, SelSync(delta=1.0, window=4, smoothing=0.5))
    np.testing.assert_allclose(changes[9:12], [4 / 1.875, 2.8 / 1.875, 1.4 / 1.875], atol=1e-6)
    assert [k for k, v in enumerate(sync) if v] == [0, 1, 2, 3, 10, 11]

    changes, sync = told(jump, SelSync(delta=1.0, window=1, norm_window=2, smoothing=0.0))
    np.testing.assert_allclose(changes[8:12], [0, 2, 2 / 3, 0], atol=1e-6)
    assert [k for k, v in enumerate(sync) if v] == [0, 10]


def test_a_threshold_that_is_met_exactly_triggers() -> None:
    _, sync = told([1.0] * 4 + [2.0] * 4, SelSync(delta=1.0, window=1))
    assert [k for k, v in enumerate(sync) if v] == [0, 4]


def test_gradients_of_zero_neither_divide_by_zero_nor_trigger() -> None:
    changes, sync = told([0.0, 0.0, 0.0, 0.0, 3.0, 3.0, 0.0, 0.0], SelSync(delta=2.0, window=1))
    assert changes[:3] == [0, 0, 0] and changes[3] > 1e20 and changes[4:] == [0, 1, 0]
    assert [k for k, v in enumerate(sync) if v] == [0, 4]


def test_the_threshold_acts_live_on_all_ranks_before_the_same_step() -> None:
    sessions = run(
        experiment(3, 16, strategy=SelSync(delta=0.0, window=2)), Change(6, "strategy.delta", 1e6),
        Change(11, "strategy.delta", 0.0), Change(13, "strategy.aggregate", "gradients"),
    )  # fmt: skip
    for s in sessions:
        assert synchronised(s) == [0, 1, 2, 3, 4, 5, 11, 12, 13, 14, 15]


def test_a_longer_window_has_to_fill_first() -> None:
    s = run(experiment(2, 16, strategy=SelSync(delta=1e6, window=2)), Change(5, "strategy.window", 9))[0]
    assert synchronised(s) == [0, 1, 5, 6, 7, 8]


def test_across_every_kind_of_change_both_hosts_send_the_same() -> None:
    changes = (
        Change(4, "strategy.delta", 0.3), Change(6, "bucket_mb", 0.02), Change(9, "strategy.window", 1),
        Change(11, "strategy.inject_ranks", 0.5), Change(14, "strategy", "DDP"),
        Change(16, "strategy", {"SelSync": {"window": 2, "inject_ranks": 1.0}}),
    )  # fmt: skip
    e = experiment(3, 22, strategy=SelSync(window=3), eval_every=5)
    sessions = run(e, *changes)
    simulated = simulate(e.set("pace", 5.0), changes=changes, real=True)
    for s in sessions:
        assert by_step(comm(simulated, s.rank.index)) == by_step(begun(s.record))
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-3, atol=1e-5)


def test_a_switch_to_ddp_takes_the_mean() -> None:
    e = experiment(3, 9, strategy=SelSync(delta=1e6, window=1), task=toy(plain), pace=5.0, eval_every=1)
    r = simulate(e, changes=(Change(6, "lr", 1e-30), Change(6, "strategy", "DDP")), real=True)
    held, drift = samples(r, "held_out", 0), samples(r, "drift", 0)
    assert drift[6] > 1e-3 and drift[7] < 1e-7
    assert held[6] == pytest.approx(held[9], abs=1e-6)


def test_with_sizes_only_every_step_synchronises() -> None:
    r = simulate(paced(3, 9, strategy=SelSync(window=1, delta=1e6)))
    assert samples(r, "synchronised", 0).tolist() == [1.0] * 9
    assert len(rows(r, "comm", 0, FLAG)) == 9


SHARED = [("x", 8 * 4), ("y", 4 * 4), ("who", 8)]  # bytes of one example


def tagged(seen: dict[int, list[list[int]]]) -> Task:
    """A task whose examples carry their rank; `seen` collects each rank's inputs of the loss by step."""

    def data(rank: int, ranks: int, seed: int) -> list:
        made = []
        for step in range(30):
            x, y = batch(rank, step, seed, 8)
            made.append({"pair": (x, y), "more": [torch.full((8,), rank), "a word"]})
        return made

    def loss(model: nn.Module, given: dict) -> torch.Tensor:
        who, word = given["more"]
        assert word == "a word" and who.dtype == torch.int64
        assert len(who) == len(given["pair"][0]) == len(given["pair"][1])
        seen[int(who[0])].append(who.tolist())
        return mse(model, given["pair"])

    return toy(plain, data=data, loss=loss)


def test_ranks_share_examples_in_turn_at_the_cost_of_their_bytes() -> None:
    seen: dict[int, list[list[int]]] = defaultdict(list)
    strategy = SelSync(window=1, inject_ranks=0.5, inject_share=0.25)
    e = experiment(4, 8, strategy=strategy, task=tagged(seen))
    sessions = run(e)
    for rank, s in enumerate(sessions):
        for step in range(8):
            giving = strategy.givers(step, 4)
            assert len(giving) == 2
            assert seen[rank][step] == [rank] * 8 + [g for g in giving if g != rank for _ in range(2)]
            sent = [n for k, what, n in s.record.comm() if k == step and what.startswith("send examples")]
            assert sorted(sent) == sorted([2 * n for _, n in SHARED] * 3 if rank in giving else [])
    assert sorted(g for step in range(2) for g in strategy.givers(step, 4)) == [0, 1, 2, 3]
    simulated = simulate(e.set("pace", 5.0), real=True)
    for s in sessions:
        assert by_step(comm(simulated, s.rank.index)) == by_step(begun(s.record))
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("share", "ranks", "size", "givers"), [(0.3, 3, 4, 1), (1.0, 3, 3, 3), (0.01, 5, 5, 1)])
def test_equally_many_ranks_join_each_step_and_equally_often(share: float, ranks: int, size: int, givers: int) -> None:
    turns = [SelSync(inject_ranks=share).givers(step, ranks) for step in range(ranks)]
    assert {len(turn) for turn in turns} == {givers}
    assert [sum(r in turn for turn in turns) for r in range(ranks)] == [givers] * ranks


def test_sharing_shows_all_data_to_ranks_with_different_data() -> None:
    """Each rank only has one sign of the first input; if all ranks share, every batch has both."""
    given: dict[bool, list[torch.Tensor]] = {False: [], True: []}

    def data(rank: int, ranks: int, seed: int) -> list:
        pairs = [batch(rank, step, seed) for step in range(20)]
        return [(torch.cat([x[:, :1].abs() * (-1) ** rank, x[:, 1:]], 1), y) for x, y in pairs]

    for sharing in (False, True):

        def loss(model: nn.Module, pair: tuple, sharing: bool = sharing) -> torch.Tensor:
            given[sharing].append(pair[0][:, 0].sign())
            return mse(model, pair)

        run(experiment(2, 5, strategy=SelSync(inject_ranks=float(sharing)), task=toy(data=data, loss=loss)))
    assert all(len(signs.unique()) == 1 for signs in given[False])
    assert all(len(signs.unique()) == 2 and len(signs) == 5 for signs in given[True])


def test_batches_that_cannot_be_split_into_examples_raise_an_error() -> None:
    def data(rank: int, ranks: int, seed: int) -> list:
        return [(*batch(rank, step, seed), torch.tensor(1.0)) for step in range(20)]

    sessions = live(experiment(2, 5, strategy=SelSync(inject_ranks=1.0), task=toy(data=data)))
    ended(sessions)
    for s in sessions:
        assert "examples in dimension 0" in s.error["text"] and "use inject_ranks=0" in s.error["text"]


def test_sharing_examples_with_sizes_only_raises_strategy_error() -> None:
    with pytest.raises(StrategyError, match="simulate with real=True"):
        simulate(paced(2, 3, strategy=SelSync(inject_ranks=1.0)))


def test_one_rank_alone_sends_nothing() -> None:
    (s,) = run(experiment(1, 4, strategy=SelSync(inject_ranks=1.0, window=1)))
    assert isinstance(s.model, Net) and s.record.comm() == []
