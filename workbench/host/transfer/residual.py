"""Sends or drops a compressor's residual when another takes over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.compressors import Compressor, Dense, ErrorFeedback, inside
from workbench.compressors._leaving import _Leaving as Leaving
from workbench.compressors._sketch import SIGNS, WIDTH, sketch
from workbench.experiment import Experiment
from workbench.host.transfer.change_view import ChangeView
from workbench.host.transfer.momentum import move_momentum
from workbench.rank import Rank
from workbench.settings import Json

WARN_RATIO = 3.0  # of the gradient's length, for a warning


def start_compressor(run: ChangeView) -> None:
    """Sets the experiment's compressor."""
    run.exchange_by(run.experiment.compressor)


async def change_compressor(run: ChangeView, was: Experiment, wanted: Experiment, foreign: bool = False) -> None:
    """Changes the compressor, at once or after the residual of the old one is sent.

    A new compressor that keeps its residual in the same buffer goes on with it. Otherwise the old one decides. Its
    `whole` sends the residual in one step. Error feedback sends it in one step or in several, or drops it (`off`). Both
    happen at once if layers had either. If a third compressor without error feedback is set in between, the remaining
    steps go on.

    foreign: drops the residual, which does not fit the next exchanges
    """
    left, present = _find_feedback(was.compressor), run.rank.compressor
    if was.partition != wanted.partition:  # made for the old partition
        run.rank.memory.drop(Leaving.asked)
    steps = run.flushing if isinstance(present, Leaving) else 0
    start_compressor(run)
    if foreign:
        for buffer in sorted({c.residual for c in (*inside(was.compressor), *inside(present)) if c.residual}):
            _drop_residual(run, was, buffer, await _sketch_residual(run, buffer))
        return
    kept = {"", ErrorFeedback.residual, *(c.residual for c in inside(wanted.compressor))}
    others = [c for c in (*inside(present), *inside(was.compressor)) if c.residual not in kept]
    whole: Compressor = Dense()
    if others:
        whole = others[0].whole()
        run.exchange_by(whole, flushing=1)
    if has_error_feedback(wanted.compressor):
        return None if others else run.rank.memory.drop(Leaving.asked)
    if not steps and left is not None:
        owed = await _sketch_residual(run, ErrorFeedback.residual)
        if ErrorFeedback.residual not in run.rank.memory.buffers or (owed is not None and not owed.any()):
            return run.rank.memory.drop(ErrorFeedback.residual)
        off = getattr(left, "off", "flush")
        if off == "drop":
            return _drop_residual(run, was, ErrorFeedback.residual, owed)
        steps = left.over if off == "bleed" else 1
        if run.rank.mesh.inside:  # compared with the gradient of this rank's part of the model
            owed = await _sketch_residual(run, ErrorFeedback.residual, run.rank.replicas)
        if owed is not None:
            run.rank.memory.parts[Leaving.asked] = {"": owed}
    if steps:
        _plan_sending(run, steps, whole)


def _plan_sending(run: ChangeView, steps: int, whole: Compressor) -> None:
    run.exchange_by(Leaving(share=1.0 / steps, of=whole) if steps else run.experiment.compressor, steps)


async def count_flush_step(run: ChangeView) -> None:
    """Counts a step that has sent its share. The new compressor takes over after the last one."""
    if run.experiment.strategy.in_flight:
        await run.experiment.strategy.drain(run.rank.replicas, run.state)
    sent = run.rank.compressor
    if isinstance(sent, Leaving):
        _mark_sent(run)
        _plan_sending(run, run.flushing - 1, sent.of)
    else:
        start_compressor(run)
    if not run.flushing:
        for buffer in {c.residual for c in inside(sent)}:
            run.rank.memory.drop(buffer)
        await move_momentum(run)
        run.choose_lane()


def _mark_sent(run: ChangeView) -> None:
    """Records the norms of residual and gradient after the first of these steps. Warns of long steps."""
    found = run.rank.memory.parts.pop(Leaving.asked, {})
    owed = found.pop("", None)
    if not found:
        return
    share = owed / run.flushing
    residual, gradient = float(owed.norm()), float((torch.stack(list(found.values())).sum(0) - share).norm())
    detail: dict[str, Json] = {
        "sent": residual,
        "gradient": gradient,
        "steps": run.flushing,
        "unit": run.experiment.strategy.exchanges,
    }
    if float(share.norm()) > WARN_RATIO * gradient:
        part = f" (in rank {run.rank.number()}'s part of the model)" if run.rank.mesh.inside else ""
        times = f"{float(share.norm()) / gradient:.1f} times" if gradient else "infinitely many times"
        detail["text"] = (
            f"a step sent the residual of the compression, {times} as long as its gradient{part}; "
            f"ErrorFeedback(off='bleed') would spread it over {'more' if run.flushing > 1 else 'several'} steps, and "
            f"off='drop' would drop it"
        )
    run.mark("residual", detail)


async def _sketch_residual(run: ChangeView, buffer: str, among: Rank | None = None) -> Tensor | None:
    """Returns a sketch of the residuals' sum over all ranks, or over `among`; None with sizes only."""
    pieces = run.rank.memory.buffers.get(buffer, {})
    mine = torch.zeros(SIGNS * WIDTH, device=run.layout.order[0].param.device)
    if not mine.is_meta:
        mine = sum((sketch(piece, name) for name, piece in pieces.items()), mine)
    total = await (among or run.rank).all_reduce(mine, "sum", "residual")
    return None if total.is_meta else total


def _drop_residual(run: ChangeView, was: Experiment, buffer: str, owed: Tensor | None) -> None:
    pieces = list(run.rank.memory.buffers.get(buffer, {}).values())
    run.rank.memory.drop(buffer)
    run.rank.memory.drop(Leaving.asked)
    if owed is None or not pieces:  # sizes only, or a rank that exchanges nothing
        return
    norm = sum(float(p.float().square().sum()) for p in pieces) ** 0.5
    detail: dict[str, Json] = {"dropped": norm, "mean": float(owed.norm()), "unit": was.strategy.exchanges}
    if run.rank.id == 0:
        what = f"{was.strategy.exchanges} of length {detail['mean']:.3g}"
        detail["text"] = f"dropped the residual of the compression: {what}"
    run.mark("residual", detail)


def has_error_feedback(compressor: Compressor) -> bool:
    """Looks also at wrapped compressors."""
    return _find_feedback(compressor) is not None


def _find_feedback(compressor: Compressor) -> Any:
    return next((c for c in inside(compressor) if c.residual == ErrorFeedback.residual), None)
