"""Policies change knobs during a run. Each file has one frozen dataclass of knobs."""

from typing import Any

from workbench.policies._base import Decision as Decision
from workbench.policies._base import Policy as Policy
from workbench.policies._base import PolicyBase as PolicyBase
from workbench.policies._base import Seen as Seen
from workbench.settings import member, shipped


def __getattr__(name: str) -> Any:
    return member(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *shipped(__name__)})
