"""Tests Local SGD against a plain reference and DDP: schedule, warm-up, groups and momenta."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters_or_parameter_groups

from tests.ranks import batch, ended, experiment, live, mse, net, run, toy, weights
from tests.sim.virtual import begun, comm, paced, samples, seconds, stack
from tests.unit.test_engine_control import until
from workbench import simulate
from workbench.compressors import TopK
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state, list_optimizer_tensors
from workbench.settings import Change, KnobError, to_plain
from workbench.strategies import DDP, HierarchicalLocalSGD, LocalSGD, PostLocalSGD
from workbench.tasks import Task

pytestmark = pytest.mark.ranks

plain = partial(torch.optim.SGD, lr=0.05)
heavy = partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.1)
nesterov = partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True)
adam = partial(torch.optim.Adam, lr=0.01)


def momenta(session: Any) -> torch.Tensor:
    """Returns a rank's whole optimizer state: (n,) float64."""
    return torch.cat([t.reshape(-1).double() for t in list_optimizer_tensors(session.layout, session.optimizer)])


def reference(ranks: int, steps: int, strategy: LocalSGD, optimizer: Any) -> list[torch.nn.Module]:
    """Runs the papers' Local SGD in one process. Returns the ranks' models after `steps`."""
    models = [net() for _ in range(ranks)]
    optimizers = [optimizer(m.parameters()) for m in models]
    since = since_group = 0
    for step in range(steps):
        for r, model in enumerate(models):
            model.zero_grad()
            mse(model, batch(r, step, 0)).backward()
        if step < getattr(strategy, "warmup", 0):
            for same in zip(*(m.parameters() for m in models), strict=True):
                mean = torch.stack([p.grad for p in same]).mean(0)
                for p in same:
                    p.grad = mean.clone()
        for o in optimizers:
            o.step()
        if step < getattr(strategy, "warmup", 0):
            continue
        since, since_group = since + 1, since_group + 1
        if since == strategy.every:
            _average(models, optimizers, range(ranks), strategy.momentum)
            since = since_group = 0
        elif isinstance(strategy, HierarchicalLocalSGD) and since_group == strategy.group_every:
            for first in range(0, ranks, strategy.group):
                _average(models, optimizers, range(first, first + strategy.group), strategy.momentum)
            since_group = 0
    return models


@torch.no_grad()
def _average(models: list[Any], optimizers: list[Any], who: range, momentum: str) -> None:
    for same in zip(*(models[r].parameters() for r in who), strict=True):
        mean = torch.stack(list(same)).mean(0)
        slots = [optimizers[r].state[p] for r, p in zip(who, same, strict=True)]
        for p in same:
            p.copy_(mean)
        for key in slots[0]:
            found = [s[key] for s in slots]
            if found[0] is None or momentum == "keep":
                continue
            value = torch.stack(found).mean(0) if momentum == "average" else torch.zeros_like(found[0])
            for x in found:
                x.copy_(value)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).double() for _, p in sorted(model.named_parameters())])


VARIANTS = [
    (3, LocalSGD(every=4), heavy), (2, PostLocalSGD(every=3, warmup=5), heavy),
    (4, HierarchicalLocalSGD(every=6, group=2, group_every=1), heavy),
    (4, HierarchicalLocalSGD(every=6, group=2, group_every=2, momentum="average"), heavy),
    (6, HierarchicalLocalSGD(every=5, group=3, group_every=2, warmup=2, momentum="zero"), heavy),
    (3, LocalSGD(every=4, momentum="average"), adam), (3, LocalSGD(every=4, momentum="zero"), adam),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "strategy", "optimizer"), VARIANTS, ids=[str(k) for k in range(len(VARIANTS))])
def test_every_variant_equals_the_plain_loop_on_both_hosts(ranks: int, strategy: LocalSGD, optimizer: Any) -> None:
    e = experiment(ranks, 14, strategy=strategy, task=toy(optimizer))
    sessions = run(e)
    for s, model in zip(sessions, reference(ranks, 14, strategy, optimizer), strict=True):
        torch.testing.assert_close(weights(s), flat(model), rtol=1e-4, atol=1e-5)
    simulated = simulate(e.set("pace", 5.0), real=True)
    sizes = simulate(e.set("pace", 5.0))
    for s in sessions:
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-4, atol=1e-5)
        assert comm(simulated, s.rank.index) == comm(sizes, s.rank.index) == begun(s.record)


