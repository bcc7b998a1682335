"""Explains a deadlock: which ranks wait for what, or which requests repeat without end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from workbench.rank import Op
from workbench.settings.rank_text import conjugate_wait, format_ranks
from workbench.sim.clock.fiber import Fiber

MAX_LISTED_RANKS = 8  # listed one by one
OBSERVED_EVENTS = 1_000  # to find out which requests repeat


class Deadlock(RuntimeError):
    """Ranks wait for each other and no pending event can free them, or they loop and no time passes.

    The message has a line for each wait: the ranks, the operation, its step and its lane.

    What to do: let all ranks of a group make the same calls in the same order.
    """


def explain_deadlock(world: Any) -> str:
    """Returns a line of text for each wait."""
    lines = [f"deadlock at {world.clock.now:.6f} s: no event is left that could free a rank:"]
    for lane, meetings in world.open.items():
        for meeting in meetings.values():
            ranks = meeting.here
            here = [r for r, fiber in zip(ranks, meeting.fibers, strict=True) if fiber is not None]
            gone = [r for r, fiber in zip(ranks, meeting.fibers, strict=True) if fiber is None]
            where = f"(step {next(filter(None, meeting.fibers)).step}, lane {lane.strip()!r})"
            lines.append(
                f"  {format_ranks(here, MAX_LISTED_RANKS)} {conjugate_wait(here)} in {meeting.name} {where} "
                f"for {format_ranks(gone, MAX_LISTED_RANKS)}"
            )
    for (what, group), come in world._gathered.items():
        gone = [r for r in world.list_simulated_ranks(group) if r not in come]
        lines.append(
            f"  {format_ranks(sorted(come), MAX_LISTED_RANKS)} {conjugate_wait(list(come))} to {what} "
            f"together with {format_ranks(gone, MAX_LISTED_RANKS)}"
        )
    for (rank, kind), waiting in world.mail.waiting.items():
        for wait in waiting:
            from_ = wait.source if wait.replayed is None else wait.replayed
            whom = "any rank" if from_ is None else f"rank {from_}"
            lines.append(f"  rank {rank} waits in recv {kind!r} (step {wait.fiber.step}) for a message from {whom}")
    lines += _describe_others(world)
    return "\n".join(lines)


def _describe_others(world: Any) -> list[str]:
    """Describes ranks outside network operations."""
    found: dict[str, list[int]] = {}
    for session, life in zip(world.sessions, world.lives, strict=True):
        on = life.on.on if isinstance(life.on, Fiber) else life.on
        if life.done:
            found.setdefault(f"finished all {session.rank.step} steps", []).append(session.rank.id)
        elif on is not None and isinstance(on, Fiber):
            begun = "" if on.lane is None or on.lane.busy is on else ", which has not begun"
            where = f"wait in step {session.rank.step} for their child {on.name!r}{begun}"
            found.setdefault(where, []).append(session.rank.id)
    return [f"  {format_ranks(ranks, MAX_LISTED_RANKS)}: {what}" for what, ranks in found.items()]


def explain_standstill(world: Any) -> str:
    """Runs OBSERVED_EVENTS more events to count the requests that repeat while time stands still."""
    asked: Counter[str] = Counter()

    def noting(verb: str, do: Callable[[Fiber, Op], Any]) -> Callable[[Fiber, Op], Any]:
        def noted(fiber: Fiber, op: Op) -> Any:
            asked[f"  {_name_fiber(fiber)}: {verb} {_name_op(op)}".rstrip()] += 1
            return do(fiber, op)

        return noted

    for host in world.hosts:
        host.wrap_verbs(noting)
    world.clock.run_events(OBSERVED_EVENTS)
    world.mail.release_receiver()
    lines = [line for line, _ in asked.most_common(MAX_LISTED_RANKS)]
    return "\n".join([f"time stands still at {world.clock.now:.6f} s, but these requests repeat:", *sorted(lines)])


def explain_endless_loop(fiber: Fiber, op: Op) -> str:
    """Returns the fiber's repeated request, and a remedy."""
    return (
        f"time stands still at {fiber.host.clock.now:.6f} s, but this request repeats:\n  {_name_fiber(fiber)}: "
        f"{op.verb} {_name_op(op)}".rstrip()
        + "\nThe requests of this loop take no time: let it wait for a message, a step or a collective"
    )


def _name_fiber(fiber: Fiber) -> str:
    return f"rank {fiber.host.index} in step {fiber.host.rank.step} ({fiber.name})"


def _name_op(op: Op) -> str:
    return next((repr(x) for x in reversed(op.args) if isinstance(x, str) and x), "")
