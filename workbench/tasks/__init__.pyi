# Written by `make tables`, for editors and type checkers.
from workbench.tasks._base import Learner as Learner
from workbench.tasks._base import TaskBase as TaskBase
from workbench.tasks._base import TaskError as TaskError
from workbench.tasks._base import at_rate as at_rate
from workbench.tasks._base import rate as rate
from workbench.tasks._split import Colwise as Colwise
from workbench.tasks._split import Plan as Plan
from workbench.tasks._split import Rowwise as Rowwise
from workbench.tasks._split import Scatter as Scatter
from workbench.tasks._split import Sequence as Sequence
from workbench.tasks._split import Way as Way
from workbench.tasks._split import way_of as way_of
from workbench.tasks.byte_gpt import ByteGPT as ByteGPT
from workbench.tasks.click_through import ClickThrough as ClickThrough
from workbench.tasks.criteo_tsv import CriteoTSV as CriteoTSV
from workbench.tasks.digits import Digits as Digits
from workbench.tasks.own import Task as Task
