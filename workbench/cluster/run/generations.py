"""Follows a run's generations: training ranks, lost ranks, and answered requests.

A generation's first rank records its members. If it is lost, the kernel may read this later, from disk.
"""

from __future__ import annotations

from typing import Any

from workbench.cluster.run.commands import CommandQueue
from workbench.cluster.run.evicting import Evictions
from workbench.cluster.run.state import RunState


def went_on(live: RunState, orders: CommandQueue, evictions: Evictions, step: int, detail: dict[str, Any]) -> None:
    """Takes in a new generation, or why there is none."""
    live.notes.append(detail["text"])
    if "members" not in detail:
        return
    live.admit_ranks([m for m in detail["members"] if m not in live.been])  # added by another kernel
    if detail.get("turn", live.turn + 1) <= live.turn:  # by a lost rank, read late
        return was_resized(live, step, detail)
    live.turn = detail.get("turn", live.turn)
    unheard = [m for m in live.members if m not in (*detail["members"], *detail["gone"])]  # unreported ends
    live.members, gone = tuple(detail["members"]), [*detail["gone"], *unheard]
    live.ending.note_joined(live.members)
    live.ending.note_outlived(gone, step)
    live.step = min(live.step, step)
    live.changes.resized(step, detail)
    orders.follow_leader(live.members[0], gone if evictions.acts else ())
    said = detail.get("preempted", ()), detail.get("new"), detail.get("spare", ())
    evictions.went_on(gone, *said)


def was_resized(live: RunState, step: int, detail: dict[str, Any]) -> None:
    """Answers a resize. Dismisses new ranks outside the current generation."""
    live.orders.dismiss_ranks([m for m in live.changes.made(step, detail) if m not in live.members])
