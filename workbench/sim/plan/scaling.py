"""Step time by number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from workbench import analysis
from workbench.analysis.steps.words import format_seconds
from workbench.compressors import Dense, inside
from workbench.experiment import Experiment
from workbench.fabric.networks import network as named
from workbench.fabric.pace import SHARES
from workbench.rank import StrategyError
from workbench.record.store import RunError
from workbench.settings import KnobError
from workbench.sim.costs.costs import Costs
from workbench.sim.costs.durations import PHASES
from workbench.sim.costs.even_ranks import explain_unlike
from workbench.sim.plan.quick_simulator import MAX_UNEVEN_RANKS, UNTYPICAL_STEPS, QuickSimulator

RANK_COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
COLUMNS = ("ranks", "step", "computing", "sent per rank and step", "")


class ScalingRow(NamedTuple):
    """The prediction for a number of ranks.

    ranks:      their number
    seconds:    per step
    computing:  share of the step in which a rank computes
    sent:       bytes per rank and step
    experiment: its settings; None if it was not simulated
    refused:    why it was not simulated, or ""
    """

    ranks: int
    seconds: float
    computing: float
    sent: float
    experiment: Experiment | None
    refused: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table as text."""
        if self.refused:
            return f"{self.ranks:,}", "", "", "", self.refused
        sent = analysis.format_bytes(self.sent)
        return f"{self.ranks:,}", format_seconds(self.seconds), f"{self.computing:.0%} of it", sent, ""


class Scaling(list[ScalingRow]):
    """A table by number of ranks, with sentences from `list_assumptions` below."""

    def __init__(self, rows: Sequence[ScalingRow], assumptions: tuple[str, ...]) -> None:
        super().__init__(rows)
        self.assumptions = assumptions

    def __repr__(self) -> str:
        return "\n".join([*("  ".join(filter(None, r.cells)) for r in self), *(f"- {a}" for a in self.assumptions)])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row.cells)}</tr>" for row in self)
        said = "".join(f"<li>{escape(a)}</li>" for a in self.assumptions)
        return f"<table><tr>{head}</tr>{body}</table><ul>{said}</ul>"


def make_scaling_row(quick: QuickSimulator, ranks: int, made: Callable[[int], Experiment]) -> ScalingRow:
    """made: returns the experiment"""
    try:
        e = made(ranks)
        if ranks > MAX_UNEVEN_RANKS and (reason := explain_unlike(e, quick.costs.even(ranks))):
            raise KnobError(reason)
        told = quick.predict_step(e)
    except (KnobError, StrategyError, RunError) as error:
        return ScalingRow(ranks, float("nan"), float("nan"), float("nan"), None, str(error))
    found = analysis.break_down(told.run.timeline, UNTYPICAL_STEPS, analysis.last_steps(told.run.timeline)[1])
    computing = float(found.compute.mean() / found.seconds.mean())
    return ScalingRow(ranks, told.seconds, computing, told.sent, e)


def list_assumptions(now: Experiment, e: Experiment, costs: Costs, network: str, error: float) -> tuple[str, ...]:
    """Returns sentences about a prediction for `e` from a run of `now`.

    error: simulation error for the run as it is, as a share of the measured time
    """
    each = sum(max(d.seconds for d in getattr(costs, p)) for p in PHASES)
    each = max(each, sum(SHARES.values()) * e.pace * 1e-3)
    said = [
        f"Each rank computes as fast as this run's ranks ({format_seconds(each)} a step, batch {e.batch}), on any "
        f"machine; the global batch grows with the ranks. For the run's own settings, the simulated time is off by "
        f"{error:+.0%}.",
    ]
    if network:
        said.append(named(network).text)
    elif not e.fabric.shaped:
        said.append("The wire is this machine's, as measured between the ranks of this run.")
    how = type(e.fabric.algorithm).__name__ if not e.fabric.algorithm.native else "a ring, 2 (p-1) messages one by one"
    said.append(f"All-reduces go by {how}; each rank has a port of its own, and there is no other traffic.")
    if e.ranks > MAX_UNEVEN_RANKS:
        said.append(f"Above {MAX_UNEVEN_RANKS} ranks one replica is simulated for all, each rank as fast as the "
                    f"slowest of all is expected to be, for normal independent times.")  # fmt: skip
    unknown = [
        type(c).__name__ for c in inside(e.compressor) if not isinstance(c, Dense) and not costs.list_codec_prices(c)
    ]
    if not costs.list_codec_prices(e.compressor) and unknown:
        said.append(f"This run has not used {unknown[0]}, so encoding and decoding take no time here.")
    if e.fabric.faults and e.fabric.faults == now.fabric.faults:
        said.append("The present faults stay.")
    said.append("The loss is not predicted.")
    return tuple(said)
