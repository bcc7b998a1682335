"""Resumes the checkpoint of a run's last step; `make last-steps` tries all pairs of strategy and partition."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.last_steps import OUT, PAIRS, resume_last_step
from tests.thinned import thinned

RECORDED = json.loads(OUT.read_text())


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "partition"), thinned(PAIRS, of=40, long=6))
def test_the_checkpoint_of_the_last_step_resumes(strategy: str, partition: str, tmp_path: Path) -> None:
    outcome, why = resume_last_step(strategy, partition, tmp_path)
    known = RECORDED.get(f"{strategy}, {partition}")  # a new strategy has no entry until the next campaign
    assert outcome in ((known["outcome"],) if known else ("resumed", "refused")), why
