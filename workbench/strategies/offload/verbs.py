"""The verbs for state in host memory or on disk. Both hosts perform them."""

from __future__ import annotations

from workbench.rank import Bucket, Op, Rank, StrategyError
from workbench.rank.verbs import list_verbs

OFFLOADABLE = ("parameters", "gradients", "optimizer state")  # of a bucket, can leave the device


def offload(rank: Rank, shard: Bucket, what: str, to: str) -> Op:
    """Keeps a part of a shard's state off the device.

    shard:  a bucket, or a shard of one
    what:   "gradients", "optimizer state" or "parameters"
    to:     "host" or "disk"

    Anything already off the device moves there. For parameters this is a copy: `hold` decides what stays in the
    model.

    A child may use it; its lane is then busy. Raises StrategyError for another `what` or `to`.
    """
    return _checked(rank, Op("offload", shard, what, to), "disk")


def fetch(rank: Rank, shard: Bucket, what: str, to: str = "device", keep: bool = False) -> Op:
    """Brings offloaded state to the "host" or back to the "device".

    shard:  a bucket, or a shard of one
    what:   as in `offload`
    to:     "host" or "device"
    keep:   whether the offloaded copy stays as well

    For parameters or gradients that reach the device it returns (n,), owned by the caller; otherwise None. Raises
    StrategyError for another `what` or `to`.
    """
    return _checked(rank, Op("fetch", shard, what, to, keep), "device")


def _checked(rank: Rank, op: Op, other: str) -> Op:
    """Returns `op`. Raises StrategyError for an unknown kind of state or place. other: the place besides the host"""
    what, to = op.args[1:3]
    if what not in OFFLOADABLE or to not in ("host", other):
        raise StrategyError(
            f"{op.verb} of {what!r} to {to!r}: must be one of {', '.join(map(repr, OFFLOADABLE))}, and go to 'host' "
            f"or {other!r}"
        )
    op.measures = rank.phase == "evaluation"
    return op


VERBS = list_verbs(offload, fetch)
