"""Shared by the ShadowSyncs: embedding tables on servers; trainers look up and step rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.rank import Bucket, Rank
from workbench.settings import knob
from workbench.strategies._server import leaves_none
from workbench.strategies._shadow import Shadowing
from workbench.strategies.embedding_tables._tables import Rows, joined, parted, put, tables_in, without
from workbench.strategies.embedding_tables.verbs import look_up, row_grads, update_rows

NO_ROWS = torch.empty(0, dtype=torch.int64)


class Ask(IntEnum):
    """Kinds of requests that a trainer sends to a server."""

    LOOK_UP = 0
    PUSH = 1
    ALL = 2
    MEET = 3


@dataclass(frozen=True, kw_only=True)
class Embeddings(Shadowing):
    """The last ranks hold the tables; the other ranks train with workers that wait for rows only.

    A member also derives from a strategy with a shadow, which handles the other parameters.
    """

    servers: int = knob(1, 1, 64, unit="ranks", doc="the last ranks, which hold the tables and do not train")
    workers: int = knob(1, 1, 64, live=False, doc="concurrent steps on each trainer, without locks")  # type: ignore[misc]
    piece_kb: float = knob(64.0, 0.25, 1e6, unit="kB", log=True, doc="size of one message of the shadow")  # type: ignore[misc]

    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    plain: ClassVar[bool] = False
    exchanges: ClassVar[str] = "parameters"
    clips: ClassVar[bool] = False
    tables: ClassVar[bool] = True

    def trains(self, index: int, size: int) -> bool:
        return size == 1 or index < size - self.servers

    def refuses_size(self, size: int) -> str | None:
        return None if size == 1 else leaves_none(self.servers, size)

    def owner(self, table: int, size: int) -> int:
        servers = self.serving(size)
        return servers[table % len(servers)]

    def serving(self, size: int) -> list[int]:
        """Returns the ranks that serve; one rank alone holds its tables itself."""
        return list(range(size - self.servers, size)) if size > 1 else [0]

    async def replica(self, rank: Rank) -> list[Bucket]:
        return without(await rank.params(), rank.tables)

    def init(self, rank: Rank, params: list[Bucket]) -> Any:
        return super().init(rank, without(params, rank.tables))

    @abstractmethod
    def peers(self, rank: Rank) -> Rank:
        """Returns the ranks with which a trainer's shadow makes its rounds."""

    async def background(self, rank: Rank, state: Any) -> None:
        if rank.role == "server":
            await self._serve(rank, state)
        else:
            await super().background(self.peers(rank), state)

    async def step(self, rank: Rank, state: Any) -> None:
        rows = await look_up(rank)
        asked = self._by_server(rank, rows) if rank.size > 1 else {}
        for server, its in asked.items():
            await self._ask(rank, server, Ask.LOOK_UP, rank.worker, *(len(r) for r in its.values()), ids=its.values())
        for server, its in asked.items():
            got, _ = await rank.recv(None, server, f"rows {rank.worker}")
            put(tables_in(await rank.params(), its), its, got)
        await rank.forward()
        await rank.backward()
        if asked:
            grads = await row_grads(rank, {name: r for its in asked.values() for name, r in its.items()})
            for server, its in asked.items():
                await self._ask(rank, server, Ask.PUSH, rank.worker, rank.lr)
                await rank.send(joined(grads[name] for name in its), server, f"grads {rank.worker}")
        await rank.update()

    async def known(self, rank: Rank, state: Any) -> list[Bucket]:
        known = [bucket.like(bucket.data.clone()) for bucket in await rank.params()]
        common = await super().known(rank, state)  # None before the first round: this rank knows only its own
        for bucket, its in zip(without(known, rank.tables), common or [], strict=common is not None):
            bucket.data.copy_(its.data)
        if rank.index == 0 and rank.size > 1:
            tables = tables_in(known, rank.tables)
            asked = self._by_server(rank, {name: torch.arange(len(table)) for name, table in tables.items()})
            for server in asked:
                await self._ask(rank, server, Ask.ALL, 0)
            for server, its in asked.items():
                put(tables, its, (await rank.recv(None, server, "tables"))[0])
        return known

    async def _ask(self, rank: Rank, server: int, *numbers: float, ids: Iterable[Tensor] = ()) -> None:
        """Sends a heading and row numbers in float64, because it holds whole numbers below 2^53 exactly."""
        await rank.send(torch.cat([torch.tensor(numbers, dtype=torch.float64), *ids]), server, "turn")

    def _by_server(self, rank: Rank, rows: Rows) -> dict[int, Rows]:
        """Returns the rows to request of each table, by server."""
        found: dict[int, Rows] = {}
        for k, name in enumerate(rank.tables):
            found.setdefault(self.owner(k, rank.size), {})[name] = rows.get(name, NO_ROWS)
        return found

    async def _serve(self, rank: Rank, state: Any) -> None:
        """Answers each turn that arrives at this server."""
        mine = [name for k, name in enumerate(rank.tables) if self.owner(k, rank.size) == rank.index]
        asked: dict[tuple[int, int], Rows] = {}  # by worker, the rows of its last look-up
        while (turn := await rank.recv(None, None, "turn")) is not None:
            numbers, who = turn[0].tolist(), turn[1]
            tables = tables_in(await rank.params(), mine)
            match numbers:
                case [Ask.LOOK_UP, worker, *rest]:
                    counts, ids = [int(n) for n in rest[: len(mine)]], turn[0][2 + len(mine) :].long()
                    rows = asked[who, int(worker)] = dict(zip(mine, ids.split(counts), strict=True))
                    found = joined(tables[name][rows[name]] for name in mine)
                    await rank.send(found, who, f"rows {int(worker)}")
                case [Ask.PUSH, worker, lr]:
                    rows = asked[who, int(worker)]
                    grads, _ = await rank.recv(None, who, f"grads {int(worker)}")
                    for name, grad in parted(rows, grads, tables):
                        await update_rows(rank, name, rows[name], grad, lr)
                case [Ask.MEET, *where]:
                    await self._met_in(rank, state, who, *map(int, where))
                case _:
                    await rank.send(joined(tables.values()), who, "tables")

    async def _met_in(self, rank: Rank, state: Any, who: int, number: int, start: int, stop: int) -> None:
        """Handles these elements of bucket `number` from the shadow of rank `who`, if shadows meet servers."""


class AmongTrainers:
    """A mixin for Embeddings: trainers' shadows meet among themselves, and servers take no part in rounds."""

    def peers(self, rank: Rank) -> Rank:
        return rank.group("data")

    async def leave(self: Any, rank: Rank, state: Any) -> None:
        """Gives every rank, also servers, the mean of the training ranks."""
        for bucket in await self.replica(rank):
            if rank.role == "server":
                bucket.data.zero_()
            else:
                bucket.data.div_(self.batches(rank.size))
            await rank.all_reduce(bucket.data, "sum", bucket.name)
