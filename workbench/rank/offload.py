"""The verbs of a Rank for state in host memory or on disk."""

from __future__ import annotations

from typing import Any

from workbench.rank.awaitables import Op
from workbench.rank.bucket import Bucket
from workbench.rank.errors import StrategyError

OFFLOADABLE = ("parameters", "gradients", "optimizer state")  # of a bucket, can leave the device


class Elsewhere:
    """The part of a Rank that moves state off its device and back."""

    phase: str

    # host and disk
    def offload(self, shard: Bucket, what: str, to: str) -> Op:
        """Keeps a part of a shard's state off the device.

        shard:  a bucket, or a shard of one
        what:   "gradients", "optimizer state" or "parameters"
        to:     "host" or "disk"

        Anything already off the device moves there. For parameters this is a copy: `hold` decides what stays in the
        model.

        A child may use it; its lane is then busy. Raises StrategyError for another `what` or `to`.
        """
        return self._kept("offload", shard, what, to, "disk")

    def fetch(self, shard: Bucket, what: str, to: str = "device", keep: bool = False) -> Op:
        """Brings offloaded state to the "host" or back to the "device".

        shard:  a bucket, or a shard of one
        what:   as in `offload`
        to:     "host" or "device"
        keep:   whether the offloaded copy stays as well

        For parameters or gradients that reach the device it returns (n,), owned by the caller; otherwise None. Raises
        StrategyError for another `what` or `to`.
        """
        return self._kept("fetch", shard, what, to, "device", keep)

    def _kept(self, verb: str, shard: Bucket, what: str, to: str, other: str, *rest: Any) -> Op:
        if what not in OFFLOADABLE or to not in ("host", other):
            raise StrategyError(
                f"{verb} of {what!r} to {to!r}: must be one of {', '.join(map(repr, OFFLOADABLE))}, and go to 'host' "
                f"or {other!r}"
            )
        op = Op(verb, shard, what, to, *rest)
        op.measures = self.phase == "evaluation"
        return op
