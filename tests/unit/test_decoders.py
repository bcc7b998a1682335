"""Tests transformers' decoder models: their own plan for slices, and a recipe for cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.agree import sampled
from tests.piped import seen
from tests.ranks import run, toy
from tests.split import near, spread, together
from workbench import simulate
from workbench.host.placement.stage_cuts import list_parts, run_parts
from workbench.partitions import Partition, Pipeline, Tensor, Whole
from workbench.partitions.schedules import Interleaved, ZeroBubble
from workbench.settings import Change
from workbench.tasks import decoder_parts

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.ranks
KINDS = ["Llama", "Mistral", "Qwen2", "Qwen3"]
WORDS, LAYERS = 64, 3


def decoder(kind: str = "Llama", **rest: Any) -> nn.Module:
    """Makes a small model from a separate generator, because ranks on threads share torch's."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, **{"tie_word_embeddings": False, **rest},
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    rng = torch.Generator().manual_seed(11)
    for p in model.parameters():
        p.data = (0.2 * torch.randn(p.shape, generator=rng)).to(p) if not p.is_meta else p.data
    return model


def texts(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(rank)
    return [torch.randint(0, WORDS, (4, 9), generator=rng) for _ in range(4)]


def loss(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(text[:, :-1]).logits.flatten(0, 1), text[:, 1:].flatten())


def held_out(model: nn.Module) -> float:
    return float(loss(model, texts(9, 1, 0)[0]))


TASK = toy(model=decoder, data=texts, loss=loss, evaluate=held_out)
WAYS = [Tensor(), Pipeline(micros=2), Pipeline(micros=2, of=Tensor()), Pipeline(micros=4, schedule=ZeroBubble()),
        Pipeline(micros=2, schedule=Interleaved(chunks=2))]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=["slices", "stages", "both", "halves", "pieces"])
def test_a_partitioned_llama_learns_as_on_one_rank(way: Partition) -> None:
    e = spread(way.size, 4, task=TASK, partition=way, eval_every=2, pace=1.0)
    (plain,), sessions = run(spread(1, 4, task=TASK, eval_every=2)), run(e)
    near(together(sessions), {p.name: p.param.data for p in plain.layout.order}, 1e-5)
    assert seen(sessions[0], "held_out") == pytest.approx(seen(plain, "held_out"), abs=1e-4)
    spans = simulate(e).spans
    sent = spans[(spans.lane == "comm") & (spans.step == 2) & (spans["rank"] == 0)].nbytes.sum()
    assert sent == sum(n for step, _, n in sessions[0].record.comm() if step == 2)


@pytest.mark.parametrize("cached", [True, False])
def test_a_models_layers_are_units_for_recomputation(cached: bool) -> None:
    """Bit-identical, with and without a cache of keys and values."""
    task = toy(model=lambda: _caching(cached), data=texts, loss=loss, evaluate=None)
    runs = [simulate(spread(2, 4, task=task, partition=Whole(checkpoint=what), pace=1.0), real=True)
            for what in ("none", "units", "attention")]  # fmt: skip
    losses, kept = ([sampled(run, name, 0) for run in runs] for name in ("loss", "memory activations"))
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 4
    assert 3 * kept[1][-1] < kept[2][-1] < kept[0][-1]
    assert runs[1].details("checkpoint")[0][2]["units"] == LAYERS


def _caching(cached: bool) -> nn.Module:
    model = decoder()
    model.config.use_cache = cached  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_models_parts_compute_the_same_as_the_model(kind: str, attention: str) -> None:
    model, text = decoder(kind).eval(), texts(0, 1, 0)[0]
    model.set_attn_implementation(attention)  # type: ignore[operator]
    parts = list_parts(model, TASK.build())
    assert len(parts) == LAYERS + 2
    assert torch.equal(run_parts(parts, text).logits, model(text).logits)
    assert torch.equal(run_parts(parts, input_ids=text).logits, model(input_ids=text).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_models_own_plan_slices_it(kind: str) -> None:
    task = toy(model=lambda: decoder(kind), data=texts, loss=loss, evaluate=None)
    sessions, (plain,) = run(spread(2, 3, task=task, partition=Tensor())), run(spread(1, 3, task=task))
    near(together(sessions), {p.name: p.param.data for p in plain.layout.order}, 1e-5)
    assert len(sessions[0].training.spread.split.sliced) >= 7 * LAYERS


def test_a_model_with_tied_embeddings_can_be_sliced_but_not_cut() -> None:
    """All ranks hold slices of the vocabulary; two stages would each need the whole."""
    task = toy(model=lambda: decoder(tie_word_embeddings=True), data=texts, loss=loss, evaluate=None)
    sessions = run(spread(2, 6, task=task, partition=Tensor()), Change(3, "partition", Pipeline(micros=2)))
    ((*_, said),) = sessions[0].record.noted("refused")
    assert "parameter model.embed_tokens.weight is tied: stages 0 and 1 would each need it" in said
    (plain,) = run(spread(1, 6, task=task))
    near(together(sessions), {p.name: p.param.data for p in plain.layout.order}, 1e-5)


def test_other_models_have_no_recipe() -> None:
    assert decoder_parts(nn.Linear(2, 2)) is None
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4)
    assert decoder_parts(transformers.GPT2LMHeadModel(config)) is None
