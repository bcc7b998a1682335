"""Tries one batch before a model is spread: the parts must learn what the whole model does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.host.passes.stage_module import StageModule, cut_batch
from workbench.host.placement.replica_spread import ReplicaSpread
from workbench.host.placement.stage_cuts import StageCuts, list_parts, replace_forward, run_parts
from workbench.host.reconfigure.trial_slices import check_slices
from workbench.settings import KnobError
from workbench.settings.describe_error import text_of
from workbench.tasks import Learner

Again = Callable[[Callable[[], Tensor]], Tensor]

PIPELINE = "partition=Pipeline"
# The micro-batches' mean loss may differ by this share, because their numbers of targets differ.
MEAN_TOLERANCE = 0.2


def check_spread(model: nn.Module, learner: Learner, spread: ReplicaSpread, batch: object, count: int) -> None:
    """Raises KnobError if `model`, spread this way, would not learn the same.

    model: whole; the trial may change it
    count: the number of micro-batches
    """
    if spread.stages:
        _check_stages(model, learner, spread.stages, batch, count)
    if spread.split and not next(model.parameters()).is_meta:
        check_slices(model, learner, spread.split, batch)


def check_parts(model: nn.Module, learner: Learner, batch: object, said: str) -> None:
    """Raises KnobError if `model`, passed part by part, would not learn the same.

    A model without declared parts is passed whole. `said` names the setting.
    """
    try:
        parts = list_parts(model, learner)
    except KnobError:
        return
    try:
        with _preserve_model(model) as again:
            whole, pieces, calls = _compute_losses(again, model, parts, learner, batch)
    except Exception as error:
        raise KnobError(f"{said}: in a trial on one batch, the model fails part by part: {text_of(error)}") from error
    _require_once(calls, said, "the trial calls its parts once")
    _compare_losses(float(whole), float(pieces), said)


def _check_stages(model: nn.Module, learner: Learner, stages: StageCuts, batch: object, count: int) -> None:
    try:
        parts = list_parts(model, learner)
        with _preserve_model(model) as again:
            whole, pieces, calls = _compute_losses(again, model, parts, learner, batch)
            with replace_forward(model, partial(run_parts, parts)):
                micros = cut_batch(batch, count)
                micros = micros[:1] if whole.is_meta else micros  # without values all are alike
                means = [again(partial(learner.loss, model, micro)) for micro in micros]
            with torch.enable_grad():
                _run_pieces(model, learner, stages, micros[0])
    except KnobError:
        raise
    except Exception as error:
        raise KnobError(_explain_failure(model, error)) from error
    _require_once(calls, PIPELINE, "a pipeline calls each part once per micro-batch")
    if not whole.is_meta:
        _compare_losses(float(whole), float(pieces), PIPELINE)
        _compare_means(float(whole), [float(x) for x in means])


def _compute_losses(again: Again, model: nn.Module, parts: list[nn.Module], learner: Learner,
              batch: object) -> tuple[Tensor, Tensor, int]:  # fmt: skip
    calls: list[int] = []

    def composed(*inputs: object, **named: object) -> Any:
        calls.append(1)
        return run_parts(parts, *inputs, **named)

    whole = again(partial(learner.loss, model, batch))
    with replace_forward(model, composed):
        return whole, again(partial(learner.loss, model, batch)), len(calls)


def _require_once(calls: int, said: str, why: str) -> None:
    if calls != 1:
        raise KnobError(f"{said}: the loss calls the model {calls} times, and {why}; call model once in loss(model, "
        f"batch)")  # fmt: skip


def _compare_losses(whole: float, pieces: float, said: str) -> None:
    if math.isfinite(whole) and whole != pieces:  # else nothing can be compared
        raise KnobError(
            f"{said}: the parts, one after the other, give the loss {pieces:.6g}, and the model gives {whole:.6g}; "
            f"return parts from `parts` that together compute the model"
        )


def _compare_means(whole: float, means: list[float]) -> None:
    mean = sum(means) / len(means)
    if math.isfinite(whole) and not abs(mean - whole) <= MEAN_TOLERANCE * abs(whole) + 1e-6:
        raise KnobError(
            f"partition=Pipeline: the loss of a batch is {whole:.6g}, but the mean over its micro-batches is "
            f"{mean:.6g}. A pipeline sums means: return a mean over examples from loss(model, batch) "
            f"(reduction='mean'), or take micros=1"
        )


def _run_pieces(model: nn.Module, learner: Learner, stages: StageCuts, micro: object) -> None:
    count = len(stages)
    ways = [StageModule(model, stages.pieces_of_stage(stage), stage, count) for stage in range(count)]
    x: Tensor | None = None
    for number in range(len(stages.pieces)):
        x = ways[number % count].run_forward(learner.loss, micro, x, 0, number // count).clone()
    grad: Any = 1.0
    for number in reversed(range(len(stages.pieces))):
        grad = ways[number % count].run_backward(grad, 0, number // count)


@contextmanager
def _preserve_model(model: nn.Module) -> Iterator[Again]:
    """Yields a function with fixed random numbers."""
    was, grads, state = model.training, [p.grad for p in model.parameters()], torch.get_rng_state()

    def again(compute: Callable[[], Tensor]) -> Tensor:
        torch.set_rng_state(state)
        with torch.no_grad():
            return compute()

    model.eval()  # without random numbers and buffer changes
    try:
        with torch.random.fork_rng():
            yield again
    finally:
        model.train(was)
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad


def _explain_failure(model: nn.Module, error: Exception) -> str:
    if next(model.parameters()).is_meta:
        return (
            f"partition=Pipeline: the outputs of stages are not known, because the model does not run on the meta "
            f"device ({text_of(error)}); take a task whose model does, or real=True"
        )
    return f"partition=Pipeline: in a trial on one batch, a stage fails: {text_of(error)}"
