"""ShadowSync with model averaging."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.strategies.embedding_tables._embeddings import AmongTrainers, Embeddings
from workbench.strategies.shadow_ma import ShadowMA


@dataclass(frozen=True, kw_only=True)
class ShadowSyncMA(AmongTrainers, Embeddings, ShadowMA):
    """Embedding tables on servers. Workers train the replicated parameters, and shadows average them.

        worker:  rows <- look up ids of its batch;   loss of the batch;   push the gradient of rows
                 params_i <- optimizer_i(params_i, grad_i)                     all but the tables
        server:  table[ids] <- optimizer(table[ids], gradient of rows)         for each push, one by one
        shadow:  before <- params_i;   mean <- (1/t) sum_j before_j;   params_i += alpha (mean - before)

    Tables and workers act as under ShadowSync, also at an evaluation and when the strategy is left. Rows cost the same.
    The shadow is ShadowMA's, without the tables. The t trainers' shadows average among themselves in rounds without the
    servers. So servers send only rows, and a trainer sends 2 (t-1)/t of the other parameters' bytes in each round. A
    round lasts as long as the slowest trainer's. One trainer alone averages nothing. A round goes in pieces of
    `piece_kb`, so a look-up waits for at most one piece.

    When the strategy is left, the result is the trainers' mean. An evaluation uses the last mean.

    When to use it: as ShadowSync, if trainers are about equally fast or rows fill the servers' ports.

    Reference: Zheng et al., "ShadowSync: Performing Synchronization in the Background for Highly Scalable
    Distributed Training", 2020, https://arxiv.org/abs/2003.03477; of rows alone: torch.optim.SparseAdam
    """
