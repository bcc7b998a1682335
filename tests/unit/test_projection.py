"""Compares Projection with the best approximation in as few directions, and tests its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.piped import WIDTH, assembled, loss, piped
from tests.ranks import run, toy
from tests.unit.test_pipeline import broad, wide
from workbench.compressors import Projection
from workbench.optimizers import SGD
from workbench.partitions import Pipeline

RNG = torch.Generator().manual_seed(3)


def features(spectrum: torch.Tensor, n: int = 200) -> torch.Tensor:
    """Returns (4, n / 4, m) with these singular values."""
    m = len(spectrum)
    left, right = (torch.linalg.qr(torch.randn(k, m, generator=RNG, dtype=torch.float64)).Q for k in (n, m))
    return ((left * spectrum) @ right.T).view(4, n // 4, m).float()


def passed(x: torch.Tensor, **knobs: int) -> torch.Tensor:
    by = Projection(**knobs)
    return by.decode(by.encode(x), x)


@pytest.mark.parametrize("decay", [0.3, 0.7])
def test_projection_keeps_nearly_as_much_as_the_best_directions(decay: float) -> None:
    """The optimum of Eckart and Young follows from the singular values alone; more iterations come nearer."""
    spectrum = decay ** torch.arange(40, dtype=torch.float64)
    x = features(spectrum)
    best = float(spectrum[6:].norm() / spectrum.norm())
    off = [float((x - passed(x, rank=6, iterations=q)).norm() / x.norm()) for q in (1, 2, 4)]
    assert best - 1e-6 <= off[2] <= off[1] + 1e-6 <= off[0] + 2e-6
    assert off[0] < 3 * best + 1e-6 and off[2] < 1.05 * best + 1e-6


def test_a_tensor_of_low_rank_passes_whole() -> None:
    spectrum = torch.zeros(40, dtype=torch.float64)
    spectrum[:5] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    x = features(spectrum)
    torch.testing.assert_close(passed(x, rank=5), x, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(passed(1e-30 * x, rank=5), 1e-30 * x, atol=1e-35, rtol=1e-3)
    assert torch.equal(passed(torch.zeros(4, 50, 40)), torch.zeros(4, 50, 40))


def test_a_tensor_that_would_not_shrink_is_sent_unchanged() -> None:
    x = torch.randn(3, 4, 10, generator=RNG)
    assert torch.equal(passed(x, rank=8), x) and Projection(rank=8).chosen(Projection(rank=8).encode(x)) is None


def test_a_non_finite_tensor_decodes_to_nan() -> None:
    x = torch.randn(50, 40, generator=RNG)
    x[3, 3] = torch.inf
    assert passed(x).isnan().all()


def test_a_gradient_goes_back_along_the_same_directions() -> None:
    """The reference is autograd through the projected tensor with fixed directions."""
    x = features(0.8 ** torch.arange(40, dtype=torch.float64)).requires_grad_()
    by = Projection(rank=4)
    payload = by.encode(x.detach())
    basis = payload[1].view(40, 4)
    grad = torch.randn(x.shape, generator=RNG)
    (x @ basis @ basis.T).backward(grad)
    chosen = by.chosen(payload)
    assert chosen is not None and x.grad is not None
    way = by.through(chosen)
    torch.testing.assert_close(way.decode(way.encode(grad), grad), x.grad, atol=1e-5, rtol=1e-4)


def test_a_zero_tensor_passes_its_whole_gradient() -> None:
    """The reference is finite differences: near zero, a tensor in few directions passes whole, whichever they are."""
    nothing, by = torch.zeros(4, 50, 40, dtype=torch.float64), Projection(rank=4)
    spectrum = torch.zeros(40, dtype=torch.float64)
    spectrum[:4] = 1.0
    grad = features(spectrum).double()
    moved = by.decode(by.encode(nothing + 1e-6 * grad), nothing) - by.decode(by.encode(nothing), nothing)
    chosen = by.chosen(by.encode(nothing))
    assert chosen is not None
    way = by.through(chosen)
    back = way.decode(way.encode(grad), nothing)
    assert float((back * grad).sum()) == pytest.approx(float((moved / 1e-6 * grad).sum()), rel=1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize("masked", [True, False])
def test_between_stages_a_gradient_is_sent_as_coordinates(masked: bool) -> None:
    """Compares with autograd in one process, along the same directions or past them."""
    way = Pipeline(micros=1, activations=Projection(rank=3), mask=masked)
    task = toy(model=wide, data=broad, loss=loss, evaluate=None)
    sessions = run(piped(2, 1, task=task, partition=way, optimizer=SGD(momentum=0.0)))
    model, (x, y) = wide(), broad(0, 1, 0)[0]
    assert x.shape == (32, WIDTH)
    between = model[0](x)
    basis = Projection(rank=3).encode(between.detach())[1].view(200, 3)
    came = (between.detach() @ basis @ basis.T).requires_grad_()
    nn.functional.mse_loss(model[1](came), y).backward()
    assert came.grad is not None
    between.backward(came.grad @ basis @ basis.T if masked else came.grad)
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(assembled(sessions, 2)[name], p.detach() - 1e-2 * p.grad, rtol=1e-5, atol=1e-7)
    sent = [n for _, name, n in sessions[1].record.comm() if "send gradient" in name]
    assert sent == [4 * 32 * (3 if masked else 200)]
