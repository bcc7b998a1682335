"""Checks with sizes only whether an experiment fits into memory, now or after a change."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench import analysis
from workbench.experiment import Experiment
from workbench.host.memory.budget import MB, WHEN_BETWEEN, OutOfMemory, format_mb
from workbench.policies import ByHand
from workbench.rank import StrategyError
from workbench.settings import Change, KnobError, each, knobs, resolve
from workbench.settings.describe_error import said
from workbench.sim.run.simulate import simulate
from workbench.tasks import TaskError

MEMORY_KNOBS = (
    "strategy",
    "partition",
    "compressor",
    "optimizer",
    "batch",
    "bucket_mb",
    "memory_mb",
    "clip",
)  # use memory
SIMULATED_STEPS = 3  # before and after a change: the optimizer has state from the second step on
MAX_ROUND_STEPS = 64  # of a strategy's round or warm-up, at most


def longest_round(strategy: Any) -> int:
    """Returns the steps of a strategy's longest round or warm-up; 0 without such knobs."""
    return max((int(k.default) for k in knobs(strategy) if k.unit == "steps"), default=0)


def require_memory(e: Experiment, path: str | Mapping[str, Any] = "", value: Any = None) -> None:
    """Raises KnobError with the memory needed if a rank of `e` needs more than `memory_mb`.

    path, value: a change that must fit during the switch and after it

    Raises nothing if the experiment cannot be simulated. Warns if the simulation fails otherwise.
    """
    wanted = e.set(path, value) if path else e.checked()
    changed = [resolve(wanted, one)[0].partition(".")[0] for one in each(path, value)] if path else MEMORY_KNOBS
    if not (wanted.memory_mb and set(changed) & set(MEMORY_KNOBS)):
        return
    change = dict(each(path, value)) if path else {}
    try:
        found = _foresee_memory(e, change)
    except OutOfMemory as error:
        raise KnobError(_describe_refusal(e, change, error)) from None
    except (KnobError, StrategyError, TaskError):  # ranks report these errors
        return
    except Exception as error:
        warnings.warn(
            f"memory_mb={wanted.memory_mb:g} was not checked before the start, because the simulation of the settings "
            f"failed: {said(error)}; ranks still count their memory as they train",
            stacklevel=4,
        )
        return
    require_room(wanted, found)


def _foresee_memory(e: Experiment, change: dict[str, Any]) -> list[analysis.RankMemory]:
    """Returns each rank's memory from the change on, or from the start. Raises OutOfMemory."""
    wanted = e.set(change) if change else e
    before = SIMULATED_STEPS + min(MAX_ROUND_STEPS, longest_round(e.strategy)) if change else 0
    steps, healthy = (
        before + SIMULATED_STEPS + min(MAX_ROUND_STEPS, longest_round(wanted.strategy)),
        replace(e.fabric, faults=()),
    )
    last = steps if e.eval_every else 0  # one evaluation, when all memory is in use
    short = replace(e, steps=steps, eval_every=last, pace=e.pace or 1.0, fabric=healthy, policy=ByHand())
    run = simulate(short, changes=[Change(before, change)] if change else [], real=False)
    return analysis.measure_memory(run.timeline, before)


def _describe_refusal(e: Experiment, change: dict[str, Any], error: OutOfMemory) -> str:
    """If the switch does not fit, suggests only simulated settings."""
    lack = error.lack
    if lack is None or not change:
        return str(error)
    if lack.when != WHEN_BETWEEN:
        return lack.make_message(e)
    free, rest = replace(e, memory_mb=0.0), {path: value for path, value in change.items() if path != "memory_mb"}
    try:
        after = max(one.peak for one in _foresee_memory(free, rest)) + _count_late_bytes(lack.wanted)
    except Exception:  # the memory after the switch is unknown
        return lack.make_message(e)
    lack = replace(lack, enough=f"memory_mb={format_mb(1.05 * max(lack.needed, after))}")
    return lack.make_message(e, lambda path, value: _does_fit(e, change | {path: value}))


def _does_fit(e: Experiment, change: dict[str, Any]) -> bool:
    try:
        require_room(e.set(change), _foresee_memory(e, change))
    except Exception:  # refused, or unknown
        return False
    return True


def _count_late_bytes(e: Experiment) -> int:
    """Returns the bytes of buckets that may wait for sums on real ranks."""
    return _count_outstanding(e) * int(e.bucket_mb * MB)


def _count_outstanding(e: Experiment) -> int:
    return int(getattr(e.strategy, "outstanding", 0))


def require_room(e: Experiment, found: list[analysis.RankMemory]) -> None:
    """Raises KnobError if the peak and `outstanding` buckets of real ranks exceed `memory_mb`."""
    waiting, worst = _count_late_bytes(e), max(found, key=lambda one: one.peak)
    if worst.peak + waiting > e.memory_mb * MB:
        raise KnobError(
            f"memory_mb={e.memory_mb:g}: rank {worst.rank} needs {format_mb(worst.peak)} MB, and {format_mb(waiting)} "
            f"more for late exchanges (outstanding={_count_outstanding(e)} buckets of {e.bucket_mb:g} MB); take "
            f"fewer or smaller buckets, or memory_mb={format_mb(1.02 * (worst.peak + waiting))}"
        )
