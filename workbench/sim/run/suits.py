"""Whether a task's model can be trained as an experiment says: asked of its sizes alone, before anybody trains."""

from __future__ import annotations

from typing import Any

from torch import nn

from workbench.experiment import Experiment
from workbench.host.core.meta import outline
from workbench.host.memory.batches import Chance
from workbench.host.passes.checkpointing import units_of
from workbench.host.reconfigure.refusing import refuses_model
from workbench.settings import KnobError
from workbench.tasks import Learner

Outlined = tuple[Learner, nn.Module] | None  # None: the model does not let itself be built without values
_LAST: list[tuple[Any, Outlined]] = []  # the task that was asked of last


def outlined(task: Any) -> bool:
    """Does what is asked of this task build nothing?"""
    return bool(_LAST) and _LAST[0][0] == task


def refused_by_model(e: Experiment) -> str:
    """Why the model of `e`'s task cannot be trained so, in a sentence that says what would do, or "".

    The model is built once, on the meta device, and random numbers go on as if it had not been. Of one that cannot be
    built there nobody can tell.
    """
    if (found := _outline(e)) is None:
        return ""
    learner, model = found
    try:
        reason = refuses_model(e, model, learner)
        units_of(model, learner, e.partition)
    except KnobError as error:
        return str(error)
    except Exception:  # of a task's own functions, which ranks will say in full
        return ""
    return reason or ""


def _outline(e: Experiment) -> Outlined:
    if not outlined(e.task):
        try:
            learner = e.task.build()
            with Chance(e.seed):
                made: Outlined = learner, outline(learner, built=False)
        except Exception:
            made = None
        _LAST[:] = [(e.task, made)]
    return _LAST[0][1]
