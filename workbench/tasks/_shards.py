"""Splits examples into one shard for each rank, evenly or skewed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from workbench.tasks._base import TaskError, shuffled


def draw_from_shard(shards: list[Tensor], rank: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Yields indices of one rank's batches without end, `(batch,)` int64. Shuffles the rank's shard each epoch."""
    mine = shards[rank]
    return (mine[index] for index in shuffled(len(mine), 0, 1, batch, seed * 4099 + rank))


def dirichlet(labels: Tensor, ranks: int, alpha: float, seed: int) -> list[Tensor]:
    """Returns shards by rank. Each rank has its own mix of labels: q_r ~ Dirichlet(alpha * prior).

    Shards are equally large, and each example belongs to one rank. Ranks take turns: each draws a label by its q, then
    an example of that label. A used-up label drops out. A rank with only used-up labels draws a new q. Ranks that want
    the same label share its examples and fill up with other labels. So at alpha = 1 with 10 even labels the variance of
    shares is about 33 % below that of q.
    """
    if len(labels) < ranks:
        raise TaskError(f"ranks={ranks}: must be at most {len(labels)}, because each rank needs an example")
    generator = np.random.default_rng(seed)
    shown, counts = np.unique(labels.numpy(), return_counts=True)
    hands = [generator.permutation(np.flatnonzero(labels.numpy() == kind)).tolist() for kind in shown]
    wanted = mixes(counts, ranks, alpha, seed)
    left = counts.astype(float)
    shards: list[list[int]] = [[] for _ in range(ranks)]
    for turn in range(len(labels)):
        mix = wanted[turn % ranks] * (left > 0)
        if not mix.any():
            mix[left > 0] = generator.dirichlet(alpha * left[left > 0] / left.sum())
            wanted[turn % ranks] = mix
        kind = int(generator.choice(len(shown), p=mix / mix.sum()))
        shards[turn % ranks].append(hands[kind].pop())
        left[kind] -= 1
    return [torch.tensor(sorted(shard)) for shard in shards]


def mixes(counts: np.ndarray, ranks: int, alpha: float, seed: int) -> np.ndarray:
    """Returns `(ranks, labels)` float64: each rank's wanted share of each label, q_r ~ Dirichlet(alpha * prior).

    The prior is the mix of all examples. A large alpha gives every rank the prior; a small one gives few labels or one.
    """
    return np.random.default_rng([seed, 1]).dirichlet(alpha * counts / counts.sum(), ranks)


def by_files(owners: Tensor, ranks: int) -> list[Tensor]:
    """Returns shards of whole files by rank, about equally large. `owners`: each example's file, `(n,)` int64.

    The largest remaining file goes to the rank with the fewest examples.
    """
    files, sizes = owners.unique(return_counts=True)
    if len(files) < ranks:
        raise TaskError(
            f"ranks={ranks}: must be at most {len(files)}, because each rank needs a file (or shards='iid')"
        )
    holds, home = [0] * ranks, torch.zeros(int(files[-1]) + 1, dtype=torch.int64)
    for place in torch.argsort(sizes, descending=True, stable=True).tolist():
        rank = min(range(ranks), key=holds.__getitem__)
        home[files[place]] = rank
        holds[rank] += int(sizes[place])
    return [(home[owners] == rank).nonzero()[:, 0] for rank in range(ranks)]
