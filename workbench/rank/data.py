"""The verbs of a Rank for batches."""

from __future__ import annotations

from workbench.rank.awaitables import Op


class Data:
    """The part of a Rank that draws batches."""

    # data
    def batch(self) -> Op:
        """Returns the next batch of this rank's data, to inspect it before `forward(batch)`."""
        return Op("batch")

    def client(self, index: int, count: int) -> Op:
        """Makes this rank read the data of one client.

        index:  the client, from 0
        count:  number of clients: the data has so many shards per rank
        """
        return Op("client", index, count)
