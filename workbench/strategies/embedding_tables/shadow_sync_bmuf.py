"""ShadowSync with block momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.strategies.embedding_tables._embeddings import AmongTrainers, Embeddings
from workbench.strategies.shadow_bmuf import ShadowBMUF


@dataclass(frozen=True, kw_only=True)
class ShadowSyncBMUF(AmongTrainers, Embeddings, ShadowBMUF):
    """Embedding tables on servers; the replicated parameters are pulled to a global model with momentum.

        worker:  rows <- look up ids of its batch;   loss of the batch;   push the gradient of rows
                 params_i <- optimizer_i(params_i, grad_i)                     all but the tables
        server:  table[ids] <- optimizer(table[ids], gradient of rows)         for each push, one by one
        shadow:  before <- params_i;   mean <- (1/t) sum_j before_j
                 delta <- eta delta + zeta (mean - W);   W <- W + delta;   params_i += alpha (W - before)

    Tables and workers act as under ShadowSync, also at an evaluation and when the strategy is left. Rows cost the same.
    The shadow is ShadowBMUF's, without the tables and among the t trainers. W and delta are the same on each trainer,
    and servers hold neither. The momentum does not act on the tables, because they move only by pushes. So with large
    eta the tables and the other parameters learn at different rates. It sends as many bytes as ShadowSyncMA. With eta =
    0 and zeta = 1 the two strategies are equal.

    When the strategy is left, the result is the trainers' mean and delta is dropped. An evaluation uses W.

    When to use it: as ShadowSyncMA, with many trainers. Their mean moves only 1/t as far as each of them.

    Reference: Zheng et al., "ShadowSync: Performing Synchronization in the Background for Highly Scalable
    Distributed Training", 2020, https://arxiv.org/abs/2003.03477; of rows alone: torch.optim.SparseAdam
    """

    moves_frozen: ClassVar[bool] = True
