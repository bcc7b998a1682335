"""ShadowSync with block momentum: embedding tables on servers, workers on trainers, whose shadows filter their mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.strategies._embeddings import AmongTrainers, Embeddings
from workbench.strategies.shadow_bmuf import ShadowBMUF


@dataclass(frozen=True, kw_only=True)
class ShadowSyncBMUF(AmongTrainers, Embeddings, ShadowBMUF):
    """Embedding tables on servers; all else replicated, and pulled to a global model whose momentum filters the mean.

        worker:  rows <- look up ids of its batch;   loss of the batch;   push the gradient of rows
                 params_i <- optimizer_i(params_i, grad_i)                     all but the tables
        server:  table[ids] <- optimizer(table[ids], gradient of rows)         for each push, one by one
        shadow:  before <- params_i;   mean <- (1/t) sum_j before_j
                 delta <- eta delta + zeta (mean - W);   W <- W + delta;   params_i += alpha (W - before)

    Tables, workers and what rows cost are ShadowSync's, and the shadow is ShadowBMUF's, of all but the tables, among
    the t trainers: W and delta are the same on each, and servers know of neither. The momentum acts on all but the
    tables alone; these move as far as pushes take them, so where eta is large the two learn at unlike rates. Bytes are
    those of ShadowSyncMA, which this is with eta = 0 and zeta = 1.

    When it is left the trainers' mean goes on, delta is forgotten, and every rank gets the tables with what the
    optimizer remembers of them. An evaluation brings rank 0 all of them, beside W.

    When to use it: as ShadowSyncMA, with many trainers, whose mean moves only a t-th of the way that each of them does.

    Reference: Zheng et al., "ShadowSync: Performing Synchronization in the Background for Highly Scalable
    Distributed Training", 2020, https://arxiv.org/abs/2003.03477; of rows alone: torch.optim.SparseAdam
    """

    moves_frozen: ClassVar[bool] = True
