"""Tests Hogwild: one shared vector for all ranks of a host, lost updates, refusals and cleanup."""

from __future__ import annotations

import gc
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import batch as examples
from tests.ranks import ended, experiment, fingerprint, live, mse, poisoned, run, toy, weights
from tests.sim.insides import simulated
from tests.sim.virtual import comm, paced, rows, samples, seconds
from tests.unit.test_engine_apart import over, until
from workbench import simulate
from workbench.compressors import TopK
from workbench.engine.collectives import clock_offset as clocks
from workbench.engine.rank.session import Session
from workbench.fabric import Freeze, Slow
from workbench.host.placement.canonical_state import hash_model_state, list_optimizer_tensors
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, Hogwild

pytestmark = pytest.mark.ranks

BLOCK = re.compile(r"(\d+) +\S*/workbench-\S+\.shared( \(deleted\))?$", re.M)


def blocks() -> list[str]:
    """Returns the inode of every shared mapping in this process. All must have lost their file names."""
    found = [(m[1], m[2]) for m in BLOCK.finditer(Path("/proc/self/maps").read_text())]
    assert all(deleted for _, deleted in found), "a block still has its name"
    return [inode for inode, _ in found]


def files() -> list[Path]:
    """Returns blocks that still have a name. Other tests create and remove folders at the same time."""
    found: list[Path] = []
    for folder in os.listdir(tempfile.gettempdir()):
        if folder.startswith("workbench-"):
            with suppress(FileNotFoundError, NotADirectoryError):
                found += [p for p in Path(tempfile.gettempdir(), folder).iterdir() if p.suffix == ".shared"]
    return found


@pytest.fixture(scope="module")
def _opened_once() -> None:
    """Opens what torch opens once in a process and keeps."""
    run(experiment(2, 1))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(_opened_once: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks that a test leaves no file, mapping, descriptor or thread."""
    kept = 5 if "TorchDDP" in request.node.name else 0  # torch's DDP keeps the last run's store
    before = len(os.listdir("/proc/self/fd")) + kept, threading.active_count()
    yield
    end = time.monotonic() + 60
    while time.monotonic() < end:
        gc.collect()
        now = len(os.listdir("/proc/self/fd")), threading.active_count()
        if not blocks() and now[0] <= before[0] and now[1] <= before[1]:
            break
        time.sleep(0.05)
    assert not files() and not blocks() and now[0] <= before[0] and now[1] <= before[1], (before, now, blocks())


sgd = partial(torch.optim.SGD, lr=0.05)


# -- one vector


def test_all_ranks_share_one_vector_in_one_block_of_memory() -> None:
    sessions = run(experiment(4, 6, strategy=Hogwild()))
    assert len(blocks()) == 4 and len(set(blocks())) == 1, "four mappings of one block"
    first, last = (s.layout.weights[0] for s in (sessions[0], sessions[3]))
    first[7] = 42.0
    assert last[7] == 42.0
    assert all(
        p.data.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for p in sessions[0].model.parameters()
    )


def test_vectors_of_several_dtypes_lie_in_one_block() -> None:
    class Mixed(nn.Module):
        """An odd number of narrow weights next to wide ones."""

        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Parameter(torch.randn(4, 8))
            self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.exact = nn.Parameter(torch.ones(5, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.wide.T + self.narrow.sum().float() + self.exact.sum().float()

    sessions = run(experiment(2, 4, task=toy(sgd, model=Mixed), strategy=Hogwild()))
    first, second = ({w.dtype: w for w in one.layout.weights} for one in sessions)
    assert len(set(blocks())) == 1 and set(first) == {torch.float32, torch.bfloat16, torch.float64}
    for dtype, w in first.items():
        assert torch.equal(w, second[dtype]) and float(w[0]) != 1.0
    held = second[torch.float32].clone()
    first[torch.bfloat16].fill_(9.0)
    first[torch.float64].fill_(7.0)
    assert torch.equal(second[torch.float32], held), "they do not overlap"
    assert set(second[torch.bfloat16].tolist()) == {9.0}


# -- what it computes


def test_one_rank_is_bit_identical_to_sequential_gradient_descent() -> None:
    want = weights(run(experiment(1, 12, task=toy(sgd), strategy=DDP()))[0])
    assert torch.equal(weights(run(experiment(1, 12, task=toy(sgd), strategy=Hogwild()))[0]), want)


class Table(nn.Module):
    """A table in which each rank trains its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(32, 5, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids)


def looked_up(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
    """Draws rows that no other rank looks up, in the rank's own order."""
    rng = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 8, (3,), generator=rng) + 8 * rank for _ in range(16)]


