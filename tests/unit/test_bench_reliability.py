"""Tests docs/project/reliability.md: figures from its data, and missing data."""

from __future__ import annotations

from typing import Any

from tests.bench import cycles_page, joins_page, reliability

DATA = reliability.ROOT / "docs" / "data"


def round_of(seed: int, wrong: str = "", at: str = "", **done: int) -> dict[str, Any]:
    return {"seed": seed, "campaign": "7", "wrong": wrong, "at": at, "done": done, "seconds": 60,
            "noticed": {"kill": [0.4, 0.2]}, "recovered": {"kill": [1.0, 3.0], "changes": [0.1]}}  # fmt: skip


def test_the_page_matches_its_data() -> None:
    written = (reliability.ROOT / "docs" / "project" / "reliability.md").read_text()
    assert written == reliability.page(*reliability.read(DATA))


def test_the_page_counts_faults_survivals_and_missing_rounds() -> None:
    rounds = [round_of(7, kill=2, applied=40, refused=3), round_of(8, at="kill", kill=2, **{"ended in words": 1}),
              round_of(9, wrong="Stuck: after cut: no progress", at="cut", cut=1, applied=5)]  # fmt: skip
    broken = [{"round": 0, "point": "close", "hit": True, "outcome": "closed"},
              {"round": 1, "point": "set", "hit": False, "outcome": "WRONG: it hangs"}]  # fmt: skip
    calm = [{"seed": 5, "wrong": "", "applied": 30, "refused": 2, "others": 4, "seconds": 120},
            {"seed": 6, "wrong": "AssertionError: step 3", "seconds": 60, "mended": "a ticket was lost."}]  # fmt: skip
    text = reliability.page(rounds, broken, calm, {})
    assert "| a rank's engine killed (SIGKILL) | 4 | 3 | 1 | 0 | 0.3, 0.4 | 2.0, 3.0 |" in text
    assert "| all connections between two ranks shut down | 1 | 0 | 0 | 1 |  |  |" in text
    assert "| 7 | 3 | 3 | 45 | 3 | 5 | 1 | 1 |" in text
    assert "**Result:** 75 changes (45 in campaigns, 30 without faults) and 7 faults (5 in campaigns, 2 inter" in text
    assert "3 ended wrong. The goal is 10,000 changes and 500 faults without any loss. **The goal is not" in text
    assert "| [Campaigns](#campaigns) | 45 changes and 5 faults | 1 |" in text
    assert "| [Interrupts](#interrupts) | 2 interrupts | 1 |" in text
    assert "| 5 | 3 | 2 | 30 | 2 | 4 | 1 |" in text
    assert "- without faults, seed 6: `AssertionError: step 3…`. Cause, removed since: a ticket was lost." in text
    assert "- seed 9, after cut: `Stuck: after cut: no progress…`. Not fixed yet." in text
    assert "- interrupt 1, set: `it hangs`" in text
    assert "| close | 1 | 1 | 0 | 1 | 0 |" in text and "| set | 1 | 0 | 0 | 0 | 1 |" in text
    enough = [round_of(7, kill=500, applied=9_000), round_of(8)]
    held = [{**calm[0], "applied": 1_000}]
    assert "The goal is reached." in (text := reliability.page(enough, [], held, {})) and "ended wrong\n" not in text
    lost = reliability.page([{**enough[0], "wrong": "Stuck"}, round_of(8, cut=2, applied=7)], [], held, {})
    assert "1 ended wrong." in lost and "**The numbers are reached, but not without loss.**" in lost
    assert "The 1 rounds after the last wrong round had 7 changes and 2 faults, and lost nothing." in lost
    assert "as required" not in lost
    again = [round_of(6, wrong="Stuck"), round_of(7, applied=10_000, kill=498)]
    assert "are 500 faults, as required." in reliability.page(again, [broken[0]] * 2, [], {})
    assert "as required" not in reliability.page(again, broken, [], {}), "an interrupt lost something"


def series(busy: bool, noticed: float) -> dict[str, Any]:
    times = {"median": noticed, "p95": 3 * noticed, "worst": 4 * noticed}
    return {"busy": busy, "partitions": busy, "kills": 100, "survived": 99, "load": 2.6, "seen": times, "on": times}


