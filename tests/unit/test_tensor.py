"""Tests tensor parallelism on real ranks: each rank has slices of every matrix, and all learn as one would."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import piped
from tests.agree import crosses_alike, memory_alike, sampled, spans_alike
from tests.ranks import ended, live, make_fitting, run, shipped
from tests.sim.insides import simulated
from tests.split import CONTEXT, LAYERS, ROWS, WIDTH, Small, alone, entropy, held_out, near, small, spread, together
from tests.waiting import until
from workbench import simulate
from workbench.compressors import QSGD, Compressor, ErrorFeedback, TopK
from workbench.experiment import Experiment, partition_rules
from workbench.optimizers import SGD, AdamW
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.settings import Change
from workbench.strategies import DDP, Strategy
from workbench.tasks import ByteGPT, Digits

pytestmark = pytest.mark.ranks
seen = piped.seen


@pytest.mark.parametrize(("ranks", "ways"), [(2, 2), (4, 2), (4, 4)])
def test_tensor_parallelism_learns_as_one_process_does(ranks: int, ways: int) -> None:
    e = spread(ranks, partition=Tensor(ways=ways), eval_every=3)
    sessions = run(e)
    near(together(sessions), alone(e, ranks // ways))
    plain = run(spread(ranks // ways, eval_every=3)) if ranks > ways else None
    if plain:
        assert seen(sessions[0], "held_out") == pytest.approx(seen(plain[0], "held_out"), abs=1e-5)
    losses = [seen(s, "loss") for s in sessions[:ways]]
    assert losses == [losses[0]] * ways, "all ranks of a replica compute the same loss"


@pytest.mark.parametrize("ways", [2, 4])
def test_a_sequential_is_split_automatically(ways: int) -> None:
    e = piped.piped(ways, partition=Tensor(ways=ways), optimizer=SGD(momentum=0.0))
    want = {name: x.detach() for name, x in piped.alone(e, (6, 1, 1)).items()}
    near(together(run(e)), want)


def test_each_rank_has_its_part_of_every_matrix_and_its_state() -> None:
    sessions = run(spread(4, partition=Tensor(ways=4), optimizer=AdamW()))
    whole = sum(p.numel() for p in Small().parameters())
    sliced = sum(p.numel() for n, p in Small().named_parameters() if n in sessions[0].training.spread.split.sliced)
    for s in sessions:
        state = sum(x.numel() for slots in s.optimizer.state.values() for x in slots.values() if x.dim())
        assert state == 2 * s.layout.element_count == 2 * sum(p.numel for p in s.layout.order)
        assert s.layout.element_count < 1.3 * whole / 4
        assert sum(p.numel() for p in s.model.parameters()) == sliced / 4 + whole - sliced
        assert all(p.grad is None for p in s.model.parameters())


def test_the_collectives_match_the_paper() -> None:
    """Each layer makes two all-reduces of activations forward and two backward; vocabulary and head add theirs."""
    sessions = run(spread(2, 3, partition=Tensor()))
    one = 4 * ROWS * CONTEXT * WIDTH
    rows = [(name, n) for step, name, n in sessions[1].record.comm() if step == 2 and "parameters" not in name]
    said = Counter(name.split()[0] + " " + name.split()[1] for name, _ in rows)
    assert said["all_reduce activation"] == 2 * LAYERS + 1, "two a layer, and the embedding's"
    assert said["all_reduce gradient"] == 4 * LAYERS + 1, "q, k, v and up of a layer have one each; the head's"
    assert said["all_gather activation"] == 1, "the head's"
    assert {n for name, n in rows if name.startswith("all_reduce")} == {one}
    assert all("tensor" in name for name, _ in rows)


def test_a_fused_matrix_costs_two_all_reduces_each_way() -> None:
    task = ByteGPT(layers=3, width=16, heads=2, context=8)
    (sent,) = [run(Experiment(task=task, ranks=2, steps=2, eval_every=0, partition=Tensor()))[0].record.comm()]
    said = Counter(tuple(name.split()[:2]) for step, name, _ in sent if step == 1)
    assert said["all_reduce", "activation"] == 2 * 3 + 1 and said["all_reduce", "gradient"] == 2 * 3 + 1


def test_live_switches_between_partitions_lose_nothing() -> None:
    """From whole to two slices, four, a pipeline and back: with the fewest bytes, as in the Marks."""
    e = spread(4, 15, eval_every=3, optimizer=AdamW(), lr=1e-2, task=small(parts=parts))
    ways = [Tensor(), Tensor(ways=4), Pipeline(micros=1), Tensor(ways=4), Whole()]
    changes = [Change(2 * k + 2, "partition", way) for k, way in enumerate(ways)]
    sessions = run(e, *changes)
    assert not sessions[0].record.noted("refused")
    marks = [json.loads(m[3]) for m in sessions[0].record.noted("partition")]
    assert [(m["stages"], m["slices"]) for m in marks] == [(1, 2), (1, 4), (2, 1), (1, 4), (1, 1)]
    assert marks[0]["nbytes"] == 0, "whoever has all of it lacks nothing"
    assert marks[1]["nbytes"] > 0 and "4 slices" in marks[1]["text"]
    first = {p.name: p.param.data for p in sessions[0].layout.order}
    assert all(torch.equal(first[p.name], p.param.data) for s in sessions for p in s.layout.order)
    record, sims = simulated(e.set("pace", 2.0), *changes)
    for s, t in zip(sessions, sims, strict=True):
        assert seen(s, "loss") == pytest.approx(sampled(record, "loss", s.rank.id), rel=1e-4)
        assert not record.details("refused") and t.spread is None


class Before(nn.Module):
    def __init__(self, model: Small) -> None:
        super().__init__()
        self.words, self.places = model.words, model.places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x) + self.places.weight[: x.shape[1]]


def parts(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, Small)
    return [Before(model), *model.blocks, nn.Sequential(model.norm, model.head)]


def test_the_engine_and_the_simulator_agree() -> None:
    """Bit-identical if only two ranks sum; the same bytes under each name; with sizes only the same times, too."""
    e = spread(4, 9, eval_every=3, pace=4.0, partition=Tensor())
    changes = [Change(3, "partition", Whole()), Change(6, "partition", Tensor())]
    sessions = run(e, *changes)
    real, sizes = (simulate(e, changes=changes, real=values) for values in (True, False))
    for rank, s in enumerate(sessions):
        for name in ("loss", "held_out"):
            assert sampled(real, name, rank)[:3] == seen(s, name)[:3]  # after it four replicas sum in another order
            assert sampled(real, name, rank) == pytest.approx(seen(s, name), rel=1e-5)
    for each in (real, sizes):
        crosses_alike(each, sessions)
    spans_alike(real, sizes)


def test_both_hosts_report_the_same_memory() -> None:
    task = ByteGPT(layers=4, width=32, context=16, heads=2)
    e = Experiment(task=task, ranks=2, steps=5, pace=8.0, bucket_mb=0.05, eval_every=0, partition=Tensor())
    ours = run(e)
    memory_alike(e, ours)


TWO = spread(4, partition=Tensor())
PARTED = [name for name, cls in shipped(Strategy).items()
          if partition_rules.explain_refusal(replace(TWO, strategy=make_fitting(cls, 2))) is None]  # fmt: skip
OF_WHAT_IT_HOLDS = {"StreamingDiLoCo", "LowPrecisionDecentralized"}  # their fragments and scales depend on buckets
ADAM = {"OneBitAdam", "QAdam"}  # they divide a gradient by its size, so near zero the rounding error counts


@pytest.mark.parametrize("name", sorted({*PARTED} - OF_WHAT_IT_HOLDS))
def test_a_strategy_does_the_same_between_sliced_and_whole_replicas(name: str) -> None:
    strategy = make_fitting(shipped(Strategy)[name], 2)
    lr = 1e-3 if name in ADAM else 0.1
    e = spread(4, 8, strategy=strategy, partition=Tensor(), lr=lr)
    dealt, whole = run(e), run(spread(2, 8, strategy=strategy, lr=lr))
    for replica in range(2):
        near(together(dealt, replica), {p.name: p.param.data for p in whole[replica].layout.order}, 1e-5)


@pytest.mark.parametrize("name", PARTED)
def test_no_strategy_makes_replicated_parameters_differ_within_a_replica(name: str) -> None:
    """All ranks of a replica have the same parameters in the next forward, also if a strategy changes one rank's."""
    strategy = make_fitting(shipped(Strategy)[name], 2)
    compressor = ErrorFeedback(of=TopK(density=0.1)) if strategy.exchanges == "gradients" else None
    e = spread(4, 8, strategy=strategy, partition=Tensor(), eval_every=0)
    try:
        e = replace(e, compressor=compressor).checked() if compressor else e
    except Exception:  # it does not compress
        pass
    sessions = run(e, Change(7, "partition", Whole()), Change(7, "strategy", DDP()))
    assert not sessions[0].record.noted("refused")
    for pair in (sessions[:2], sessions[2:]):
        assert seen(pair[0], "loss")[:7] == seen(pair[1], "loss")[:7]