def bent(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids).sin() * (1 + ids[:, None] / 10)).sum()


def test_disjoint_supports_are_bit_identical_to_any_serial_order() -> None:
    def start() -> nn.Module:
        model = Table()
        with torch.no_grad():
            model.rows.weight.copy_(torch.linspace(-1, 1, 160).view(32, 5))
        return model

    steps, found = 40, []
    task = toy(sgd, model=start, data=looked_up, loss=bent, evaluate=None)
    chosen = experiment(4, steps, task=task, strategy=Hogwild())
    for order in list(permutations(range(4)))[::7]:
        model = start()
        optimizer = sgd(model.parameters())
        for rank in order:
            for step in range(steps):
                optimizer.zero_grad()
                bent(model, looked_up(rank, 4, 0)[step % 16]).backward()
                optimizer.step()
        found.append(model.rows.weight.detach().clone())
    assert all(torch.equal(found[0], other) for other in found[1:]), "so one reference will do"
    for s in run(chosen):
        assert torch.equal(s.model.rows.weight, found[0])
    _, ranks = simulated(chosen.set("pace", 5.0).set("faults", [Slow(rank=2, factor=1.7)]))
    assert torch.equal(ranks[3].model.rows.weight, found[0])


class Tally(nn.Module):
    """Every update adds 1 to every element."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.Parameter(torch.zeros(200_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.sums.sum() * x


def test_overlapping_increments_may_be_lost_but_never_invented(record_property: Any) -> None:
    ranks, steps = 4, 60
    task = toy(partial(torch.optim.SGD, lr=1.0), model=Tally, loss=lambda m, x: m(x), evaluate=None,
               data=lambda rank, ranks, seed: [torch.ones(())])  # fmt: skip
    chosen = experiment(ranks, steps, task=task, strategy=Hogwild())
    sums = run(chosen)[0].model.sums.detach()
    assert bool((sums == sums.round()).all()) and float(sums.max()) <= ranks * steps
    assert float(sums.min()) >= 1 and float(sums.mean()) > steps, "more than one rank alone would have made"
    lost = 1 - float(sums.mean()) / (ranks * steps)
    record_property("lost", lost)
    print(
        f"{lost:.2g} of all increments were lost, and at the worst element {ranks * steps - float(sums.min()):g} of "
        f"{ranks * steps}"
    )
    _, (first, *_) = simulated(chosen.set("pace", 5.0))
    assert set(first.model.sums.tolist()) == {ranks * steps}, "an update of the simulator is one moment"


class Line(nn.Module):
    """One layer: its gradient depends only on the weights that its forward read."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 4, bias=False)
        with torch.no_grad():
            self.line.weight.fill_(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)


def test_virtual_time_alone_decides_which_updates_a_rank_reads() -> None:
    """A plain replay gives the same values: reads at the start of a forward, writes at the start of an update."""
    chosen = paced(3, 12, task=toy(sgd, model=Line), strategy=Hogwild(), faults=[Slow(rank=1, factor=2.3)])
    found, ranks = simulated(chosen)
    compute = rows(found, "compute")
    moments = [
        (float(t0), str(name), int(rank), int(step))
        for t0, name, rank, step in zip(compute.t0, compute.name, compute.rank, compute.step, strict=True)
        if name != "backward"
    ]
    model, grads, seen, written = Line(), {}, {}, 0
    for _, name, rank, step in sorted(moments):
        if name == "forward":
            seen[rank] = written
            (grads[rank],) = torch.autograd.grad(mse(model, examples(rank, step, 0)), list(model.parameters()))
        else:
            written += 1
            with torch.no_grad():
                model.line.weight.sub_(0.05 * grads[rank])
            seen[rank] = written - 1 - seen[rank]
    assert set(seen.values()) != {0}, "gradients are stale"
    torch.testing.assert_close(ranks[0].model.line.weight, model.line.weight, rtol=1e-6, atol=1e-8)
    assert len({hash_model_state(s.layout) for s in ranks}) == 1


def test_hogwild_learns_on_both_hosts() -> None:
    chosen = experiment(3, 40, task=toy(partial(torch.optim.SGD, lr=0.02)), strategy=Hogwild(), pace=3.0, eval_every=40)
    held = [v for _, name, _, v in run(chosen)[0].record.samples if name == "held_out"]
    assert held[-1] < 0.5 * held[0]
    simulations = samples(simulate(chosen, real=True), "held_out", 0)
    assert simulations[0] == pytest.approx(held[0], rel=1e-5) and simulations[-1] < 0.5 * held[0]


# -- nothing is sent, nobody waits


