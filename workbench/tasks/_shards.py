"""Who gets which examples: shards that are alike, or skewed, so that every rank sees another part of the world."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from workbench.tasks._base import TaskError, shuffled


def dealt(shards: list[Tensor], rank: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Indices of one rank's batches without end, from its own shard, which each epoch shuffles anew: (batch,) int64."""
    mine = shards[rank]
    return (mine[index] for index in shuffled(len(mine), 0, 1, batch, seed * 4099 + rank))


def dirichlet(labels: Tensor, ranks: int, alpha: float, seed: int) -> list[Tensor]:
    """Shards by rank in which each rank has its own mix of labels: q_r ~ Dirichlet(alpha * prior).

    Shards are equally large. Ranks draw in turn, a label by their q and then one of its examples; a label of which none
    is left drops out, and a rank of whose labels none is left draws another q. So each example belongs to one rank,
    and ranks that ask for the same label share it and take what else is there: shares vary less than q, in variance
    by about a third at alpha = 1 with 10 even labels.
    """
    if len(labels) < ranks:
        raise TaskError(f"{len(labels)} examples cannot be dealt to {ranks} ranks: take at most {len(labels)} ranks")
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
    """(ranks, labels) float64: by rank the share of each label that it asks for, q_r ~ Dirichlet(alpha * prior).

    The prior is the mix of all examples: with a large alpha every rank has that, with a small one few labels or one.
    """
    return np.random.default_rng([seed, 1]).dirichlet(alpha * counts / counts.sum(), ranks)


def by_files(owners: Tensor, ranks: int) -> list[Tensor]:
    """Shards by rank of whole files, about equally large; `owners` is the file of each example, (n,) int64.

    The largest file that is left goes to the rank that has least.
    """
    files, sizes = owners.unique(return_counts=True)
    if len(files) < ranks:
        raise TaskError(
            f"{len(files)} files cannot be dealt to {ranks} ranks: take at most {len(files)} ranks, or shards='iid'"
        )
    holds, home = [0] * ranks, torch.zeros(int(files[-1]) + 1, dtype=torch.int64)
    for place in torch.argsort(sizes, descending=True, stable=True).tolist():
        rank = min(range(ranks), key=holds.__getitem__)
        home[files[place]] = rank
        holds[rank] += int(sizes[place])
    return [(home[owners] == rank).nonzero()[:, 0] for rank in range(ranks)]
