"""BetweenSites: uncompressed inside a site, compressed between sites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.compressors._base import Compressor
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.compressors.top_k import TopK
from workbench.rank import Bucket, Memory, Rank, sites
from workbench.settings import knob

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BetweenSites(Compressor):
    """Adds up uncompressed in a site; its first rank exchanges the sum compressed and sends the result back.

        inside:    s <- sum of the site's x_i                                       all-reduce
        between:   out <- sum over sites of C(s), by the site's first rank          `of`, among these
        inside:    out to all of the site                                           broadcast

    C acts on few sums instead of many gradients. With TopK these are the largest elements of a site's sum. The first
    rank counts the unsent part of the site's sum as its own. So it is that rank's residual under error feedback. The
    bare name means ErrorFeedback(of=BetweenSites()). A site has `site` consecutive ranks, the last may be smaller. Set
    it to the value of `fabric.site`. With m sites of g ranks, a rank sends 2 (g-1)/g of the bucket inside its site, and
    (g-1)/g for the broadcast. The first rank also sends the bytes of `of` among m ranks.

    When to use it: sites with fast connections inside and slow ones between them. Without compression use
    `Hierarchical`, an all-reduce algorithm of the network.

    Reference: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2022,
    https://arxiv.org/abs/2107.01499 (hierarchical communication, compressed between machines)
    """

    of: Compressor = knob(TopK(), doc="compressor of the sums that sites exchange")
    site: int = knob(2, 1, 4096, unit="ranks", doc="neighbouring ranks that sum uncompressed")

    alike: ClassVar[bool] = False

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    def refuses(self) -> str | None:
        if self.of.carries:
            return f"of={self.of}: it keeps the momentum of one rank, and the sum of a site has none; use TopK"
        return None

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        inside, leaders = sites(rank, self.site)
        mine = bucket.data.clone() if leaders is not None else None
        if inside.size > 1:
            await inside.all_reduce(bucket.data, "sum", bucket.name)
        own = None
        if leaders is not None and leaders.size > 1:
            assert mine is not None
            total = bucket.data.clone()
            own = await self.of.reduce(leaders, bucket, memory)
            own = None if own is None else mine + (own - total)
        if inside.size > 1:
            await inside.broadcast(bucket.data, 0, bucket.name)
        return own