def test_no_byte_is_sent() -> None:
    chosen = experiment(4, 8, strategy=Hogwild(), pace=2.0)
    assert [s.record.comm() for s in run(chosen)] == [[]] * 4
    for real in (False, True):
        assert not [row for r in range(4) for row in comm(simulate(chosen, real=real), r)]


def test_a_frozen_rank_delays_no_other_rank() -> None:
    sessions = live(experiment(3, 0, strategy=Hogwild(), pace=10.0))
    try:
        until(lambda: all(s.rank.step > 3 for s in sessions), sessions)
        asked = {"path": "faults", "value": [{"Freeze": {"rank": 1, "seconds": 60.0}}]}
        sessions[0].request({"kind": "change", "id": "f", **asked})
        until(lambda: sessions[0].record.noted("change"), sessions)
        at = [s.rank.step for s in sessions]
        until(lambda: all(sessions[r].rank.step > at[r] + 40 for r in (0, 2)), sessions)
        assert sessions[1].rank.step <= at[1] + 1, "it stands still all the while"
    finally:
        over(sessions)
    frozen = simulate(paced(3, 20, strategy=Hogwild()), changes=[Change(5, "faults", (Freeze(rank=1, seconds=3.0),))])
    assert max(seconds(frozen, 0)) == pytest.approx(10e-3) and max(seconds(frozen, 1)) == pytest.approx(10e-3)
    assert [r for r in range(3) if frozen.details("fault", r)] == [1]


# -- in and out, and changes while it lasts


CHAIN = (Change(3, "strategy", "Hogwild"), Change(8, "strategy", "LocalSGD"), Change(14, "strategy", "DDP"))


OPTIMIZERS = [partial(torch.optim.SGD, lr=0.02, momentum=0.9), partial(torch.optim.Adam, lr=1e-3)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["SGD", "Adam"])
def test_switching_in_and_out_live_leaves_ranks_equal(optimizer: Any) -> None:
    chosen = experiment(4, 20, task=toy(optimizer), pace=2.0).set("faults", [Slow(rank=1, factor=2.0)])
    sessions = run(chosen, *CHAIN)
    assert not blocks(), "each rank's memory is its own again"
    _, virtual = simulated(chosen, *CHAIN)
    for ranks in (sessions, virtual):
        assert len({hash_model_state(s.layout) for s in ranks}) == 1
        assert len({fingerprint(list_optimizer_tensors(s.layout, s.optimizer)) for s in ranks}) == 1
        assert len({s.layout.weights[0].data_ptr() for s in ranks}) == 4
        assert len({s.rank.step for s in ranks}) == 1


@pytest.mark.parametrize("other", ["TorchDDP", {"AsyncServer": {"servers": 1}}, "ShadowMA", "Gossip"], ids=str)
def test_runs_switch_from_every_kind_of_strategy_to_hogwild_and_back(other: Any) -> None:
    plan = [Change(2, "strategy", "Hogwild"), Change(6, "strategy", other), Change(10, "strategy", "DDP")]
    sessions = run(experiment(3, 14, strategy=DDP(), pace=2.0), Change(0, "strategy", other), *plan)
    assert len(sessions[0].record.noted("change")) == 4 and not blocks()
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


def test_switching_in_and_out_without_learning_changes_nothing() -> None:
    still = [Change(3, "lr", 1e-30), Change(4, "strategy", "Hogwild"), Change(8, "strategy", "DDP")]
    stay = run(experiment(3, 10, strategy=DDP()), still[0])
    went = run(experiment(3, 10, strategy=DDP()), *still)
    assert torch.equal(weights(went[0]), weights(stay[0])), "all ranks held the same bits"