@pytest.mark.parametrize("compressor", [ErrorFeedback(of=TopK(density=0.1)), QSGD()], ids=str)
def test_gradients_between_sliced_replicas_are_compressed(compressor: Compressor) -> None:
    e = spread(4, 8, compressor=compressor, partition=Tensor())
    sessions, plain = run(e), run(e.set("compressor", "Dense"))
    first, second = together(sessions, 0), together(sessions, 1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    sent = [sum(n for _, name, n in each[0].record.comm() if " data " in name) for each in (sessions, plain)]
    assert 0 < sent[0] < 0.5 * sent[1]


def test_a_replica_is_clipped_as_a_whole() -> None:
    e = spread(4, clip=0.5, partition=Tensor(), pace=2.0)
    sessions = run(e)
    near(together(sessions), alone(e, 2))
    norms = [seen(s, "grad_norm") for s in sessions]
    assert norms == [norms[0]] * 4 and max(norms[0]) > 0.5
    assert sampled(simulate(e, real=True), "grad_norm", 3) == pytest.approx(norms[3], rel=1e-6)


def test_dropout_differs_by_rank_inside_a_pair_of_layers_and_is_equal_outside() -> None:
    """In the simulator each rank has its own random numbers. The test records dropout by rank and module."""
    let: dict[tuple[int, str], list[torch.Tensor]] = {}

    def noting() -> nn.Module:
        model = Small(dropout=0.5)
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout) and not next(model.parameters()).is_meta:
                module.register_forward_hook(partial(note, (id(model), name)))
        return model

    def note(where: tuple[int, str], module: nn.Module, x: Any, y: torch.Tensor) -> None:
        if module.training:
            let.setdefault(where, []).append(y != 0)

    e = spread(2, 3, task=small(model=noting, evaluate=None), partition=Tensor(), pace=1.0)
    _, sessions = simulated(e)
    one, two = (id(s.model) for s in sessions)
    for name in {name for _, name in let}:
        for a, b in zip(let[one, name], let[two, name], strict=True):
            if name.endswith("outside"):
                assert torch.equal(a, b)
            else:
                assert (a != b).float().mean() > 0.3