@pytest.mark.parametrize("optimizer", [plain, heavy, nesterov], ids=["plain", "heavy ball", "nesterov"])
@pytest.mark.parametrize("strategy", [
    LocalSGD(every=1), HierarchicalLocalSGD(every=1, group=2), HierarchicalLocalSGD(every=256, group=4, group_every=1),
], ids=["all", "both", "one group"])  # fmt: skip
def test_averaging_after_each_step_is_data_parallelism(strategy: LocalSGD, optimizer: Any) -> None:
    e = experiment(4, 9, task=toy(optimizer), pace=5.0, eval_every=1)
    ours, want = (simulate(e.set("strategy", to_plain(one)), real=True) for one in (strategy, DDP()))
    for rank in range(4):
        np.testing.assert_allclose(samples(ours, "loss", rank), samples(want, "loss", rank), rtol=1e-5, atol=1e-6)
    assert samples(ours, "drift").max() < 1e-7


def test_averaging_after_each_step_differs_from_data_parallelism_with_adam() -> None:
    """A strategy that averages gradients would give the same result."""
    want = run(experiment(3, 8, task=toy(adam)))[0]
    got = run(experiment(3, 8, strategy=LocalSGD(every=1), task=toy(adam)))[0]
    assert (weights(got) - weights(want)).abs().max() > 1e-3


def test_kept_momenta_differ_and_average_to_those_of_data_parallelism() -> None:
    want = momenta(run(experiment(3, 8))[0])
    kept = torch.stack([momenta(s) for s in run(experiment(3, 8, strategy=LocalSGD(every=1)))])
    assert (kept[0] - kept[1]).norm() > 0.1 * want.norm()
    torch.testing.assert_close(kept.mean(0), want, rtol=1e-4, atol=1e-6)


def test_averaged_momenta_equal_data_parallelism_and_zeroed_ones_are_zero() -> None:
    want = momenta(run(experiment(3, 8))[0])
    for s in run(experiment(3, 8, strategy=LocalSGD(every=1, momentum="average"))):
        torch.testing.assert_close(momenta(s), want, rtol=1e-4, atol=1e-6)
    for s in run(experiment(3, 8, strategy=LocalSGD(every=4, momentum="zero"))):
        assert momenta(s).count_nonzero() == 0


def test_ranks_with_the_same_data_never_differ() -> None:
    def data(rank: int, ranks: int, seed: int) -> list:
        return [batch(0, step, seed) for step in range(20)]

    for s in run(experiment(2, 11, strategy=LocalSGD(every=4), task=toy(data=data), eval_every=1)):
        assert [v for _, name, _, v in s.record.samples if name == "drift"] == [0.0] * 12


def test_an_average_makes_ranks_equal_to_their_mean() -> None:
    before = run(experiment(4, 6, strategy=LocalSGD(every=7)))
    after = run(experiment(4, 6, strategy=LocalSGD(every=6)))
    assert len({hash_model_state(s.layout) for s in before}) == 4
    assert len({hash_model_state(s.layout) for s in after}) == 1
    mean = torch.stack([weights(s) for s in before]).mean(0)
    torch.testing.assert_close(weights(after[0]), mean, rtol=1e-6, atol=1e-7)


def exchanged(session: Any, steps: int) -> list[str]:
    """Returns, by step, which ranks averaged: "all", "group" or "none"."""
    kinds = ["none"] * steps
    for step, what, _ in session.record.comm():
        kinds[step] = "group" if " in within" in what else "all"
    return kinds