def sized(rank: int, ranks: int, seed: int, batch: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [examples(rank, step, seed, batch) for step in range(16)]


def test_live_changes_of_buckets_rate_and_batch_keep_the_one_vector() -> None:
    chosen = experiment(3, 0, task=toy(sgd, data=sized), strategy=Hogwild(), pace=4.0, eval_every=5)
    sessions = live(chosen.set("faults", [Slow(rank=1, factor=3.0)]))
    try:
        turns = [("bucket_mb", 0.02), ("lr", 0.005), ("bucket_mb", 1.0), ("batch", 2), ("bucket_mb", 0.01)]
        for k, (path, value) in enumerate(turns):
            sessions[0].request({"kind": "change", "id": str(k), "path": path, "value": value})
            until(lambda k=k: len(sessions[0].record.noted("change")) > k, sessions)
            begun = [s.rank.step for s in sessions]
            until(lambda b=begun: all(s.rank.step > n + 2 for s, n in zip(sessions, b, strict=True)), sessions)
            assert len(blocks()) == 3 and len(set(blocks())) == 1, "one block again"
        cuts = [len(json.loads(mark[3])["nbytes"]) for mark in sessions[0].record.noted("buckets")]
        assert cuts == [2, 2, 1, 2]
        assert len({(s.experiment.bucket_mb, s.experiment.lr, s.experiment.batch) for s in sessions}) == 1
        sessions[0].request({"kind": "pause"})
        until(lambda: all(s.phase == "paused" for s in sessions), sessions)
        assert len({hash_model_state(s.layout) for s in sessions}) == 1
        assert {v for _, name, _, v in sessions[1].record.samples if name == "drift"} == {0.0}
    finally:
        over(sessions)


def test_new_buckets_keep_the_parameters() -> None:
    """At a learning rate of nearly 0 the parameters keep their values in the new layout."""
    plan = [Change(4, "lr", 1e-30), Change(6, "bucket_mb", 0.02), Change(9, "bucket_mb", 1.0)]
    chosen = experiment(3, 12, strategy=Hogwild(), pace=2.0, eval_every=1)
    (found, cut), (other, stayed) = simulated(chosen, *plan), simulated(chosen, plan[0])
    for held in (samples(found, "held_out", 0), samples(other, "held_out", 0)):
        assert list(held[5:]) == [held[5]] * 8 and held[0] != held[5]
    assert len({s.layout.weights[0].data_ptr() for s in cut}) == 1
    assert torch.equal(weights(cut[0]), weights(stayed[0]))
    sessions = run(chosen, *plan)
    held = [v for step, name, _, v in sessions[0].record.samples if name == "held_out" and step > 5]
    assert held == [held[0]] * len(held)


# -- when something goes wrong


def test_a_failing_rank_frees_the_other_ranks_and_is_named() -> None:
    sessions = live(experiment(4, 0, task=poisoned(2, 6), strategy=Hogwild(), pace=3.0))
    ended(sessions)
    causes = [s.error for s in sessions if s.error and not s.error["consequence"]]
    assert [(e["rank"], e["step"], e["text"]) for e in causes] == [(2, 6, "a bad example")]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_while_switching_in_leaves_no_file(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lie_in = ParameterLayout.adopt_vectors

    def stumbles(self: ParameterLayout, vectors: Any) -> None:
        if threading.current_thread().name == f"rank {rank} training":
            assert len(files()) == 1, "the others have not come yet"
            raise ValueError("stumbled")
        lie_in(self, vectors)

    monkeypatch.setattr(ParameterLayout, "adopt_vectors", stumbles)
    sessions = live(experiment(3, 9), (Change(3, "strategy", "Hogwild"),))
    until(lambda: any(s.error for s in sessions))
    if not all(s.join(3) for s in sessions):  # gloo may let a peer wait for ever; a lab ends it like this
        over(sessions)
    assert not files()
    causes = [s.error for s in sessions if s.error and not s.error["consequence"]]
    assert [(e["rank"], e["text"]) for e in causes] == [(rank, "stumbled")]


def refusals(sessions: list[Session]) -> list[str]:
    return [m[3] for m in sessions[0].record.noted("refused")]


def test_hogwild_on_several_hosts_is_refused_before_a_run_and_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks.platform, "node", lambda: threading.current_thread().name.split(" training")[0])
    sessions = live(experiment(2, 4, strategy=Hogwild()))
    ended(sessions)
    assert any("and ranks on several hosts cannot" in s.error["text"] for s in sessions if s.error)
    assert all(s.phase == "failed" and s.rank.step == 0 for s in sessions)
    sessions = run(experiment(2, 8), Change(3, "strategy", "Hogwild"))
    (reason,) = refusals(sessions)
    assert "take a lab on one host" in reason and {s.phase for s in sessions} == {"done"}
    assert {r[2] for s in sessions for r in s.record if r[1] == "step"} == {"DDP"}


def test_hogwild_on_a_gpu_is_refused() -> None:
    sessions = live(experiment(2, 0, pace=5.0))
    try:
        until(lambda: all(s.rank.step > 2 for s in sessions), sessions)
        for s in sessions:
            s.device = f"cuda:{s.rank.index}"
        sessions[0].request({"kind": "change", "id": "x", "path": "strategy", "value": "Hogwild"})
        until(lambda: refusals(sessions), sessions)
        assert "the parameters are on cuda:0; take a lab with device='cpu'" in refusals(sessions)[0]
    finally:
        for s in sessions:
            s.device = "cpu"
        over(sessions)


def test_hogwild_with_a_compressor_is_refused() -> None:
    with pytest.raises(KnobError, match=r"Hogwild sends nothing, so .* use Dense with it"):
        experiment(2, strategy=Hogwild(), compressor=TopK.usual())
