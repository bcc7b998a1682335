"""Tests training loops in a `with` block: few changed lines, and one model on all ranks after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import ended, live, run
from tests.scripts import SCRIPTS
from tests.unit.test_led import SIX, far, made, of, off, stepped
from tests.waiting import until
from workbench import training
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, LocalSGD, Strategy, TorchDDP
from workbench.tasks import TaskError


def in_a_block(name: str) -> tuple[str, str]:
    """Returns the script's loop, and the same loop in a block."""
    script, times = SCRIPTS[name], ", 4" if name == "gradient accumulation" else ""
    loop = script.loop.strip("\n")
    taken = loop.replace("enumerate(loader)", f"enumerate(run.steps(loader{times}))")
    taken = taken.replace("in loader:", f"in run.steps(loader{times}):")
    optimizers = ", ".join(n for n, x in script.make(8).items() if isinstance(x, torch.optim.Optimizer))
    lines = [f"    {line}" for line in taken.splitlines()]
    return loop, "\n".join(["import workbench", f"with workbench.training(model, {optimizers}) as run:", *lines])


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*SIX, "a stream"])
def test_a_block_changes_at_most_five_lines_and_no_loss(name: str) -> None:
    before, after = in_a_block(name)
    was = [line.strip() for line in before.splitlines()]
    assert sum(line.strip() not in was for line in after.splitlines()) <= 5
    found: list[Any] = []

    def train() -> None:
        names = SCRIPTS[name].make(8)
        exec(f"losses = []\ntorch.manual_seed(0)\nrandom.seed(0)\n{after}", names)
        found.append((names["losses"], names["run"].model() is names["model"]))

    train()  # without ranks
    (session,) = run(of(train))
    assert found == [(SCRIPTS[name].plain(8)["losses"], True)] * 2
    assert session.record.losses() == found[0][0]


def block(seen: list[Any], path: Path | None = None, many: int = 1, times: int = 1) -> Callable[[], None]:
    """Trains 12 batches in two halves in a block, then checks the model and the usable parts after it."""

    def train() -> None:
        model, batches = made()
        optimizer = stepped(model)
        with training(model, optimizer) as ours:
            for half in ours.steps([part for batch in batches * many for part in batch.split(4)]):
                for _ in range(times):
                    optimizer.zero_grad()
                    off(model, half).backward()
                    optimizer.step()
        state = {name: x.clone() for name, x in model.state_dict().items()}
        off(ours.model(), batches[0]).backward()  # works as without a block again
        if path is not None:
            ours.save_model(path.with_suffix(f".{ours.rank}.pt"))
        seen.append((ours, state))

    return train


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=64), TorchDDP()], ids=lambda s: type(s).__name__)
def test_after_the_block_all_ranks_are_equal_and_independent(strategy: Strategy, tmp_path: Path) -> None:
    seen: list[Any] = []
    sessions = run(of(block(seen, tmp_path / "model"), 2, strategy=strategy), Change(5, "bucket_mb", 0.02))
    assert [s.phase for s in sessions] == ["done", "done"] and sessions[0].rank.step == 12
    assert sorted((b.rank, b.ranks) for b, _ in seen) == [(0, 2), (1, 2)]
    assert [b.changes for b, _ in seen] == [(Change(5, "bucket_mb", 0.02),)] * 2
    torch.testing.assert_close(seen[0][1], seen[1][1], rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["model.0.pt"]
    torch.testing.assert_close(torch.load(tmp_path / "model.0.pt"), seen[0][1], rtol=0, atol=0)


@pytest.mark.ranks
def test_after_the_block_the_model_is_the_mean_of_drifted_replicas() -> None:
    seen: list[Any] = []
    run(of(block(seen), 2, strategy=LocalSGD(every=64)))
    alone = [made()[0] for _ in range(2)]
    for number, model in enumerate(alone):
        optimizer = stepped(model)
        for batch in made()[1]:
            optimizer.zero_grad()
            off(model, batch.split(4)[number]).backward()
            optimizer.step()
    first, second = (model.state_dict() for model in alone)
    assert far(*alone) > 1e-4
    torch.testing.assert_close(seen[0][1], {name: (x + second[name]) / 2 for name, x in first.items()})


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["steps", "stop"])
def test_a_run_that_ends_early_ends_only_the_block(how: str) -> None:
    seen: list[Any] = []
    train = block(seen, many=1 if how == "steps" else 10**4)
    sessions = live(of(train, 2, strategy=LocalSGD(every=64), steps=7 if how == "steps" else 0))
    if how == "stop":
        assert until(lambda: sessions[0].rank.step > 3)
        sessions[0].request({"kind": "stop", "id": "e"})
    ended(sessions)
    assert len(seen) == 2 and not any(s.error for s in sessions)
    torch.testing.assert_close(seen[0][1], seen[1][1], rtol=0, atol=0)


