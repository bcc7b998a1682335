# ruff: noqa: E501
"""The measured and drawn settings of each strategy, one entry each; default knobs without an entry.

An entry may name a strategy that does not exist yet; readers of the table report and skip it. An entry quotes a paper's
numbers only from the paper's own text or its published record. Otherwise it says that it quotes none. Results at this
scale are computed from the data and never written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.compressors import Compressor, Dense
from workbench.fabric import Fault, Slow, TransientStraggler
from workbench.settings import KnobError, checked, describe, find, members
from workbench.strategies import Strategy

SLOW_RANK = 1  # not rank 0, which evaluates and may serve, and not the last, which may serve
FAST, LINK, SLOW, STUMBLE = "fast", "100 Mbit/s, 5 ms", "one rank 2x slow", "random 5x slowdowns"
NOT_QUOTED = "No numbers are quoted, because the paper's own text was not available."


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The local form of a paper's headline, and why it may not show: `measure` on `where` at least `least`.

    measure: "pace" (samples per second), "time" (to the fixed loss), both over DDP's; "bytes" (DDP's over its own);
             "control" (the loss without its outer momentum over its own, from a common state)
    headline: whether the paper claims this; only then the page says whether it shows
    time:    if the headline includes a time: the smallest relative speed to the fixed loss
    beside:  another row whose loss and bytes on that fabric are named next to it
    """

    measure: str
    where: str
    least: float
    why: str
    headline: bool = True
    time: float = 0.0
    beside: str = ""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One strategy.

    knobs:  its settings in the campaign, one row each
    rate:   the learning rate as a multiple of the task's, if its rule needs another than DDP's
    paper:  the headline in a sentence, with its source
    claim:  the part of it that the tables can show
    see:    the figure's caption; shown: the knobs that show it; window: ms; mbit, latency, faults, fault: the network
            and its faults (and their description), if not the usual; real: whether it reads values
    compressor: the compressor that it needs, by its bare name, if not Dense
    """

    name: str
    see: str
    paper: str = NOT_QUOTED
    claim: Claim | None = None
    knobs: tuple[Mapping[str, Any], ...] = ({},)
    rate: float = 1.0
    shown: Mapping[str, Any] = field(default_factory=dict)
    window: float = 250.0
    mbit: float = 0.0
    latency: float = 0.0
    faults: tuple[Fault, ...] = ()
    fault: str = ""
    real: bool = False
    compressor: str = ""

    def strategy(self, knobs: Mapping[str, Any]) -> Strategy:
        """Returns the strategy with these knobs, checked. Raises KnobError, also for an unknown knob."""
        cls = find(Strategy, self.name)
        try:
            return checked(cls(**knobs))
        except TypeError as error:
            raise KnobError(f"{self.name}({knobs}): {error}; correct its entry in tests/bench/methods.py") from error

    def codec(self) -> Compressor:
        """Returns its compressor. Raises KnobError if no such compressor exists."""
        return find(Compressor, self.compressor).usual() if self.compressor else Dense()

    def label(self, knobs: Mapping[str, Any]) -> str:
        """Returns its name in a row or figure, with only the knobs that are not default."""
        inside = ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in knobs.items())
        return f"{self.name}({inside})" if inside else self.name


def tempo(name: str) -> str:
    """Returns a note for a row's name if its learning rate is not DDP's, else ""."""
    rate = method(name).rate
    return f", at {rate:g} times the learning rate" if rate != 1.0 else ""


def found(name: str) -> type[Strategy] | None:
    """Returns the shipped strategy with this name, or None if there is none (yet)."""
    try:
        cls = find(Strategy, name)
    except KnobError:
        return None
    return cls if cls.__module__.startswith("workbench.") else None


def method(name: str) -> Method:
    """Returns the entry of a strategy, or one with default knobs. Raises KnobError for an unknown strategy."""
    listed = next((m for m in METHODS if m.name == name), None)
    return listed or Method(name=name, see=str(describe(find(Strategy, name))["doc"]))


def methods() -> tuple[Method, ...]:
    """Returns all entries, then each shipped strategy without one, except those that need embedding tables."""
    listed = {m.name for m in METHODS}
    ships = [name for name, cls in members(Strategy).items() if found(name) is cls and not (cls.opaque or cls.tables)]
    return (*METHODS, *(method(name) for name in ships if name not in listed))


_ONE_SLOW = {"faults": (Slow(rank=2, factor=2.0),), "fault": "rank 2 computes 2 times as long"}
_STUMBLING = {
    "faults": (TransientStraggler(probability=0.2, factor=3.0, seed=5),),
    "fault": "in a random fifth of its steps a rank computes 3 times as long",
}
_SMALL = "With 0.1 M parameters on four ranks, a large batch loses little and a slow start loses much."

METHODS = (
    Method(
        name="DDP",
        shown={"accumulate": 4},
        window=280,
        see="With accumulate=4 three of four backward passes send nothing; at the fourth all ranks meet, and only then do parameters change.",
        paper="Near-linear scaling to 256 GPUs (Li et al., VLDB 2020).",
    ),
    Method(
        name="AdaAlter",
        rate=400.0,  # of 30, 100, 200, 400, 800 and 1600, by one seed: its root begins near 1
        see="Each rank steps on its own with the denominators that all agreed upon last; parameters and sums of squares are averaged together.",
    ),
    Method(
        name="BackupWorkers",
        knobs=({"backup": 1},),
        shown={"backup": 1},
        mbit=1600.0,
        **_ONE_SLOW,
        see="The server beside rank 0 takes the first three gradients and answers; the slow rank's comes too late and is dropped. What the others still wait for is the server's port.",
        paper="Converges faster and to better accuracy than asynchronous and than plain synchronous training (abstract of Chen et al., 2016).",
        claim=Claim(
            measure="time",
            where=STUMBLE,
            least=1.0,
            why="With one backup of four ranks, 25 % of the gradients are discarded; the paper's hundred machines had about four backups. Two ranks are often slow at once.",
        ),
    ),
    Method(
        name="AsyncServer",
        mbit=800.0,
        **_ONE_SLOW,
        see="Nobody waits for the slow rank; who has pushed waits for the server alone, whose port (rank 0's) is the narrow place.",
        paper="Asynchronous training of ResNet-32 on 8 workers was 6.6 times as fast as synchronous and 2.7 points less accurate (recomputed from the logs that Sync-Switch's authors released).",
        claim=Claim(
            measure="time",
            where=SLOW,
            least=1.0,
            headline=False,
            why="The paper's number comes from another cluster and task, with its price in accuracy. Here it is the time to one loss.",
        ),
    ),
    Method(
        name="BoundedStaleness",
        knobs=({"bound": 3},),
        rate=0.25,
        shown={"bound": 2},
        mbit=1600.0,
        **_STUMBLING,
        see="A rank that stumbles holds nobody up as long as the others are at most two iterations ahead; only then do they wait.",
        claim=Claim(
            measure="time",
            where=STUMBLE,
            least=1.0,
            headline=False,
            why="The sum of stale updates was worth less than the saved waiting time.",
        ),
    ),
    Method(
        name="Hogwild",
        rate=0.25,
        **_ONE_SLOW,
        see="One memory for all ranks of a host: nothing crosses a network and nobody waits, whatever the others do.",
        claim=Claim(
            measure="pace",
            where=SLOW,
            least=1.0,
            headline=False,
            why="Its ranks share one machine's memory, and DDP's network was as fast.",
        ),
    ),
    Method(
        name="LocalSGD",
        knobs=({"every": 4}, {"every": 20}),
        shown={"every": 4},
        see="Three steps of four touch no network; then everybody stands still while the whole model is averaged.",
        paper="As a baseline of SlowMo's table 1, averaging every 12 steps on 32 nodes: ImageNet at 69.9 % instead of 76.0 %, 294 ms per iteration instead of 420 ms.",
        claim=Claim(measure="pace", where=LINK, least=1.4, why="The network took a small part of a step."),
    ),
    Method(
        name="SlowMo",
        knobs=({"every": 12}, {"every": 12, "beta": 0.2}),
        shown={"every": 4},
        see="To the eye this is Local SGD: the slow momentum works on the average without a byte or a wait of its own. Look at its loss instead.",
        paper="Over Local SGD with 12 steps: ImageNet 69.9 % to 73.2 %, CIFAR-10 91.7 % to 93.2 %, without longer iterations (Wang et al., ICLR 2020, tables 1 and 2).",
        claim=Claim(measure="control", where=LINK, least=1.0, why=_SMALL),
    ),
    Method(
        name="BMUF",
        knobs=({"every": 12}, {"every": 12, "eta": 0.25}),
        shown={"every": 4},
        see="Blocks of four steps alone, then one average: as Local SGD on the wire; the block momentum costs nothing that could be seen here.",
        paper="Almost linear speed-up to 16 GPUs (LSTM) and 64 GPUs (DNN) on 309 and 1860 hours of speech without loss of accuracy (abstract of Chen and Huo, ICASSP 2016).",
        claim=Claim(
            measure="time",
            where=LINK,
            least=1.0,
            headline=False,
            why="The paper's claim is speed-up with the number of ranks without loss of accuracy. The number of ranks was not varied here.",
        ),
    ),
    Method(
        name="EASGD",
        knobs=({"every": 4},),
        shown={"every": 4},
        see="Every fourth step the exchange with the centre begins together with the forward and hides behind it; what is left over is waited for before the update.",
        claim=Claim(
            measure="pace", where=LINK, least=1.4, headline=False, why="The network took a small part of a step."
        ),
    ),
    Method(
        name="DiLoCo",
        knobs=({"every": 20}, {"every": 20, "outer_lr": 1.0, "outer_momentum": 0.5}),
        shown={"every": 8},
        mbit=150.0,
        window=360,
        see="Eight steps alone, then one outer step for which the whole model is sent at once and everybody stands still.",
        paper="Eight workers reached a perplexity of 15.02 with 500 times less communication, one worker 16.23, one with eight times the batch 15.30 (Douillard et al., 2023).",
        claim=Claim(
            measure="bytes",
            where=LINK,
            least=15.0,
            headline=False,
            why="The paper's claim is the loss at this saving. Runs from a common state measure it, below.",
        ),
    ),
    Method(
        name="StreamingDiLoCo",
        knobs=({"every": 20, "fragments": 2},),
        shown={"every": 8, "fragments": 4, "bits": 32},
        mbit=150.0,
        window=360,
        see="A quarter of the model every second step, sent while the next step is being computed: as many bytes as DiLoCo (here uncompressed), but no burst and nobody waits.",
        paper="1 B parameters: the same loss as data parallelism (2.66 against 2.67 after 25 B tokens) with 400 times fewer bits and a peak 8 times lower (Douillard et al., 2025, table 1).",
        claim=Claim(
            measure="bytes",
            where=LINK,
            least=100.0,
            headline=False,
            why="The paper's claim is the same loss at this saving. Runs from a common state measure it, below.",
        ),
    ),
    Method(
        name="SelSync",
        knobs=({"delta": 0.3}, {"delta": 0.05, "norm_window": 25}),
        shown={"delta": 0.125, "window": 1},
        real=True,
        window=330,
        see="In each step all ask, in 8 bytes, whether any gradient changed much; only then the whole model is averaged, at steps that nobody knows beforehand.",
        paper="As accurate as synchronous training or more, in up to 14 times less time (abstract of Tyagi and Swany, 2023).",
        claim=Claim(
            measure="time",
            where=LINK,
            least=1.0,
            why="In every step all ranks wait for its question of 8 bytes, which costs a whole all-reduce's latency.",
        ),
    ),
    Method(
        name="ShadowMA",
        mbit=150.0,
        window=300,
        see="No step ever stands still: averaging goes on beside it, and a new round begins as soon as the last is over.",
        paper="Throughput grows linearly with the trainers, quality no worse than averaging in the foreground (abstract of Zheng et al., 2020).",
        claim=Claim(
            measure="pace",
            where=LINK,
            least=1.4,
            headline=False,
            why="The paper's claim is how throughput grows with the number of trainers, at a loss no worse than averaging in the foreground. The number of trainers was not varied here.",
            beside="LocalSGD(every=20)",
        ),
    ),
    Method(
        name="AsyncModelAverage",
        knobs=({"every_ms": 100.0},),
        shown={"every_ms": 60.0},
        see="An averaging, a rest of 60 ms on the clock, the next averaging: steps go on as if nothing happened, and the wire is free in between.",
        paper="Bagua, of which this is one algorithm, was up to 2 times as fast as DDP, Horovod and BytePS on 128 GPUs (abstract of Gan et al., VLDB 2021).",
        claim=Claim(
            measure="pace", where=LINK, least=1.4, headline=False, why="The paper's claim is about Bagua as a whole."
        ),
    ),
    Method(
        name="Gossip",
        knobs=({"graph": "ring"}, {"graph": "exponential"}),
        shown={"graph": "ring"},
        mbit=1000.0,
        latency=3.0,
        window=150,
        see="Eight messages to two neighbours, sent before the forward, instead of four all-reduces of six messages one after the other: less latency, more bytes, and nobody waits for ranks further away.",
        paper="Bagua's study of trade-offs: as latency rises to 5 ms, decentralised training wins (Gan et al., VLDB 2021).",
        claim=Claim(
            measure="pace",
            where=LINK,
            least=1.0,
            why="Bandwidth mattered more than latency: a ring of 4 sends 33 % more bytes than the all-reduce.",
        ),
    ),
    Method(
        name="StochasticGradientPush",
        knobs=({"graph": "exponential"},),
        shown={"overlap": 1},
        mbit=400.0,
        see="Each rank gives half of itself to one other, another one in each step, and takes what it was given a step later: every message hides behind a whole step.",
        paper="32 nodes of 8 GPUs at 10 Gbit/s: 90 epochs of ImageNet in 1.6 hours instead of more than 5, within 1.2 points (abstract of an earlier version of Assran et al., ICML 2019).",
        claim=Claim(
            measure="pace",
            where=LINK,
            least=1.4,
            headline=False,
            why="The paper's claim is the time to an equal accuracy on 256 GPUs; samples/s do not measure that. Here it waits for its neighbour in each step.",
        ),
    ),
    Method(
        name="LowPrecisionDecentralized",
        shown={},
        mbit=200.0,
        latency=1.0,
        window=300,
        see="A byte per parameter to two neighbours, after the update: nothing hides it, but it is a third of the bytes and two messages per bucket.",
        paper="Bagua's study of trade-offs: as bandwidth falls from 100 to 1 Gbit/s, low precision wins (Gan et al., VLDB 2021).",
        claim=Claim(measure="pace", where=LINK, least=1.4, why="Latency mattered more than bandwidth."),
    ),
    Method(
        name="QAdam",
        knobs=({"warmup": 60},),
        shown={"warmup": 12},
        compressor="ByteGrad",
        mbit=200.0,
        window=300,
        see="After its warm-up it is DDP's timeline with a quarter of the bytes: momenta of one byte per element, summed in two hops.",
        paper="In Bagua it trained BERT-Large on 128 GPUs; Bagua as a whole was up to 2 times as fast as its rivals (Gan et al., VLDB 2021).",
        claim=Claim(
            measure="pace", where=LINK, least=1.0, headline=False, why="The paper's claim is about Bagua as a whole."
        ),
    ),
    Method(
        name="OneBitAdam",
        knobs=({"warmup": 60},),
        shown={"warmup": 12},
        compressor="OneBit",
        mbit=200.0,
        window=300,
        see="After the freeze only signs of the momentum cross the wire, a thirty-second of the bytes.",
        paper="Up to 5 times less communication and up to 3.4 times as fast (title of DeepSpeed's tutorial).",
        claim=Claim(
            measure="bytes", where=LINK, least=2.5, time=1.7, why="The warm-up, 20 % of the run, sent whole gradients."
        ),
    ),
)
