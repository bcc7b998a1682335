"""Where something goes on for hours, what allocators keep of what was let go is given back now and then."""

from __future__ import annotations

import pytest

from tests import ranks
from workbench.record import tidy


@pytest.mark.ranks
def test_each_rank_gives_back_between_two_steps_once_half_a_minute_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(tidy, "give_back", lambda: given.append("back"))
    ranks.run(ranks.experiment(steps=3))
    assert not given
    monkeypatch.setattr(tidy.Tidy.__init__, "__defaults__", (0.0,))
    ranks.run(ranks.experiment(steps=3))
    assert len(given) == 2 * 3
