"""Tests unusual models, losses and switches that once broke tensor parallelism."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import weight_norm

from tests.piped import seen
from tests.ranks import ended, live, run, toy
from tests.sim.insides import simulated
from tests.split import PLAN, Block, Small, alone, entropy, near, small, spread, texts, together
from tests.unit.test_tensor import parts
from workbench import simulate
from workbench.experiment import Experiment
from workbench.host.passes.local_runner import run_together as in_one_process
from workbench.host.passes.tensor_parallel import compute_together, copy_slice
from workbench.host.placement.tensor_split import split_model
from workbench.partitions import Partition, Pipeline, Tensor
from workbench.settings import Change, KnobError
from workbench.strategies import DDP
from workbench.tasks import ByteGPT, Colwise, Partial, Plan, Rowwise

pytestmark = pytest.mark.ranks
NO_NORM = {name: way for name, way in PLAN.items() if name != "norm"}
SWITCHES: list[tuple[Partition, Plan, Change, str]] = [
    (Tensor(), NO_NORM, Change(3, "sequence", True), "norm.weight would get another gradient"),
    (Pipeline(micros=1), {"head": Colwise()}, Change(3, "partition", Tensor()), "the slices of a rank fail"),
    (Tensor(ways=4), PLAN, Change(3, "sequence", True), "6 positions cannot be split evenly over 4 ranks"),
]


@pytest.mark.parametrize(("was", "plan", "change", "words"), SWITCHES, ids=[words[:12] for *_, words in SWITCHES])
def test_a_wrong_plan_is_refused_from_any_partition(was: Partition, plan: Plan, change: Change, words: str) -> None:
    e = spread(was.size, 6, task=small(parts=parts, split=lambda _: plan), partition=was)
    sessions = run(e, change)
    ((*_, refused),) = sessions[0].record.noted("refused")
    assert words in refused and len(sessions[0].record.noted("partition")) == 1


class Normed(Block):
    """A block that normalises the queries of each head, as Qwen3 does."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.queries = nn.LayerNorm(4)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](h)
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.queries(q), k, v, is_causal=True)
        h = h + self.o(mixed.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.norms[1](h))))


def normed() -> nn.Module:
    """Returns a model with the usual start, at which that norm's gradients are very small."""
    model = Small()
    model.blocks = nn.ModuleList(Normed() for _ in range(2))
    rng = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        one = torch.ones if name.endswith("weight") else torch.zeros
        p.data = 0.02 * torch.randn(p.shape, generator=rng) if p.dim() > 1 else one(p.shape)
    return model


def test_a_wrong_but_small_gradient_is_found() -> None:
    task = small(model=normed, evaluate=None)
    sessions = live(spread(2, 6, task=task, partition=Tensor()))
    ended(sessions)
    said = str(sessions[0].error)
    assert re.search(r"blocks\.\d\.queries\.\w+ would get another gradient than in the whole model", said)
    assert "Use Partial()" in said


def test_a_module_on_a_ranks_own_heads_learns_from_all_ranks() -> None:
    task = small(model=normed, split=lambda _: {**PLAN, "blocks.*.queries": Partial()})
    e = spread(2, 6, task=task, partition=Tensor())
    near(together(run(e)), alone(e, 1, model=normed()))


def test_dropout_is_equal_on_all_ranks_after_any_other_random_draws() -> None:
    model = Small(dropout=0.5)
    dealt = split_model(2, model, small().build())
    kept: list[list[torch.Tensor]] = [[], []]

    def work(k: int, ask: Any) -> None:
        part = copy_slice(model, dealt, k).train()
        part.get_submodule("blocks.1.outside").register_forward_hook(lambda m, x, y: kept[k].append(y != 0))
        with compute_together(part, dealt, k, ask) as both:
            for number in range(3):
                with both.run_pass(None), torch.enable_grad():
                    entropy(part, texts(0, 1, 0)[number]).backward()
                torch.rand(1 + 7 * k)  # as noise for its own parameters

    in_one_process([partial(work, k) for k in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True)) and not torch.equal(kept[0][0], kept[0][1])


