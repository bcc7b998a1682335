"""Writes the part of docs/project/reliability.md about faults while ranks join."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.joins import ENDINGS, KINDS, LIMIT, MARGIN, REFERENCES, REFUSALS, STEPS, WINDOW

ASKED = 300  # faults
OUTCOMES = {"went on": "the survivors trained on", "ended": "it ended with a documented error", "wrong": "wrong again",
            "too late": "the fault came after the last step"}  # fmt: skip
ABOUT = f"""`make joins` plays one round for each seed. A round trains one run of {STEPS} steps. New ranks join the run,
and a fault occurs at a random moment of the join. In 3 of 10 rounds a new rank replaces a killed rank
(`on_death="replace"`). In the other rounds `lab.resize` requests two more ranks. Odd rounds run next to two processes
that spin. Each round names the commit that it ran.

A round passes in one of two ways:

- The run ends as planned, and each mean of {WINDOW} losses after the fault is near the range of {REFERENCES}
  undisturbed runs with other seeds. A mean may be outside of the range by at most {MARGIN:g} times
  the width of the range.
- The run ends with a documented error, and no survivor held the full state.

A round is wrong if anything else happens, or if the run takes over {LIMIT:g} s. If the fault came after the last step,
the round does not count.

The undisturbed runs have the same join. For `lab.resize`, two ranks train and two more join. For `on_death="replace"`,
four ranks train, one is killed, and a new rank replaces it. So until the fault a step has as many examples as in the
round.

The range of {REFERENCES} runs is narrow, and a run may leave it without a fault (see the control below). Fewer
survivors see fewer examples in each step, so their losses are higher. So a round with means outside of the range
plays a twin. The twin has the same seed and as many ranks at each step, but by request and without the fault. If the
twin's means are outside on the same side, the fault is not the cause, and the round passes.
"""


def quote_error(text: str) -> str:
    """Returns an error's text as code."""
    return "`" + text.replace("`", "'") + "`"


def counts(one: dict[str, Any]) -> bool:
    """Whether a round counts: its fault came in time, and the present check judged it."""
    return one["outcome"] != "too late" and one.get("judge") != "former"


def name_kind(one: dict[str, Any]) -> str:
    return one["kinds"][0] if len(one["kinds"]) == 1 else "two"


def describe(joins: dict[str, Any]) -> str:
    """Returns the section's text."""
    rounds = joins.get("each", [])
    if not rounds:
        return f"{ABOUT}\n{list_sentences()}\nNot measured yet.\n"
    late = [one for one in rounds if one["outcome"] == "too late"]
    old = [one for one in rounds if one.get("judge") == "former"]
    rounds = [one for one in rounds if counts(one)]
    every = Counter(one["outcome"] for one in rounds)
    outside = [one for one in rounds if "twin" in one]
    passed = sum(one["outcome"] == "went on" for one in outside)
    empty = sum(any(line.startswith("cut 0") for line in one.get("faults", [])) for one in rounds)
    missing = f" **{ASKED - len(rounds)} of {ASKED} rounds are still to be played.**" if len(rounds) < ASKED else ""
    text = (f"{len(rounds)} rounds: in {every['went on']} the survivors trained on, {every['ended']} ended with a "
            f"documented error, {every['wrong']} were wrong.{missing}\n\n"
            f"- The losses of {len(outside)} rounds were outside of the range. In {passed} of these rounds the twin's "
            f"losses were outside, too. These rounds count as trained on.\n"
            f"- {len(late)} faults came after the last step.\n"
            f"- In {empty} rounds the two ranks had no connection to cut.\n"
            f"- {len(old)} rounds that replaced a rank trained on, but the campaign compared them with runs that "
            f"begin with two ranks. They do not count and must be played again.\n"
            )  # fmt: skip
    settings = {one["setting"]: one["setting"] for one in rounds}
    tables = [tabulate(rounds, KINDS, name_kind, "fault"), "",
              tabulate(rounds, settings, lambda one: one["setting"], "setting")]  # fmt: skip
    controls = [*describe_controls(joins.get("controls", {})), *describe_alarms(joins.get("alarms", {}))]
    notes = [f"- {note}" for note in joins.get("notes", [])]
    after = [*controls, "", *notes, "", *list_wrong(rounds), "", *list_again(joins["each"]), ""]
    return "\n".join([ABOUT, list_sentences(), text, *tables, *after])


