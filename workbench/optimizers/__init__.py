"""Optimizers: one per file, each a frozen dataclass of knobs."""

from typing import Any

from workbench.optimizers._base import Optimizer as Optimizer
from workbench.optimizers._slots import carry as carry
from workbench.optimizers._slots import elementwise as elementwise
from workbench.settings import member, shipped


def __getattr__(name: str) -> Any:
    return member(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *shipped(__name__)})
