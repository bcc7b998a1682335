"""Settings of strategies in older records, translated to today's names."""

from __future__ import annotations

from typing import Any

Plain = dict[str, Any]
LOCAL_SGD = ("start", "group", "group_every")  # former knobs of LocalSGD
GROUPS = {"group": 1, "group_every": 1}  # their values without groups


def local_sgd(name: str, settings: Plain) -> tuple[str, Plain]:
    """Translates LocalSGD's former `start` and groups to PostLocalSGD and HierarchicalLocalSGD.

    name: today's name of the strategy in the record
    """
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
    """Translates AsyncServer's former knob `synchronous` to SyncServer."""
    now = {**settings}
    return ("SyncServer" if now.pop("synchronous", name == "SyncServer") else "AsyncServer"), now


def one_bit_adam(name: str, settings: Plain) -> tuple[str, Plain]:
    """Translates OneBitAdam's former `freeze_step`, DeepSpeed's name of its warm-up."""
    now = {**settings}
    now["warmup"] = now.pop("freeze_step")
    return name, now