def list_sentences() -> str:
    """Returns the messages with which a run may end, and those with which it refuses new ranks."""
    ends = [f'- "{sentence}": {means}' for sentence, means in ENDINGS.items()]
    refuses = [f'- "{sentence}": {means}' for sentence, means in REFUSALS.items()]
    about = "A run that trains on answers a failed request with one of these sentences:"
    return "\n".join(["A run may end in a join with one of these errors:", "", *ends, "", about, "", *refuses, ""])


def tabulate(rounds: list[dict[str, Any]], rows: dict[str, str], key: Any, head: str) -> str:
    lines = [f"| {head} | rounds | trained on | ended with an error | wrong |", "| --- | --- | --- | --- | --- |"]
    for name, words in rows.items():
        count = Counter(one["outcome"] for one in rounds if key(one) == name)
        lines.append(f"| {words} | {count.total()} | {count['went on']} | {count['ended']} | {count['wrong']} |")
    return "\n".join(lines)


def describe_controls(controls: dict[str, Any]) -> list[str]:
    """Returns how often the check of losses raises an alarm without a fault."""
    if not controls:
        return []
    runs, alarms = sum(one["runs"] for one in controls.values()), sum(len(one["alarms"]) for one in controls.values())
    return ["", f"Control: {runs} undisturbed runs with further seeds went through the same check of losses. {alarms} "
                f"of them gave an alarm. They cover {len(controls)} pairs of a setting and a way to join."]  # fmt: skip


def describe_alarms(alarms: dict[str, Any]) -> list[str]:
    """Returns how many simulations leave the range of undisturbed ones, with the margin and without."""
    if not alarms:
        return []
    kinds = [(name, kind, one) for name, every in alarms.items()
             for kind, one in {"undisturbed": every, **every.get("harms", {})}.items()]  # fmt: skip
    rows = [f"| {name} | {kind} | {one['compared']} | {one['left the range']} | {one['left the margin']} |"
            for name, kind, one in kinds]  # fmt: skip
    return ["", "Simulations of 4 ranks, without joins and faults, show how often the check gives an alarm. For an "
                "undisturbed run an alarm is chance. For a harmed run an alarm is correct (`python -m tests.joins "
                "--alarms SlowMo`):", "",
            "| strategy | simulation | comparisons | left the range | left it by more than the margin |",
            "| --- | --- | --- | --- | --- |", *rows]  # fmt: skip


def list_wrong(rounds: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each wrong round. "mended" is a cause that a later change removed, "cause" is no fault."""
    lines = []
    for one in rounds:
        if one["outcome"] == "wrong":
            twin = f" Its twin: {one['twin']}." if "twin" in one else ""
            unknown = " The cause is not known." if one.get("twin") == "within the range" else ""
            cause = f" {one['cause']}" if "cause" in one else unknown
            since = f" Cause, removed since: {one['mended']}" if "mended" in one else "" if twin else " Not fixed yet."
            lines.append(f"- {describe_round(one)}.{twin}{cause}{since}")
    return ["Wrong rounds:", "", *lines] if lines else []


def list_again(rounds: list[dict[str, Any]]) -> list[str]:
    """A line for each round that was wrong at first and was played again."""
    lines = []
    for one in rounds:
        for before in one.get("earlier", ()):
            if before["outcome"] == "wrong":
                mended = f" Cause, removed since: {before['mended']}" if "mended" in before else ""
                then = f"Played again at {one['commit']}: {OUTCOMES[one['outcome']]}."
                lines.append(f"- {describe_round(before)}.{mended} {then}")
    again = sum("earlier" in one for one in rounds)
    return [f"{again} rounds were played again. These rounds were wrong at first:", "", *lines] if again else []


def describe_round(one: dict[str, Any]) -> str:
    """The round's seed, commit, setting and faults, and why it had its outcome."""
    what = ", ".join([one["setting"], one["how"], *(one.get("faults") or ())])
    return f"seed {one['seed']} at {one['commit']}, {what}: {quote_error(one['why'].splitlines()[0][:200])}"
