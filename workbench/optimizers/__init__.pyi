# Written by `make tables`, for editors and type checkers.
from workbench.optimizers._base import Optimizer as Optimizer
from workbench.optimizers._slots import carry as carry
from workbench.optimizers._slots import elementwise as elementwise
from workbench.optimizers.adam import Adam as Adam
from workbench.optimizers.adamw import AdamW as AdamW
from workbench.optimizers.lamb import LAMB as LAMB
from workbench.optimizers.lars import LARS as LARS
from workbench.optimizers.sgd import SGD as SGD
from workbench.optimizers.task_own import TaskOwn as TaskOwn
