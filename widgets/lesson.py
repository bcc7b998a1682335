"""All that lessons are made of, for a notebook's first cell.

Predictions are written down before the run and held against the record; exercises check themselves; a worksheet at the
end says what was done. `lesson(X)` teaches one member of a family.
"""

from __future__ import annotations

from widgets.exercises import FACTOR as FACTOR
from widgets.exercises import Challenge as Challenge
from widgets.exercises import Exercise as Exercise
from widgets.exercises import Goal as Goal
from widgets.exercises import Hidden as Hidden
from widgets.exercises import Riddle as Riddle
from widgets.exercises import more_steps as more_steps
from widgets.exercises import where_time_goes as where_time_goes
from widgets.fastest import Fastest as Fastest
from widgets.fastest import what_it_takes as what_it_takes
from widgets.prediction import Prediction as Prediction
from widgets.taught import lesson as lesson
from widgets.worksheet import handed_in as handed_in
from widgets.worksheet import worksheet as worksheet
from workbench.doors.priced import priced as priced
