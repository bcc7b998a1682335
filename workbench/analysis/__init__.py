"""Pure functions from the rows of a timeline to numbers and tables. Nothing here draws."""

from workbench.analysis.communication.bandwidth import ByCollective as ByCollective
from workbench.analysis.communication.bandwidth import by_collective as by_collective
from workbench.analysis.communication.entered import Entered as Entered
from workbench.analysis.communication.entered import entered as entered
from workbench.analysis.communication.lateness import Lateness as Lateness
from workbench.analysis.communication.lateness import Strips as Strips
from workbench.analysis.communication.lateness import lateness as lateness
from workbench.analysis.compare.break_even import BreakEven as BreakEven
from workbench.analysis.compare.break_even import break_even as break_even
from workbench.analysis.compare.clear import Estimate as Estimate
from workbench.analysis.compare.clear import Ratio as Ratio
from workbench.analysis.compare.clear import compared as compared
from workbench.analysis.compare.comparison import Compared as Compared
from workbench.analysis.compare.comparison import Curve as Curve
from workbench.analysis.compare.comparison import compare as compare
from workbench.analysis.compare.comparison import curve as curve
from workbench.analysis.compare.comparison import differing as differing
from workbench.analysis.compare.compression import Compression as Compression
from workbench.analysis.compare.compression import compression as compression
from workbench.analysis.compare.compression import ratios as ratios
from workbench.analysis.compare.effect import Card as Card
from workbench.analysis.compare.effect import Effect as Effect
from workbench.analysis.compare.effect import before_after as before_after
from workbench.analysis.compare.trend import Trend as Trend
from workbench.analysis.export.taken import taken as taken
from workbench.analysis.resources.gpus import RankGpu as RankGpu
from workbench.analysis.resources.gpus import gpus as gpus
from workbench.analysis.resources.memory import RankMemory as RankMemory
from workbench.analysis.resources.memory import memory as memory
from workbench.analysis.resources.memory import readable as readable
from workbench.analysis.resources.saving import Saving as Saving
from workbench.analysis.resources.saving import saving as saving
from workbench.analysis.resources.unheeded import unheeded as unheeded
from workbench.analysis.resources.upkeep import RankClock as RankClock
from workbench.analysis.resources.upkeep import RankCost as RankCost
from workbench.analysis.resources.upkeep import clocks as clocks
from workbench.analysis.resources.upkeep import recording as recording
from workbench.analysis.steps.collectives import Arrivals as Arrivals
from workbench.analysis.steps.collectives import arrivals as arrivals
from workbench.analysis.steps.examples import examples_per_second as examples_per_second
from workbench.analysis.steps.mesh import Arrangement as Arrangement
from workbench.analysis.steps.mesh import arrangement as arrangement
from workbench.analysis.steps.segment import segment as segment
from workbench.analysis.steps.settings import Stretch as Stretch
from workbench.analysis.steps.settings import stretches as stretches
from workbench.analysis.steps.steps import Breakdown as Breakdown
from workbench.analysis.steps.steps import Overlap as Overlap
from workbench.analysis.steps.steps import StepTimes as StepTimes
from workbench.analysis.steps.steps import breakdown as breakdown
from workbench.analysis.steps.steps import bytes_per_step as bytes_per_step
from workbench.analysis.steps.steps import overlap as overlap
from workbench.analysis.steps.steps import per_rank as per_rank
from workbench.analysis.steps.steps import sendings as sendings
from workbench.analysis.steps.steps import step_times as step_times
from workbench.analysis.steps.window import change_steps as change_steps
from workbench.analysis.steps.window import last_steps as last_steps
from workbench.analysis.steps.window import stands_for as stands_for
from workbench.analysis.stragglers.apart import since_met as since_met
from workbench.analysis.stragglers.bubble import Bubble as Bubble
from workbench.analysis.stragglers.bubble import bubble as bubble
from workbench.analysis.stragglers.bubble import spread_at as spread_at
from workbench.analysis.stragglers.causes import Cause as Cause
from workbench.analysis.stragglers.causes import causes as causes
from workbench.analysis.stragglers.path import Piece as Piece
from workbench.analysis.stragglers.path import critical_path as critical_path
from workbench.analysis.stragglers.straggler import Verdict as Verdict
from workbench.analysis.stragglers.straggler import straggler as straggler
from workbench.analysis.stragglers.straggler import why_silent as why_silent
from workbench.analysis.summary.overview import line as line
from workbench.analysis.summary.overview import summary as summary

__all__ = [
    "Arrangement", "Arrivals", "BreakEven", "Breakdown", "Bubble", "ByCollective", "Card", "Cause", "Compared",
    "Compression", "Curve", "Effect", "Entered", "Estimate", "Lateness", "Overlap", "Piece", "RankClock", "RankCost",
    "RankGpu", "RankMemory", "Ratio", "Saving", "StepTimes", "Stretch", "Strips", "Trend", "Verdict", "arrangement",
    "arrivals", "before_after", "break_even", "breakdown", "bubble", "by_collective", "bytes_per_step", "causes",
    "change_steps", "clocks", "compare", "compared", "compression", "critical_path", "curve", "differing", "entered",
    "examples_per_second", "gpus", "last_steps", "lateness", "line", "memory", "overlap", "per_rank", "ratios",
    "readable", "recording", "saving", "segment", "sendings", "since_met", "spread_at", "stands_for", "step_times",
    "straggler", "stretches", "summary", "taken", "unheeded", "why_silent",
]  # fmt: skip