def test_the_schedule_is_torchs_shifted_to_the_end_of_each_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's averagers act in the first step of a period, ours in its last. With groups torch omits the start."""
    done: list[Any] = []
    module = average_parameters_or_parameter_groups.__module__
    monkeypatch.setattr(f"{module}.average_parameters_or_parameter_groups", lambda _, group: done.append(group))

    def torchs(averager: Any, steps: int) -> list[str]:
        kinds = []
        for _ in range(steps):
            done.clear()
            averager.average_parameters([])
            kinds.append(done[0] if done else "none")
        return kinds

    theirs = torchs(PeriodicModelAverager(period=4, warmup_steps=3, process_group="all"), 16)
    assert [i for i, kind in enumerate(theirs) if kind == "all"] == [3, 7, 11, 15]
    ours = exchanged(run(experiment(2, 19, strategy=PostLocalSGD(every=4, warmup=3)))[0], 19)
    assert ours == ["all"] * 3 + ["none"] * 3 + theirs[3:]

    groups = HierarchicalModelAverager.__new__(HierarchicalModelAverager)
    groups.step, groups.warmup_steps, groups._periods = 0, 0, [2, 6]
    groups.period_process_group_dict = {2: "group", 6: "all"}
    theirs = torchs(groups, 15)
    ours = exchanged(run(experiment(4, 14, strategy=HierarchicalLocalSGD(every=6, group=2, group_every=2)))[0], 14)
    assert ours == theirs[1:]


@pytest.mark.parametrize("ranks", [2, 3])
def test_warm_up_is_bit_identical_to_data_parallelism(ranks: int) -> None:
    chosen = PostLocalSGD(every=4, warmup=6)
    ours, ddp = run(experiment(ranks, 6, strategy=chosen)), run(experiment(ranks, 6))
    for s, want in zip(ours, ddp, strict=True):
        assert torch.equal(weights(s), weights(want)) and torch.equal(momenta(s), momenta(want))
        assert s.record.comm() == want.record.comm()
    assert run(experiment(ranks, 9, strategy=chosen))[0].record.comm()[-1][0] == 5, "and then nothing is sent"


def test_raising_warmup_averages_parameters_and_momenta_first() -> None:
    sessions = run(experiment(3, 16, strategy=PostLocalSGD(every=4, warmup=0)), Change(4, "strategy.warmup", 16))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    assert all(torch.equal(momenta(s), momenta(sessions[0])) for s in sessions)
    names = {what for step, what, _ in sessions[0].record.comm() if step > 4}
    assert names == {what for step, what, _ in run(experiment(3, 9))[0].record.comm() if step > 4}
    assert "all_reduce momentum" in {what for step, what, _ in sessions[0].record.comm() if step == 4}


def test_raising_warmup_between_two_averages_begins_with_an_average() -> None:
    sessions = run(experiment(3, 9, strategy=PostLocalSGD(every=4, warmup=0)), Change(6, "strategy.warmup", 64))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    assert all(torch.equal(momenta(s), momenta(sessions[0])) for s in sessions)
    names = [what for step, what, _ in sessions[0].record.comm() if step == 6]
    buckets = [f"all_reduce bucket {k}" for k in range(len(sessions[0].layout.buckets))]
    assert names == [*buckets, "all_reduce size of momentum", "all_reduce momentum", *buckets]


def neighbours(rank: int, group: int) -> range:
    """Returns the ranks of a rank's group of `group` consecutive ranks."""
    return range(rank - rank % group, rank - rank % group + group)


