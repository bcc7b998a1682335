"""The rounds in which ranks agree on TorchFSDP's gathers and sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from workbench.engine.baselines import units
from workbench.rank import StrategyError


def take_part(monkeypatch: pytest.MonkeyPatch, *announced: list[int]) -> tuple[list[int], list[int]]:
    """Makes the sum of unit 0 on a rank while ranks announce these. Returns the performed and the served units."""
    run: Any = SimpleNamespace(control=None, foresee_reads=lambda cheaply: None)
    made, served = list[int](), list[int]()
    rounds = units.UnitRounds(run, ["a", "b"], lambda unit, is_sum, numel: served.append(unit), lambda unit: 8)
    rounds.needed = True
    monkeypatch.setattr(units, "gather_lists", lambda wire, mine: list(announced))
    rounds.run_round(0, True, announced[0][1], lambda: made.append(0))
    return made, served


def test_a_rank_serves_the_units_of_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_part(monkeypatch, [1, 8], [3, 8]) == ([0], [1])


def test_ranks_that_announce_the_same_part_of_a_unit_sum_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_part(monkeypatch, [1, 4], [1, 4]) == ([0], [])


@pytest.mark.parametrize("announced", [([1, 4], [1, 8]), ([1, 4], [3, 8]), ([1, 4], [units.BACKWARD_OVER, 0])])
def test_a_part_of_a_unit_that_another_rank_would_send_whole_is_refused(
    monkeypatch: pytest.MonkeyPatch, announced: tuple[list[int], list[int]]
) -> None:
    """A torch before 2.13 sends only the gradients that a rank has."""
    with pytest.raises(StrategyError, match="gradients of different parameters of a, which this version"):
        take_part(monkeypatch, *announced)
