"""A hundred random live changes on real ranks; `make torture` does a thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture import sequence, torture
from workbench.lab import Lab

SEED, TURNS = 20, 100


def test_a_sequence_depends_on_its_seed_alone() -> None:
    assert sequence(SEED, TURNS, 4) == sequence(SEED, TURNS, 4) != sequence(SEED + 1, TURNS, 4)
    assert sum(map(len, sequence(SEED, TURNS, 4))) == TURNS


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
