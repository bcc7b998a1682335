"""Tests errors of ranks at home: folded, with the cause before its consequences, in one sentence."""

from __future__ import annotations

from typing import Any

from workbench.cluster.run.rank_errors import RankError, explain_lost_state
from workbench.settings import KnobError


def failed(rank: int, text: str, kind: str = "ValueError", **rest: Any) -> dict[str, Any]:
    return {"rank": rank, "step": 7, "op": "forward", "type": kind, "text": text, "traceback": "", **rest}


def test_identical_errors_are_folded() -> None:
    error = RankError([failed(r, "no such shape") for r in (3, 1, 0, 2)])
    assert str(error) == "ranks 0-3, step 7, forward: ValueError: no such shape"
    assert (error.rank, error.ranks, error.freed) == (0, [0, 1, 2, 3], [])


def test_consequences_are_folded_under_the_cause() -> None:
    freed = [failed(r, "Connection closed by peer [127.0.0.1]:1", "RuntimeError", t=0.0) for r in (0, 1)]
    error = RankError([*freed, failed(2, "out of range", "IndexError", t=1.0)])
    assert (error.rank, error.ranks, error.freed) == (2, [2], [0, 1])
    assert str(error).startswith("rank 2, step 7, forward: IndexError: out of range (ranks 0, 1 were freed")


def test_a_dead_engine_is_the_cause_before_any_other_error() -> None:
    error = RankError([failed(0, "strange", t=0.0), failed(1, "its engine (pid 5) is gone", "EngineDied", t=1.0)])
    assert error.rank == 1


def test_consequences_alone_are_still_an_error() -> None:
    assert "rank 1" in str(RankError([failed(1, "Broken pipe", "RuntimeError")]))


def test_the_line_of_the_users_own_code_is_shown() -> None:
    lines = ['  File "/x/torch/nn/modules/module.py", line 1, in f', '  File "<ipython-input-3>", line 2, in loss']
    error = RankError([failed(0, "bad", traceback="\n".join(lines))])
    assert str(error).endswith('File "<ipython-input-3>", line 2, in loss')
    assert error._repr_mimebundle_()["text/plain"].startswith("RankError: rank 0")


def test_the_error_reports_a_lost_state_and_gives_advice() -> None:
    errors = {r: {"type": "EngineDied", "text": "its engine ended"} for r in (0, 1)}
    explain_lost_state(errors, (0, 1), (2, 3), "")
    assert (
        errors[0]["text"]
        == errors[1]["text"]
        == (
            "its engine ended; no rank that is left holds the trained state (ranks 2, 3 were still joining); "
            "there is no checkpoint to go on from, take save_every=100"
        )
    )
    errors = {0: {"type": "EngineDied", "text": "gone"}}
    explain_lost_state(errors, (0, 1), (), "run/step-8")
    assert errors[0]["text"] == "gone", "rank 1 lives"
    explain_lost_state(errors, (0,), (), "run/step-8")
    assert errors[0]["text"].endswith("go on from the newest checkpoint with lab.run(resume='run/step-8')")


def test_a_setting_that_a_rank_refused_is_a_knob_error_in_the_kernel() -> None:
    error = RankError([failed(0, "compressor=Cast: takes floats", "KnobError")])
    assert isinstance(error, KnobError) and "compressor=Cast" in str(error) and error.rank == 0
    assert not isinstance(RankError([failed(0, "no such shape")]), KnobError)