def test_a_recomputed_layer_draws_the_same_random_numbers() -> None:
    """With dropout between two matrices, a checkpointed layer has the same gradients as one that keeps all."""

    class Again(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.words(x) + self.places.weight[: x.shape[1]]
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False)
            return self.head(self.norm(h))

    runs = [simulated(spread(2, 4, task=small(model=lambda kind=kind: kind(dropout=0.3), evaluate=None),
                             partition=Tensor(), pace=1.0)) for kind in (Small, Again)]  # fmt: skip
    (_, kept), (_, again) = runs
    for s, t in zip(kept, again, strict=True):
        assert all(torch.equal(p.param.data, q.param.data) for p, q in zip(s.layout.order, t.layout.order, strict=True))
    sent = [sum(record.spans.name.str.contains("activation")) for record, _ in runs]
    assert sent[1] > sent[0], "what is computed again is exchanged again"


def test_the_linear_layers_of_a_convolutional_network_are_split() -> None:
    e = Experiment(task=Digits(), ranks=2, steps=3, partition=Tensor(), eval_every=0, pace=1.0)
    (_, sessions), (_, (plain,)) = simulated(e), simulated(replace(e, ranks=1, partition=Whole()))
    assert {name.split(".")[0] for name in sessions[0].spread.split.sliced} == {"6", "8"}
    near(together(sessions), {p.name: p.param.data for p in plain.layout.order}, 1e-5)


@pytest.mark.parametrize("index", range(2))
def test_when_a_rank_fails_the_other_ranks_leave(index: int) -> None:
    def failing(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
        name = threading.current_thread().name
        calls[name] = calls.get(name, 0) + 1
        if name == f"rank {index} training" and calls[name] > 9:
            raise ValueError("on purpose")
        return entropy(model, text)

    calls: dict[str, int] = {}
    sessions = live(spread(2, 0, partition=Tensor(), task=small(loss=failing, evaluate=None)))
    ended(sessions)
    assert "on purpose" in sessions[index].error["text"]
    assert all(s.error is None or s.error["consequence"] for s in sessions if s is not sessions[index])


def test_when_evaluation_fails_on_one_rank_the_other_ranks_leave() -> None:
    def failing(model: nn.Module) -> float:
        if threading.current_thread().name == "rank 1 training":
            raise ValueError("on purpose")
        return held_out(model)

    sessions = live(spread(2, 4, partition=Tensor(), task=small(evaluate=failing), eval_every=2))
    ended(sessions)
    assert "on purpose" in sessions[1].error["text"]


def test_a_run_with_slices_can_be_paused_and_stopped() -> None:
    sessions = live(spread(4, 0, partition=Tensor(), pace=20.0))
    until(lambda: sessions[0].rank.step > 3)
    sessions[0].request({"kind": "pause", "id": "a"})
    until(lambda: sessions[0].phase == "paused")
    sessions[0].request({"kind": "change", "at_step": 0, "path": "partition", "value": "Whole", "id": "b"})
    sessions[0].request({"kind": "resume", "id": "c"})
    until(lambda: bool(sessions[0].record.noted("partition")[1:]))
    sessions[0].request({"kind": "stop", "id": "d"})
    ended(sessions)
    assert all(s.phase == "stopped" and s.error is None for s in sessions)
