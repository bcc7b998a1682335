"""What a stranger broke in tensor parallelism, held: models, losses and switches that are awkward for it."""

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
from workbench.host.passes.crew import together as in_one_process
from workbench.host.passes.together import computing, slice_of
from workbench.host.placement.splitting import split
from workbench.partitions import Partition, Pipeline, Tensor
from workbench.settings import Change, KnobError
from workbench.strategies import DDP
from workbench.tasks import ByteGPT, Colwise, Partial, Plan, Rowwise

pytestmark = pytest.mark.ranks
NO_NORM = {name: way for name, way in PLAN.items() if name != "norm"}
SWITCHES: list[tuple[Partition, Plan, Change, str]] = [
    (Tensor(), NO_NORM, Change(3, "sequence", True), "norm.weight would learn something else"),
    (Pipeline(micros=1), {"head": Colwise()}, Change(3, "partition", Tensor()), "a rank's slices fail"),
    (Tensor(ways=4), PLAN, Change(3, "sequence", True), "6 positions cannot be dealt out to 4 ranks evenly"),
]


@pytest.mark.parametrize(("was", "plan", "change", "words"), SWITCHES, ids=[words[:12] for *_, words in SWITCHES])
def test_it_is_tried_whatever_it_is_switched_from(was: Partition, plan: Plan, change: Change, words: str) -> None:
    e = spread(was.size, 6, task=small(parts=parts, split=lambda _: plan), partition=was)
    sessions = run(e, change)
    ((*_, refused),) = sessions[0].record.noted("refused")
    assert words in refused and len(sessions[0].record.noted("partition")) == 1


class Normed(Block):
    """A block that norms the queries of each head, as Qwen3 does."""

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
    """With the usual start, from which the gradients of that norm are very small."""
    model = Small()
    model.blocks = nn.ModuleList(Normed() for _ in range(2))
    rng = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        one = torch.ones if name.endswith("weight") else torch.zeros
        p.data = 0.02 * torch.randn(p.shape, generator=rng) if p.dim() > 1 else one(p.shape)
    return model


def test_a_small_gradient_that_is_wrong_is_found_out() -> None:
    task = small(model=normed, evaluate=None)
    sessions = live(spread(2, 6, task=task, partition=Tensor()))
    ended(sessions)
    said = str(sessions[0].error)
    assert re.search(r"blocks\.\d\.queries\.\w+ would learn something else than in the whole model", said)
    assert "is Partial()" in said


def test_what_works_on_a_ranks_own_heads_learns_from_all() -> None:
    task = small(model=normed, split=lambda _: {**PLAN, "blocks.*.queries": Partial()})
    e = spread(2, 6, task=task, partition=Tensor())
    near(together(run(e)), alone(e, 1, model=normed()))


def test_whatever_a_rank_draws_between_two_forwards_it_drops_what_the_others_drop() -> None:
    model = Small(dropout=0.5)
    dealt = split(2, model, small().build())
    kept: list[list[torch.Tensor]] = [[], []]

    def work(k: int, ask: Any) -> None:
        part = slice_of(model, dealt, k).train()
        part.get_submodule("blocks.1.outside").register_forward_hook(lambda m, x, y: kept[k].append(y != 0))
        with computing(part, dealt, k, ask) as both:
            for number in range(3):
                with both.passing(None), torch.enable_grad():
                    entropy(part, texts(0, 1, 0)[number]).backward()
                torch.rand(1 + 7 * k)  # as noise for the parameters that it has

    in_one_process([partial(work, k) for k in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True)) and not torch.equal(kept[0][0], kept[0][1])