@pytest.mark.parametrize(("ranks", "group"), [(4, 2), (6, 3), (5, 5), (8, 4)])
def test_bytes_of_a_group_follow_the_formula(ranks: int, group: int) -> None:
    e = experiment(ranks, 4, strategy=HierarchicalLocalSGD(every=4, group=group, group_every=2))
    sessions = run(e)
    for s in sessions:
        sent = [n for step, _, n in s.record.comm() if step == 1]
        assert sent == [2 * (group - 1) * b.nbytes // group for b in s.layout.buckets]
        mine = neighbours(s.rank.id, group)
        among = {what.partition(" in ")[2] for step, what, _ in s.record.comm() if step == 1}
        assert among == {f"within [{', '.join(map(str, mine))}]"}
        assert {step for step, _, _ in s.record.comm()} == {1, 3}
    for real in (False, True):
        simulated = simulate(e.set("pace", 5.0), real=real)
        for s in sessions:
            assert comm(simulated, s.rank.index) == begun(s.record)


class Choosy(torch.nn.Module):
    """Uses its second layer only if `both` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.a(x) + self.b(x) if both else self.a(x)


def choosy() -> Task:
    """Returns a task in which only rank 0 uses the whole model."""

    def data(rank: int, ranks: int, seed: int) -> list:
        return [(*batch(rank, step, seed), rank == 0) for step in range(20)]

    def loss(model: torch.nn.Module, given: tuple) -> torch.Tensor:
        return (model(given[0], given[2]) - given[1]).square().mean()

    return toy(heavy, model=lambda: net(Choosy), data=data, loss=loss, evaluate=None)


def test_momenta_are_averaged_if_a_rank_uses_only_part_of_the_model() -> None:
    sessions = run(experiment(2, 6, task=choosy(), strategy=LocalSGD(every=3, momentum="average")))
    assert torch.equal(momenta(sessions[0]), momenta(sessions[1])) and momenta(sessions[0]).count_nonzero() > 60


def test_raising_warmup_clears_momenta_that_some_ranks_lack() -> None:
    e = experiment(2, 8, task=choosy(), strategy=PostLocalSGD(every=3, warmup=0))
    sessions = run(e, Change(4, "strategy.warmup", 8))
    assert torch.equal(momenta(sessions[0]), momenta(sessions[1]))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    assert "all_reduce momentum" not in {what for _, what, _ in sessions[0].record.comm()}


@pytest.mark.parametrize(("optimizer", "times"), [(heavy, 1), (adam, 2)])
def test_bytes_of_averaged_momenta_follow_the_formula(optimizer: Any, times: int) -> None:
    s = run(experiment(4, 3, strategy=LocalSGD(every=3, momentum="average"), task=toy(optimizer)))[0]
    counters = 4 * len(s.layout.order) if times == 2 else 0  # Adam counts the steps of each parameter
    sent = {what: n for _, what, n in s.record.comm()}
    assert sent["all_reduce momentum"] == traffic("all_reduce", times * s.layout.byte_count + counters, 4)[0]


def test_a_group_average_makes_a_group_equal_to_its_mean() -> None:
    apart = run(experiment(4, 6, strategy=LocalSGD(every=64)))
    close = run(experiment(4, 6, strategy=HierarchicalLocalSGD(every=64, group=2, group_every=6)))
    for first in (0, 2):
        pair = close[first : first + 2]
        assert torch.equal(weights(pair[0]), weights(pair[1]))
        mean = (weights(apart[first]) + weights(apart[first + 1])) / 2
        torch.testing.assert_close(weights(pair[0]), mean, rtol=1e-6, atol=1e-7)
    assert not torch.equal(weights(close[0]), weights(close[2]))


class Few(torch.nn.Module):
    """Three parameters: fewer than a group of 4 has ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :3] @ self.w


@pytest.mark.parametrize("group", [2, 4])
def test_groups_average_pieces_of_unequal_size(group: int) -> None:
    def loss(model: torch.nn.Module, pair: tuple) -> torch.Tensor:
        return (model(pair[0]) - pair[1][:, 0]).square().mean()

    task = toy(plain, model=lambda: net(Few), loss=loss, evaluate=None)
    e = experiment(4, 5, task=task, strategy=HierarchicalLocalSGD(every=64, group=group, group_every=5))
    apart = run(e.set("strategy.group", 1))
    for s in run(e):
        mean = torch.stack([weights(apart[r]) for r in neighbours(s.rank.index, group)]).mean(0)
        torch.testing.assert_close(weights(s), mean, rtol=1e-6, atol=1e-7)


def test_a_group_average_takes_the_time_of_its_bytes() -> None:
    """In a group of 2 each rank sends half the model twice. A collective of 4 sends it 1.5 times."""
    strategy = HierarchicalLocalSGD(every=8, group=2, group_every=2)
    e = paced(4, 8, pace=10.0, mbit=100.0, task=stack(layers=8, width=100), strategy=strategy, bucket_mb=0.04)
    lasts = seconds(simulate(e))
    wire = 8 * 4 * 100**2 * 8e-6 / 100
    assert lasts[1] - lasts[0] == pytest.approx(wire, rel=0.1)
    assert lasts[7] - lasts[0] == pytest.approx(1.5 * wire, rel=0.01)


def test_groups_that_do_not_divide_the_ranks_are_refused_with_a_reason() -> None:
    with pytest.raises(KnobError, match="group=4 does not divide 6 ranks into equal groups; use one of 1, 2, 3, 6"):
        experiment(6, strategy=HierarchicalLocalSGD(group=4))
    chosen = experiment(6, strategy=HierarchicalLocalSGD(group=3))
    with pytest.raises(KnobError, match="group=5 does not divide"):
        chosen.set("strategy.group", 5)


