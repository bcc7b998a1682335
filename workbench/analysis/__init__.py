"""Pure functions from a timeline's rows to numbers and tables. Nothing here draws."""

import warnings
from typing import Any

from workbench.analysis.communication.bandwidth import ByCollective as ByCollective
from workbench.analysis.communication.bandwidth import by_collective as by_collective
from workbench.analysis.communication.lateness import Lateness as Lateness
from workbench.analysis.communication.lateness import LatenessStrips as LatenessStrips
from workbench.analysis.communication.lateness import measure_lateness as measure_lateness
from workbench.analysis.communication.open_collectives import OpenCollective as OpenCollective
from workbench.analysis.communication.open_collectives import list_open as list_open
from workbench.analysis.compare.break_even import BreakEven as BreakEven
from workbench.analysis.compare.break_even import break_even as break_even
from workbench.analysis.compare.clear_difference import Estimate as Estimate
from workbench.analysis.compare.clear_difference import Ratio as Ratio
from workbench.analysis.compare.clear_difference import compare_values as compare_values
from workbench.analysis.compare.comparison import Compared as Compared
from workbench.analysis.compare.comparison import LossCurve as LossCurve
from workbench.analysis.compare.comparison import compare_runs as compare_runs
from workbench.analysis.compare.comparison import list_differences as list_differences
from workbench.analysis.compare.comparison import loss_curve as loss_curve
from workbench.analysis.compare.compression import Compression as Compression
from workbench.analysis.compare.compression import compression_ratios as compression_ratios
from workbench.analysis.compare.compression import measure_compression as measure_compression
from workbench.analysis.compare.effect import Card as Card
from workbench.analysis.compare.effect import Effect as Effect
from workbench.analysis.compare.effect import before_after as before_after
from workbench.analysis.compare.trend import Trend as Trend
from workbench.analysis.export.taken import convert_traces as convert_traces
from workbench.analysis.resources.gpus import RankGpu as RankGpu
from workbench.analysis.resources.gpus import measure_gpus as measure_gpus
from workbench.analysis.resources.memory import RankMemory as RankMemory
from workbench.analysis.resources.memory import format_bytes as format_bytes
from workbench.analysis.resources.memory import measure_memory as measure_memory
from workbench.analysis.resources.saving import CheckpointProgress as CheckpointProgress
from workbench.analysis.resources.saving import checkpoint_progress as checkpoint_progress
from workbench.analysis.resources.unheeded import list_unheeded as list_unheeded
from workbench.analysis.resources.upkeep import RankClock as RankClock
from workbench.analysis.resources.upkeep import RankCost as RankCost
from workbench.analysis.resources.upkeep import list_clocks as list_clocks
from workbench.analysis.resources.upkeep import recording_costs as recording_costs
from workbench.analysis.steps.collectives import Arrivals as Arrivals
from workbench.analysis.steps.collectives import line_up as line_up
from workbench.analysis.steps.examples import examples_per_second as examples_per_second
from workbench.analysis.steps.mesh import Arrangement as Arrangement
from workbench.analysis.steps.mesh import find_arrangement as find_arrangement
from workbench.analysis.steps.segment import cut_segment as cut_segment
from workbench.analysis.steps.settings import Stretch as Stretch
from workbench.analysis.steps.settings import list_stretches as list_stretches
from workbench.analysis.steps.steps import Breakdown as Breakdown
from workbench.analysis.steps.steps import Overlap as Overlap
from workbench.analysis.steps.steps import StepTimes as StepTimes
from workbench.analysis.steps.steps import break_down as break_down
from workbench.analysis.steps.steps import bytes_per_step as bytes_per_step
from workbench.analysis.steps.steps import measure_overlap as measure_overlap
from workbench.analysis.steps.steps import per_rank as per_rank
from workbench.analysis.steps.steps import sent_bytes as sent_bytes
from workbench.analysis.steps.steps import step_times as step_times
from workbench.analysis.steps.window import change_steps as change_steps
from workbench.analysis.steps.window import last_steps as last_steps
from workbench.analysis.steps.window import stands_for as stands_for
from workbench.analysis.stragglers.apart import since_met as since_met
from workbench.analysis.stragglers.bubble import Bubble as Bubble
from workbench.analysis.stragglers.bubble import measure_bubble as measure_bubble
from workbench.analysis.stragglers.bubble import spread_at as spread_at
from workbench.analysis.stragglers.causes import Cause as Cause
from workbench.analysis.stragglers.causes import find_causes as find_causes
from workbench.analysis.stragglers.path import PathPiece as PathPiece
from workbench.analysis.stragglers.path import critical_path as critical_path
from workbench.analysis.stragglers.straggler import StragglerVerdict as StragglerVerdict
from workbench.analysis.stragglers.straggler import find_straggler as find_straggler
from workbench.analysis.stragglers.straggler import why_silent as why_silent
from workbench.analysis.summary.overview import summarise_run as summarise_run
from workbench.analysis.summary.overview import summary_line as summary_line

