"""ShadowSync: embedding tables on servers, several workers per trainer, and a shadow that keeps the rest together."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.rank import Rank
from workbench.settings import knob
from workbench.strategies._embeddings import Embeddings
from workbench.strategies._shadow import Shadow
from workbench.strategies.shadow_easgd import ShadowEASGD


@dataclass(frozen=True, kw_only=True)
class ShadowSync(Embeddings, ShadowEASGD):
    """Embedding tables on servers; all else replicated, trained by workers that wait for rows only, kept by a shadow.

        worker:  rows <- look up ids of its batch;   loss of the batch;   push the gradient of rows
                 params_i <- optimizer_i(params_i, grad_i)                     all but the tables
        server:  table[ids] <- optimizer(table[ids], gradient of rows)         for each push, one by one
        shadow:  as ShadowEASGD, of all but the tables

    The tables are those of the task's own model whose rows its `lookups` names: table k lies with server k mod s, and
    with it what the optimizer remembers of it. A push steps its rows alone, as torch's SparseAdam does: momenta of
    other rows rest, and one step counter stands for the whole table. Trainers read and change rows of one table in any
    order, so a row may have moved between look-up and push. `workers` steps go on at once on each trainer, each with a
    batch and gradients of its own, on the same parameters without a lock; its optimizer steps one by one.
    A step of the record is one of each worker's.

    A worker sends 8 bytes for each distinct row that its batch reads and the bytes of the row's gradient, and gets
    those of the row: 8 r + 4 r w and 4 r w for r rows of w numbers in fp32, and in headings 40 bytes for each server
    that it asks and 8 for each table. The shadow's rounds cost what ShadowEASGD's do, of the model without its tables.

    When it is left the centre goes on, and every rank gets the tables with what the optimizer remembers of them. An
    evaluation brings rank 0 all of them. One rank alone has its tables itself.

    When to use it: tables are most of the model and a batch reads few of their rows, as in recommenders; all but the
    tables is small, so its exchange may lag behind.

    Reference: Zheng et al., "ShadowSync: Performing Synchronization in the Background for Highly Scalable
    Distributed Training", 2020, https://arxiv.org/abs/2003.03477; of rows alone: torch.optim.SparseAdam
    """

    servers: int = knob(1, 1, 64, unit="ranks", doc="the last ranks, which hold tables and centre and do not train")

    def peers(self, rank: Rank) -> Rank:
        return rank

    async def _shadow_came(self, rank: Rank, state: Shadow, who: int) -> None:
        await self._met(rank, state, who)
