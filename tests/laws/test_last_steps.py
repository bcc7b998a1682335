"""Resumes the checkpoint of a run's last step; `make last-steps` tries all pairs of strategy and partition."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.last_steps import PAIRS, resume_last_step
from tests.thinned import thinned


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "partition"), thinned(PAIRS, of=40, long=6))
def test_the_checkpoint_of_the_last_step_resumes(strategy: str, partition: str, tmp_path: Path) -> None:
    outcome, why = resume_last_step(strategy, partition, tmp_path)
    assert outcome in ("resumed", "refused") and (outcome == "resumed" or why)
