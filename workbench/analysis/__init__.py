"""Questions about a timeline, each a pure function from rows to a number or a table. Nothing here draws."""

from workbench.analysis.apart import since_met as since_met
from workbench.analysis.break_even import BreakEven as BreakEven
from workbench.analysis.break_even import break_even as break_even
from workbench.analysis.bubble import Bubble as Bubble
from workbench.analysis.bubble import bubble as bubble
from workbench.analysis.bubble import spread_at as spread_at
from workbench.analysis.clear import Estimate as Estimate
from workbench.analysis.clear import Ratio as Ratio
from workbench.analysis.clear import compared as compared
from workbench.analysis.collectives import Arrivals as Arrivals
from workbench.analysis.collectives import arrivals as arrivals
from workbench.analysis.compression import Compression as Compression
from workbench.analysis.compression import compression as compression
from workbench.analysis.compression import ratios as ratios
from workbench.analysis.effect import Card as Card
from workbench.analysis.effect import Effect as Effect
from workbench.analysis.effect import before_after as before_after
from workbench.analysis.examples import examples_per_second as examples_per_second
from workbench.analysis.memory import RankMemory as RankMemory
from workbench.analysis.memory import memory as memory
from workbench.analysis.memory import readable as readable
from workbench.analysis.mesh import Arrangement as Arrangement
from workbench.analysis.mesh import arrangement as arrangement
from workbench.analysis.overview import line as line
from workbench.analysis.overview import summary as summary
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
from workbench.analysis.trend import Trend as Trend
from workbench.analysis.unheeded import unheeded as unheeded
from workbench.analysis.window import change_steps as change_steps
from workbench.analysis.window import last_steps as last_steps
from workbench.analysis.window import stands_for as stands_for

__all__ = [
    "Arrangement", "Arrivals", "BreakEven", "Breakdown", "Bubble", "Card", "Compression", "Effect", "Estimate",
    "Overlap", "RankMemory", "Ratio", "StepTimes", "Stretch", "Trend", "Verdict", "arrangement", "arrivals",
    "before_after", "break_even", "breakdown", "bubble", "bytes_per_step", "change_steps", "compared", "compression",
    "examples_per_second", "last_steps", "line", "memory", "overlap", "per_rank", "ratios", "readable", "sendings",
    "since_met", "spread_at", "stands_for", "step_times", "straggler", "stretches", "summary", "unheeded", "why_silent",
]  # fmt: skip