def test_a_loss_that_reads_parameters_is_refused_with_the_reason() -> None:
    def decayed(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
        return entropy(model, text) + 0.01 * sum((p**2).sum() for p in model.parameters())

    sessions = run(spread(2, 6, task=small(loss=decayed, evaluate=None)), Change(3, "partition", Tensor()))
    ((*_, refused),) = sessions[0].record.noted("refused")
    assert "the loss reads parameters, and a rank has only slices" in refused


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    def averaged(model: nn.Module) -> float:
        other = copy.deepcopy(model)
        for p in other.parameters():
            p.data.zero_()
        return float(entropy(other, texts(9, 1, 0)[0]))

    e = spread(2, 4, task=small(evaluate=averaged), eval_every=2)
    whole, dealt = run(e), run(e.set("partition", Tensor()))
    assert seen(dealt[0], "held_out") == pytest.approx(seen(whole[0], "held_out"), abs=1e-6)


def test_a_model_that_keeps_its_output_can_be_switched() -> None:
    class Keeping(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = super().forward(x)
            return self.kept

    sessions = run(spread(2, 8, task=small(model=Keeping)), Change(3, "partition", Tensor()))
    assert not sessions[0].record.noted("refused") and len(sessions[0].record.noted("partition")) == 1


class Noisy(nn.Module):
    """Noise between two split layers, and functional dropout after them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        return F.dropout(self.two(h + 0.1 * torch.randn_like(h)), 0.1, True)


def pairs(rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(rank)
    return [(torch.randn(8, 6, generator=rng), torch.randn(8, 2, generator=rng)) for _ in range(4)]


def squares(model: nn.Module, pair: Any) -> torch.Tensor:
    return F.mse_loss(model(pair[0]), pair[1])


def test_noise_between_layers_is_not_mistaken_for_an_error() -> None:
    plan = {"one": Colwise(), "two": Rowwise()}
    task = toy(model=Noisy, data=pairs, loss=squares, evaluate=None, split=lambda _: plan)
    sessions = run(spread(2, 6, task=task), Change(3, "partition", Tensor()))
    assert not sessions[0].record.noted("refused") and len(sessions[0].record.noted("partition")) == 1


def test_replicated_parameters_are_sent_once_per_step() -> None:
    """This also holds if a step has four forwards; each rank only sends its own part."""
    e = spread(4, 5, partition=Tensor(ways=4), strategy=DDP(accumulate=4))
    sessions = run(e)
    whole = sum(p.numel() for n, p in Small().named_parameters() if n in sessions[0].training.spread.split.owners)
    told = [(step, n) for s in sessions for step, name, n in s.record.comm() if "parameters that all have" in name]
    assert [step for step, _ in told] == [*range(5)] * 4
    assert sum(n for step, n in told if step == 2) == 3 * 4 * whole, "to three others each"


@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_a_compiled_model_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps the DDP whose forward runs in a global variable. Ranks of another test are threads, so they may have
    left
    theirs: the first to begin is the last to restore it.
    """
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)

    def compiled() -> nn.Module:
        model = Small()
        model.compile(backend="eager")
        return model

    e = spread(2, 3, task=small(model=compiled), partition=Tensor())
    near(together(run(e)), alone(e, 1, 3))


def test_a_model_that_reads_values_trains_but_cannot_be_simulated() -> None:
    class Looking(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.0 if float(self.norm.weight.sum()) > 1e9 else 0.5)

    e = spread(2, 6, task=small(model=Looking), partition=Tensor(), pace=1.0)
    near(together(run(e)), alone(e, 1, model=Looking()))
    with pytest.raises(KnobError, match=r"the exchanges inside a pass are not known, .* train on real ranks"):
        simulate(e, real=True)


def test_an_embedding_with_a_padding_index_is_split() -> None:
    def padded() -> nn.Module:
        model = Small()
        model.words = nn.Embedding(32, 16, padding_idx=20)
        model.words.weight.data = Small().words.weight.data
        return model

    e = spread(2, 6, task=small(model=padded), partition=Tensor())
    found = together(run(e))
    near(found, alone(e, 1, model=padded()))
    assert torch.equal(found["words.weight"][20], Small().words.weight[20]), "padding learns nothing"


def test_a_word_outside_the_vocabulary_raises_an_index_error() -> None:
    def odd(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
        some = texts(rank, ranks, seed)
        return [some[0], some[1].clone().index_fill_(1, torch.tensor([0]), 32)]

    sessions = live(spread(2, 6, task=small(data=odd, evaluate=None), partition=Tensor()))
    ended(sessions)
    assert any("index out of range" in str(s.error) for s in sessions)


def test_activations_between_layers_stay_in_half_precision() -> None:
    """A bias that is added after an all-reduce must not widen the type."""
    dtypes: list[torch.dtype] = []

    def note(module: nn.Module, x: Any, y: torch.Tensor) -> None:
        if not y.is_meta:
            dtypes.append(y.dtype)

    def half(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hook = model.get_submodule("blocks.0.down").register_forward_hook(note)
            loss = entropy(model, text)
            hook.remove()
        return loss

    for sequence in (False, True):
        dtypes.clear()
        _, sessions = simulated(spread(2, 3, task=small(loss=half), partition=Tensor(sequence=sequence), pace=1.0))
        assert set(dtypes) <= {torch.bfloat16, torch.float64} and torch.bfloat16 in dtypes
        (plain,) = simulated(spread(1, 3, task=small(loss=half), pace=1.0))[1]
        near(together(sessions), {p.name: p.param.data for p in plain.layout.order}, 2e-3)


WORDS: list[tuple[Any, Plan, bool, str]] = [
    (lambda: nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.Linear(8, 2)), {"0": Colwise(), "1": Rowwise()}, False,
     "0 computes its weight from other parameters (weight_norm, spectral_norm, pruning)"),
    (lambda: nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)), {"0": Rowwise()}, False, "an Embedding with max_norm"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "plan", "sequence", "words"), WORDS, ids=[words[:20] for *_, words in WORDS])
