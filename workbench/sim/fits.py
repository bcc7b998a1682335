"""Whether ranks have the memory that an experiment needs, or would need after a change: a few steps of sizes only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench import analysis
from workbench.experiment import Experiment
from workbench.host.budget import MB, OutOfMemory
from workbench.policies import ByHand
from workbench.settings import Change, KnobError, each, knobs, resolve
from workbench.sim.simulate import simulate

FILLS = ("strategy", "partition", "compressor", "optimizer", "batch", "bucket_mb", "memory_mb", "clip")  # memory
STEPS = 3  # before a change, and after it: what is remembered is there from the second on
MOST = 64  # steps of a strategy's own round, or beginning, that are waited for


def longest(strategy: Any) -> int:
    """The most steps that a knob of the strategy names: of a round, or until it does otherwise."""
    return max((int(k.default) for k in knobs(strategy) if k.unit == "steps"), default=0)


def require_memory(e: Experiment, path: str | Mapping[str, Any] = "", value: Any = None) -> None:
    """Raises KnobError, which says what is needed for what, if a rank of `e` needs more than its `memory_mb`.

    path, value: a change, after which it must fit, and on the way there

    Says nothing where nobody can tell: of what cannot be simulated the ranks find out for themselves.
    """
    wanted = e.set(path, value) if path else e.checked()
    changed = [resolve(wanted, one)[0].partition(".")[0] for one in each(path, value)] if path else FILLS
    if not (wanted.memory_mb and set(changed) & set(FILLS)):
        return
    before = STEPS + min(MOST, longest(e.strategy)) if path else 0
    steps, healthy = before + STEPS + min(MOST, longest(wanted.strategy)), replace(e.fabric, faults=())
    last = steps if e.eval_every else 0  # an evaluation once all is there
    short = replace(e, steps=steps, eval_every=last, pace=e.pace or 1.0, fabric=healthy, policy=ByHand())
    try:
        run = simulate(short, changes=[Change(before, path, value)] if path else [], real=False)
    except OutOfMemory as error:
        raise KnobError(error.beside(e) if path else str(error)) from None
    except Exception:
        return
    require_room(wanted, analysis.memory(run.timeline, before))


def require_room(e: Experiment, found: list[analysis.RankMemory]) -> None:
    """On real ranks as many buckets as may be `outstanding` can wait for their sum, which takes no time here."""
    buckets = int(getattr(e.strategy, "outstanding", 0))
    waiting = buckets * int(e.bucket_mb * MB)
    worst = max(found, key=lambda one: one.peak)
    if worst.peak + waiting > e.memory_mb * MB:
        raise KnobError(
            f"memory_mb={e.memory_mb:g}: rank {worst.rank} needs {worst.peak / MB:.3g} MB, and {waiting / MB:.3g} more "
            f"where exchanges are late (outstanding={buckets} buckets of {e.bucket_mb:g} MB); take fewer or smaller "
            f"buckets, or memory_mb={1.02 * (worst.peak + waiting) / MB:.3g}"
        )
