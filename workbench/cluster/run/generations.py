"""Follows a run's generations: training ranks, lost ranks, and answered requests.

The first rank of a generation records its members. If that rank is lost, the kernel may read this from disk during a
later generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.cluster.run.controller import RunController


def went_on(live: RunController, step: int, detail: dict[str, Any]) -> None:
    """Takes in a new generation, or why the ranks cannot continue."""
    live.notes.append(detail["text"])
    if "members" not in detail:
        return
    live.admit_ranks([m for m in detail["members"] if m not in live.been])  # ranks that another kernel added
    if detail.get("turn", live.turn + 1) <= live.turn:  # from a lost rank, after a later generation
        return was_resized(live, step, detail)
    live.turn = detail.get("turn", live.turn)
    unheard = [m for m in live.members if m not in (*detail["members"], *detail["gone"])]  # no rank reported their end
    live.members, gone = tuple(detail["members"]), [*detail["gone"], *unheard]
    live.ending.note_joined(live.members)
    live.ending.note_outlived(gone, step)
    live.step = min(live.step, step)
    live.changes.resized(step, detail)
    live.orders.follow_leader(live.members[0], gone if live.evicting.acts else ())
    said = detail.get("preempted", ()), detail.get("new"), detail.get("spare", ())
    live.evicting.went_on(gone, *said)


def was_resized(live: RunController, step: int, detail: dict[str, Any]) -> None:
    """Answers a resize. Dismisses new ranks outside the current generation."""
    live.orders.dismiss_ranks([m for m in live.changes.made(step, detail) if m not in live.members])