@pytest.mark.filterwarnings("ignore")
def test_modules_that_compute_their_weights_raise_knob_error(
    model: Any, plan: Plan, sequence: bool, words: str
) -> None:
    with pytest.raises(KnobError, match=re.escape(words)):
        split_model(2, model(), toy(model=model, data=pairs, loss=squares, split=lambda _: plan).build(), sequence)


def test_batch_norm_is_refused_with_sequence_parallelism() -> None:
    model = Small()
    model.norm = nn.BatchNorm1d(16)  # type: ignore[assignment]
    with pytest.raises(KnobError, match="norm: a BatchNorm1d needs the statistics of a whole batch"):
        split_model(2, model, small().build(), True)


def test_bytes_follow_live_changes_of_batch_and_micro_batch_size() -> None:
    """Both change live in the simulator with sizes only, and the bytes follow."""
    task = ByteGPT(layers=2, width=16, heads=2, context=8)
    e = Experiment(task=task, ranks=4, steps=6, pace=1.0, eval_every=0, partition=Pipeline(micros=2, of=Tensor()))
    changes = [Change(2, "micros", 4), Change(4, "batch", 16)]
    spans = simulate(e, changes=changes).spans
    mine = spans[(spans["rank"] == 0) & spans.name.str.contains("activation blocks")]
    each = [mine[mine.step == step].nbytes.max() for step in (1, 3, 5)]
    assert each == [4 * 4 * 8 * 16, 4 * 2 * 8 * 16, 4 * 4 * 8 * 16]
