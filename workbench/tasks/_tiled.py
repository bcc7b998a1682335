"""Splits Linear layers into sequential tiles, to save memory."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor, nn

HOLDERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # torch's containers, which do not read members by name


class TiledLinear(nn.Module):
    """A Linear of `tiles` Linears, each with a share of the outputs: `(..., in) -> (..., out)`.

    A strategy that gathers parameters on demand (ZeRO3, ZeROInfinity) holds one tile's weight and gradient at a time:
    1/tiles of the layer. Outputs and gradients may differ from the Linear's in their last bits, because a product of
    fewer rows may use another order. Raises ValueError if `tiles` is below 1 or exceeds the outputs.

    Reference: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", SC
    2021, https://arxiv.org/abs/2104.07857, section 5.1.3 (memory-centric tiling)
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True, tiles: int = 2) -> None:
        super().__init__()
        if not 1 <= tiles <= outputs:
            raise ValueError(f"tiles={tiles}: must be from 1 to the {outputs} outputs of the layer")
        sizes = [outputs // tiles + (k < outputs % tiles) for k in range(tiles)]
        self.tiles = nn.ModuleList(nn.Linear(inputs, size, bias) for size in sizes)

    @classmethod
    def of(cls, linear: nn.Linear, tiles: int) -> TiledLinear:
        """Returns a layer with the weights of `linear`, its `requires_grad` flags and its training mode."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, tiles)
        made.to(linear.weight.device, linear.weight.dtype)
        at = 0
        with torch.no_grad():
            for tile in made.tiles:
                assert isinstance(tile, nn.Linear)
                rows = slice(at, at := at + tile.out_features)
                tile.weight.copy_(linear.weight[rows])
                if linear.bias is not None:
                    tile.bias.copy_(linear.bias[rows])
                    tile.bias.requires_grad_(linear.bias.requires_grad)
                tile.weight.requires_grad_(linear.weight.requires_grad)
        return made.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tile(x) for tile in self.tiles], dim=-1)


def tiled(model: nn.Module, largest_mb: float) -> nn.Module:
    """Splits every plain Linear of more than `largest_mb` MB in place, into tiles of at most that size.

    Use it for a task's own model if a layer with its gradient exceeds `memory_mb`: `Task(model=lambda: tiled(Big(),
    4.0), ...)`. A layer needs as many outputs as tiles; else its tiles stay larger. A layer used twice stays shared.
    Weights tied to another layer stay whole. So do layers in torch's transformer modules, which read them by name.
    Returns `model`, or the TiledLinear if `model` itself is such a Linear. Raises ValueError if `largest_mb` is not
    above 0.

    >>> [name for name, _ in tiled(nn.Sequential(nn.Linear(500, 1000), nn.Linear(1000, 3)), 1.0).named_children()]
    ['0', '1']
    """
    if not largest_mb > 0:
        raise ValueError(f"largest_mb={largest_mb:g}: must be above 0 MB")
    made: dict[int, nn.Module] = {}
    uses: dict[int, int] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                uses[id(p)] = uses.get(id(p), 0) + 1

    def cut(child: nn.Module | None) -> nn.Module | None:
        if type(child) is not nn.Linear or uses[id(child.weight)] > 1:
            return child
        nbytes = child.weight.numel() * child.weight.element_size()
        tiles = min(ceil(nbytes / (largest_mb * 1e6)), child.out_features)
        if tiles > 1 and id(child) not in made:
            made[id(child)] = TiledLinear.of(child, tiles)
        return made.get(id(child), child)

    for module in list(model.modules()):
        if type(module).__module__.startswith("torch.nn.") and not isinstance(module, HOLDERS):
            continue
        for name, child in module._modules.items():
            module._modules[name] = cut(child)
    return cut(model) or model
