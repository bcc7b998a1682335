"""Tests the tasks: they learn, are reproducible, give disjoint examples, and report errors in your own."""

from __future__ import annotations

import importlib.util
import time
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from workbench.settings import KnobError, members
from workbench.tasks import ByteGPT, Digits, Learner, Task, TaskBase, TaskError, at_rate, byte_gpt
from workbench.tasks._base import shuffled
from workbench.tasks.byte_gpt import GPT


def trained(task: TaskBase, steps: int, ranks: int = 4) -> tuple[float | dict[str, float], nn.Module, Learner]:
    """Returns the evaluation of `task` after `steps` steps on the joined batch of `ranks` ranks."""
    torch.manual_seed(0)
    learner = task.build()
    model = learner.model()
    optimizer = learner.optimizer(model.parameters(), task.lr)
    streams = [iter(learner.data(rank, ranks, task.batch, 0)) for rank in range(ranks)]
    for _ in range(steps):
        for stream in streams:
            (learner.loss(model, next(stream)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return learner.evaluate(model), model, learner


@pytest.mark.slow
def test_byte_gpt_starts_at_log_256_and_is_under_3_nats_after_30_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_gpt, "HELD_OUT", 48)  # the users' size; other tests use a third
    learner = ByteGPT().build()
    assert learner.evaluate(learner.model()) == pytest.approx(5.545, abs=0.01)
    assert trained(ByteGPT(), 30)[0] < 3.0


@pytest.mark.slow
def test_digits_reaches_90_percent_accuracy_after_60_steps() -> None:
    found, model, learner = trained(Digits(), 60)
    assert found["accuracy"] >= 0.9
    assert learner.evaluate(model) == found


def test_training_is_reproducible_bit_by_bit() -> None:
    first, second = (trained(ByteGPT(width=32, layers=1), 3)[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("task", [ByteGPT(), Digits()], ids=repr)
def test_evaluation_is_quick_and_the_model_large_enough_for_communication_to_matter(task: TaskBase) -> None:
    learner = task.build()
    model = learner.model()
    learner.evaluate(model)
    seconds = []
    for _ in range(3):
        began = time.thread_time()  # of this thread: other load does not count
        learner.evaluate(model)
        seconds.append(time.thread_time() - began)
    assert min(seconds) < 0.15
    assert 3e5 < sum(p.numel() for p in model.parameters()) < 1.5e6


def test_every_shipped_task_but_your_own_builds_from_its_defaults() -> None:
    shipped = {name: cls for name, cls in members(TaskBase).items() if cls.__module__.startswith("workbench.")}
    assert {"ByteGPT", "Digits", "Task"} <= set(shipped)
    for name, cls in shipped.items():
        if name != "Task" and not cls.has_own_loop:
            assert isinstance(cls.usual().build(), Learner)


def test_ranks_see_disjoint_examples_within_an_epoch_that_depend_on_the_seed() -> None:
    streams = [torch.cat(list(islice(shuffled(100, rank, 4, 5, seed=0), 5))) for rank in range(4)]
    assert sorted(torch.cat(streams).tolist()) == list(range(100))
    assert not torch.equal(streams[0], torch.cat(list(islice(shuffled(100, 0, 4, 5, seed=1), 5))))


def test_a_batch_larger_than_a_ranks_share_takes_from_the_next_epoch() -> None:
    batch = next(shuffled(10, 1, 4, 64, seed=0))
    assert batch.shape == (64,)
    assert len(set(batch.tolist())) == 10


def test_held_out_bytes_are_not_trained_on() -> None:
    from workbench.tasks._source import source

    held_out, text = (bytes(source(h).numpy()) for h in (True, False))
    assert held_out[5000:5200] not in text


def test_a_gpt_takes_texts_shorter_than_its_context_and_is_causal() -> None:
    model = GPT(layers=1, width=16, heads=2, context=8)
    nn.init.normal_(model.head.weight)
    text = torch.tensor([[1, 2, 3, 4]])
    other = torch.tensor([[1, 2, 9, 9]])
    assert torch.allclose(model(text)[:, :2], model(other)[:, :2])


# Your own.


def own(**other: Any) -> Task:
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 1),
        "data": lambda rank, ranks, seed: [(torch.ones(2, 4), torch.ones(2, 1))] * 3,
        "loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    }
    return Task(**parts | other)


def run_once(task: Task, lr: float = 0.0, batch: int = 0) -> torch.optim.Optimizer:
    """Runs one step with all functions."""
    learner = task.build()
    model = learner.model()
    optimizer = learner.optimizer(model.parameters(), lr)
    learner.loss(model, next(iter(learner.data(0, 1, batch, 0)))).backward()
    optimizer.step()
    if learner.evaluate:
        learner.evaluate(model)
    return optimizer


def test_your_own_task_uses_its_own_rate_until_one_is_given() -> None:
    assert run_once(own()).param_groups[0]["lr"] == 0.1
    assert run_once(own(), lr=0.5).param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("part", "function", "words"),
    [
        ("model", lambda: 3, "model.. returned a int: must return a torch.nn.Module"),
        ("model", lambda: nn.ReLU(), "no parameters that learn"),
        ("model", "<model>", "a record keeps only its name"),
        ("data", lambda rank, ranks, seed: None, "returned None: must return an iterable"),
        ("loss", lambda model, batch: 1.0, "returned a float: must return a scalar Tensor"),
        ("loss", lambda model, batch: model(batch[0]), r"shape \(2, 1\): must be a scalar; take its mean"),
        ("loss", lambda model, batch: model(batch[0]).mean().detach(), "does not depend on the model's parameters"),
        ("optimizer", lambda params: None, "returned None: must return a torch.optim.Optimizer"),
        ("evaluate", lambda model: {"accuracy": 1}, "returned accuracy: must also return 'loss'"),
        ("evaluate", lambda model: "good", "returned a str: must return a number"),
    ],
)
def test_an_invalid_function_is_named_with_a_remedy(part: str, function: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        run_once(own(**{part: function}))


def test_a_batch_size_is_refused_unless_data_takes_one() -> None:
    with pytest.raises(KnobError, match="makes its own batches"):
        run_once(own(), batch=16)
    assert own().refuses(0) is None
    sized = own(data=lambda rank, ranks, seed, batch: [(torch.ones(batch or 2, 4), torch.ones(batch or 2, 1))])
    assert sized.refuses(16) is None
    assert len(next(iter(sized.build().data(0, 1, 16, 0)))[0]) == 16


def test_the_bare_name_of_your_own_task_raises_knob_error() -> None:
    with pytest.raises(KnobError, match="needs your own functions"):
        Task.usual()


def test_a_new_rate_keeps_the_ratio_of_several_groups() -> None:
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": a.parameters(), "lr": 0.1}, {"params": b.parameters(), "lr": 0.01}])
    at_rate(optimizer, 1.0)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([1.0, 0.1])


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is not installed (test extra)")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_an_unmodified_gpt_2_from_transformers_learns() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    held_out = torch.arange(32)[None]
    task = own(
        model=lambda: GPT2LMHeadModel(shape),
        data=lambda rank, ranks, seed: [torch.arange(64).view(2, 32)],
        loss=lambda model, batch: model(input_ids=batch, labels=batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        evaluate=lambda model: float(model(input_ids=held_out, labels=held_out).loss.detach()),
    )
    learner = task.build()
    model = learner.model()
    before = learner.evaluate(model)
    optimizer = learner.optimizer(model.parameters(), 0.0)
    for _ in range(5):
        learner.loss(model, next(iter(learner.data(0, 1, 0, 0)))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert learner.evaluate(model) < before
