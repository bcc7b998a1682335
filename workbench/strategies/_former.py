"""What runs that were recorded earlier say of a strategy, in today's names."""

from __future__ import annotations

from typing import Any

Plain = dict[str, Any]


def local_sgd(settings: Plain) -> tuple[str, Plain]:
    """LocalSGD had a `start`, and groups; these are strategies of their own."""
    now = {**settings}
    warmup, group = now.pop("warmup", 0), now.pop("group", 1)
    warmup = now.pop("start", warmup)
    group_every = now.pop("group_every", 1)
    if group != 1:
        return "HierarchicalLocalSGD", {**now, "warmup": warmup, "group": group, "group_every": group_every}
    return ("PostLocalSGD", {**now, "warmup": warmup}) if warmup else ("LocalSGD", now)


def async_server(settings: Plain) -> tuple[str, Plain]:
    """AsyncServer could be `synchronous`, whose pushes are never stale."""
    now = {**settings}
    if not now.pop("synchronous", False):
        return "AsyncServer", now
    return "SyncServer", {**now, **({"weight": "sum"} if now.get("weight") == "staleness" else {})}


def one_bit_adam(settings: Plain) -> tuple[str, Plain]:
    """The warm-up of OneBitAdam had DeepSpeed's name."""
    now = {**settings}
    warmup = now.pop("freeze_step", None)
    return "OneBitAdam", (now if warmup is None else {**now, "warmup": warmup})
