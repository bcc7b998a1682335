"""Model and data pairs that learn within a minute on two cores; `Task(...)` brings your own."""

from typing import Any

from workbench.settings import member, shipped
from workbench.tasks._adopt import adopt as adopt
from workbench.tasks._base import Learner as Learner
from workbench.tasks._base import TaskBase as TaskBase
from workbench.tasks._base import TaskError as TaskError
from workbench.tasks._base import at_rate as at_rate
from workbench.tasks._base import rate as rate
from workbench.tasks._base import same_groups as same_groups
from workbench.tasks._base import shuffled as shuffled
from workbench.tasks._base import stands_for as stands_for
from workbench.tasks._block import Block as Block
from workbench.tasks._block import training as training
from workbench.tasks._decoders import decoder_parts as decoder_parts
from workbench.tasks._loops import steps as steps
from workbench.tasks._split import Colwise as Colwise
from workbench.tasks._split import Partial as Partial
from workbench.tasks._split import Plan as Plan
from workbench.tasks._split import Rowwise as Rowwise
from workbench.tasks._split import Scatter as Scatter
from workbench.tasks._split import Sequence as Sequence
from workbench.tasks._split import Way as Way
from workbench.tasks._split import way_of as way_of


def __getattr__(name: str) -> Any:
    if name in ("TiledLinear", "tiled"):  # layers: a recorded run opens without torch
        from workbench.tasks import _tiled

        return getattr(_tiled, name)
    return member(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *shipped(__name__)})
