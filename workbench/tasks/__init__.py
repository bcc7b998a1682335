"""Model and data pairs that learn within a minute on two cores; `Task(...)` brings your own."""

from typing import Any

from workbench.settings import member, shipped
from workbench.tasks._base import Learner as Learner
from workbench.tasks._base import TaskBase as TaskBase
from workbench.tasks._base import TaskError as TaskError
from workbench.tasks._base import at_rate as at_rate
from workbench.tasks._base import rate as rate


def __getattr__(name: str) -> Any:
    return member(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *shipped(__name__)})
