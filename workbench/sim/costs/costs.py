"""Prices of a step's parts for simulations, measured from a run or given by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.sim.costs.durations import PHASES, AlphaBeta, Duration, name_codec
from workbench.sim.costs.measure import measure_costs
from workbench.sim.costs.prices import Price, price_bytes

if TYPE_CHECKING:
    from workbench.record.run import Run


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Prices of compute, codecs and the unshaped network. A Fabric and a `pace` state their own costs.

    forward, backward, update: seconds of one pass by rank, as numbers or Durations. One value serves all ranks
    codec:    by compressor (`Costs.kind`): prices of each stretch of work on a bucket between two operations, while the
              rank's step waits; for most compressors (encode, decode). A number is seconds per byte.
              Line(seconds, seconds per byte) adds fixed seconds per stretch
    beside:   these prices while the rank computes and may share a core with the codec; default: `codec`
    slows:    extra seconds of compute for each second that a codec works at the same time
    wire:     price of a collective on an unshaped Link
    linked:   least price of a transfer on a shaped Link between processes that take turns; default: `wire`
    post:     price of a message on an unshaped Link; default: the price of a collective of its bytes
    late:     seconds by which a collective on a shaped Link ends after its time (sleeping is not exact)
    between:  seconds of a step that belong to no other part
    evaluate: seconds of one evaluation
    parts:    seconds of a forward and of a backward of each part of the model (see `balance`). Only their proportions
              count, when the model is cut into stages; empty: proportional to the numbers of parameters
    coder:    by compressor: prices of encoding and decoding an activation between stages, or between ranks of a stage
    flop:     by name: seconds per floating-point operation of a strategy's own arithmetic (`rank.work`)
    asked:    seconds of a strategy's requests "curve", "value" and "factors"; "collect": extra seconds of a backward
              that collects factors. By default a curve costs a forward and a backward, and a value a forward
    density:  share of elements that a value-based compressor keeps, with sizes only; 0: unknown

    If an experiment states a `pace`, compute takes the longer of the pace and the measured time.

    compressor:  in methods: a Compressor
    nbytes:      in methods: bytes of an activation
    """

    forward: tuple[Duration, ...] = (Duration(0.0),)
    backward: tuple[Duration, ...] = (Duration(0.0),)
    update: tuple[Duration, ...] = (Duration(0.0),)
    codec: Mapping[str, tuple[Price, ...]] = field(default_factory=dict)
    beside: Mapping[str, tuple[Price, ...]] = field(default_factory=dict)
    slows: float = 0.0
    wire: AlphaBeta = AlphaBeta()
    linked: AlphaBeta = AlphaBeta()
    post: AlphaBeta = AlphaBeta()
    late: float = 0.0
    between: float = 0.0
    evaluate: float = 0.0
    parts: tuple[tuple[float, float], ...] = ()
    density: float = 0.0
    coder: Mapping[str, tuple[Price, Price]] = field(default_factory=dict)
    flop: Mapping[str, float] = field(default_factory=dict)
    asked: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for phase in PHASES:
            given: Any = getattr(self, phase)
            each = given if isinstance(given, (tuple, list)) and not isinstance(given, Duration) else (given,)
            object.__setattr__(self, phase, tuple(d if isinstance(d, Duration) else Duration(float(d)) for d in each))
            if any(d.seconds < 0 or d.spread < 0 for d in getattr(self, phase)):
                raise ValueError(f"{phase}={given!r}: seconds and spreads cannot be negative")
        object.__setattr__(self, "parts", tuple((float(there), float(back)) for there, back in self.parts))

    @classmethod
    def measured(cls, run: Run) -> Costs:
        """Calibrates from a recorded run, real or simulated. Excludes the first steps and steps after a change.

        Each phase gets a median and a spread (1.4826 MAD) per rank, without faults. Each stretch of codec work gets the
        mean time until the last rank has finished it, with and without compute. Its price is per byte, or a Line if the
        largest bucket is at least twice the smallest. `slows` comes from steps with different compressors.

        On an unshaped Link, `wire` is a least-squares fit to the median transfers (last arrival to end). On a shaped
        Link, `linked` is the mean transfer of collectives that take over 3 times as long as their Link demands.
        `between`, `evaluate` and `density` are medians.

        run:  the run
        """
        return cls(**measure_costs(run))

    def scale_compute(self, n: float) -> Costs:
        """Returns costs with more or less compute.

        n:  the factor on the seconds of compute
        """
        found: dict[str, Any] = {p: tuple(d._replace(seconds=n * d.seconds) for d in getattr(self, p)) for p in PHASES}
        return replace(self, **found)

    def at_least(self, seconds: Mapping[str, float]) -> Costs:
        """Returns costs whose phases take at least given seconds.

        seconds:  by phase: "forward", "backward" and "update"
        """
        found: dict[str, Any] = {p: tuple(d._replace(seconds=max(d.seconds, seconds[p])) for d in getattr(self, p))
                                 for p in PHASES}  # fmt: skip
        return replace(self, **found)

    def even(self, ranks: int) -> Costs:
        """Returns costs with all ranks as fast as the slowest is expected to be in a step.

        ranks:  number of ranks

        Each rank's step is an independent normal number with the rank's own mean and spread. The result is correct if
        all ranks meet in each step, and too slow if they meet less often.
        """
        kinds = math.lcm(*(len(getattr(self, p)) for p in PHASES))
        each = [[getattr(self, p)[r % len(getattr(self, p))] for p in PHASES] for r in range(min(kinds, ranks))]
        means = np.array([sum(d.seconds for d in one) for one in each])
        spreads = np.array([math.hypot(*(d.seconds * d.spread for d in one)) for one in each])
        slowest = each[int(means.argmax())]
        factor = 1.0
        if spreads.any():
            counts = np.bincount(np.arange(ranks) % len(each))
            x = np.linspace((means - 9.0 * spreads).min(), (means + 9.0 * spreads).max(), 20_001)
            below = torch.special.ndtr(torch.from_numpy((x[:, None] - means) / np.maximum(spreads, 1e-12))).numpy()
            expected = x[0] + np.trapezoid(1.0 - (below**counts).prod(1), x)
            factor = float(expected / means.max())
        found: dict[str, Any] = {p: Duration(factor * d.seconds) for p, d in zip(PHASES, slowest, strict=True)}
        return replace(self, **found)

    def draw_seconds(self, phase: str, rank: int, step: int, seed: int) -> float:
        """Returns the seconds of a phase on a rank in a step, the same for the same seed.

        phase:  "forward", "backward" or "update"
        rank:   the rank's number
        step:   the step, from 0
        seed:   the experiment's seed
        """
        durations: tuple[Duration, ...] = getattr(self, phase)
        duration = durations[rank % len(durations)]
        return duration.draw_seconds(f"{seed}/{rank}/{step}/{phase}") if duration.spread else duration.seconds

    def list_codec_prices(self, compressor: Any) -> tuple[Price, ...]:
        """Returns prices of each stretch of codec work; () for none."""
        return self.codec.get(self.kind(compressor), ())

    def list_prices_beside(self, compressor: Any) -> tuple[Price, ...]:
        """Returns these prices while the rank computes."""
        return self.beside.get(self.kind(compressor)) or self.list_codec_prices(compressor)

    def price_coding(self, compressor: Any, how: str, nbytes: int) -> float:
        """Returns the seconds to encode or decode an activation; 0 if unknown.

        how:  "encode" or "decode"
        """
        there, back = self.coder.get(self.kind(compressor), (0.0, 0.0))
        return price_bytes(there if how == "encode" else back, nbytes)

    kind = staticmethod(name_codec)

    def __or__(self, other: Costs) -> Costs:
        """Adds codecs and strategy arithmetic of `other`, and wire prices that are missing here."""
        names = ("codec", "beside", "coder", "flop", "asked")
        both: dict[str, Any] = {name: {**getattr(self, name), **getattr(other, name)} for name in names}
        wires = ("wire", "linked", "post")
        both |= {name: one if any(one := getattr(self, name)) else getattr(other, name) for name in wires}
        return replace(self, **both)