def test_a_loss_that_reads_parameters_is_refused_in_words() -> None:
    def decayed(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
        return entropy(model, text) + 0.01 * sum((p**2).sum() for p in model.parameters())

    sessions = run(spread(2, 6, task=small(loss=decayed, evaluate=None)), Change(3, "partition", Tensor()))
    ((*_, refused),) = sessions[0].record.noted("refused")
    assert "it reads parameters, of which a rank has slices" in refused


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    def averaged(model: nn.Module) -> float:
        other = copy.deepcopy(model)
        for p in other.parameters():
            p.data.zero_()
        return float(entropy(other, texts(9, 1, 0)[0]))

    e = spread(2, 4, task=small(evaluate=averaged), eval_every=2)
    whole, dealt = run(e), run(e.set("partition", Tensor()))
    assert seen(dealt[0], "held_out") == pytest.approx(seen(whole[0], "held_out"), abs=1e-6)


def test_a_model_that_keeps_what_it_computed_is_switched() -> None:
    class Keeping(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = super().forward(x)
            return self.kept

    sessions = run(spread(2, 8, task=small(model=Keeping)), Change(3, "partition", Tensor()))
    assert not sessions[0].record.noted("refused") and len(sessions[0].record.noted("partition")) == 1


class Noisy(nn.Module):
    """Noise between two layers that are dealt out, and functional dropout behind them."""

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


def test_noise_between_layers_is_no_fault() -> None:
    plan = {"one": Colwise(), "two": Rowwise()}
    task = toy(model=Noisy, data=pairs, loss=squares, evaluate=None, split=lambda _: plan)
    sessions = run(spread(2, 6, task=task), Change(3, "partition", Tensor()))
    assert not sessions[0].record.noted("refused") and len(sessions[0].record.noted("partition")) == 1


def test_what_all_have_is_told_once_a_step_and_nothing_beside() -> None:
    """Also where a step has four forwards; each rank sends what it looks after and no more."""
    e = spread(4, 5, partition=Tensor(ways=4), strategy=DDP(accumulate=4))
    sessions = run(e)
    whole = sum(p.numel() for n, p in Small().named_parameters() if n in sessions[0].training.spread.split.owners)
    told = [(step, n) for s in sessions for step, name, n in s.record.comm() if "parameters that all have" in name]
    assert [step for step, _ in told] == [*range(5)] * 4
    assert sum(n for step, n in told if step == 2) == 3 * 4 * whole, "to three others each"


@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_a_compiled_model_is_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch notes for the whole process whose DDP runs a forward, so ranks of another test, which are threads, may have
    left theirs (the first to begin is the last to be put back).
    """
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)

    def compiled() -> nn.Module:
        model = Small()
        model.compile(backend="eager")
        return model

    e = spread(2, 3, task=small(model=compiled), partition=Tensor())
    near(together(run(e)), alone(e, 1, 3))


def test_a_model_that_looks_at_values_trains_and_is_not_simulated_in_words() -> None:
    class Looking(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.0 if float(self.norm.weight.sum()) > 1e9 else 0.5)

    e = spread(2, 6, task=small(model=Looking), partition=Tensor(), pace=1.0)
    near(together(run(e)), alone(e, 1, model=Looking()))
    with pytest.raises(KnobError, match=r"when ranks meet in a pass cannot be told, .* train it on real ranks"):
        simulate(e, real=True)


def test_an_embedding_that_pads_is_dealt_out() -> None:
    def padded() -> nn.Module:
        model = Small()
        model.words = nn.Embedding(32, 16, padding_idx=20)
        model.words.weight.data = Small().words.weight.data
        return model

    e = spread(2, 6, task=small(model=padded), partition=Tensor())
    found = together(run(e))
    near(found, alone(e, 1, model=padded()))
    assert torch.equal(found["words.weight"][20], Small().words.weight[20]), "padding learns nothing"


def test_a_word_that_no_rank_has_is_refused_as_ever() -> None:
    def odd(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
        some = texts(rank, ranks, seed)
        return [some[0], some[1].clone().index_fill_(1, torch.tensor([0]), 32)]

    sessions = live(spread(2, 6, task=small(data=odd, evaluate=None), partition=Tensor()))
    ended(sessions)
    assert any("index out of range" in str(s.error) for s in sessions)


def test_in_half_precision_what_lies_between_layers_stays_half() -> None:
    """A bias that is added behind an all-reduce does not widen it."""
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
     "0 computes its weight from others (weight_norm, spectral_norm, pruning)"),
    (lambda: nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)), {"0": Rowwise()}, False, "an Embedding with max_norm"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "plan", "sequence", "words"), WORDS, ids=[words[:20] for *_, words in WORDS])
@pytest.mark.filterwarnings("ignore")
def test_modules_that_compute_their_weights_are_refused_in_words(
    model: Any, plan: Plan, sequence: bool, words: str
) -> None:
    with pytest.raises(KnobError, match=re.escape(words)):
        split(2, model(), toy(model=model, data=pairs, loss=squares, split=lambda _: plan).build(), sequence)


def test_statistics_of_a_batch_do_not_go_with_sequences() -> None:
    model = Small()
    model.norm = nn.BatchNorm1d(16)  # type: ignore[assignment]
    with pytest.raises(KnobError, match="norm: a BatchNorm1d takes statistics of a whole batch"):
        split(2, model, small().build(), True)


def test_batches_and_micro_batches_of_another_size_are_priced_as_they_are() -> None:
    """Turned live, in the simulator with sizes only: bytes follow."""
    task = ByteGPT(layers=2, width=16, heads=2, context=8)
    e = Experiment(task=task, ranks=4, steps=6, pace=1.0, eval_every=0, partition=Pipeline(micros=2, of=Tensor()))
    changes = [Change(2, "micros", 4), Change(4, "batch", 16)]
    spans = simulate(e, changes=changes).spans
    mine = spans[(spans["rank"] == 0) & spans.name.str.contains("activation blocks")]
    each = [mine[mine.step == step].nbytes.max() for step in (1, 3, 5)]
    assert each == [4 * 4 * 8 * 16, 4 * 2 * 8 * 16, 4 * 4 * 8 * 16]
