"""Tests KFAC of convolutions against Grosse and Martens' formulas in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.agree import crosses_alike, sampled
from tests.ranks import experiment, net, run, toy, weights
from workbench import simulate
from workbench.experiment import Experiment
from workbench.strategies import KFAC
from workbench.strategies.second_order.layer_rows import find_layers, make_input_rows
from workbench.tasks import Digits

pytestmark = pytest.mark.ranks
LR = 0.05


class Seeing(nn.Module):
    """Two convolutions, one with stride, dilation and padding, and a Linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))
        self.b, self.c = nn.Conv2d(3, 2, 2, bias=False), nn.Linear(2 * 2 * 3, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))).flatten(1))


def data(rank: int, ranks: int, seed: int) -> list[Any]:
    rng = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, 2, 5, 6, generator=rng).double(), torch.randn(4, 3, generator=rng).double())
            for _ in range(16)]  # fmt: skip


def patches(layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """Returns the window's inputs, cut out place by place: (B, T, i)."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    x = F.pad(x, (pw, pw, ph, ph))
    high, wide = x.shape[2] - dh * (kh - 1), x.shape[3] - dw * (kw - 1)
    seen = [x[:, :, i : i + dh * (kh - 1) + 1 : dh, j : j + dw * (kw - 1) + 1 : dw].flatten(1)
            for i in range(0, high, sh) for j in range(0, wide, sw)]  # fmt: skip
    rows = torch.stack(seen, 1)
    return rows if layer.bias is None else torch.cat([rows, torch.ones_like(rows[..., :1])], 2)


def factors(model: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns Omega = E sum_t a_t a_t^T and Gamma = E mean_t g_t g_t^T (section 3.1), by each example's own loss."""
    first = model.a(x)
    second = model.b(torch.tanh(first))
    flat = torch.tanh(second).flatten(1)
    out = model.c(flat)
    loss = (out - y).square().mean(1).sum()
    g = torch.autograd.grad(loss, [first, second, out])
    found = {}
    for name, given, slope in (("a", x, g[0]), ("b", torch.tanh(first), g[1])):
        a, s = patches(getattr(model, name), given.detach()), slope.flatten(2).movedim(1, 2)
        omega, gamma = (torch.einsum("bti,btj->ij", each, each) for each in (a, s))
        found[name] = omega / len(x), gamma / s[..., 0].numel()
    one = torch.cat([flat.detach(), torch.ones(len(x), 1, dtype=x.dtype)], 1)
    found["c"] = one.T @ one / len(x), g[2].T @ g[2] / len(x)
    return found


def after(steps: int, ranks: int, k: KFAC) -> torch.Tensor:
    """Trains one process by plain descent, with new factors and inverses in every step."""
    model, running = net(Seeing), dict[str, tuple[torch.Tensor, ...]]()
    for step in range(steps):
        x, y = (torch.cat(part) for part in zip(*(data(r, ranks, 0)[step] for r in range(ranks)), strict=True))
        keeps = min(1 - 1 / (step + 1), k.decay)
        for name, new in factors(model, x, y).items():
            running[name] = tuple(keeps * f + (1 - keeps) * n for f, n in zip(running.get(name, new), new, strict=True))
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for name, (a, g) in running.items():
                layer = getattr(model, name)
                grad = layer.weight.grad.flatten(1)
                grad = grad if layer.bias is None else torch.cat([grad, layer.bias.grad[:, None]], 1)
                if step >= k.warmup:
                    pi = (a.diagonal().mean() / g.diagonal().mean()).sqrt()
                    eye, root = (torch.eye(len(m), dtype=m.dtype) for m in (a, g)), k.damping**0.5
                    i, o = eye
                    grad = torch.linalg.inv(g + root / pi * o) @ grad @ torch.linalg.inv(a + pi * root * i)
                n = layer.weight[0].numel()
                layer.weight -= LR * grad[:, :n].view_as(layer.weight)
                if layer.bias is not None:
                    layer.bias -= LR * grad[:, -1]
    return torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])


@pytest.mark.parametrize(("ranks", "fraction"), [(1, 1.0), (3, 1.0), (4, 0.5)])
def test_all_ranks_together_equal_one_process_with_all_examples(ranks: int, fraction: float) -> None:
    k = KFAC(damping=0.03, kl_clip=0.0, warmup=2, factors_every=1, inverses_every=1, decay=0.7, fraction=fraction)
    task = toy(partial(torch.optim.SGD, lr=LR), model=partial(net, Seeing), data=data, evaluate=None)
    e = experiment(ranks, 10, task=task, strategy=k)
    want, sessions = after(10, ranks, k), run(e)
    for session in sessions:
        np.testing.assert_allclose(weights(session), want, rtol=1e-9, atol=1e-11)
    if ranks == 3:
        assert sampled(simulate(e.set("pace", 5.0)), "preconditioned", 0)[0] == 1.0
        crosses_alike(simulate(e.set("pace", 5.0)), sessions)


def test_conv1d_is_treated_as_an_image_with_one_line() -> None:
    """Checks window, stride, padding and dilation of a Conv1d along its only direction."""
    torch.manual_seed(0)
    line = nn.Conv1d(3, 4, 3, stride=2, padding=2, dilation=2)
    x = torch.randn(5, 3, 11)
    rows, terms = make_input_rows(line, x, x.dtype)
    made = rows @ torch.cat([line.weight.flatten(1), line.bias[:, None]], 1).T
    torch.testing.assert_close(made.view(5, -1, 4).movedim(1, 2), line(x))
    assert terms == 5


def test_convolutions_that_are_no_single_matrix_use_the_plain_gradient() -> None:
    conv = partial(nn.Conv2d, 4, 4, 3)
    model = nn.Sequential(conv(groups=2), conv(padding=1, padding_mode="circular"), conv(padding="same"),
                          nn.ConvTranspose2d(4, 4, 3), conv())  # fmt: skip
    assert list(find_layers(model, {name for name, _ in model.named_parameters()})) == ["4"]


def test_every_layer_of_digits_is_preconditioned() -> None:
    e = Experiment(task=Digits(), strategy=KFAC(), ranks=2, steps=5, eval_every=0, pace=5.0)
    assert sampled(simulate(e), "preconditioned", 0)[0] == 1.0
