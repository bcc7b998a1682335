"""Held-out loss of the consolidated model, outside step time."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch

from workbench.engine.canonical import mean_model
from workbench.engine.collectives import Wire
from workbench.host.layout import Layout

if TYPE_CHECKING:
    from workbench.engine.setup import Parts


def evaluate(run: Parts, together: bool) -> None:
    """Evaluates into the record: the mean model, for which ranks meet, or what this rank knows of it."""
    began, step = run.clock.now(), run.rank.step
    run.host.at("evaluate")
    if together:
        numbers, drift = held_out(run.learner.evaluate, run.model, run.layout, run.control, run.commons.held)
    else:
        numbers, drift = known_held_out(run)
    now = run.clock.now()
    run.evaluated = max(run.evaluated, now - began)
    run.record.span(step, "eval", "evaluate", began, began, now, 0)
    run.record.sample(step, "drift", now, drift)
    for name, value in numbers.items():
        run.record.sample(step, "held_out" if name == "loss" else f"held_out:{name}", now, value)


def held_out(
    evaluate: Any, model: torch.nn.Module, layout: Layout, wire: Wire | None, common: bool = False
) -> tuple[dict[str, float], float]:
    """(numbers of the mean model, this rank's drift from it). Rank 0 evaluates; the others wait for it."""
    numbers: dict[str, float] = {}
    with torch.no_grad(), mean_model(None if common else wire, layout, model) as drift:
        if evaluate is not None and (wire is None or wire.rank == 0):
            numbers = _numbers(evaluate, model)
        if wire is not None:
            done = torch.tensor([numbers.get("loss", math.nan)], dtype=torch.float64)
            wire.wait(wire.broadcast(done, 0))
    return numbers, drift


def known_held_out(run: Parts) -> tuple[dict[str, float], float]:
    """As `held_out` where ranks keep no common step: rank 0 evaluates what its strategy knows, and nobody waits."""
    known = run.host.drive(run.experiment.strategy.known(run.rank, run.state)) or run.layout.params()
    with torch.no_grad():
        with run.host.alone:
            known = [bucket.like(bucket.data.clone()) for bucket in known]
            own = known if run.commons.held else run.layout.params()
        squares = sum(float((k.data - o.data).float().square().sum()) for k, o in zip(known, own, strict=True))
        drift = (squares / max(1, run.layout.numel)) ** 0.5
        if run.learner.evaluate is None or run.rank.id:
            return {}, drift
        twin = run.twin = run.twin or copy.deepcopy(run.model)
        params = dict(twin.named_parameters())
        for bucket in known:
            for part in bucket.parts:
                params[part.name].copy_(bucket.data[part.start : part.stop].view(part.shape))
        for copied, live in zip(twin.buffers(), run.model.buffers(), strict=True):
            copied.copy_(live)
        return _numbers(run.learner.evaluate, twin), drift


def _numbers(evaluate: Any, model: torch.nn.Module) -> dict[str, float]:
    was = model.training
    model.eval()
    try:
        answer = evaluate(model)
    finally:
        model.train(was)
    numbers = dict(answer) if isinstance(answer, dict) else {"loss": answer}
    return {k: float(v) for k, v in numbers.items()}
