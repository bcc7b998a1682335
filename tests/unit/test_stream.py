"""Checks that a stream of many ranks stays within the budgets of a page and of a network."""

from __future__ import annotations

from tests.bench.stream import streamed


def test_64_ranks_at_20_steps_per_second_stay_within_the_budget_of_the_page() -> None:
    found = streamed(64, seconds=2.0, warm=2.0)
    assert found.rows > 64 * 20 * 8
    assert found.kilobytes < 300 and 3 < found.messages < 40
