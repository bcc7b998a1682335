"""Checks that a tiled layer equals the layer, and fits where the layer does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.ranks import experiment, run, toy
from tests.unit.test_zero_3 import seen
from workbench import KnobError
from workbench.optimizers import AdamW
from workbench.run import require_memory
from workbench.strategies import ZeROInfinity
from workbench.tasks import TiledLinear, tiled

WIDTH = 256


class Wide(nn.Module):
    """Two layers; one layer is large."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.tied = nn.Linear(4 * WIDTH, WIDTH)
        self.again = nn.Linear(4 * WIDTH, WIDTH)
        self.again.weight = self.tied.weight
        rng = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = 0.05 * torch.randn(p.shape, generator=rng)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.into(x)))


def data(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 8, generator=rng) for _ in range(4)]


@pytest.mark.parametrize("tiles", [1, 3, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_equal_the_layers(tiles: int, bias: bool) -> None:
    torch.manual_seed(0)
    whole, x = nn.Linear(20, 31, bias), torch.randn(5, 6, 20, requires_grad=True)
    cut, y = TiledLinear.of(whole, tiles), x.detach().clone().requires_grad_()
    one, other = whole(x), cut(y)
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    for out in (one, other):
        out.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    torch.testing.assert_close(torch.cat([tile.weight.grad for tile in cut.tiles]), whole.weight.grad)


def test_only_large_layers_with_untied_weights_are_tiled() -> None:
    model = tiled(Wide(), 0.3)
    assert isinstance(model.into, nn.Linear) and type(model.tied) is type(model.again) is nn.Linear
    assert isinstance(model.out, TiledLinear) and len(model.out.tiles) == 4
    assert max(p.numel() for p in model.out.parameters()) * 4 <= 0.3e6


def test_a_layer_used_twice_stays_one_and_a_frozen_one_frozen() -> None:
    layer = nn.Linear(300, 300)
    twice = tiled(nn.Sequential(layer, nn.ReLU(), layer), 0.2)
    assert twice[0] is twice[2] and isinstance(twice[0], TiledLinear)
    assert sum(p.numel() for p in twice.parameters()) == 300 * 301
    frozen = tiled(nn.Sequential(nn.Linear(300, 300).requires_grad_(False)), 0.2).eval()
    assert isinstance(frozen[0], TiledLinear) and not any(p.requires_grad for p in frozen.parameters())
    assert isinstance(tiled(nn.Linear(300, 300), 0.2), TiledLinear)


def test_layers_that_torch_reads_by_name_stay_whole() -> None:
    layer = tiled(nn.TransformerEncoderLayer(64, 4, 512, batch_first=True), 0.05).eval()
    with torch.no_grad():
        assert layer(torch.randn(2, 3, 64)).shape == (2, 3, 64)


@pytest.mark.parametrize("largest_mb", [0.0, -1.0, float("nan")])
def test_an_invalid_size_raises_value_error(largest_mb: float) -> None:
    with pytest.raises(ValueError, match=r"largest_mb=.*: must be above 0 MB"):
        tiled(nn.Linear(4, 4), largest_mb)


def test_an_invalid_number_of_tiles_raises_value_error() -> None:
    with pytest.raises(ValueError, match="tiles=9: must be from 1 to the 8 outputs"):
        TiledLinear(4, 8, tiles=9)


@pytest.mark.ranks
def test_a_layer_too_large_for_the_device_trains_in_tiles() -> None:
    """Its weight and its gradient are 1 MB each; a device of 1.5 MB holds neither both nor the update's copies."""

    class Large(Wide):
        def __init__(self) -> None:
            super().__init__()
            del self.tied, self.again

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    whole, cut = (toy(model=model, data=data, loss=loss, evaluate=None)
                  for model in (Large, lambda: tiled(Large(), 0.2)))  # fmt: skip
    e = experiment(2, 6, task=whole, strategy=ZeROInfinity(outstanding=1), optimizer=AdamW(), lr=1e-3, memory_mb=1.5)
    with pytest.raises(KnobError, match=r"needs [\d.]+ MB in a step"):
        require_memory(e)
    fits = replace(e, task=cut, bucket_mb=0.1)
    require_memory(fits)
    sessions, plain = run(fits), run(replace(e, memory_mb=0.0))
    assert max(seen(sessions[0], "memory peak")) < 1.5e6 < max(seen(plain[0], "memory peak"))
    assert sessions[0].record.losses() == pytest.approx(plain[0].record.losses(), rel=1e-5)
