"""How gradients become steps: one optimizer per file, each a frozen dataclass of knobs."""

from workbench.optimizers._base import Optimizer as Optimizer
from workbench.optimizers._base import built as built
from workbench.optimizers._slots import carry as carry
from workbench.optimizers.adam import Adam as Adam
from workbench.optimizers.adamw import AdamW as AdamW
from workbench.optimizers.lamb import LAMB as LAMB
from workbench.optimizers.lars import LARS as LARS
from workbench.optimizers.sgd import SGD as SGD
from workbench.optimizers.task_own import TaskOwn as TaskOwn

__all__ = ["LAMB", "LARS", "SGD", "Adam", "AdamW", "Optimizer", "TaskOwn", "built", "carry"]
