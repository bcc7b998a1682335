"""Schemes for the sum of sparse vectors over ranks: the bytes of each, and its exchange.

Every scheme takes the bucket's vector `x` and its nonzero units, a bool `(units,)`. It leaves the sum over ranks in
`x`, bit-identical on all ranks. It returns how many units were nonzero on at least one rank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.compressors._uneven import LENGTH_BYTES, gathered, lengths_of
from workbench.compressors._units import Owned, Units, bitmap, flags, message, opened, size
from workbench.rank import Rank

SCHEMES = ("gather", "tree", "owners", "ring", "dense")  # of schemes with equal cost the first is taken


class Sparsity(NamedTuple):
    """The load: on average k of `units` units with v of n values, of `width` bytes each.

    pool: the number of units from which each rank is assumed to choose at random; smaller if ranks choose alike
    """

    k: float
    v: float
    units: int
    n: int
    width: int
    pool: float

    def message(self, k: float, share: float = 1.0) -> int:
        """Bytes of a message of k units, or of a share of one."""
        return size(k * share, self.v * k / self.k * share, self.width)


class Exchange(NamedTuple):
    """The expected bytes of one exchange to every other rank, or to one, after an exchange of lengths."""

    told: int  # lengths that each rank sends to all other ranks
    nbytes: int
    many: bool

    def sent(self, p: int) -> int:
        return LENGTH_BYTES * self.told * (p - 1) + self.nbytes * (p - 1 if self.many else 1)


def unions(load: Sparsity, p: int) -> list[float]:
    """By j, how many units 1 to p ranks are expected to have together: pool * (1 - (1 - k / pool)^j).

    Uses only products. They are equal on every machine, so all ranks choose the same scheme.
    """
    out, left = [], 1.0
    for _ in range(p):
        left *= 1.0 - load.k / load.pool
        out.append(load.pool * (1.0 - left))
    return out


def pool(load: Sparsity, p: int, together: int) -> float:
    """Returns the pool from which p ranks with k units each have `together` distinct units."""
    low, high = max(load.k, 1.0), float(load.units)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if unions(load._replace(pool=middle), p)[-1] < together else (low, middle)
    return high


def rounds(scheme: str, load: Sparsity, p: int) -> list[Exchange]:
    """Returns the exchanges that a scheme is expected to make; empty for "dense"."""
    u = unions(load, p)
    match scheme:
        case "gather":
            return [Exchange(0, load.message(u[0]), True)]
        case "tree":
            stages = range(p.bit_length() - 1)
            out = [Exchange(1, load.message(u[2**i - 1]), False) for i in stages]
            if 2 ** len(stages) < p:  # ranks beyond a power of 2 send theirs before and receive the sum after
                out = [Exchange(1, load.message(u[0]), False), *out, Exchange(1, load.message(u[-1]), False)]
            return out
        case "ring":
            first = [Exchange(1, load.message(k, 1 / p), False) for k in u[:-1]]
            return [*first, Exchange(1, load.message(u[-1], 1 / p), True)]
        case "owners":
            bits = math.ceil(load.units / p / 8)
            back = bits + round(load.width * load.v * u[-1] / load.k / p)
            return [Exchange(p, load.message(u[0], 1 / p), True), Exchange(1, back, True)]
    return []


def expected(scheme: str, load: Sparsity, p: int) -> int:
    """Returns the bytes that a rank is expected to send."""
    if scheme == "dense":
        return 2 * (p - 1) * load.n * load.width // p
    return sum(r.sent(p) for r in rounds(scheme, load, p))


async def exchanged(scheme: str, load: Sparsity, rank: Rank, x: Tensor, name: str) -> None:
    """Makes a scheme's exchanges with sizes only."""
    p = rank.size
    if scheme == "dense":
        await rank.all_reduce(x, "sum", name)
    for r in rounds(scheme, load, p):
        if r.told:
            await rank.all_gather(x.new_empty(r.told, dtype=torch.int64), name)
        to = [(r.nbytes,) * p if r.many else _one(p, (i + 1) % p, r.nbytes) for i in range(p)]
        rows = [x.new_empty(n, dtype=torch.uint8) for n in to[rank.index]]
        await rank.all_to_allv(rows, tuple(to), name)


def _one(p: int, to: int, nbytes: int) -> tuple[int, ...]:
    return tuple(nbytes if j == to else 0 for j in range(p))


