"""Acts on a loss that is not finite or has diverged, by the experiment's policy.

Marks bring alarms in any order. Rank 0 acts on its own alarm at once. The lab acts on the first alarm of any rank. The
note names the earliest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from workbench.cluster.run.state import RunState
from workbench.experiment.non_finite_rules import NO_ROWS
from workbench.record.alarms import describe_layer, describe_value

UNWATCHED = "{what}, and the run was ended, {why}; {mend}, {else_}, or let it pause: on_nan='pause'"
ELSE = {"nan": "let it skip such steps: on_nan='skip'", "diverged": "let it go on: diverged=0"}


class Alarmed(NamedTuple):
    """What one rank met. The smallest instance is the earliest."""

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


class Alarm:
    """One run's alarms, with one note per topic."""

    def __init__(self, live: RunState) -> None:
        self.live = live
        self._first: Alarmed | None = None  # since the run began or resumed
        self._went_on = float("-inf")  # when the run last resumed
        self._pauses = True  # whether the first alarm pauses the run; False: it ends it
        self._skipped: dict[int, tuple[bool, str]] = {}  # by step: (whether a rank met it on its own data, sentence)
        self._notes: dict[str, str] = {}

    def went_on(self, t: float) -> None:
        self._went_on = max(self._went_on, t)
        self._first = self._first if self._first and self._first.t > t else None

    def heard(self, name: str, rank: int, step: int, t: float, detail: dict[str, Any]) -> None:
        """Takes in a rank's mark. The first alarm pauses, ends or rolls back the run, by the policy."""
        said = {k: str(detail.get(k, "")) for k in ("loss", "layer", "why", "best")}
        found = Alarmed(t, rank, step, name, **said)
        if detail.get("skipped"):
            return self._skip(found, bool(detail.get("own")))
        if t < self._went_on:
            return
        known, self._first = self._first, min(found, self._first or found)
        if known is None:
            self._act(found)
        if self._first != known:
            self._tell(self._first)

    def _skip(self, found: Alarmed, own: bool) -> None:
        """Notes a skipped step. Non-finite own data outrank a sum."""
        if own >= self._skipped.get(found.step, (False, ""))[0]:
            self._skipped[found.step] = own, found.sentence
        _, sentence = self._skipped[max(self._skipped)]
        count = len(self._skipped)
        self._say("skipped", f"{sentence}; that step was skipped" + (f", as {count} in all" if count > 1 else ""))

    @property
    def _policy(self) -> str:
        policy: str = self.live.changes.experiment.on_nan
        return policy if policy in ("pause", "stop", "roll back") else "auto"

    def _act(self, first: Alarmed) -> None:
        if self._policy == "roll back":
            return self.live.queue_order("request", request={"id": "nan", "kind": "roll back", "step": first.step})
        self._pauses = self._policy == "pause" or (self._policy == "auto" and self.live.watched())
        if self._pauses:
            self.live.queue_order("request", request={"id": "nan", "kind": "pause"})
        else:
            self.live.come_to_end()

    def went_back(self, t: float, detail: dict[str, Any]) -> None:
        """Takes in a roll-back's result. Without `to` it failed, `text` says why, and the ranks stand still."""
        text = detail["text"]
        if "to" in detail:
            self.went_on(t)
            return self._say("back", text)
        self._pauses = self.live.watched()
        self._say("back", f"{text}; {'the run pauses' if self._pauses else 'nobody watches, so the run ends'}")
        if not self._pauses:
            unwatched = {"rank": self._first.rank if self._first else 0, "step": self.live.step, "op": "",
                         "type": "FloatingPointError", "text": text}  # fmt: skip
            self.live.ending.unwatched = unwatched
            self.live.come_to_end()

    def _tell(self, first: Alarmed) -> None:
        if self._policy == "roll back":
            return self._say("first", f"{first.sentence}, before any other's; the ranks go back to a checkpoint")
        asked = self._policy == "stop"
        does = "the run pauses" if self._pauses else "the run ends" if asked else "nobody watches, so the run ends"
        self._say("first", f"{first.sentence}, before any other's; {does}")
        why = "as on_nan='stop' says" if asked else "for nobody watches it who could take something back and go on"
        about = {"rank": first.rank, "step": first.step, "op": f"layer {first.layer!r}" if first.layer else ""}
        empty = first.why == NO_ROWS
        known = {**first._asdict(), "layer": "", "why": NO_ROWS if empty else ""}
        mend = "give every rank at least 1 row in each batch" if empty else "lower the learning rate"
        text = UNWATCHED.format(what=describe_value(first.name, known), why=why, mend=mend, else_=ELSE[first.name])
        unwatched = {**about, "type": "FloatingPointError", "text": text}
        self.live.ending.unwatched = None if self._pauses else unwatched

    def _say(self, about: str, text: str) -> None:
        self.live.notes[:] = [n for n in self.live.notes if n != self._notes.get(about)] + [text]
        self._notes[about] = text
