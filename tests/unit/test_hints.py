"""Tests that an unknown name or knob is refused with the intended one; a table of wrong inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from widgets.teach.exercises import Exercise
from widgets.teach.worksheet import worksheet
from workbench.cli import app
from workbench.compressors import ErrorFeedback, TopK
from workbench.experiment import Experiment, user_input
from workbench.run import Run, plan
from workbench.settings import KnobError
from workbench.strategies import DDP, HSDP, LocalSGD

WRONG: list[tuple[str, Any, list[str], list[str]]] = [  # knob, value, words of the answer, words that mislead
    ("strategy", "FSDP", ["did you mean", "TorchFSDP", "ZeRO3"], ["HSDP"]),
    ("strategy", "zero-3", ["did you mean ZeRO3?"], []),
    ("strategy", "local_sgd", ["did you mean LocalSGD?"], []),
    ("strategy", "DistributedDataParallel", ["DDP or TorchDDP"], []),
    ("strategy", "Pipeline", ["Pipeline is a partition; set partition=Pipeline"], ["Wavelet"]),
    ("strategy", "tensor parallel", ["Tensor is a partition; set partition=Tensor"], []),
    ("strategy", "TopK", ["TopK is a compressor; set compressor=TopK"], []),
    ("strategy", "SGD", ["SGD is an optimizer; set optimizer=SGD"], ["LocalSGD"]),
    ("strategy", "Ring", ["Ring is an algorithm; set fabric.algorithm=Ring"], []),
    ("strategy", "GPipe", ["GPipe is a schedule; set partition.schedule=GPipe"], []),
    ("compressor", "DDP", ["DDP is a strategy; set strategy=DDP"], []),
    ("compressor", "bf16", ["did you mean Cast?"], []),
    ("partition", "ZeRO3", ["ZeRO3 is a strategy; set strategy=ZeRO3"], []),
    ("partition", "PP", ["did you mean Pipeline?"], []),
    ("optimizer", "PowerSGD", ["PowerSGD is a compressor; set compressor=PowerSGD"], []),
    ("fabric.faults", ["Ring"], ["set fabric.algorithm=Ring"], []),
    ("density", 0.01, ["knob of", "compressor=", "TopK", "set strategy or compressor first"], ["did you mean"]),
    ("compressor.density", 0.01, ["TopK", "here compressor is Dense", "set compressor first"], ["TEASQFed"]),
    ("strategy.every", 8, ["LocalSGD", "here strategy is DDP", "set strategy first"], []),
    ("every", 8, ["LocalSGD", "DiLoCo", "set strategy, compressor or fabric.algorithm first"], []),
    ("stages", 2, ["partition=Pipeline", "here partition is Whole"], []),
    ("compressor.bucket_mb", 4, ["did you mean bucket_mb?"], []),
    ("strategy.lr", 4, ["did you mean lr?"], []),
    ("DDP", True, ["DDP is a strategy; set strategy=DDP"], []),
    ("densty", 0.1, ["did you mean density"], []),
    ("strategy", DDP, ["must be a strategy, such as DDP()"], ["AdaAlter"]),
    ("compressor", TopK, ["must be a compressor, such as TopK()"], ["ACPSGD"]),
    ("optimizer", torch.optim.SGD, ["must be an optimizer, such as SGD()"], []),
    ("strategy", TopK(), ["must be a strategy", "TopK is a compressor"], []),
    ("policy", LocalSGD, ["must be a policy", "LocalSGD is a strategy"], []),
    ("strategy.nosuch", 1, ["strategy has accumulate"], ["did you mean"]),
    ("fabric.link.mbit", 1, ["fabric.link has bandwidth, latency"], ["did you mean"]),
    ("fabric.link.latncy", 1, ["did you mean fabric.link.latency?"], ["jitter"]),
    ("compressor.nosuch", 1, ["compressor has no knobs"], ["did you mean"]),
    ("learning_rate", 0.1, ["there are task, strategy", "lr"], ["did you mean"]),
]


@pytest.mark.parametrize(("path", "value", "words", "misleading"), WRONG, ids=[f"{w[0]}={w[1]}" for w in WRONG])
def test_a_wrong_setting_is_refused_with_the_intended_one(
    path: str, value: Any, words: list[str], misleading: list[str]
) -> None:
    with pytest.raises(KnobError) as caught:
        Experiment().set(path, value)
    for word in words:
        assert word in str(caught.value)
    for word in misleading:
        assert word not in str(caught.value)


def test_an_experiment_takes_the_same_names_as_set() -> None:
    made = Experiment(strategy="LocalSGD", compressor="TopK", partition="Whole", policy="ByHand")  # type: ignore[arg-type]
    assert made.strategy == LocalSGD() and made.compressor == ErrorFeedback(of=TopK())
    assert made.checked() == Experiment().set({"strategy": "LocalSGD", "compressor": "TopK"})
    plain: Any = {"TopK": {"density": 0.25}}
    assert ErrorFeedback(of=plain) == ErrorFeedback(of=TopK(density=0.25)), "members inside members, too"
    with pytest.raises(KnobError, match="Pipeline is a partition; set partition=Pipeline"):
        Experiment(strategy="Pipeline")  # type: ignore[arg-type]
    with pytest.raises(KnobError, match="strategy=3: must be a strategy"):
        Experiment(strategy=3)  # type: ignore[arg-type]


def test_the_error_for_ranks_explains_its_range(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["run", "digits", "--ranks", "5000", "--out", str(tmp_path / "run")])
    assert said.exit_code == 2
    words = f"ranks=5000: must be an integer in [1, {user_input.MAX_RANKS}], the most processes of a lab"
    assert f"{words}; simulate(experiment) takes up to 4096 ranks" in " ".join(said.output.split())
    with pytest.raises(KnobError, match=r"ranks=5000: must be an integer in \[1, 4096\]"):
        Experiment(ranks=5000)
    assert Experiment(ranks=user_input.RANKS_LIMIT).ranks == 4096, "what the sentence says holds"


def test_a_plan_without_a_valid_pair_has_a_reason() -> None:
    e = Experiment(ranks=3, pace=10.0, batch=2, memory_mb=0.5)
    with pytest.raises(KnobError, match=r"plan: no strategy and partition can train this .*memory_mb=0\.5"):
        plan(e, strategies=[DDP()])
    with pytest.raises(KnobError, match=r"plan: .*\(1 refused\): HSDP\(\), Whole\(\): group=2 does not divide 3 ranks"):
        plan(e.set("memory_mb", 0.0), strategies=[HSDP(group=2)], partitions=[e.partition])


def test_a_summary_shows_the_settings_in_force() -> None:
    run = Run(Experiment(strategy=DDP(), ranks=2), name="changed")
    assert (run.summary()["strategy"], run.summary()["compressor"]) == ("DDP", "Dense")
    for number, (path, value) in enumerate([("compressor", "TopK"), ("strategy", {"LocalSGD": {"every": 4}})]):
        mark = {"rank": [0], "step": [4], "t": [1.0 + number], "name": ["change"],
                "detail": [f'{{"id": "{number}", "path": "{path}", "value": {json.dumps(value)}}}']}  # fmt: skip
        run.append("marks", 0, number, mark)
    assert [change.path for change in run.changes] == ["compressor", "strategy"]
    assert (run.summary()["strategy"], run.summary()["compressor"]) == ("LocalSGD", "TopK")
    assert repr(run).startswith("Run changed: LocalSGD, 2 ranks")


def test_a_missing_answer_is_no_attempt() -> None:
    which = Exercise("which of the two hints?", lambda **said: (said == {"a": 1, "b": 2}, "judged"))
    assert which.check(a=None, b=None) == "Write down your answer first: a, b are None."
    assert which.check(a=1, b=None) == "Write down your answer first: b is None."
    assert which.check(None) == "Write down your answer first: answer 1 is None."
    assert which.check(a=1, b=2) == "judged"
    assert "which of the two hints?; 1 try, 0 hints; solved" in repr(worksheet("12"))
