"""Tests codecs for activations and their gradients inside layers that ranks compute together."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.agree import crosses_alike, memory_alike, sampled, spans_alike
from tests.piped import seen
from tests.ranks import run
from tests.split import CONTEXT, HEADS, LAYERS, ROWS, WIDTH, Small, near, small, spread, texts, together
from tests.unit.test_tensor import parts
from workbench import simulate
from workbench.compressors import (
    DGC,
    E3M0,
    QSGD,
    ByteGrad,
    Cast,
    Codec,
    Compressor,
    Dense,
    PowerSGD,
    Projection,
    TopK,
)
from workbench.experiment import Experiment
from workbench.partitions import Partition, Pipeline, Tensor
from workbench.settings import Change, KnobError
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks
TASK = small(parts=parts)
WAYS = 2


def coded(x: torch.Tensor, by: Compressor, count: int) -> torch.Tensor:
    """Returns `x` after each of `count` parts of its positions was encoded and decoded."""
    if isinstance(by, Dense):
        return x.clone()
    assert isinstance(by, Codec)
    return torch.cat([by.decode(by.encode(part), part) for part in x.chunk(count, 1)], 1)


def added(xs: list[torch.Tensor], by: Compressor) -> torch.Tensor:
    """Returns the sum of coded tensors; a linear codec sums in its own floats."""
    total = sum(xs[1:], xs[0])
    return coded(total, by, 1) if isinstance(by, Cast) else total


class Ahead(torch.autograd.Function):
    """The sum of all ranks' coded tensors. The gradient returns for the sent part, or for all of it."""

    @staticmethod
    def forward(ctx: Any, way: Tensor, *ys: torch.Tensor) -> torch.Tensor:
        by, count = way.activations, WAYS if way.sequence else 1
        made = [coded(y, by, count) for y in ys]
        ctx.way, ctx.made = way, made
        ctx.bases = [by.encode(y)[1].view(WIDTH, -1) for y in ys] if isinstance(by, Projection) else []
        return added(made, by)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if ctx.way.mask and ctx.bases:
            return None, *(grad @ basis @ basis.T for basis in ctx.bases)
        masks = ctx.way.mask and isinstance(ctx.way.activations, TopK)
        return None, *(grad * (made != 0) if masks else grad for made in ctx.made)


