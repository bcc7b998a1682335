"""Follows a run's generations: training ranks, lost ranks, and answered requests.

A generation's first rank records its members. If it is lost, the kernel may read this later, from disk.
"""

from __future__ import annotations

from typing import Any

from workbench.cluster.run.command_queue import CommandQueue
from workbench.cluster.run.evictions import Evictions
from workbench.cluster.run.run_state import RunState


def apply_new_generation(
    live: RunState, commands: CommandQueue, evictions: Evictions, step: int, detail: dict[str, Any]
) -> None:
    """Takes in a new generation, or why there is none."""
    live.notes.append(detail["text"])
    if "members" not in detail:
        return
    live.admit_ranks([m for m in detail["members"] if m not in live.used_ranks])  # added by another kernel
    if detail.get("turn", live.generation_number + 1) <= live.generation_number:  # by a lost rank, read late
        return answer_resize(live, step, detail)
    live.generation_number = detail.get("turn", live.generation_number)
    unheard = [m for m in live.members if m not in (*detail["members"], *detail["gone"])]  # unreported ends
    live.members, gone = tuple(detail["members"]), [*detail["gone"], *unheard]
    live.ending.note_joined(live.members)
    live.ending.note_removed(gone, step)
    live.step = min(live.step, step)
    live.changes.note_resized(step, detail)
    commands.follow_leader(live.members[0], gone if evictions.can_replace else ())
    loss = detail.get("preempted", ()), detail.get("new"), detail.get("spare", ())
    evictions.note_continued(gone, *loss)


def answer_resize(live: RunState, step: int, detail: dict[str, Any]) -> None:
    """Answers a resize. Dismisses new ranks outside the current generation."""
    live.commands.dismiss_ranks([m for m in live.changes.note_superseded_resize(step, detail) if m not in live.members])
