"""What the kernel makes of a run's generations: who trains now, who is gone, and what was asked without an answer yet.

A rank says in the record who went on. One that is lost may have said so where nobody heard it: its rows are read
from its disk when others have gone on since, or never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.cluster.run.live import Live


def went_on(live: Live, step: int, detail: dict[str, Any]) -> None:
    """Ranks went on without others, or say why they cannot."""
    live.notes.append(detail["text"])
    if "members" not in detail:
        return
    live.admit([m for m in detail["members"] if m not in live.been])  # of whom another kernel knew
    if detail.get("turn", live.turn + 1) <= live.turn:  # one who is lost said it, and others have gone on since
        return was_resized(live, step, detail)
    live.turn = detail.get("turn", live.turn)
    unheard = [m for m in live.members if m not in (*detail["members"], *detail["gone"])]  # whose end nobody heard of
    live.members, gone = tuple(detail["members"]), [*detail["gone"], *unheard]
    live.ending.joined(live.members)
    live.ending.outlived(gone, step)
    live.step = min(live.step, step)
    live.changes.resized(step, detail)
    live.orders.hears(live.members[0], gone if live.evicting.acts else ())
    said = detail.get("preempted", ()), detail.get("new"), detail.get("spare", ())
    live.evicting.went_on(gone, *said)


def was_resized(live: Live, step: int, detail: dict[str, Any]) -> None:
    """Other ranks trained from `step` on, and those who do now have said so since."""
    live.orders.dismiss([m for m in live.changes.made(step, detail) if m not in live.members])
