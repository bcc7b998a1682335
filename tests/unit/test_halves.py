"""Tests backwards in two halves: bit-identical to one backward, without recomputation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.agree import memory_alike
from tests.piped import deep
from tests.ranks import run
from tests.split import Block
from workbench.experiment import Experiment
from workbench.host.passes.split_backward import SplitBackward
from workbench.host.passes.stage_module import StageModule
from workbench.partitions import Pipeline, Tensor
from workbench.partitions.schedules import ZeroBubble
from workbench.rank import StrategyError
from workbench.settings import KnobError
from workbench.tasks import ByteGPT

WIDTH = 16


class Twice(nn.Module):
    """One matrix, used again on its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(torch.tanh(self.one(x)))


class Beside(nn.Module):
    """Parameters without influence of the input, an unused one, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own, self.idle = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.still = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) * self.two(self.own).sigmoid() + self.own.sin() + self.still


class Again(nn.Module):
    """A block with recomputed activations."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


MODELS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "layers": lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, WIDTH)),
    "block": lambda: Block(0.0), "twice": Twice, "beside": Beside, "again": Again,
    "no parameters": lambda: nn.Tanh(),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_both_halves_equal_one_backward(name: str) -> None:
    torch.manual_seed(0)
    model, x, grad = MODELS[name](), torch.randn(3, 4, WIDTH), torch.randn(3, 4, WIDTH)
    whole, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(whole).backward(grad)
    want = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    halves = SplitBackward(model(own), own, model.parameters())
    first = halves.of_input(grad)
    assert first is not None and whole.grad is not None and torch.equal(first, whole.grad)
    assert all(p.grad is None for p in model.parameters())
    halves.of_params()
    for n, p in model.named_parameters():
        assert (p.grad is None) == (want[n] is None) and (p.grad is None or torch.equal(p.grad, want[n])), n


def test_halves_give_gradients_in_the_same_order_and_call_hooks_once() -> None:
    torch.manual_seed(0)
    came: list[list[str]] = []
    for split in (False, True):
        model, x = Block(0.0), torch.randn(3, 4, WIDTH, requires_grad=True)
        came.append(heard := [])
        for n, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, n=n, heard=heard: heard.append(n))
        made = model(x)
        if split:
            halves = SplitBackward(made, x, model.parameters())
            halves.of_input(torch.ones_like(made))
            assert not heard
            halves.of_params()
        else:
            made.sum().backward()
    assert Counter(came[0]) == Counter(came[1]) and set(Counter(came[1]).values()) == {1}


class Counting(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return func(*args, **(kwargs or {}))


def test_no_matrix_product_is_computed_twice() -> None:
    model, x = MODELS["layers"](), torch.randn(3, 4, WIDTH, requires_grad=True)
    counts = []
    for split in (False, True):
        made = model(x)
        with Counting() as counting:
            if split:
                halves = SplitBackward(made, x, model.parameters())
                halves.of_input(torch.ones_like(made))
                first = counting.products
                halves.of_params()
            else:
                made.backward(torch.ones_like(made))
        counts.append(counting.products)
    assert counts == [4, 4] and first == 2


def test_halves_in_the_wrong_order_are_refused() -> None:
    model = deep()
    piece = StageModule(model, [tuple(model)], 0, 1)
    with pytest.raises(StrategyError, match="backward of micro-batch 0 has no open forward"):
        piece.backward_inputs(1.0, 0)
    with pytest.raises(StrategyError, match="second half of micro-batch 0's backward was asked for before its first"):
        piece.backward_weights(0)


def test_a_stage_without_input_gradient_is_refused() -> None:
    """Its input is integers, or it passes no gradient on."""
    model = nn.Sequential(nn.Embedding(4, WIDTH), nn.Linear(WIDTH, 4))
    for came, parts in ((torch.tensor([1, 2]), (model[0],)), (torch.randn(2, WIDTH), (Cut(), model[1]))):
        piece = StageModule(model, [parts], 1, 3)
        made = piece.run_forward(lambda net, batch: net(batch), None, came, 0)
        with pytest.raises(StrategyError, match="returns no gradient for its input"):
            piece.backward_inputs(torch.ones_like(made), 0)


class Cut(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


def test_zero_bubble_with_tensor_slices_is_refused() -> None:
    with pytest.raises(KnobError, match=r"schedule=ZeroBubble: ranks that share a stage cannot split .* of=Whole"):
        Experiment(ranks=4, partition=Pipeline(schedule=ZeroBubble(), of=Tensor())).checked()


@pytest.mark.ranks
def test_a_stage_keeps_the_activations_of_its_pending_second_halves() -> None:
    """Engine and simulator agree on every category.

    With shapes only, the peak lacks values of nodes without parameters. The engine frees them with the last part of
    their graph; a whole backward frees them on its way.
    """
    task = ByteGPT(layers=6, width=32, context=16, heads=2)
    way = Pipeline(stages=4, micros=8, schedule=ZeroBubble())
    e = Experiment(task=task, ranks=4, steps=5, pace=8.0, bucket_mb=0.05, eval_every=0, partition=way)
    memory_alike(e, run(e), peak=0.1)
