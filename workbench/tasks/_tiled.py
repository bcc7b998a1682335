"""Linear layers cut into tiles that are computed one after the other: each needs the memory of one tile only."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TiledLinear(nn.Module):
    """A Linear of `tiles` Linears, each of which makes its share of the outputs; (..., in) -> (..., out).

    Under a strategy that gathers parameters when they are read (ZeRO3, ZeROInfinity) a tile's weight and its gradient
    are the most that is there of the layer, 1/tiles of them. Outputs are the Linear's, to the bit; the gradient of the
    input is added up tile by tile, so that its last bits may differ.

    Raises ValueError for tiles that are none, or more than outputs.

    Reference: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning",
    SC 2021, https://arxiv.org/abs/2104.07857, section 5.1.3 (memory-centric tiling)
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True, tiles: int = 2) -> None:
        super().__init__()
        if not 1 <= tiles <= outputs:
            raise ValueError(f"tiles={tiles}: must be from 1 to the {outputs} outputs of the layer")
        sizes = [outputs // tiles + (k < outputs % tiles) for k in range(tiles)]
        self.tiles = nn.ModuleList(nn.Linear(inputs, size, bias) for size in sizes)

    @classmethod
    def of(cls, linear: nn.Linear, tiles: int) -> TiledLinear:
        """The layer with the weights of `linear`."""
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
        return made

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tile(x) for tile in self.tiles], dim=-1)


def tiled(model: nn.Module, largest_mb: float) -> nn.Module:
    """`model`, changed in place: every plain Linear of more than `largest_mb` MB is cut into tiles of at most that.

    For a task's own model where a layer with its gradient is too large for `memory_mb`:
    `Task(model=lambda: tiled(Big(), 4.0), ...)`. Weights that are tied to others stay whole. Returns `model`.

    >>> [name for name, _ in tiled(nn.Sequential(nn.Linear(500, 1000), nn.Linear(1000, 3)), 1.0).named_children()]
    ['0', '1']
    """
    uses: dict[int, int] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                uses[id(p)] = uses.get(id(p), 0) + 1
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if type(child) is nn.Linear and uses[id(child.weight)] == 1:
                nbytes = child.weight.numel() * child.weight.element_size()
                if (tiles := -(-nbytes // int(largest_mb * 1e6))) > 1:
                    module._modules[name] = TiledLinear.of(child, min(tiles, child.out_features))
    return model
