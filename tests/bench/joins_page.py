"""Writes the part of docs/reliability.md about faults while ranks join."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.joins import ENDINGS, KINDS, LIMIT, REFERENCES, REFUSALS, STEPS, WINDOW

ASKED = 300  # faults
ABOUT = f"""Each round trains one run of {STEPS} steps. New ranks join it, and a fault falls at a random moment of it.
`make joins` plays the rounds. Each seed is one round. Odd rounds run next to two processes that spin. In three of ten
rounds a new rank replaces a killed one (`on_death="replace"`). In the others `lab.resize` asks for new ranks. A round
passes if the run ends as planned and no mean of {WINDOW} losses after the fault lies above the range of {REFERENCES}
undisturbed runs with other seeds. It also passes if the run ends with a documented error and no survivor held the full
state. A round is wrong if anything else happens, or if the run takes over {LIMIT:g} s. A round whose fault came after
the last step does not count. Each round names the commit that it ran.
"""


def name_kind(one: dict[str, Any]) -> str:
    return one["kinds"][0] if len(one["kinds"]) == 1 else "two"


def describe(joins: dict[str, Any]) -> str:
    """Returns the section's text."""
    rounds = joins.get("each", [])
    if not rounds:
        return f"{ABOUT}\n{list_sentences()}\nNot measured yet.\n"
    late = [one for one in rounds if one["outcome"] == "too late"]
    rounds = [one for one in rounds if one["outcome"] != "too late"]
    every = Counter(one["outcome"] for one in rounds)
    below = sum(one.get("below", 0) > 0 for one in rounds)
    empty = sum(any(line.startswith("cut 0") for line in one.get("faults", [])) for one in rounds)
    missing = f" **{ASKED - len(rounds)} of {ASKED} rounds are still to be played.**" if len(rounds) < ASKED else ""
    text = (f"{len(rounds)} rounds: in {every['went on']} the survivors trained on, {every['ended']} ended with a "
            f"documented error, {every['wrong']} were wrong.{missing} {len(late)} faults came too late. "
            f"In {empty} rounds the two ranks had no connection to cut. "
            f"In {below} rounds some means lay below the range, and none above. These count as trained on; with both "
            f"ends of the range as limits they would be wrong. The limit was changed after the first such rounds. "
            f'With `on_death="replace"` four ranks train from the start; the undisturbed runs begin with two.\n'
            )  # fmt: skip
    settings = {one["setting"]: one["setting"] for one in rounds}
    tables = [tabulate(rounds, KINDS, name_kind, "fault"), "",
              tabulate(rounds, settings, lambda one: one["setting"], "setting")]  # fmt: skip
    controls = describe_controls(joins.get("controls", {}))
    after = [*controls, "", *joins.get("notes", []), "", *list_wrong(rounds), ""]
    return "\n".join([ABOUT, list_sentences(), text, *tables, *after])


def list_sentences() -> str:
    """Returns the messages with which a run may end, and those with which it refuses new ranks."""
    ends = [f'- "{sentence}": {means}' for sentence, means in ENDINGS.items()]
    refuses = [f'- "{sentence}": {means}' for sentence, means in REFUSALS.items()]
    about = "A run that trains on answers a request that failed with one of these:"
    return "\n".join(["A run may end in a join with one of these sentences:", "", *ends, "", about, "", *refuses, ""])


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
    return ["", f"Control: {runs} undisturbed runs with further seeds went through the same check of losses; {alarms} "
                f"gave an alarm."]  # fmt: skip


def list_wrong(rounds: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each wrong round; "mended" names the repair, "again" the outcome of a replay."""
    lines = []
    for one in rounds:
        if one["outcome"] == "wrong":
            faults = ", ".join(one.get("faults") or [one["how"]])
            since = f"Mended since: {one['mended']}" if "mended" in one else "Not mended yet."
            why = one["why"].splitlines()[0][:200]
            again = f" Played again at {one['again'][1]}: {one['again'][0]}." if "again" in one else ""
            lines.append(f"- seed {one['seed']} at {one['commit']}, {one['setting']}, {faults}: {why}. {since}{again}")
    return lines