async def gather(rank: Rank, x: Tensor, units: Units, mine: Tensor, sizes: list[int], name: str) -> int:
    """Sends every rank's pairs to every rank; `sizes` is each rank's message in bytes."""
    sent = message(units, x, _places(mine))
    every = await rank.all_to_allv([sent] * rank.size, tuple((n,) * rank.size for n in sizes), name)
    x.zero_()
    mine = torch.zeros_like(mine)
    for one in every:
        _add(x, mine, one, units)
    return int(mine.count_nonzero())


async def tree(rank: Rank, x: Tensor, units: Units, mine: Tensor, name: str) -> int:
    """Recursive doubling: in stage i each rank exchanges its partial sum with the rank 2^i away."""
    r, p, mine = rank.index, rank.size, mine.clone()
    full = 1 << (p.bit_length() - 1)

    async def given(to: list[int]) -> Tensor:
        sent = message(units, x, _places(mine)) if to[r] >= 0 else message(units, x, _places(mine[:0]))
        return await _passed(rank, sent, to, name)

    x.add_(0.0)  # -0 becomes 0, as on ranks that add nothing
    if full < p:
        _add(x, mine, await given([i - full if i >= full else -1 for i in range(p)]), units)
    stage = 1
    while stage < full:
        got = await given([i ^ stage if i < full else -1 for i in range(p)])
        _add(x, mine, got, units, first=bool(r & stage))
        stage *= 2
    if full < p:
        got = await given([i + full if i + full < p else -1 for i in range(p)])
        if r >= full:
            index, elements, values = opened(got, units, x.dtype)
            x.zero_()[elements] = values
            return index.numel()
    return int(mine.count_nonzero())


async def ring(rank: Rank, x: Tensor, units: Units, mine: Tensor, name: str) -> int:
    """Cuts the vector into p slices of equal units. Ranks add to a slice in turn; its last holder sends it to all."""
    r, p, mine = rank.index, rank.size, mine.clone()
    cuts = [units.count * c // p for c in range(p + 1)]

    def slice_of(c: int) -> Tensor:
        c %= p
        return message(units, x, _places(mine[cuts[c] : cuts[c + 1]]) + cuts[c])

    to = [(i + 1) % p for i in range(p)]
    for turn in range(p - 1):
        _add(x, mine, await _passed(rank, slice_of(r - turn), to, name), units)
    every = await gathered(rank, slice_of(r + 1), name)
    x.zero_()
    together = 0
    for one in every:
        index, elements, values = opened(one, units, x.dtype)
        x[elements] = values
        together += index.numel()
    return together


async def owners(rank: Rank, x: Tensor, units: Units, mine: Tensor, owned: Owned, name: str) -> int:
    """Sends pairs to their owners. Owners add them up and send all ranks the sums and a bit per unit that they own."""
    index = _places(mine)
    owner = owned.owner[index]
    counts = torch.bincount(owner, minlength=rank.size).tolist()
    pieces = index[owner.argsort(stable=True)].split(counts)
    rows = [message(units, x, piece) for piece in pieces]
    lengths = await lengths_of(rank, [row.numel() for row in rows], x, name)
    got = await rank.all_to_allv(rows, lengths, name)
    x.zero_()
    mine = torch.zeros_like(mine)
    for one in got:
        _add(x, mine, one, units)
    lists = owned.lists()
    here = lists[rank.index].long()
    has = mine[here]
    sums = x[units.elements(here[has])]
    every = await gathered(rank, torch.cat([bitmap(has), sums.view(torch.uint8)]), name)
    together = 0
    for places, one in zip(lists, every, strict=True):
        head = -(-places.numel() // 8)
        index = places[flags(one[:head], places.numel())].long()
        x[units.elements(index)] = one[head:].clone().view(x.dtype)
        together += index.numel()
    return together


def _places(mine: Tensor) -> Tensor:
    return mine.nonzero().flatten()


def _add(x: Tensor, mine: Tensor, got: Tensor, units: Units, first: bool = False) -> None:
    """Adds a message to `x` and its units to `mine`. `first` puts its values first, because NaNs keep the order."""
    index, elements, values = opened(got, units, x.dtype)
    here = x[elements]
    x[elements] = values.add_(here) if first else here.add_(values)
    mine[index] = True


async def _passed(rank: Rank, sent: Tensor, to: list[int], name: str) -> Tensor:
    """Sends rank i's `sent` to rank to[i] (-1: nowhere, `sent` is empty). Returns what arrived."""
    p, r = rank.size, rank.index
    sizes = [row[0] for row in await lengths_of(rank, [sent.numel()], sent, name)]
    rows = [sent if j == to[r] else sent[:0] for j in range(p)]
    got = await rank.all_to_allv(rows, tuple(_one(p, to[i], sizes[i]) for i in range(p)), name)
    return got[to.index(r)] if r in to else sent[:0]
