"""The parts of lessons: predictions, exercises that check themselves, figures, a worksheet and `lesson(X)`."""

from __future__ import annotations

from widgets.teach.exercises import SLOW_FACTOR as SLOW_FACTOR
from widgets.teach.exercises import Challenge as Challenge
from widgets.teach.exercises import Exercise as Exercise
from widgets.teach.exercises import Goal as Goal
from widgets.teach.exercises import Hidden as Hidden
from widgets.teach.exercises import Riddle as Riddle
from widgets.teach.exercises import more_steps as more_steps
from widgets.teach.exercises import where_time_goes as where_time_goes
from widgets.teach.fastest import Fastest as Fastest
from widgets.teach.fastest import what_it_takes as what_it_takes
from widgets.teach.figures import draw_collective as draw_collective
from widgets.teach.figures import draw_graph as draw_graph
from widgets.teach.figures import draw_lines as draw_lines
from widgets.teach.figures import draw_memory as draw_memory
from widgets.teach.figures import draw_mesh as draw_mesh
from widgets.teach.figures import draw_roofline as draw_roofline
from widgets.teach.figures import draw_schedule as draw_schedule
from widgets.teach.prediction import Prediction as Prediction
from widgets.teach.taught import lesson as lesson
from widgets.teach.worksheet import handed_in as handed_in
from widgets.teach.worksheet import worksheet as worksheet
from workbench.entrypoints.step_prediction import predict_step
from workbench.fabric.messages import list_rounds as list_rounds

priced = predict_step  # as the lessons call it

FACTOR = SLOW_FACTOR  # the old name