def test_the_page_judges_how_fast_kills_are_noticed() -> None:
    text = reliability.page([], [], [], {}, kills=[series(False, 0.5), series(True, 1.1)])
    assert "| the whole model | no | 100 | 99 | 0.50, 1.50, 2.00 | 0.50, 1.50, 2.00 | 3 |" in text
    assert "- whole models, quiet: the median until a kill is noticed is 0.50 s. The limit of 1 s is kept." in text
    assert "- parts, busy: the 95th percentile until a kill is noticed is 3.30 s. The limit of 3 s is **not" in text


def test_the_page_counts_joins_with_faults_by_fault_and_setting() -> None:
    one = {"seed": 3, "setting": "DDP", "how": "resize", "kinds": ["old"], "faults": ["killed rank 0"], "commit": "abc"}
    rounds = [{**one, "outcome": "went on", "why": ""}, {**one, "outcome": "ended", "why": "nobody holds it"},
              {**one, "kinds": ["old", "cut"], "outcome": "wrong", "why": "mean loss 2.302"}]  # fmt: skip
    controls = {"DDP": {"runs": 2, "alarms": []}, "ZeRO3": {"runs": 2, "alarms": ["mean loss 0.5"]}}
    text = reliability.page([], [], [], {}, more={"joins.json": {"each": rounds, "controls": controls}})
    assert "3 rounds: in 1 the survivors trained on, 1 ended with a documented error, 1 were wrong." in text
    assert "**297 of 300 rounds are still to be played.**" in text
    assert "| an old rank killed | 2 | 1 | 1 | 0 |" in text and "| DDP | 3 | 1 | 1 | 1 |" in text
    assert "- seed 3 at abc, DDP, resize, killed rank 0: `mean loss 2.302`. Not fixed yet." in text
    alarms = {"DDP": {"compared": 600, "left the range": 60, "left the margin": 0}}
    assert "| DDP | undisturbed | 600 | 60 | 0 |" in joins_page.describe({"each": rounds, "alarms": alarms})
    assert "4 undisturbed runs with further seeds went through the same check of losses. 1 of them gave an" in text


def test_the_page_keeps_outcomes_of_replayed_rounds_and_leaves_out_rounds_of_the_former_judge() -> None:
    one: dict[str, Any] = {"seed": 3, "setting": "DDP", "how": "replace", "kinds": ["old"], "commit": "abc",
                           "faults": ["killed rank 0"]}  # fmt: skip
    first = {**one, "outcome": "wrong", "why": "it hung", "mended": "a wait without an end."}
    rounds = [{**one, "commit": "def", "outcome": "went on", "why": "", "earlier": [first]},
              {**one, "seed": 4, "outcome": "wrong", "why": "mean loss 0.1", "twin": "within the range"},
              {**one, "seed": 6, "outcome": "went on", "why": "", "twin": "mean loss 0.1 from step 90"},
              {**one, "seed": 5, "outcome": "went on", "why": "", "judge": "former"}]  # fmt: skip
    text = joins_page.describe({"each": rounds})
    assert "3 rounds: in 2 the survivors trained on, 0 ended with a documented error, 1 were wrong." in text
    assert "The losses of 2 rounds were outside of the range. In 1 of these rounds the twin's losses were" in text
    assert "- 1 rounds that replaced a rank trained on, but the campaign compared them with runs that begin" in text
    assert ("- seed 3 at abc, DDP, replace, killed rank 0: `it hung`. Cause, removed since: a wait without an end. "
            "Played again at def: the survivors trained on.") in text  # fmt: skip


def test_the_page_lists_cycles_that_leave_resources() -> None:
    left = {"descriptors": {"socket:": 1}}
    rows = [{"cycle": n, "strategy": "DDP", "end": "It ends.", "left": left if n == 1 else {}} for n in range(3)]
    text = cycles_page.describe({"cycles": rows})
    assert "3 cycles: 2 left nothing, 1 left something. **97 of 100 cycles are not made yet.**" in text
    assert "| DDP | It ends. | 3 | 1 |" in text and f"- cycle 1, DDP: {left}" in text
    assert "Not measured yet" in cycles_page.describe({})
