"""ShadowSync: embedding tables on servers, several workers per trainer, and a shadow that keeps the rest together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.rank import Rank
from workbench.settings import knob
from workbench.strategies._embeddings import Ask, Embeddings
from workbench.strategies._shadow import Shadow, pieces
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
    On a port what is sent later waits, so a round goes bucket by bucket in pieces of `piece_kb`, each sent when the one
    before has come back: a look-up waits for a piece of each trainer's at most, and not for rounds.

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
