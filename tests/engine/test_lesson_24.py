"""Runs lesson 24: a strategy from a cell on two clocks and under the laws, and a paper's algorithm box."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook

RIGHT = """
class Unsaid(Qsparse):
    async def leave(self, rank, state):
        for bucket in await rank.params() if state.since else ():
            x, m = state.memory.flat("x", bucket), state.memory.flat("m", bucket)
            m.add_(x - bucket.data)
            sent = top(m, self.density)
            m.sub_(sent)
            await rank.all_reduce(sent, "mean", bucket.name)
            bucket.data.copy_(x.sub_(sent))
        state.since = 0

class Solved(Unsaid):
    plain = False

class Forgetful(Solved):
    async def leave(self, rank, state):
        for bucket in await rank.params() if state.since else ():
            state.memory.flat("m", bucket).zero_()
        await super().leave(rank, state)

class Silent(Solved):
    own = {"x": "drop", "m": "sum"}

[apart, first.broken, second.broken, [str(change) for change in done],
 *map(exercise.check, (Qsparse, Forgetful, Silent, Unsaid, Solved)), repr(worksheet("24"))]"""


def test_a_strategy_from_a_cell_is_right_on_both_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"guess = Prediction": "guess.choose(near)", "broken = Prediction": "broken.choose(answers[0])",
            "worksheet(": RIGHT}  # fmt: skip
    shown = texts("24_your_own.ipynb", tmp_path, monkeypatch, **more)
    assert any("You predicted: near them" in text and "says: the same, but" in text for text in shown), shown
    assert any("You predicted: none: it trains. The record says: two or more." in text for text in shown), shown
    apart, first, second, done, plain, forgetful, silent, unsaid, solved, sheet = eval(shown[-1])
    assert apart < 1e-4 and len(first) >= 2 and second == []
    assert all("applied at step" in change for change in done), done
    assert "away from the box's" in plain and "away from the box's" in forgetful
    assert "`own` has no rule for since" in silent
    assert "set plain = False" in unsaid
    assert solved == "The box's parameters, on all ranks. All laws kept." and "; solved" in sheet
