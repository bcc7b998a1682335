"""Runs lesson 22: three policies decide live; here no schedule beats an even one, except with a slow rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

OWN = '''
@dataclass(frozen=True, kw_only=True)
class Own(Mine):
    """Looks at every step while all are well, and seldom while one is left out."""

    wise: bool = True

    def next_look(self, experiment, after):
        return max(after, 0) + (1 if self.wise and experiment.strategy == DDP() else self.look_every)

    def decide(self, seen, state):
        late = max(seen.numbers["compute"]) > 1.5 * min(seen.numbers["compute"])
        yield Decision("so", {"strategy": {"BackupWorkers": {"backup": 1}} if late else {"DDP": {}}})


@dataclass(frozen=True, kw_only=True)
class Cheat(Policy):
    """Computes less."""

    def decide(self, seen, state):
        yield Decision("less to do", {"pace": 10.0})


[goal.check(Own(look_every=10)), goal.check(Own(look_every=10, wise=False)), goal.check(Cheat()), goal.check(5),
 shares, decided("AdaComm"), decided("GraVAC"), losses, gaps]
'''


@pytest.mark.notebook
def test_who_decides_when_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"guess = Prediction": "guess.choose(early)", "patient = Prediction": "patient.choose(saves)",
            "goal = Exercise": OWN}  # fmt: skip
    shown = texts("22_who_decides_when.ipynb", tmp_path, monkeypatch, **more)
    assert any("The record says: evenly: a fixed rule. A surprise" in text for text in shown), shown
    assert any("The record says: next to nothing. A surprise" in text for text in shown), shown
    assert any("100% of DDP's seconds, and 100% of all gradients" in text for text in shown)
    judged = eval(next(s for s in shown if "Give it a policy" in s))
    own, often, cheat, none, shares, by_loss, by_gain, losses, gaps = judged
    assert own.startswith("73% of DDP's seconds, and 91%") and often.startswith("79% of DDP's")
    assert "It may set the strategy alone" in cheat and none.startswith("Give it a policy")
    assert any("5 tries, 0 hints; solved" in text for text in shown)
    first, _, last = (int(share.partition("%")[0]) for share in shares.values())
    assert first == 100 and last < 60  # the window's demand and the gradients' effect
    periods = [int(why.rpartition("every ")[2].split()[0]) for _, why in by_loss]
    assert len(periods) >= 2 and periods == sorted(periods, reverse=True) and periods[-1] <= 4
    assert by_gain and all("of the gradient's squared norm" in why for _, why in by_gain)
    assert all(even < min(pair) for even, *pair in zip(losses["evenly"], losses["early"], losses["late"], strict=True))
    assert set(gaps) == {"early above evenly", "late above evenly"}
    assert all(mean > half > 0 for mean, half in gaps.values()), "both intervals lie above zero"
    table = next(text for text in shown if "looks every 10" in text)
    took = {int(line.split()[2]): float(line.split()[3]) for line in table.splitlines()[1:]}
    assert took[10] < took[2] and took[10] < 0.85 * 24.3  # a look costs time
    assert any("[3.0, 1.0, 3.0, 3.0]" in text for text in shown)  # batches in a round of DABMD
