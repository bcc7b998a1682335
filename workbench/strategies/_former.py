"""What runs that were recorded earlier say of a strategy, in today's names."""

from __future__ import annotations

from typing import Any

Plain = dict[str, Any]
LOCAL_SGD = ("start", "group", "group_every")  # knobs that LocalSGD had
GROUPS = {"group": 1, "group_every": 1}  # and what they were where there were no groups


def local_sgd(name: str, settings: Plain) -> tuple[str, Plain]:
    """LocalSGD had a `start`, and groups; these are strategies of their own. name: today's, of which this was said"""
    now = {**settings}
    if "start" in now:
        now["warmup"] = now.pop("start")
    if name == "HierarchicalLocalSGD" or any(now.get(knob, none) != none for knob, none in GROUPS.items()):
        return "HierarchicalLocalSGD", {"warmup": 0, **GROUPS, **now}
    now = {knob: value for knob, value in now.items() if knob not in GROUPS}
    if name == "PostLocalSGD" or now.get("warmup"):
        return "PostLocalSGD", now
    return "LocalSGD", {knob: value for knob, value in now.items() if knob != "warmup"}


def async_server(name: str, settings: Plain) -> tuple[str, Plain]:
    """AsyncServer could be `synchronous`."""
    now = {**settings}
    return ("SyncServer" if now.pop("synchronous", name == "SyncServer") else "AsyncServer"), now


def one_bit_adam(name: str, settings: Plain) -> tuple[str, Plain]:
    """The warm-up of OneBitAdam had DeepSpeed's name."""
    now = {**settings}
    now["warmup"] = now.pop("freeze_step")
    return name, now
