"""Acts on a loss that is not finite or has diverged, by the experiment's policy.

Marks bring alarms in any order. Rank 0 acts on its own alarm at once. The lab acts on the first alarm of any rank. The
note names the earliest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from workbench.cluster.run.run_state import RunState
from workbench.experiment.non_finite_rules import NO_ROWS
from workbench.record.alarms import describe_layer, describe_value

UNWATCHED_ERROR = "{what}, and the run was ended, {why}; {mend}, {else_}, or pause the run: on_nan='pause'"
ALTERNATIVES = {"nan": "skip such steps: on_nan='skip'", "diverged": "set diverged=0"}


class LossAlarm(NamedTuple):
    """The smallest of all ranks' alarms is the earliest."""

    t: float
    rank: int
    step: int
    name: str
    loss: str
    layer: str
    why: str
    best: str

    @property
    def sentence(self) -> str:
        whose, about = f"rank {self.rank}'s", self._asdict()
        if self.name == "diverged":
            return f"{whose} loss was {self.loss} at step {self.step}, after {self.best} at its best"
        what = f"loss was {self.loss}" if self.loss else "gradient was not finite"
        return f"{whose} {what} at step {self.step}{describe_layer(about)}"


class AlarmMonitor:
    """One run's alarms, with one note per topic."""

    def __init__(self, live: RunState) -> None:
        self.live = live
        self._first_alarm: LossAlarm | None = None  # since the run began or resumed
        self._resumed_at = float("-inf")
        self._is_pausing = True  # False: the first alarm ends the run
        self._skipped_steps: dict[
            int, tuple[bool, str]
        ] = {}  # by step: (whether a rank met it on its own data, sentence)
        self._notes_by_topic: dict[str, str] = {}

    def note_resumed(self, t: float) -> None:
        self._resumed_at = max(self._resumed_at, t)
        self._first_alarm = self._first_alarm if self._first_alarm and self._first_alarm.t > t else None

    def take_alarm(self, name: str, rank: int, step: int, t: float, detail: dict[str, Any]) -> None:
        """The first alarm pauses, ends or rolls back the run, by the policy."""
        detail_texts = {k: str(detail.get(k, "")) for k in ("loss", "layer", "why", "best")}
        alarm = LossAlarm(t, rank, step, name, **detail_texts)
        if detail.get("skipped"):
            return self._note_skipped(alarm, bool(detail.get("own")))
        if t < self._resumed_at:
            return
        known, self._first_alarm = self._first_alarm, min(alarm, self._first_alarm or alarm)
        if known is None:
            self._apply_policy(alarm)
        if self._first_alarm != known:
            self._update_note(self._first_alarm)

    def _note_skipped(self, alarm: LossAlarm, own: bool) -> None:
        """Notes a skipped step. Non-finite own data outrank a sum."""
        if own >= self._skipped_steps.get(alarm.step, (False, ""))[0]:
            self._skipped_steps[alarm.step] = own, alarm.sentence
        _, sentence = self._skipped_steps[max(self._skipped_steps)]
        count = len(self._skipped_steps)
        self._put_note("skipped", f"{sentence}; that step was skipped" + (f", as {count} in all" if count > 1 else ""))

    @property
    def _policy(self) -> str:
        policy: str = self.live.changes.experiment.on_nan
        return policy if policy in ("pause", "stop", "roll back") else "auto"

    def _apply_policy(self, first: LossAlarm) -> None:
        if self._policy == "roll back":
            return self.live.queue_command("request", request={"id": "nan", "kind": "roll back", "step": first.step})
        self._is_pausing = self._policy == "pause" or (self._policy == "auto" and self.live.watched())
        if self._is_pausing:
            self.live.queue_command("request", request={"id": "nan", "kind": "pause"})
        else:
            self.live.request_stop()

    def take_rollback(self, t: float, detail: dict[str, Any]) -> None:
        """Without `to` the roll-back failed, `text` says why, and the ranks stand still."""
        text = detail["text"]
        if "to" in detail:
            self.note_resumed(t)
            return self._put_note("back", text)
        self._is_pausing = self.live.watched()
        self._put_note("back", f"{text}; {'the run pauses' if self._is_pausing else 'nobody watches, so the run ends'}")
        if not self._is_pausing:
            error = {"rank": self._first_alarm.rank if self._first_alarm else 0, "step": self.live.step, "op": "",
                         "type": "FloatingPointError", "text": text}  # fmt: skip
            self.live.ending.unwatched_error = error
            self.live.request_stop()

    def _update_note(self, first: LossAlarm) -> None:
        if self._policy == "roll back":
            return self._put_note("first", f"{first.sentence}, before any other's; the ranks go back to a checkpoint")
        is_stop = self._policy == "stop"
        outcome = (
            "the run pauses" if self._is_pausing else "the run ends" if is_stop else "nobody watches, so the run ends"
        )
        self._put_note("first", f"{first.sentence}, before any other's; {outcome}")
        why = "as on_nan='stop' says" if is_stop else "because nobody watches it who could undo a change and resume"
        about = {"rank": first.rank, "step": first.step, "op": f"layer {first.layer!r}" if first.layer else ""}
        empty = first.why == NO_ROWS
        known = {**first._asdict(), "layer": "", "why": NO_ROWS if empty else ""}
        mend = "give every rank at least 1 row in each batch" if empty else "lower the learning rate"
        text = UNWATCHED_ERROR.format(
            what=describe_value(first.name, known), why=why, mend=mend, else_=ALTERNATIVES[first.name]
        )
        error = {**about, "type": "FloatingPointError", "text": text}
        self.live.ending.unwatched_error = None if self._is_pausing else error

    def _put_note(self, about: str, text: str) -> None:
        self.live.notes[:] = [n for n in self.live.notes if n != self._notes_by_topic.get(about)] + [text]
        self._notes_by_topic[about] = text
