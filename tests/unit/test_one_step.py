"""docs/one_step.md names files and functions; they are there, and both hosts run those that it says they share."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from workbench.engine.training import Training as Real
from workbench.host import changes
from workbench.host.life import Life
from workbench.sim.session import Session as Virtual

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "one_step.md"
PLACES = re.findall(r"`([\w/]+\.py): (\w+)`", PAGE.read_text())


def test_the_walk_is_short_enough_to_be_read() -> None:
    assert len(PAGE.read_text().splitlines()) <= 60 and len(PLACES) > 30


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_every_place_on_the_walk_is_in_the_code(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert name in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("rule", ["live", "over", "boundary", "step", "obey", "apart", "due"])
def test_both_hosts_live_by_the_same_rules(rule: str) -> None:
    """A host may do something before or after (`super()`), and has no version of its own."""
    for host in (Real, Virtual):
        own = vars(host).get(rule)
        assert issubclass(host, Life)
        assert own is None or "super" in own.__code__.co_names or "__class__" in own.__code__.co_freevars


def test_both_hosts_make_a_change_by_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.ranks import experiment, run
    from tests.sim.insides import simulated
    from workbench import Change

    seen: list[tuple[str, str]] = []
    plain = changes.obey

    async def obey(host: object, change: Change) -> None:
        seen.append((type(host).__module__, change.path))
        await plain(host, change)  # type: ignore[arg-type]

    monkeypatch.setattr(changes, "obey", obey)
    e, change = experiment(1, 3, pace=1.0), Change(1, "lr", 0.5)
    run(e, change)
    simulated(e, change)
    assert seen == [("workbench.engine.training", "lr"), ("workbench.sim.session", "lr")]