FORMER_NAMES = {  # of version 0.1. They work through 0.2. `compare` and `summary` are packages now
    "Curve": "LossCurve",
    "Entered": "OpenCollective",
    "Piece": "PathPiece",
    "Saving": "CheckpointProgress",
    "Strips": "LatenessStrips",
    "Verdict": "StragglerVerdict",
    "arrangement": "find_arrangement",
    "arrivals": "line_up",
    "breakdown": "break_down",
    "bubble": "measure_bubble",
    "causes": "find_causes",
    "clocks": "list_clocks",
    "compared": "compare_values",
    "compression": "measure_compression",
    "curve": "loss_curve",
    "differing": "list_differences",
    "entered": "list_open",
    "gpus": "measure_gpus",
    "lateness": "measure_lateness",
    "line": "summary_line",
    "memory": "measure_memory",
    "overlap": "measure_overlap",
    "ratios": "compression_ratios",
    "readable": "format_bytes",
    "recording": "recording_costs",
    "saving": "checkpoint_progress",
    "segment": "cut_segment",
    "sendings": "sent_bytes",
    "straggler": "find_straggler",
    "stretches": "list_stretches",
    "taken": "convert_traces",
    "unheeded": "list_unheeded",
}


def __getattr__(name: str) -> Any:
    """Returns what an old name meant, with a warning."""
    if name not in FORMER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    now = FORMER_NAMES[name]
    text = f"workbench.analysis.{name} is called {now} since version 0.2; the old name ends with 0.3"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return globals()[now]


__all__ = [
    "Arrangement",
    "Arrivals",
    "BreakEven",
    "Breakdown",
    "Bubble",
    "ByCollective",
    "Card",
    "Cause",
    "CheckpointProgress",
    "Compared",
    "Compression",
    "Effect",
    "Estimate",
    "Lateness",
    "LatenessStrips",
    "LossCurve",
    "OpenCollective",
    "Overlap",
    "PathPiece",
    "RankClock",
    "RankCost",
    "RankGpu",
    "RankMemory",
    "Ratio",
    "StepTimes",
    "StragglerVerdict",
    "Stretch",
    "Trend",
    "before_after",
    "break_down",
    "break_even",
    "by_collective",
    "bytes_per_step",
    "change_steps",
    "checkpoint_progress",
    "compare_runs",
    "compare_values",
    "compression_ratios",
    "convert_traces",
    "critical_path",
    "cut_segment",
    "examples_per_second",
    "find_arrangement",
    "find_causes",
    "find_straggler",
    "format_bytes",
    "last_steps",
    "line_up",
    "list_clocks",
    "list_differences",
    "list_open",
    "list_stretches",
    "list_unheeded",
    "loss_curve",
    "measure_bubble",
    "measure_compression",
    "measure_gpus",
    "measure_lateness",
    "measure_memory",
    "measure_overlap",
    "per_rank",
    "recording_costs",
    "sent_bytes",
    "since_met",
    "spread_at",
    "stands_for",
    "step_times",
    "summarise_run",
    "summary_line",
    "why_silent",
]  # fmt: skip
