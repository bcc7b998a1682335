"""Zen: adds up sparse gradients without loss, by the scheme that sends least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors._schemes import SCHEMES, Sparsity, exchanged, expected, gather, owners, pool, ring, tree
from workbench.compressors._uneven import lengths_of
from workbench.compressors._units import Owned, Units, size
from workbench.rank import Bucket, Memory, Rank, outlined
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Zen(Compressor):
    """Sends the nonzero elements of a sparse gradient as pairs, by the scheme that sends least. Nothing is lost.

        out = sum over ranks of x_i;   sent: (index, value) pairs of the nonzero elements

    Embedding tables have sparse gradients, because a batch reads few rows. For each bucket ranks first exchange their
    numbers of nonzero elements (32 bytes to each other rank), so that all choose alike. Let n be the number of fp32
    elements, d the nonzero share on a rank, and D_j the share on at least one of j ranks (so D_1 = d). Then a rank
    sends these bytes:

        dense     8 n (p-1)/p                                   an all-reduce
        gather    8 d n (p-1)                                   all pairs to all ranks (AGsparse)
        tree      8 n (D_1 + D_2 + D_4 + ... + D_(p/2))         recursive doubling (SparCML)
        ring      8 n (D_1 + ... + D_(p-1) + (p-1) D_p) / p     slices that go around and grow
        owners    (p-1)/p (8 d n + 4 D_p n + n/8)               balanced parallelism (Zen)

    and as headers 4 for each message and 8 for each sent length (`rounds` in _schemes.py). With "owners" a hash of the
    parameter's name and the place in it selects the rank that adds up a pair. All ranks know the owners. So the way
    back needs one bit per place and no indices, which would be shorter only for D_p < 1/32. Its bytes hardly grow with
    p. A hash spreads any support evenly over the owners, while one contiguous slice may hold nearly all of it. "auto"
    takes the least of these formulas with headers, for the measured d. It learns the ranks' overlap from the last sum,
    as the number of places among which each rank would choose at random. At first these are all places. The paper's
    system decides only between owners and tree. It decides only once, after a few steps.

    With `rows` the unit is a row of a matrix: one index for a whole row. "auto" takes rows if all ranks together then
    send less, as for embeddings. It takes elements if the nonzero ones are scattered. Vectors use elements. Matrices
    with rows of any length may share a bucket.

    All ranks add in the same order, so their results are bit-identical. Owners are computed once and kept (6 bytes for
    each unit). They do not change with the buckets. The paper's second level of hashing packs pairs on a GPU without
    locks. Here a stable sort by owner does this and cannot lose a pair. The Samples "density" and "scheme" record the
    measured share and the choice. (Schemes: 0 gather, 1 tree, 2 owners, 3 ring, 4 dense.) With sizes only, supports are
    assumed independent. They are made of rows unless `rows` is "elements".

    When to use it: large embeddings on a slow network. For a dense gradient it reads every element once and sends a
    short message more than Dense. It counts bytes, not latency. Consecutive exchanges are 2 p with "ring", 2 log2 p
    with "tree", 4 with "owners", and 1 with "gather" and "dense". One exchange precedes them.

    Reference: Wang et al., "ZEN: Empowering Distributed Training with Sparsity-driven Data Synchronization", OSDI
    2025, https://arxiv.org/abs/2309.13254; Renggli et al., "SparCML: High-Performance Sparse Communication for Machine
    Learning", SC 2019, https://arxiv.org/abs/1802.08021
    """

    scheme: str = knob(
        "auto", choices=("auto", *SCHEMES), doc="how ranks sum pairs; auto: the scheme that sends the fewest bytes"
    )
    rows: str = knob(
        "auto",
        choices=("auto", "rows", "elements"),
        doc="whether rows or elements have an index; auto: the one that sends fewer bytes",
    )

    unbiased: ClassVar[bool] = True
    varies: ClassVar[bool] = True
    pools: ClassVar[str] = "zen pools"  # by parameter, the share of its units from which ranks seem to choose
    maps: ClassVar[str] = "zen maps"  # by a bucket's first parameter, its owners
    drops: ClassVar[tuple[str, ...]] = (pools, maps)
    kind: ClassVar[str] = "sparse"

    @property
    def lossless(self) -> bool:
        return True

    async def _supposed(self, rank: Rank, bucket: Bucket, memory: Memory) -> None:
        """With sizes only: assumes a nonzero share of `rank.density`."""
        x, p = bucket.data, rank.size
        if p == 1 or not x.numel() or self.scheme == "dense":
            return await self._added(rank, bucket)
        units = Units(bucket, self._kinds[0])
        k, v = (max(1, round(rank.density * n)) for n in (units.count, units.numel))
        load = Sparsity(k, v, units.count, units.numel, x.element_size(), units.count)
        await rank.all_gather(x.new_empty(2 * len(self._kinds), dtype=torch.int64), bucket.name)
        await exchanged(self._chosen(load, p), load, rank, x, bucket.name)

    @outlined(_supposed)
    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        x, p, width = bucket.data, rank.size, bucket.data.element_size()
        if self.scheme == "dense" or not x.numel():
            await self._added(rank, bucket)
            return None
        nonzero = x != 0
        kinds = [Units(bucket, rows) for rows in self._kinds]
        touched = [units.touched(nonzero) for units in kinds]
        counts = [n for units, t in zip(kinds, touched, strict=True) for n in (int(t.count_nonzero()), units.held(t))]
        told = await lengths_of(rank, counts, x, bucket.name)
        kind = min(range(len(kinds)), key=lambda i: sum(size(row[2 * i], row[2 * i + 1], width) for row in told))
        units, mine, each = kinds[kind], touched[kind], [row[2 * kind : 2 * kind + 2] for row in told]
        await rank.sample("density", each[rank.index][1] / x.numel())
        if p == 1:
            return None
        if not any(k for k, _ in each):
            x.zero_()
            return None
        load = self._load(each, units, width, memory)
        scheme = self._chosen(load, p)
        await rank.sample("scheme", SCHEMES.index(scheme))
        match scheme:
            case "gather":
                sizes = [size(k, v, width) for k, v in each]
                together = await gather(rank, x, units, mine, sizes, bucket.name)
            case "tree":
                together = await tree(rank, x, units, mine, bucket.name)
            case "ring":
                together = await ring(rank, x, units, mine, bucket.name)
            case "owners":
                together = await owners(rank, x, units, mine, self._map(units, p, memory), bucket.name)
            case _:
                await rank.all_reduce(x, "sum", bucket.name)
                together = int(units.touched(x != 0).count_nonzero())
        seen = pool(load, p, together) / units.count
        memory.parts.setdefault(self.pools, {}).update((block.name, seen) for block in units.blocks)
        return None

    @property
    def _kinds(self) -> tuple[bool, ...]:
        """The possible units of an index: rows (True), elements (False)."""
        return {"auto": (True, False), "rows": (True,), "elements": (False,)}[self.rows]

    async def _added(self, rank: Rank, bucket: Bucket) -> None:
        """Adds up the dense bucket, unless it is empty or this rank is alone."""
        if bucket.data.numel() and rank.size > 1:
            await rank.all_reduce(bucket.data, "sum", bucket.name)

    def _load(self, each: list[tuple[int, ...]], units: Units, width: int, memory: Memory) -> Sparsity:
        k, v = (sum(row[i] for row in each) / len(each) for i in (0, 1))
        share = memory.parts.get(self.pools, {}).get(units.blocks[0].name, 1.0)
        return Sparsity(k, v, units.count, units.numel, width, max(k, share * units.count))

    def _chosen(self, load: Sparsity, p: int) -> str:
        if self.scheme != "auto":
            return self.scheme
        return min(SCHEMES, key=lambda scheme: expected(scheme, load, p))

    def _map(self, units: Units, p: int, memory: Memory) -> Owned:
        """Returns the owners. Computes them again after a change of the bucket, the ranks or the unit."""
        kept = memory.parts.setdefault(self.maps, {})
        about = p, units.blocks, units.device
        first = units.blocks[0].name
        if first not in kept or kept[first][0] != about:
            names = {block.name for block in units.blocks}
            for old in [f for f, (was, _) in kept.items() if names & {block.name for block in was[1]}]:
                del kept[old]
            kept[first] = about, Owned.among(units, p)
        owned: Owned = kept[first][1]
        return owned