def wrong(kind: str) -> Callable[[], None]:
    def train() -> None:
        model, batches = made()
        optimizer = stepped(model)
        try:
            with training(model, optimizer) as ours:
                for number, batch in enumerate(ours.steps(batches)):
                    if number == 2 and kind == "raises":
                        raise ValueError("a bad example")
                    if number == 2 and kind == "too early":
                        ours.model()
                    off(model, batch).backward()
                    optimizer.step()
        except ValueError:
            batches.clear()  # the script's handling changes nothing: the run has failed
        if kind == "another block":
            with training(model, optimizer):
                pass
        if kind == "behind it":
            ours.steps(batches)
        if kind == "fails behind it":
            raise ValueError("no such file")

    return train


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "said"), [
    ("raises", "a bad example"), ("too early", "model(): ranks share a result only after the block"),
    ("another block", "training: a run has only one block"), ("behind it", "steps: the block of workbench.training"),
    ("fails behind it", "no such file"),
])  # fmt: skip
def test_errors_in_and_after_a_block_end_the_run_with_a_reason(kind: str, said: str) -> None:
    (session,) = live(of(wrong(kind)))
    ended([session])
    assert session.phase == "failed" and session.error is not None and said in session.error["text"]


@pytest.mark.ranks
def test_a_script_may_exit_inside_its_block() -> None:
    def train() -> None:
        model, batches = made()
        optimizer = stepped(model)
        with training(model, optimizer) as ours:
            for number, batch in enumerate(ours.steps(batches)):
                if number == 3:
                    raise SystemExit(0)
                off(model, batch).backward()
                optimizer.step()

    (session,) = live(of(train))
    ended([session], 20)
    assert session.phase == "done" and session.rank.step == 3


@pytest.mark.ranks
def test_an_aborted_rank_runs_no_code_after_the_block() -> None:
    seen: list[Any] = []
    sessions = live(of(block(seen, many=10**4), 2))
    assert until(lambda: sessions[0].rank.step > 3)
    for s in sessions:
        s.abort()
    ended(sessions)
    assert not seen and not any(t for t in sessions if t.training and t.training.lead.loop._thread.is_alive())


def test_without_ranks_invalid_arguments_are_refused(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    with pytest.raises(KnobError, match="model=3: must be the Module"), training(3):  # type: ignore[arg-type]
        pass
    with pytest.raises(KnobError, match="optimizer='adam': must be an Optimizer"), training(model, "adam"):  # type: ignore[arg-type]
        pass
    with pytest.raises(KnobError, match="optimizer=SGD: has no parameter of"), training(model, stepped(other)):
        pass
    with training(model, stepped(model)) as ours:
        with pytest.raises(TaskError, match="only after the block of"):
            ours.model()
    assert ours.changes == () and repr(ours) == "workbench.training(Linear): rank 0 of 1"
    with pytest.raises(TaskError, match="there is no folder"):
        ours.save_model(tmp_path / "no" / "model.pt")
    with pytest.raises(KnobError, match="path=None: must be a file to write"):
        ours.save_model(None)  # type: ignore[arg-type]
    saved = torch.load(ours.save_model(tmp_path / "model.pt"), weights_only=True)
    torch.testing.assert_close(saved, dict(model.state_dict()), rtol=0, atol=0)
    with pytest.raises(ValueError, match="mine"), training(model) as ours:
        raise ValueError("mine")
    with pytest.raises(TaskError, match="only after the block"):
        ours.model()
