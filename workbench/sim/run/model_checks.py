"""Checks from sizes whether a task's model suits an experiment, before training starts."""

from __future__ import annotations

from typing import Any

from torch import nn

from workbench.experiment import Experiment
from workbench.host.core.valueless import make_outline
from workbench.host.memory.batches import Chance
from workbench.host.passes.checkpointing import list_units
from workbench.host.reconfigure.validation import refuses_model
from workbench.settings import KnobError
from workbench.tasks import Learner

Outlined = tuple[Learner, nn.Module] | None  # None: the model cannot be built without values
_LAST: list[tuple[Any, Outlined]] = []  # the task of the last check


def is_outlined(task: Any) -> bool:
    """Whether a check of this task builds no model."""
    return bool(_LAST) and _LAST[0][0] == task


def refused_by_model(e: Experiment) -> str:
    """Returns why the task's model does not suit `e`, with a remedy; "" if it does.

    Builds the model once on the meta device, and restores the random state. Returns "" if that fails.
    """
    if (found := _outline_model(e)) is None:
        return ""
    learner, model = found
    try:
        reason = refuses_model(e, model, learner)
        list_units(model, learner, e.partition)
    except KnobError as error:
        return str(error)
    except Exception:  # from a task's functions; ranks report it
        return ""
    return reason or ""


def _outline_model(e: Experiment) -> Outlined:
    if not is_outlined(e.task):
        try:
            learner = e.task.build()
            with Chance(e.seed):
                made: Outlined = learner, make_outline(learner, built=False)
        except Exception:
            made = None
        _LAST[:] = [(e.task, made)]
    return _LAST[0][1]
