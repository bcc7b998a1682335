"""A memory check that cannot be made before the start: silent if nothing can be simulated, else a warning."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import experiment
from workbench.rank import StrategyError
from workbench.run import require_memory
from workbench.settings import KnobError
from workbench.sim.run import memory_checks as fits


@pytest.mark.parametrize("change", [(), ("bucket_mb", 4.0)], ids=["a run", "a change"])
def test_a_simulator_that_fails_does_not_switch_the_memory_check_off_silently(
    change: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fits, "simulate", lambda *_, **__: 1 / 0)
    with pytest.warns(UserWarning) as came:
        require_memory(experiment(2, 4, memory_mb=1.0), *change)
    (text,) = {str(warning.message) for warning in came}
    assert text.startswith("memory_mb=1 was not checked before the start") and "ZeroDivisionError" in text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("error", [KnobError("it runs on ranks alone"), StrategyError("it looks at values")])
def test_an_experiment_that_cannot_be_simulated_is_left_to_its_ranks(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def refuse(*of: Any, **_: Any) -> Any:
        asked.append(of)
        raise error

    monkeypatch.setattr(fits, "simulate", refuse)
    require_memory(experiment(2, 4, memory_mb=1.0))
    assert asked
