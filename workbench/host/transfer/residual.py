"""What compression has left unsent when another compressor takes over: sent at once, over several steps, or dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.compressors import ErrorFeedback, inside
from workbench.compressors._leaving import _Leaving as Leaving
from workbench.compressors._sketch import SIGNS, WIDTH, sketch
from workbench.experiment import Experiment
from workbench.host.core.changing import Changing
from workbench.host.transfer.momentum import move_momentum
from workbench.rank import Rank

LONG = 3.0  # times a gradient's length: a residual that is sent at once and is longer makes a step worth a warning


def begin(run: Changing) -> None:
    """The compressor that a run begins with."""
    run.rank.compressor, run.flushing = run.experiment.compressor, 0


async def change(run: Changing, was: Experiment, wanted: Experiment, foreign: bool = False) -> None:
    """Another compressor takes over, at once or when what the one before owes is settled.

    One that keeps what is owed in the same place goes on with it. Else the one that is left says what becomes of it:
    its `whole` sends it in one step, and error feedback may take several, or none (`off`). One that is asked for in
    the meantime changes nothing about that. What is owed and `foreign` to what is exchanged from now on is dropped.
    """
    left, present = _feeding(was.compressor), run.rank.compressor
    if was.partition != wanted.partition:  # it was of what lay here
        run.rank.memory.drop(Leaving.asked)
    steps = run.flushing if isinstance(present, Leaving) else 0
    begin(run)
    if foreign:
        for buffer in sorted({c.residual for c in (*inside(was.compressor), *inside(present)) if c.residual}):
            _dropped(run, was, buffer, await _owed(run, buffer))
        return
    kept = {"", ErrorFeedback.residual, *(c.residual for c in inside(wanted.compressor))}
    others = [c for c in (*inside(present), *inside(was.compressor)) if c.residual not in kept]
    if others:
        run.rank.compressor, run.flushing = others[0].whole(), 1
        return
    if remembers(wanted.compressor):
        return run.rank.memory.drop(Leaving.asked)
    if not steps and left is not None:
        owed = await _owed(run, ErrorFeedback.residual)
        if ErrorFeedback.residual not in run.rank.memory.buffers or (owed is not None and not owed.any()):
            return run.rank.memory.drop(ErrorFeedback.residual)
        off = getattr(left, "off", "flush")
        if off == "drop":
            return _dropped(run, was, ErrorFeedback.residual, owed)
        steps = left.over if off == "bleed" else 1
        if run.rank.mesh.inside:  # what is sent is seen beside a gradient of the part that lies here
            owed = await _owed(run, ErrorFeedback.residual, run.rank.replicas)
        if owed is not None:
            run.rank.memory.parts[Leaving.asked] = {"": owed}
    _send_on(run, steps)


def _send_on(run: Changing, steps: int) -> None:
    """So many uncompressed steps are to come; then the compressor that was asked for takes over."""
    run.flushing = steps
    run.rank.compressor = Leaving(share=1.0 / steps) if steps else run.experiment.compressor


async def flushed(run: Changing) -> None:
    """A step has sent its share of what was owed; after the last one whom it was asked for takes over."""
    sent = run.rank.compressor
    if isinstance(sent, Leaving):
        _tell_sent(run)
        _send_on(run, run.flushing - 1)
    else:
        begin(run)
    if not run.flushing:
        run.rank.memory.drop(sent.residual)
        await move_momentum(run)
        run.choose_lane()


def _tell_sent(run: Changing) -> None:
    """After the first of these steps: how much is sent, in how many, and whether that makes long ones."""
    found = run.rank.memory.parts.pop(Leaving.asked, {})
    owed = found.pop("", None)
    if not found:
        return
    share = owed / run.flushing
    residual, gradient = float(owed.norm()), float((torch.stack(list(found.values())).sum(0) - share).norm())
    detail: dict[str, Any] = {"sent": residual, "gradient": gradient, "steps": run.flushing,
                              "unit": run.experiment.strategy.exchanges}
    if float(share.norm()) > LONG * gradient:
        part = f" (of what rank {run.rank.number()} holds of the model)" if run.rank.mesh.inside else ""
        times = f"{float(share.norm()) / gradient:.1f} times" if gradient else "infinitely many times"
        detail["text"] = (
            f"a step sent what compression had left unsent, {times} as long as its own gradient{part}; "
            f"ErrorFeedback(off='bleed') would spread that over {'more' if run.flushing > 1 else 'several'} steps, "
            f"off='drop' would leave it out"
        )
    run.mark("residual", detail)


async def _owed(run: Changing, buffer: str, among: Rank | None = None) -> Tensor | None:
    """A sketch of what all ranks together owe, from one small all-reduce; None where there are sizes only.

    among: of what these owe together, in place of all
    """
    pieces = run.rank.memory.buffers.get(buffer, {})
    mine = torch.zeros(SIGNS * WIDTH, device=run.layout.order[0].param.device)
    if not mine.is_meta:
        mine = sum((sketch(piece, name) for name, piece in pieces.items()), mine)
    total = await (among or run.rank).all_reduce(mine, "sum", "residual")
    return None if total.is_meta else total


def _dropped(run: Changing, was: Experiment, buffer: str, owed: Tensor | None) -> None:
    """What is owed is forgotten, and the record says how much: this rank's own, and on rank 0 the mean's, in words."""
    pieces = list(run.rank.memory.buffers.get(buffer, {}).values())
    run.rank.memory.drop(buffer)
    run.rank.memory.drop(Leaving.asked)
    if owed is None or not pieces:  # sizes only, or a rank that exchanges nothing: there is no norm to tell
        return
    norm = sum(float(p.float().square().sum()) for p in pieces) ** 0.5
    detail: dict[str, Any] = {"dropped": norm, "mean": float(owed.norm()), "unit": was.strategy.exchanges}
    if run.rank.id == 0:
        what = f"{was.strategy.exchanges} of length {detail['mean']:.3g}"
        detail["text"] = f"dropped what compression had left unsent: {what}"
    run.mark("residual", detail)


def remembers(compressor: Any) -> bool:
    """Does `compressor`, or what it wraps, feed a residual back?"""
    return _feeding(compressor) is not None


def _feeding(compressor: Any) -> Any:
    """What in `compressor` feeds a residual back, the outermost if there are several; or None."""
    return next((c for c in inside(compressor) if c.residual == ErrorFeedback.residual), None)
