"""The verbs of a Rank about what it keeps away from its device: in the memory of its host, or on disk."""

from __future__ import annotations

from typing import Any

from workbench.rank.awaitables import Op, StrategyError
from workbench.rank.bucket import Bucket

KEPT = ("parameters", "gradients", "optimizer state")  # what of a bucket can be kept away from the device


class Elsewhere:
    """The part of a Rank that moves things away from its device, and back."""

    phase: str

    # host and disk
    def offload(self, shard: Bucket, what: str, to: str) -> Op:
        """Keeps "gradients", "optimizer state" or "parameters" of a bucket's shard in the memory of the "host" or on
        "disk" from now on; what is away already moves there. Of parameters that is a copy: what the model holds of them
        is up to `hold`.

        A child may ask for it, too, and its lane is then busy with it. Raises StrategyError for anything else.
        """
        return self._kept("offload", shard, what, to, "disk")

    def fetch(self, shard: Bucket, what: str, to: str = "device", keep: bool = False) -> Op:
        """Brings what was offloaded to the "host" or back to the "device"; returns parameters or gradients that come to
        the device, (n,), which is the caller's, and None of the optimizer's state.

        keep: does it stay there, besides?
        """
        return self._kept("fetch", shard, what, to, "device", keep)

    def _kept(self, verb: str, shard: Bucket, what: str, to: str, other: str, *rest: Any) -> Op:
        if what not in KEPT or to not in ("host", other):
            raise StrategyError(f"{verb} of {what!r} to {to!r}: of {', '.join(map(repr, KEPT))} to 'host' or {other!r}")
        op = Op(verb, shard, what, to, *rest)
        op.measures = self.phase == "evaluation"
        return op
