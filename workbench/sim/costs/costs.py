"""Costs: what the parts of a step cost, measured from a run or stated, so that a simulation can price them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.sim.costs.durations import PHASES, AlphaBeta, Duration, kind
from workbench.sim.costs.lines import Price, taken
from workbench.sim.costs.measure import measured

if TYPE_CHECKING:
    from workbench.record.run import Run


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What compute, codecs and the bare wire cost; what a Fabric or a `pace` states is not asked here.

    forward, backward, update: seconds of one pass on each rank, as numbers or Durations; one value serves all ranks
    codec:    by compressor (`Costs.kind`), what each stretch of work on a bucket between two operations takes:
              (encode, decode) for most, while the rank's step waits. A number is seconds per byte; Line(seconds,
              seconds per byte) has a part that is of every stretch, however small the bucket
    beside:   the same while the rank computes, with which the codec may share a core; of others that of `codec`
    slows:    seconds by which the rank computes longer for each second that its codec works meanwhile
    wire:     what a collective costs where the Link is not shaped
    linked:   what its transfer takes at least where it is, between processes that sleep and take turns; not known: as
              `wire` says
    post:     the same of a message, between ranks without such a Link; not known: as a collective of its bytes
    late:     seconds by which a collective on a shaped Link ends after its time (sleeping is not exact)
    between:  seconds of a step that belong to nothing else
    evaluate: seconds of one evaluation
    parts:    seconds of a forward and of a backward of each part of the model (see `balance`), of which the proportions
              count where it is cut into stages; none: they are as numbers of parameters
    coder:    by compressor, what encoding and decoding an activation takes, as above, where it crosses between two
              stages, or between the ranks of one
    flop:     by name, seconds per floating-point operation of a strategy's own arithmetic (`rank.work`)
    asked:    seconds of what else a strategy may ask for: "curve", "value" and "factors", and "collect", by which a
              backward is longer that is listened to; without, a curve takes a forward and a backward, a value a forward
    density:  share of elements that a choice by their values keeps, for simulations with sizes only; 0: not known

    Where an experiment states a `pace`, compute takes what the pace says or what is measured, whichever is longer.
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
        """Calibrated from a recorded run, real or simulated, without its first steps and those beside a change.

        Fitted: each rank's median and spread (1.4826 MAD) of forward, backward and update, less what faults
        stretched; per compressor what each stretch of codec work takes until the last rank was through it, in the mean,
        with compute beside it and without, by the byte, or by a Line where the largest is twice the smallest, and by
        how much such compute was longer; off a Link the wire's two numbers by least squares over the medians of each
        collective's transfer (last arrival to end), on one how late collectives end, and the mean of those for which
        it asks less than a third of what they take; the median of what a step lasts beyond compute and waiting; the
        evaluation; the median of the Samples "density", which compressors write whose choice depends on the data.
        """
        return cls(**measured(run))

    def times(self, n: float) -> Costs:
        """These costs where every rank computes n times as much in a step."""
        found: dict[str, Any] = {p: tuple(d._replace(seconds=n * d.seconds) for d in getattr(self, p)) for p in PHASES}
        return replace(self, **found)

    def at_least(self, seconds: Mapping[str, float]) -> Costs:
        """These costs with phases that take so long on every rank, if they take less."""
        found: dict[str, Any] = {p: tuple(d._replace(seconds=max(d.seconds, seconds[p])) for d in getattr(self, p))
                                 for p in PHASES}  # fmt: skip
        return replace(self, **found)

    def even(self, ranks: int) -> Costs:
        """These costs with all ranks as fast as the slowest of so many is expected to be in a step.

        Each rank's step is taken for a normal number of its own mean and spread, independent of the others'. So a step
        is as long as expected where all ranks meet in each, and too long where they meet more rarely.
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

    def seconds(self, phase: str, rank: int, step: int, seed: int) -> float:
        """Seconds of one pass on a rank in a step."""
        durations: tuple[Duration, ...] = getattr(self, phase)
        duration = durations[rank % len(durations)]
        return duration.draw(f"{seed}/{rank}/{step}/{phase}") if duration.spread else duration.seconds

    def stretches(self, compressor: Any) -> tuple[Price, ...]:
        """What each stretch of codec work costs; () where it costs nothing."""
        return self.codec.get(self.kind(compressor), ())

    def stretches_beside(self, compressor: Any) -> tuple[Price, ...]:
        """The same while the rank computes."""
        return self.beside.get(self.kind(compressor)) or self.stretches(compressor)

    def coding(self, compressor: Any, how: str, nbytes: int) -> float:
        """Seconds that it takes to "encode" or "decode" an activation of so many bytes; 0 where nobody knows."""
        there, back = self.coder.get(self.kind(compressor), (0.0, 0.0))
        return taken(there if how == "encode" else back, nbytes)

    kind = staticmethod(kind)

    def __or__(self, other: Costs) -> Costs:
        """These costs with the codecs, the arithmetic of strategies and the wires that `other` knows, too."""
        names = ("codec", "beside", "coder", "flop", "asked")
        both: dict[str, Any] = {name: {**getattr(self, name), **getattr(other, name)} for name in names}
        wires = ("wire", "linked", "post")
        both |= {name: one if any(one := getattr(self, name)) else getattr(other, name) for name in wires}
        return replace(self, **both)