def test_engine_and_simulator_send_the_same_across_every_kind_of_change() -> None:
    """All ranks meet at global averages, so a change waits for the next one."""
    changes = (
        Change(3, "bucket_mb", 0.02), Change(6, "strategy.group", 2), Change(9, "strategy.group_every", 2),
        Change(12, "strategy.momentum", "average"), Change(15, "compressor", {"TopK": {"density": 0.1}}),
        Change(18, "strategy.group", 4), Change(21, "strategy", "DDP"),
        Change(23, "strategy", {"HierarchicalLocalSGD": {"group": 2, "every": 3, "warmup": 2}}),
    )  # fmt: skip
    e = experiment(4, 28, strategy=HierarchicalLocalSGD(every=3, group=1), eval_every=7)
    sessions = run(e, *changes)
    simulated = simulate(e.set("pace", 5.0), changes=changes, real=True)
    for s in sessions:
        assert comm(simulated, s.rank.index) == begun(s.record)
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-3, atol=1e-5)
    assert len(sessions[0].record.noted("change")) == len(changes)


def test_orders_reach_all_groups_before_the_same_step() -> None:
    sessions = live(experiment(4, 0, pace=5.0, strategy=HierarchicalLocalSGD(every=4, group=2)))
    try:
        until(lambda: all(s.rank.step > 6 for s in sessions))
        sessions[0].request({"kind": "change", "id": "a", "path": "strategy.group_every", "value": 2})
        until(lambda: sessions[0].record.noted("change"))
        step = sessions[0].record.noted("change")[0][0]
        until(lambda: all(s.rank.step > step + 8 for s in sessions))
        sessions[0].request({"kind": "pause"})
        until(lambda: all(s.phase == "paused" for s in sessions))
        assert len({hash_model_state(s.layout) for s in sessions}) == 1 and len({s.rank.step for s in sessions}) == 1
        for s in sessions:
            kinds = exchanged(s, s.rank.step)
            assert kinds[step - 4 : step + 8] == ["group"] * 3 + ["all"] + ["none", "group", "none", "all"] * 2
        sessions[0].request({"kind": "stop"})
        ended(sessions)
    finally:
        for s in sessions:
            s.abort()
            assert s.join(60)


def test_a_failing_rank_frees_ranks_that_wait_for_its_messages() -> None:
    def loss(model: torch.nn.Module, pair: tuple) -> torch.Tensor:
        if torch.equal(pair[0], poison):
            raise ValueError("a bad example")
        return mse(model, pair)

    poison = batch(2, 6, 0)[0]
    sessions = live(experiment(4, 50, task=toy(loss=loss), strategy=HierarchicalLocalSGD(every=256, group=2)))
    ended([sessions[2], sessions[3]])
    causes = [s.error for s in sessions if s.error and not s.error["consequence"]]
    assert [(e["rank"], e["step"], e["text"]) for e in causes] == [(2, 6, "a bad example")]
    for s in sessions:
        s.abort()
        assert s.join(60)


def test_compressed_displacements_in_groups_leave_ranks_equal() -> None:
    e = experiment(4, 12, strategy=HierarchicalLocalSGD(every=4, group=2), compressor=TopK.usual())
    sessions = run(e, Change(8, "bucket_mb", 0.03))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


def test_leaving_between_two_averages_continues_from_the_mean() -> None:
    e = experiment(3, 9, strategy=LocalSGD(every=2), task=toy(plain), pace=5.0, eval_every=1)
    changes = Change(5, "lr", 1e-30), Change(5, "strategy", "DDP")
    run = simulate(e, changes=changes, real=True)
    held, drift = samples(run, "held_out", 0), samples(run, "drift", 0)
    assert drift[5] > 1e-3 and drift[6] < 1e-7
    assert held[5] == pytest.approx(held[9], abs=1e-6)


def test_a_switch_and_back_before_one_step_leaves_ddp_unchanged() -> None:
    """A switch to another strategy and back before the same step averages only the state of the handover."""
    changes = Change(4, "strategy", {"PostLocalSGD": {"warmup": 3}}), Change(4, "strategy", "DDP")
    stay, went = run(experiment(2, 8)), run(experiment(2, 8), *changes)
    assert isinstance(went[0].experiment.strategy, DDP)
    assert torch.equal(weights(stay[0]), weights(went[0]))
