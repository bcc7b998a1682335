"""Questions about a timeline, each a pure function from rows to a number or a table. Nothing here draws."""

from workbench.analysis.apart import since_met as since_met
from workbench.analysis.bandwidth import ByCollective as ByCollective
from workbench.analysis.bandwidth import by_collective as by_collective
from workbench.analysis.break_even import BreakEven as BreakEven
from workbench.analysis.break_even import break_even as break_even
from workbench.analysis.bubble import Bubble as Bubble
from workbench.analysis.bubble import bubble as bubble
from workbench.analysis.bubble import spread_at as spread_at
from workbench.analysis.causes import Cause as Cause
from workbench.analysis.causes import causes as causes
from workbench.analysis.clear import Estimate as Estimate
from workbench.analysis.clear import Ratio as Ratio
from workbench.analysis.clear import compared as compared
from workbench.analysis.collectives import Arrivals as Arrivals
from workbench.analysis.collectives import arrivals as arrivals
from workbench.analysis.comparison import Compared as Compared
from workbench.analysis.comparison import Curve as Curve
from workbench.analysis.comparison import compare as compare
from workbench.analysis.comparison import curve as curve
from workbench.analysis.comparison import differing as differing
from workbench.analysis.compression import Compression as Compression
from workbench.analysis.compression import compression as compression
from workbench.analysis.compression import ratios as ratios
from workbench.analysis.effect import Card as Card
from workbench.analysis.effect import Effect as Effect
from workbench.analysis.effect import before_after as before_after
from workbench.analysis.entered import Entered as Entered
from workbench.analysis.entered import entered as entered
from workbench.analysis.examples import examples_per_second as examples_per_second
from workbench.analysis.gpus import RankGpu as RankGpu
from workbench.analysis.gpus import gpus as gpus
from workbench.analysis.lateness import Lateness as Lateness
from workbench.analysis.lateness import Strips as Strips
from workbench.analysis.lateness import lateness as lateness
from workbench.analysis.memory import RankMemory as RankMemory
from workbench.analysis.memory import memory as memory
from workbench.analysis.memory import readable as readable
from workbench.analysis.mesh import Arrangement as Arrangement
from workbench.analysis.mesh import arrangement as arrangement
from workbench.analysis.overview import line as line
from workbench.analysis.overview import summary as summary
from workbench.analysis.path import Piece as Piece
from workbench.analysis.path import critical_path as critical_path
from workbench.analysis.saving import Saving as Saving
from workbench.analysis.saving import saving as saving
from workbench.analysis.segment import segment as segment
from workbench.analysis.settings import Stretch as Stretch
from workbench.analysis.settings import stretches as stretches
from workbench.analysis.steps import Breakdown as Breakdown
from workbench.analysis.steps import Overlap as Overlap
from workbench.analysis.steps import StepTimes as StepTimes
from workbench.analysis.steps import breakdown as breakdown
from workbench.analysis.steps import bytes_per_step as bytes_per_step
from workbench.analysis.steps import overlap as overlap
from workbench.analysis.steps import per_rank as per_rank
from workbench.analysis.steps import sendings as sendings
from workbench.analysis.steps import step_times as step_times
from workbench.analysis.straggler import Verdict as Verdict
from workbench.analysis.straggler import straggler as straggler
from workbench.analysis.straggler import why_silent as why_silent
from workbench.analysis.taken import taken as taken
from workbench.analysis.trend import Trend as Trend
from workbench.analysis.unheeded import unheeded as unheeded
from workbench.analysis.upkeep import RankClock as RankClock
from workbench.analysis.upkeep import RankCost as RankCost
from workbench.analysis.upkeep import clocks as clocks
from workbench.analysis.upkeep import recording as recording
from workbench.analysis.window import change_steps as change_steps
from workbench.analysis.window import last_steps as last_steps
from workbench.analysis.window import stands_for as stands_for

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
