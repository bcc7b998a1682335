"""Makes 100 random live changes on real ranks; `python -m tests.torture` makes 1,000."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tests.torture
from tests.ranks import experiment
from tests.torture import mixed, more, sequence, torture
from workbench import simulate
from workbench.fabric import Fabric, Link, Slow
from workbench.lab import Lab
from workbench.run import Run
from workbench.settings import Change
from workbench.strategies import DDP, AsyncServer, LocalSGD, Strategy

SEED, TURNS = 20, 100


def test_a_sequence_depends_only_on_its_seed() -> None:
    assert sequence(SEED, TURNS, 4) == sequence(SEED, TURNS, 4) != sequence(SEED + 1, TURNS, 4)
    assert sum(map(len, sequence(SEED, TURNS, 4))) == TURNS


def switched(first: Strategy, *more: Change) -> Run:
    """Returns a run with a slow rank whose ranks switch to DDP in rank 0's step 20, after `more` changes."""
    fabric = Fabric(link=Link(bandwidth=200.0), faults=(Slow(rank=2, factor=1.6),))
    e = experiment(4, 40, strategy=first, pace=5.0, fabric=fabric)
    return simulate(e, changes=(*more, Change(20, "strategy", DDP())), real=True)


def without(run: Run, place: int, after: float = 0.0) -> Any:
    """Returns the check's findings without one of rank 1's exchanges in step 20.

    `place` counts the exchanges from time `after` on.
    """
    spans = run.spans[(run.spans.lane != "comm") | (run.spans.t0 >= after) | (run.spans.step != 20)]
    rows = spans[(spans.lane == "comm") & (spans["rank"] == 1) & (spans.step == 20)].sort_values("t0").index
    return list(mixed(run, spans.drop(rows[place])))


def test_settling_without_a_common_step_is_not_counted_as_the_next_strategys_exchange() -> None:
    """Each rank settles every change in its own step. Ranks that fell behind settle in a different step than rank 0."""
    run = switched(AsyncServer(), Change(20, "pace", 6.0), Change(20, "clip", 0.5))
    spans = run.spans
    settled = spans[(spans.lane == "comm") & (spans.name == "all_reduce versions") & (spans.step < 20)]
    assert 2 in set(settled["rank"]) and 0 not in set(settled["rank"])
    assert list(mixed(run)) == []
    assert "step 20" in without(run, -1)[0]


@pytest.mark.parametrize("first", [AsyncServer(), LocalSGD(every=8)])
@pytest.mark.parametrize("place", [0, -1], ids=["while leaving", "in the step"])
def test_all_exchanges_from_the_switch_on_are_compared(first: Strategy, place: int) -> None:
    run = switched(first)
    assert list(mixed(run)) == []
    begins = run.spans[(run.spans.lane == "switch") & (run.spans["rank"] == 1)].t0.min()
    assert "step 20" in without(run, place, begins)[0]


def test_each_played_seed_is_added_to_the_file_even_a_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def played(lab: Any, seed: int, turns: int, say: Any) -> dict[str, Any]:
        now[0] += 90.0
        assert seed != 8, "step 3: mixed"
        return {"applied": turns, "seconds": 90}

    monkeypatch.setattr(tests.torture, "Lab", lambda **_: nullcontext())
    monkeypatch.setattr(tests.torture, "torture", played)
    monkeypatch.setattr(tests.torture, "time", SimpleNamespace(monotonic=lambda: now[0]))
    out = tmp_path / "torture.json"
    assert more(out, 7, 50, 2, 1.0, print) and not more(out, 7, 50, 2, 1.0, print), "a minute each: a seed each"
    each = json.loads(out.read_text())["each"]
    assert [(one["seed"], one.get("applied"), one["wrong"][:24]) for one in each] == [
        (7, 50, ""), (8, None, "AssertionError: step 3: ")]  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_hundred_random_changes_neither_hang_nor_mix_nor_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with Lab(ranks=4, name="torture") as lab:
        found = torture(lab, SEED, TURNS)
    assert found["applied"] > TURNS / 2
