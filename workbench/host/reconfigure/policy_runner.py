"""Asks a policy and makes its decisions.

A *look* is the boundary at which rank 0 asks the policy. All ranks reach it before the same step, or meet for it. They
report the numbers since the last look and make the decisions as ordinary changes. Only rank 0 runs the policy, so it
may be any code.
"""

from __future__ import annotations

import json
import math
import struct
from bisect import bisect_left
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from workbench.host.core.planned_event import PlannedEvent
from workbench.host.reconfigure.changes import find_refused_change
from workbench.host.reconfigure.policy_view import PolicyView
from workbench.policies import Policy, Seen
from workbench.settings import Change, KnobError, resolved, to_plain
from workbench.settings.describe_error import said

SAVED_ATTRIBUTES = ("steps", "_noted", "_state", "_known", "_held", "_refused", "_said")  # in a checkpoint
POLICY_ERRORS = (Exception, SystemExit)  # only KeyboardInterrupt may end the process


@dataclass(frozen=True)
class PolicyTick(PlannedEvent):
    """Rank 0 asks the policy."""


class PolicyRunner:
    """One rank's part in asking the policy.

    names: the policy's Samples
    steps: steps since the last look
    made:  all changes so far, the same on all ranks
    """

    def __init__(self, run: PolicyView) -> None:
        self.run = run
        self.names: tuple[str, ...] = ()
        self.steps = 0
        self._noted: dict[str, list[float]] = {}
        self._state: Any = None
        self._known = False  # whether the policy has its state
        self._given = False  # the plan has its decisions, as in a replay; it only looks
        self._next: PolicyTick | None = None  # other ticks are void
        self._held: dict[str, int] = {}  # paths set by people, with the step that followed
        self.made: list[Change] = []
        self._after: list[int] = []  # changes obeyed before each in `made`
        self._refused: set[str] = set()  # decisions to avoid until a change
        self._said: set[str] = set()

    def follow_rank(self, run: PolicyView) -> None:
        """Steers `run`, the rank of the next generation."""
        self.run = run

    @property
    def policy(self) -> Policy | None:
        """None if only people decide."""
        policy = self.run.experiment.policy
        return policy if isinstance(policy, Policy) else None

    def receive_sample(self, name: str, value: float) -> None:
        if name in self.names:
            self._noted.setdefault(name, []).append(float(value))

    def plan_first(self) -> None:
        """Plans the first look, on all ranks before the first step."""
        self._given = any(isinstance(change, Change) and change.by for change in self.run.queue.planned)
        if self._given and self.policy:
            self._mark_once("given", "it replays the decisions of another run, given as changes, and makes no new ones")
        self._plan_tick(-1)

    def restart_plan(self) -> None:
        """Call it after ranks have changed."""
        self._drop_values()
        self._plan_tick(self.run.rank.step - 1)

    def _plan_tick(self, after: int, at: int | None = None) -> None:
        """Plans a look, later than `after` or before step `at`, behind changes due by then.

        Plans none without an active policy, or after the last step.
        """
        run, policy = self.run, self.policy
        run.queue.drop_events(PolicyTick)
        self.names, self._next = (), None
        if policy is None or policy.paused:
            return
        self.names = policy.reads
        at = self._choose_step(policy, after) if at is None else at
        if at < run.experiment.steps or not run.experiment.steps:
            self._next = PolicyTick(at)
            run.queue.plan_event(self._next)

    def kept(self) -> dict[str, Any]:
        """Returns state for a checkpoint without `made`, which is equal on all ranks."""
        return {name: getattr(self, name) for name in SAVED_ATTRIBUTES} | {"next": self._next and self._next.at_step}

    def restore_state(self, kept: dict[str, Any], made: list[Change]) -> None:
        """Call it after `plan_first`."""
        following, self.made, self._after = kept.pop("next"), made, [-1] * len(made)
        vars(self).update({name: kept[name] for name in SAVED_ATTRIBUTES})
        if self._next is not None and following is not None:
            self._plan_tick(following - 1, following)

    def undo_changes(self, changes: int) -> None:
        """Drops changes after the first `changes` obeyed ones."""
        count = bisect_left(self._after, changes)
        del self.made[count:], self._after[count:]

    async def agree_on_changes(self) -> None:
        """Takes changes from the rank that knows most."""
        by = (counts := await self.run.gather(len(self.made))).index(max(counts))
        mine = [(n, change.at_step, change.plain()) for n, change in zip(self._after, self.made, strict=True)]
        said = await self.run.broadcast_text(
            json.dumps([mine, self._held, self._given]) if self.run.rank.id == by else "", by
        )
        known, self._held, self._given = json.loads(said)
        self._after, self.made = [n for n, *_ in known], [Change.read(plain, step) for _, step, plain in known]

    def _choose_step(self, policy: Policy, after: int) -> int:
        """Returns the next look's step; by `look_every` if the policy fails."""
        try:
            at = int(policy.next_look(self.run.experiment, after))
        except POLICY_ERRORS as error:
            self._mark_once(
                "next_look", f"its next_look failed with {said(error)}; it looks every {policy.look_every} steps"
            )
            at = max(after, 0) + policy.look_every
        return max(at, after + 1)

    async def follow_change(self, change: Change, obeyed: Awaitable[bool]) -> bool:
        change = self._complete_paths(change)
        if made := await obeyed:
            await self._note_change(change)
        elif change.by:
            self._refused.add(_make_key(change))
        return made

    async def _note_change(self, change: Change) -> None:
        self._refused.clear()
        self.made.append(change)
        self._after.append(self.run.queue.obeyed)
        if "policy" in change.settings:  # even to the same value: the policy may set all paths again
            self._held.clear()
            self._said.clear()
            self._known = False
        if not change.by:
            others = [path for path in change.settings if path.partition(".")[0] != "policy"]
            self._held |= dict.fromkeys(others, self.run.rank.step)
        if any(path.startswith("policy") for path in change.settings):
            self._drop_values()
            self._plan_tick((await self.run.gather(self.run.rank.step))[0])

    def _complete_paths(self, change: Change) -> Change:
        """Returns full paths, or `change` if they do not resolve."""
        try:
            return resolved(self.run.experiment, change)[0]
        except KnobError:
            return change

    def count_step(self) -> None:
        """Counts a step since the last decision."""
        self.steps += 1

    def _drop_values(self) -> None:
        self.steps, self._noted = 0, {}

    async def run_tick(self, look: PolicyTick) -> bool:
        """Asks the policy and makes its decisions on all ranks. Returns whether a change was made.

        Does nothing if an earlier change here has paused or replaced the policy.
        """
        run, made = self.run, len(self.made)
        if look is not self._next:
            return False
        self._next = None
        seen = await self._gather_observation()
        said = await run.broadcast_text(self._ask_policy(seen) if run.rank.id == 0 else "")
        for number, decision in enumerate(json.loads(said)):
            about = [{"id": f"decision {seen.step}.{number} {part['path']}", **part} for part in decision]
            await self._make_decision([Change.read(part, run.rank.step) for part in about])
        if self._next is None:
            self._plan_tick(seen.step)
        return len(self.made) > made

    async def _make_decision(self, decision: list[Change]) -> None:
        if part := await find_refused_change(self.run, decision):
            self._refused.add(_make_key(part))
            return
        for part in decision:
            if not await self.run.execute_change(part):
                break  # it must wait for an earlier part

    async def _gather_observation(self) -> Seen:
        run, numbers = self.run, {}
        steps = await run.gather(run.rank.step)
        for name in self.names:
            noted = self._noted.get(name, [])
            count = self.steps if name == "compute" else len(noted)
            numbers[name] = tuple(map(_as_float, await run.gather(_as_int(_mean_or_nan(noted, count)))))
        self._drop_values()
        made = tuple(self.made)
        return Seen(experiment=run.experiment, step=steps[0], seconds=run.now, numbers=numbers, changes=made)

    def _ask_policy(self, seen: Seen) -> str:
        """Returns JSON; if the policy fails, a change that pauses it."""
        policy, name = self.policy, type(self.policy).__name__
        if self._given or policy is None:
            return "[]"
        try:
            if reason := policy.needs(seen.experiment):
                self._mark_once(f"needs {reason}", reason)
                return "[]"
            if not self._known:
                self._state, self._known = policy.init(), True
            wanted = list(self._list_decisions(policy, seen))
            if not wanted and seen.numbers and all(math.isnan(x) for each in seen.numbers.values() for x in each):
                self._mark_once("blind", f"no rank has reported {' or '.join(seen.numbers)} yet; the policy waits")
            return json.dumps(wanted)
        except POLICY_ERRORS as error:
            text = (
                f"{name} failed at step {seen.step} with {said(error)}; it is paused, and training goes on without "
                f"it; set policy.paused=false to try again"
            )
            self._mark_once(text, text, named=True)
            return json.dumps([[Change(0, "policy.paused", True, by=name, reason=text).plain()]])

    def _list_decisions(self, policy: Policy, seen: Seen) -> Iterator[list[dict[str, Any]]]:
        """Yields decisions that are new, not refused before, and touch no path set by people."""
        name, now = type(policy).__name__, seen.experiment
        for reason, changes in policy.decide(seen, self._state):
            after, decision = now, []
            for path, value in changes.items():
                change, wanted = Change(0, path, value, by=name, reason=reason), None
                with suppress(KnobError):  # refused when it is made
                    change, wanted = resolved(after, change)
                if wanted != after:
                    decision.append(change)
                after = wanted or after
            given = {path for c in decision for path in c.settings}
            held = sorted(path for path in self._held if any(_has_overlap(path, one) for one in given))
            if held:
                self._mark_once(
                    f"leaves {held}",
                    f"does not change {' and '.join(held)}, because a person set it at step {self._held[held[0]]}; "
                    f"set the policy again to let it change this setting",
                )
            elif decision and not any(_make_key(c) in self._refused for c in decision):
                now = after
                yield [change.plain() for change in decision]

    def _mark_once(self, what: str, text: str, named: bool = False) -> None:
        """Only on rank 0, once for each setting of the policy."""
        if self.run.rank.id == 0 and what not in self._said:
            self._said.add(what)
            name = type(self.policy).__name__
            self.run.mark("policy", {"policy": name, "text": text if named else f"{name}: {text}"})


class TappedRecorder:
    """Also passes samples and compute times to a PolicyRunner."""

    def __init__(self, record: Any, policy_runner: PolicyRunner) -> None:
        self._record, self._receive = record, policy_runner.receive_sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._record, name)

    def span(self, step: int, lane: str, name: str, asked: float, t0: float, t1: float, nbytes: int) -> None:
        if lane == "compute":
            self._receive("compute", t1 - t0)
        self._record.span(step, lane, name, asked, t0, t1, nbytes)

    def sample(self, step: int, name: str, t: float, value: float) -> None:
        self._receive(name, value)
        self._record.sample(step, name, t, value)


def _mean_or_nan(noted: list[float], count: int) -> float:
    """Returns NaN for no numbers, overflow, or both infinities."""
    try:
        return math.fsum(noted) / count if count and noted else math.nan
    except (OverflowError, ValueError):
        return math.nan


def _has_overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _make_key(change: Change) -> str:
    return f"{change.path} = {json.dumps(to_plain(change.value), sort_keys=True)}"


def _as_int(x: float) -> int:
    """Returns bits, because ranks gather integers."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _as_float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
