"""ShadowSync: embedding tables on servers, several workers per trainer, and a shadow that keeps the rest together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.rank import Bucket, Rank
from workbench.settings import knob
from workbench.strategies._copies import copies
from workbench.strategies._shadow import Shadow
from workbench.strategies._tables import Rows, joined, parted, put, tables_in, without
from workbench.strategies.shadow_easgd import ShadowEASGD

NONE = torch.empty(0, dtype=torch.int64)


class Ask(IntEnum):
    """What a worker asks of a server; a heading of one number is a shadow's."""

    LOOK_UP = 0
    PUSH = 1
    ALL = 2


class _State(Shadow):
    """What one rank remembers: as a shadow, and on a server by worker which rows it has looked up."""

    def __init__(self, rank: Rank, params: list[Bucket]) -> None:
        super().__init__(rank, copies(without(params, rank.tables), "centre"))
        self.asked: dict[tuple[int, int], Rows] = {}


@dataclass(frozen=True, kw_only=True)
class ShadowSync(ShadowEASGD):
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
    workers: int = knob(1, 1, 64, live=False, doc="steps that go on at once on each trainer, without locks")  # type: ignore[misc]

    clips: ClassVar[bool] = False
    tables: ClassVar[bool] = True

    def trains(self, index: int, size: int) -> bool:
        return size == 1 or super().trains(index, size)

    def refuses_size(self, size: int) -> str | None:
        return None if size == 1 else super().refuses_size(size)

    def owner(self, table: int, size: int) -> int:
        servers = self.serving(size)
        return servers[table % len(servers)]

    def serving(self, size: int) -> list[int]:
        return [0] if size == 1 else super().serving(size)

    async def replica(self, rank: Rank) -> list[Bucket]:
        return without(await rank.params(), rank.tables)

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State(rank, params)

    async def step(self, rank: Rank, state: Shadow) -> None:
        rows = await rank.look_up()
        asked = self._by_server(rank, rows) if rank.size > 1 else {}
        for server, its in asked.items():
            await self._ask(rank, server, Ask.LOOK_UP, rank.worker, *(len(r) for r in its.values()), ids=its.values())
        for server, its in asked.items():
            got, _ = await rank.recv(None, server, f"rows {rank.worker}")
            put(tables_in(await rank.params(), its), its, got)
        await rank.forward()
        await rank.backward()
        if asked:
            grads = await rank.row_grads({name: r for its in asked.values() for name, r in its.items()})
            for server, its in asked.items():
                await self._ask(rank, server, Ask.PUSH, rank.worker, rank.lr)
                await rank.send(joined(grads[name] for name in its), server, f"grads {rank.worker}")
        await rank.update()

    async def _ask(self, rank: Rank, server: int, *numbers: float, ids: Iterable[Tensor] = ()) -> None:
        """A heading, and row numbers behind it: whole numbers below 2^53 are exact in it."""
        await rank.send(torch.cat([torch.tensor(numbers, dtype=torch.float64), *ids]), server, "turn")

    def _by_server(self, rank: Rank, rows: Rows) -> dict[int, Rows]:
        """Whom to ask for what: by server the rows of each of its tables."""
        found: dict[int, Rows] = {}
        for k, name in enumerate(rank.tables):
            found.setdefault(self.owner(k, rank.size), {})[name] = rows.get(name, NONE)
        return found

    async def _serve(self, rank: Rank, state: Any) -> None:
        mine = [name for k, name in enumerate(rank.tables) if self.owner(k, rank.size) == rank.index]
        while (turn := await rank.recv(None, None, "turn")) is not None:
            numbers, who = turn[0].tolist(), turn[1]
            tables = tables_in(await rank.params(), mine)
            match numbers:
                case [_]:
                    await self._met(rank, state, who)
                case [Ask.LOOK_UP, worker, *rest]:
                    counts, ids = [int(n) for n in rest[: len(mine)]], turn[0][2 + len(mine) :].long()
                    rows = state.asked[who, int(worker)] = dict(zip(mine, ids.split(counts), strict=True))
                    found = joined(tables[name][rows[name]] for name in mine)
                    await rank.send(found, who, f"rows {int(worker)}")
                case [Ask.PUSH, worker, lr]:
                    rows = state.asked[who, int(worker)]
                    grads, _ = await rank.recv(None, who, f"grads {int(worker)}")
                    for name, grad in parted(rows, grads, tables):
                        await rank.update_rows(name, rows[name], grad, lr)
                case _:
                    await rank.send(joined(tables.values()), who, "tables")

    async def known(self, rank: Rank, state: Shadow) -> list[Bucket]:
        known = [bucket.like(bucket.data.clone()) for bucket in await rank.params()]
        for bucket in without(known, rank.tables):
            bucket.data.copy_(state.memory.flat("centre", bucket))
        if rank.index == 0 and rank.size > 1:
            tables = tables_in(known, rank.tables)
            asked = self._by_server(rank, {name: torch.arange(len(table)) for name, table in tables.items()})
            for server in asked:
                await self._ask(rank, server, Ask.ALL, 0)
            for server, its in asked.items():
                put(tables, its, (await rank.recv(None, server, "tables"))[0])
        return known
