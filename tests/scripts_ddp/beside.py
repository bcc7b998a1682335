"""A module next to a script."""

import torch


def data(rank, steps):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(8, 6, generator=generator)
        yield x, x[:, :3].tanh()
