"""The dashboard of a Lab or a Run, in a notebook.

Imports labs, runs, analyses and knobs. Never imports the engine, the cluster, a strategy or torch.
"""

from widgets.charts.board import Board as Board
from widgets.page.dashboard import Dashboard as Dashboard

__all__ = ["Board", "Dashboard"]
