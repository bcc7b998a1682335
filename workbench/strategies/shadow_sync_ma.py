"""ShadowSync that averages: embedding tables on servers, workers on trainers, whose shadows average all but tables."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.strategies._embeddings import AmongTrainers, Embeddings
from workbench.strategies.shadow_ma import ShadowMA


@dataclass(frozen=True, kw_only=True)
class ShadowSyncMA(AmongTrainers, Embeddings, ShadowMA):
    """Embedding tables on servers; all else replicated, trained by workers that wait for rows only, and averaged.

        worker:  rows <- look up ids of its batch;   loss of the batch;   push the gradient of rows
                 params_i <- optimizer_i(params_i, grad_i)                     all but the tables
        server:  table[ids] <- optimizer(table[ids], gradient of rows)         for each push, one by one
        shadow:  before <- params_i;   mean <- (1/t) sum_j before_j;   params_i += alpha (mean - before)

    Tables, workers and what rows cost are ShadowSync's, and the shadow is ShadowMA's, of all but the tables: the t
    trainers' shadows average among themselves, round by round, while servers answer workers and know of no round. So
    servers' ports carry rows alone, and a trainer sends 2 (t-1)/t of the bytes of all but the tables in each round. A
    round lasts as long as the slowest trainer's. With one trainer there is nothing to average. On a port what is sent
    later waits: so a round goes in pieces of `piece_kb`, and a look-up waits for one at most, not for the round.

    When it is left the trainers' mean goes on, and every rank gets the tables with what the optimizer remembers of
    them. An evaluation brings rank 0 all of them, beside the last mean.

    When to use it: as ShadowSync, where trainers are about equally fast or servers' ports are full of rows.

    Reference: Zheng et al., "ShadowSync: Performing Synchronization in the Background for Highly Scalable
    Distributed Training", 2020, https://arxiv.org/abs/2003.03477; of rows alone: torch.optim.SparseAdam
    """
