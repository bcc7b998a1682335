"""Random gradients, and many draws of their compressed sum in one exchange."""

from __future__ import annotations

import torch

from tests.ranks import exchange, placed
from workbench.compressors import Compressor
from workbench.rank import Memory


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heavy(seed: int, n: int) -> torch.Tensor:
    """Normal times lognormal: few elements are much larger than the rest."""
    return noise(seed, n) * (1.5 * noise(seed + 1, n)).exp()


def reduced(compressor: Compressor, g: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """(ranks, n) -> (n,) float64: the sum that every rank receives."""
    return exchange(compressor, g.clone(), placed((g.shape[1],)), [Memory(seed + r) for r in range(len(g))])


def drawn(compressor: Compressor, x: torch.Tensor, draws: int, seed: int = 0) -> torch.Tensor:
    """(ranks, n) -> (draws, n) float64. The bucket repeats the same n elements, so that each block is a draw."""
    return reduced(compressor, x.repeat(1, draws), seed).view(draws, -1)