class Back(torch.autograd.Function):
    """The same for some ranks, with a sum of their coded gradients."""

    @staticmethod
    def forward(ctx: Any, way: Tensor, count: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.way = way
        return tuple(x.clone() for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        way = ctx.way
        made = [coded(grad, way.gradients, WAYS if way.sequence else 1) for grad in grads]
        return None, None, added(made, way.gradients)


def reference(model: Small, x: torch.Tensor, way: Tensor) -> torch.Tensor:
    """Returns the output of a Small with two coding ranks, in one process: Megatron-LM's f and g."""

    def columns(layer: Any, h: torch.Tensor) -> list[torch.Tensor]:
        if way.sequence:
            h = Ahead.apply(way, h)
        biases = layer.bias.chunk(WAYS) if layer.bias is not None else [None] * WAYS
        each = zip(Back.apply(way, WAYS, h), layer.weight.chunk(WAYS), biases, strict=True)
        return [F.linear(x, w, b) for x, w, b in each]

    def rows(layer: Any, ys: list[torch.Tensor]) -> torch.Tensor:
        weights = layer.weight.chunk(WAYS, 1)
        z = Ahead.apply(way, *(F.linear(y, w) for y, w in zip(ys, weights, strict=True)))
        return (Back.apply(way, 1, z)[0] if way.sequence else z) + layer.bias

    h = model.words(x) + model.places.weight[: x.shape[1]]
    h = Back.apply(way, 1, h)[0] if way.sequence else h
    for block in model.blocks:
        n = block.norms[0](h)
        q, k, v = ([y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in columns(layer, n)]
                   for layer in (block.q, block.k, block.v))  # fmt: skip
        mixed = [F.scaled_dot_product_attention(*each, is_causal=True) for each in zip(q, k, v, strict=True)]
        h = h + rows(block.o, [m.transpose(1, 2).flatten(2) for m in mixed])
        h = h + rows(block.down, [F.gelu(y) for y in columns(block.up, block.norms[1](h))])
    return torch.cat(columns(model.head, model.norm(h)), -1)


def alone(e: Experiment, way: Tensor, steps: int = 6) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns losses and parameters of one process that codes at the same places."""
    model, losses = Small(), []
    optimizer = torch.optim.SGD(model.parameters(), e.lr)
    for step in range(steps):
        text = texts(0, 1, 0)[step % 8]
        model.zero_grad()
        loss = F.cross_entropy(reference(model, text[:, :-1], way).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


CODED = [
    Tensor(activations=TopK(density=0.2)),
    Tensor(activations=TopK(density=0.2), mask=False),
    Tensor(gradients=TopK(density=0.3)),
    Tensor(activations=TopK(density=0.3), gradients=E3M0()),
    Tensor(activations=Cast(), gradients=Cast()),
    Tensor(activations=Projection(rank=4)),
    Tensor(sequence=True, activations=TopK(density=0.3), gradients=E3M0()),
    Tensor(sequence=True, activations=Cast(), gradients=TopK(density=0.5)),
]


@pytest.mark.parametrize("way", CODED, ids=lambda way: f"{way.activations} {way.gradients} {way.mask} {way.sequence}")
def test_it_learns_as_one_process_that_codes_at_the_same_places(way: Tensor) -> None:
    e = spread(2, task=TASK, partition=way)
    sessions = run(e)
    losses, want = alone(e, way)
    assert seen(sessions[0], "loss") == seen(sessions[1], "loss") == pytest.approx(losses, rel=1e-5)
    near(together(sessions), want, 1e-5)
    plain, _ = alone(e, Tensor(sequence=way.sequence))
    assert max(abs(x - y) for x, y in zip(losses, plain, strict=True)) > 1e-4, "a codec that shows"


AGREE: list[tuple[int, Partition]] = [
    (2, CODED[0]), (2, CODED[3]), (2, CODED[4]), (2, CODED[5]), (2, CODED[6]), (2, CODED[7]),
    (2, Tensor(sequence=True, activations=Projection(rank=4), gradients=Projection(rank=4))),
    (4, Tensor(ways=4, activations=ByteGrad(), gradients=TopK(density=0.5))),
    (4, Pipeline(micros=2, activations=Cast(), of=Tensor(activations=TopK(density=0.3), gradients=Cast()))),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "way"), AGREE, ids=lambda x: str(x)[:60])
def test_the_engine_and_both_simulations_agree(ranks: int, way: Partition) -> None:
    e = spread(ranks, task=TASK, partition=way, eval_every=3, pace=4.0)
    sessions, real, sizes = run(e), simulate(e, real=True), simulate(e)
    for rank, s in enumerate(sessions):
        assert sampled(real, "loss", rank) == pytest.approx(seen(s, "loss"), rel=1e-6)
        assert sampled(real, "held_out", rank) == pytest.approx(seen(s, "held_out"), rel=1e-6)
    crosses_alike(real, sessions)
    spans_alike(real, sizes)
    if not isinstance(way, Pipeline):
        memory_alike(e, sessions)


def test_payloads_of_stages_and_layers_take_the_same_memory_on_both_hosts() -> None:
    way = Pipeline(micros=4, of=Tensor(activations=TopK(density=0.3), gradients=Cast()))
    task = ByteGPT(layers=4, width=32, context=16, heads=2)
    e = Experiment(task=task, ranks=4, steps=5, pace=8.0, bucket_mb=0.05, eval_every=0, partition=way)
    memory_alike(e, run(e))


def test_random_rounding_is_equal_on_all_ranks_and_right_on_average() -> None:
    """QSGD rounds by each rank's own random numbers, and all ranks decode the same payloads."""
    e = spread(2, 20, task=TASK, partition=Tensor(activations=QSGD(bits=8), gradients=QSGD(bits=8)), pace=1.0)
    sessions = run(e)
    losses, plain = seen(sessions[0], "loss"), seen(run(e.set("partition", Tensor()))[0], "loss")
    assert losses == seen(sessions[1], "loss") != plain
    assert losses == pytest.approx(plain, rel=0.02)
    assert sampled(simulate(e, real=True), "loss", 0) == pytest.approx(losses, rel=0.02)


def test_the_sent_bytes_are_those_of_the_payloads() -> None:
    """Each rank sends 8 bytes for each of TopK's k entries to the other; fp16 values are summed on the way."""
    one = ROWS * CONTEXT * WIDTH
    sent = {}
    for name, codec in (("dense", Dense()), ("TopK", TopK(density=0.1)), ("fp16", Cast(to="fp16"))):
        spans = simulate(spread(2, 3, task=TASK, partition=Tensor(activations=codec), pace=1.0)).spans
        mine = spans[(spans["rank"] == 0) & (spans.lane == "comm") & (spans.step == 2)]
        inside = mine[mine.name.str.contains("activation blocks")]
        sent[name] = inside.nbytes.sum(), Counter(inside.name.str.split().str[0])
    assert sent["dense"] == (2 * LAYERS * 4 * one, {"all_reduce": 2 * LAYERS})
    assert sent["TopK"] == (2 * LAYERS * 8 * round(0.1 * one), {"all_gather": 4 * LAYERS})
    assert sent["fp16"] == (2 * LAYERS * 2 * one, {"all_reduce": 2 * LAYERS})


def test_codecs_change_live_and_no_parameter_moves() -> None:
    asked = [("activations", TopK(density=0.2)), ("mask", False), ("gradients", Cast()), ("activations", Dense()),
             ("partition", Tensor(activations=E3M0())), ("partition", "Tensor")]  # fmt: skip
    changes = [Change(2 * k + 2, *each) for k, each in enumerate(asked)]
    e = spread(2, 14, task=TASK, partition=Tensor(), pace=2.0)
    sessions, real, sizes = run(e, *changes), *(simulate(e, changes=changes, real=real) for real in (True, False))
    assert not sessions[0].record.noted("refused") and len(sessions[0].record.noted("partition")) == 1
    assert sampled(real, "loss", 0) == pytest.approx(seen(sessions[0], "loss"), rel=1e-6)
    crosses_alike(real, sessions)
    spans_alike(real, sizes)
    by_step = {step: sum(n for k, name, n in sessions[0].record.comm() if k == step and "activation blocks" in name)
               for step in (1, 3, 9, 11, 13)}  # fmt: skip
    assert by_step[3] == by_step[1] * 0.4 // 8 * 8 or by_step[3] < 0.42 * by_step[1]
    assert by_step[9] == by_step[13] == by_step[1] > 6 * by_step[11]


def test_a_held_out_loss_is_computed_without_codecs() -> None:
    """The first loss belongs to the initial model, on which a codec had no effect yet."""
    losses = [seen(run(spread(2, 3, task=TASK, partition=way, eval_every=3))[0], "held_out")
              for way in (Tensor(), CODED[0])]  # fmt: skip
    assert losses[0][0] == losses[1][0] and losses[0][1] != losses[1][1]


@pytest.mark.parametrize(("way", "words"), [
    (Tensor(activations=PowerSGD()), "activations=PowerSGD"), (Tensor(gradients=DGC()), "gradients=DGC"),
    (Pipeline(of=Tensor(activations=PowerSGD())), "inside a layer a rank sends each tensor by itself"),
], ids=["activations", "gradients", "in stages"])  # fmt: skip
def test_an_unsuitable_codec_raises_knob_error(way: Partition, words: str) -> None:
    with pytest.raises(KnobError, match=re.escape(words)):
        Experiment(partition=way).checked()


def test_a_byte_gpt_learns_with_10_percent_of_its_activations() -> None:
    task = ByteGPT(layers=2, width=32, heads=2, context=16)
    way = Tensor(activations=TopK(density=0.1))
    e = Experiment(task=task, ranks=2, steps=30, partition=way, pace=1.0, eval_every=0, lr=1e-2)
    losses = sampled(simulate(e, real=True), "loss", 0)
    assert all(map(math.isfinite, losses)) and sum(losses[-5:]) / 5 < losses[0] - 1.0


def test_a_zero_initialised_layer_learns_all_of_its_features() -> None:
    """A projection of zero makes no choice: a gradient through it would reach only some features."""
    task = ByteGPT(layers=1, width=32, heads=2, context=16)
    way = Tensor(activations=Projection(rank=4), gradients=Projection(rank=4))
    e = Experiment(task=task, ranks=2, steps=4, partition=way, eval_every=0, bucket_mb=0.01)
    found = together(run(e))
    for name in ("blocks.0.attention_out.weight", "blocks.0.mlp_out.weight"):
        assert bool((found[name] != 0).any(1).all()), name
