"""ShadowSync with elastic averaging."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.rank import Rank
from workbench.settings import knob
from workbench.strategies._shadow import Shadow, pieces
from workbench.strategies.embedding_tables._embeddings import Ask, Embeddings
from workbench.strategies.shadow_easgd import ShadowEASGD


@dataclass(frozen=True, kw_only=True)
class ShadowSync(Embeddings, ShadowEASGD):
    """Embedding tables on servers. Workers train the replicated parameters, and a shadow synchronises them.

        worker:  rows <- look up ids of its batch;   loss of the batch;   push the gradient of rows
                 params_i <- optimizer_i(params_i, grad_i)                     all but the tables
        server:  table[ids] <- optimizer(table[ids], gradient of rows)         for each push, one by one
        shadow:  as ShadowEASGD, of all but the tables

    The tables are the parameters whose rows the task's `lookups` name. Server k mod s holds table k and its optimizer
    state. A push steps only its own rows, as torch's SparseAdam does. One step counter serves the whole table. Trainers
    read and change rows in any order, so a row may change between look-up and push. Each trainer runs `workers` steps
    at once on the same parameters without a lock. Each worker has its own batch and gradients. The trainer's optimizer
    makes their steps one by one. A step of the record is one step of each worker.

    A worker sends 8 bytes for each distinct row of its batch and the row's gradient. It receives the row. For r rows of
    w numbers in fp32 these are 8 r + 4 r w and 4 r w bytes. Headings add 40 bytes for each server asked and 8 for each
    table. A shadow's round costs the same as ShadowEASGD's without the tables. Messages on a port wait for earlier
    ones. So a round sends each bucket in pieces of `piece_kb`, and each piece waits for the answer to the piece before.
    A look-up then waits for at most one piece of each trainer.

    When the strategy is left, the result is the centre. Every rank receives the tables with their optimizer state. For
    an evaluation rank 0 fetches all tables. One rank alone holds its tables itself.

    When to use it: tables are most of the model and a batch reads few of their rows, as in recommenders. The exchange
    of the few other parameters may lag behind.

    Reference: Zheng et al., "ShadowSync: Performing Synchronization in the Background for Highly Scalable
    Distributed Training", 2020, https://arxiv.org/abs/2003.03477; of rows alone: torch.optim.SparseAdam
    """

    servers: int = knob(1, 1, 64, unit="ranks", doc="the last ranks; they hold tables and centre and do not train")

    def peers(self, rank: Rank) -> Rank:
        return rank

    async def _meet(self, rank: Rank, state: Shadow, step: int) -> None:
        servers = self.serving(rank.size)
        for number, bucket in enumerate(await self.replica(rank)):
            before, server, start = bucket.data.clone(), servers[number % len(servers)], 0
            centre = state.memory.flat("centre", bucket)
            if server == rank.index:  # one rank alone
                self._give_way(state, [bucket])
            for piece in pieces(before, self.piece_kb) if server != rank.index else ():
                stop = start + len(piece)
                await self._ask(rank, server, Ask.MEET, number, start, stop)
                await rank.send(piece, server, f"shadow {bucket.name}")
                got, _ = await rank.recv(torch.empty_like(piece), server, f"centre {bucket.name}")
                centre[start:stop].copy_(got)
                start = stop
            bucket.data.add_(centre - before, alpha=self.alpha)

    async def _met_in(self, rank: Rank, state: Shadow, who: int, number: int, start: int, stop: int) -> None:
        bucket = (await self.replica(rank))[number]
        centre = state.memory.flat("centre", bucket)[start:stop]
        got, _ = await rank.recv(torch.empty_like(centre), who, f"shadow {bucket.name}")
        await rank.send(centre.lerp_(got, self.alpha), who, f"centre {bucket.name}")
