# ruff: noqa: E501
"""The claims: the papers' statements, where each is tested, on which grid, and the required result.

The sentences about papers are this project's own, from the text that `source` names. Costs are those of
docs/project/strategies.md, so a step computes for 8 ms with any task.
"""

from __future__ import annotations

from typing import Any

from tests.bench.home_looks import Because, Claim, Look
from tests.bench.home_regimes import (
    BYTES,
    CLICKS,
    EIGHT,
    EIGHT_LONGER,
    EVEN,
    FAST_SIXTEEN,
    FAST_TWO,
    LARGE,
    LATENCY,
    NARROW,
    NO_LATENCY,
    NO_WIRE_EVEN,
    NO_WIRE_SIXTEEN,
    NO_WIRE_TWO,
    ONE,
    ONE_LONGER,
    SITES,
    SIXTEEN,
    SKEWED,
    SLOW_WIRE,
    STUMBLING,
    TWO,
    UNEVEN,
    WARM,
)  # fmt: skip
from tests.bench.home_rows import Regime, Row

RATES = tuple(round(0.25 * 2 ** (n / 2), 3) for n in range(12))  # for rows with no other setting to tune


def ddp(regime: Regime, **axes: Any) -> Row:
    """Returns the baseline with the same budget: twelve learning rates by default."""
    return Row(regime=regime, method="DDP", axes=axes or {"rate": RATES})


def row(regime: Regime, method: str, axes: dict[str, tuple[Any, ...]], **rest: Any) -> Row:
    return Row(regime=regime, method=method, axes=axes, **rest)


THREE, FOUR = (2.0, 4.0, 8.0), (1.0, 2.0, 4.0, 8.0)  # around 5.7, the best of RATES for the first baseline
SIX, SUMMED = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0), (0.125, 0.25, 0.5, 1.0)  # SUMMED: p updates are added, not averaged
SOONER = (Look("time", 1.05),)  # a smaller ratio is no difference; for accuracies it is one held-out example
PACE = Look("pace", 1.05)  # a row that is faster but reaches the loss later gains less from the same examples

CLAIMS = (
    Claim(
        method="LocalSGD", source="abstract of Stich, 2018",
        paper="As fast as mini-batch SGD by the number of gradients, with up to the square root of T times fewer rounds of communication.",
        row=row(SLOW_WIRE, "LocalSGD", {"rate": FOUR, "every": (4, 8, 16)}), against=ddp(SLOW_WIRE), looks=(*SOONER, Look("bytes", 4.0)),
    ),
    Claim(
        method="BackupWorkers", source="abstract of Chen et al., 2016",
        paper="Converges faster and to a better accuracy than synchronous training, which waits for every rank.",
        row=row(STUMBLING, "BackupWorkers", {"rate": SIX, "backup": (1, 2)}), against=ddp(STUMBLING), looks=SOONER,
    ),
    Claim(
        method="BoundedStaleness", source="abstract of Ho et al., 2013",
        paper="Converges faster than fully synchronous and than asynchronous training.",
        row=row(STUMBLING, "BoundedStaleness", {"rate": SUMMED, "bound": (1, 3, 8)}), against=ddp(STUMBLING), looks=(*SOONER, PACE),
        because=Because(words="A rank fetches only when its copy is too old. Older parameters cost more than the shorter waits gain", regime=STUMBLING, knobs={"eager": True, "bound": 3}),
    ),
    Claim(
        method="BoundedStaleness, against no bound", source="abstract of Ho et al., 2013",
        paper="Converges faster than fully synchronous and than asynchronous training.",
        row=row(STUMBLING, "BoundedStaleness", {"rate": SUMMED, "bound": (1, 3, 8)}),
        against=row(STUMBLING, "BoundedStaleness", {"rate": tuple(r / 8 for r in RATES)}, fixed={"bound": 64}), looks=(*SOONER, PACE),
        because=Because(words="Without a bound, each rank fetches in every iteration, so its copy is fresher. With a bound, it fetches only when its copy is too old", regime=STUMBLING, knobs={"eager": True, "bound": 8}),
    ),
    Claim(
        method="BoundedStaleness, eager", source="abstract and experiments of Dai et al., 2015",
        paper="Fetching before a copy is too old reduces staleness. Training converges faster, per iteration and per second.",
        row=row(STUMBLING, "BoundedStaleness", {"rate": SUMMED, "bound": (1, 3, 8)}, fixed={"eager": True}),
        against=row(STUMBLING, "BoundedStaleness", {"rate": SUMMED, "bound": (1, 3, 8)}), looks=SOONER,
    ),
    Claim(
        method="Gossip, exponential graph", source="abstract of Gan et al., 2021, and its study of trade-offs",
        paper="The higher the latency, the more decentralised training gains over an all-reduce.",
        row=row(LATENCY, "Gossip", {"rate": FOUR, "every": (1, 2, 4)}, fixed={"graph": "exponential"}), against=ddp(LATENCY), looks=SOONER,
    ),
    Claim(
        method="EASGD", source="abstract of Zhang et al., 2015",
        paper="Better than Downpour, because its ranks may explore. It communicates little.",
        row=row(SKEWED, "EASGD", {"rate": THREE, "every": (4, 16), "beta": (0.45, 0.9)}),
        against=row(SKEWED, "AsyncServer", {"rate": THREE, "push": (4, 16), "fetch": (4, 16)}), looks=(Look("loss", 1.05),),
    ),
    Claim(
        method="SelSync", source="abstract of Tyagi and Swany, 2023",
        paper="As accurate as synchronous training or more, in up to 14 times less time.",
        row=row(BYTES, "SelSync", {"rate": THREE, "delta": (0.02, 0.03, 0.05, 0.1)}, fixed={"norm_window": 25}), against=ddp(BYTES), looks=(*SOONER, Look("points", -1.0)),
        because=Because(words="In every step all ranks wait for its question, which costs an all-reduce's latency", regime=NO_LATENCY),
    ),
    Claim(
        method="SelSync's injection", source="abstract of Tyagi and Swany, 2023",
        paper="If ranks see different classes, sharing a few examples keeps it accurate.",
        row=row(SKEWED, "SelSync", {"rate": THREE, "delta": (0.05, 0.3), "inject_share": (0.25, 0.5)}, fixed={"inject_ranks": 0.5}),
        against=row(SKEWED, "SelSync", {"rate": FOUR, "delta": (0.05, 0.1, 0.3)}), looks=(Look("points", 0.28),),
    ),
    Claim(
        method="SlowMo", source="Wang et al., 2020, tables 1 and 2",
        paper="A lower loss and a higher accuracy than Local SGD with as many rounds (ImageNet 69.9 % to 73.2 %), at no cost in time.",
        row=row(WARM, "SlowMo", {"rate": THREE, "beta": (0.2, 0.4, 0.6, 0.8)}, fixed={"every": 50}),
        against=row(WARM, "LocalSGD", {"rate": RATES}, fixed={"every": 50}), looks=(Look("loss", 1.005), Look("pace", 0.99)),
    ),
    Claim(
        method="DiLoCo", source="Douillard et al., 2023, condensed",
        paper="Synchronising every 500 steps, it ends at the loss of synchronous training with as many examples, or below.",
        row=row(WARM, "DiLoCo", {"rate": THREE, "outer_lr": (0.7, 1.0), "outer_momentum": (0.5, 0.9)}, fixed={"every": 50}), against=ddp(WARM), looks=(Look("loss", 0.98), Look("bytes", 20.0)),
    ),
    Claim(
        method="StreamingDiLoCo", source="Douillard et al., 2025, its tables",
        paper="The loss of data parallelism with 400 times fewer bits, and a peak 8 times lower.",
        row=row(WARM, "StreamingDiLoCo", {"rate": THREE, "outer_lr": (0.7, 1.0), "outer_momentum": (0.5, 0.9)}, fixed={"every": 50, "fragments": 3}), against=ddp(WARM),
        looks=(Look("loss", 0.98), Look("bytes", 200.0), Look("burst", 8.0)),
    ),
    Claim(
        method="BMUF", source="abstract of Chen and Huo, 2016",
        paper="Almost linear speed-up with the number of GPUs, without loss of accuracy.",
        row=row(EIGHT, "BMUF", {"rate": THREE, "every": (4, 8), "eta": (0.25, 0.5)}), against=ddp(ONE), looks=(Look("pace", 7.2), Look("loss", 0.98)),
        because=Because(words="It makes 1/8 of the updates, which matters as long as the loss falls steeply", regime=EIGHT_LONGER, against=ONE_LONGER),
    ),
    Claim(
        method="PostLocalSGD", source="abstract of Lin et al., 2020",
        paper="Generalises better than training with large batches, at the same efficiency.",
        row=row(LARGE, "PostLocalSGD", {"rate": FOUR, "every": (4, 8, 16)}, fixed={"warmup": 45}), against=ddp(LARGE), looks=(Look("points", 0.28), Look("pace", 1.0)),
    ),
    Claim(
        method="HierarchicalLocalSGD", source="abstract of Lin et al., 2020: it names variants only",
        paper="If sites are far apart, averaging more often within a site saves time.",
        row=row(SITES, "HierarchicalLocalSGD", {"rate": THREE, "group_every": (1, 4), "every": (8, 16)}, fixed={"group": 2}),
        against=row(SITES, "LocalSGD", {"rate": FOUR, "every": (4, 8, 16)}), looks=SOONER,
    ),
    Claim(
        method="AsyncModelAverage", source="abstract of Gan et al., 2021",
        paper="Of Bagua as a whole: up to twice as fast as DDP.",
        row=row(SLOW_WIRE, "AsyncModelAverage", {"rate": FOUR, "every_ms": (0.0, 50.0, 200.0)}), against=ddp(SLOW_WIRE), looks=SOONER,
    ),
    Claim(
        method="Gossip, ring", source="abstract of Gan et al., 2021, and its study of trade-offs",
        paper="The higher the latency, the more decentralised training gains over an all-reduce.",
        row=row(LATENCY, "Gossip", {"rate": FOUR, "every": (1, 2, 4)}, fixed={"graph": "ring"}), against=ddp(LATENCY), looks=SOONER,
    ),
    Claim(
        method="StochasticGradientPush", source="abstract of an earlier version of Assran et al., 2019",
        paper="Three times as fast as all-reduces over Ethernet, within 1.2 points of accuracy.",
        row=row(NARROW, "StochasticGradientPush", {"rate": THREE, "overlap": (0, 1), "every": (1, 2)}), against=ddp(NARROW), looks=SOONER,
    ),
    Claim(
        method="LowPrecisionDecentralized", source="abstract of Gan et al., 2021, and its study of trade-offs",
        paper="The narrower the wire, the more low precision gains.",
        row=row(NARROW, "LowPrecisionDecentralized", {"rate": FOUR, "every": (1, 2, 4)}), against=ddp(NARROW), looks=SOONER,
    ),
    Claim(
        method="QAdam", source="abstract of Gan et al., 2021",
        paper="Of Bagua as a whole: up to twice as fast as DDP.",
        row=row(NARROW, "QAdam", {"rate": FOUR, "warmup": (30, 60, 120)}), against=ddp(NARROW), looks=SOONER,
    ),
    Claim(
        method="OneBitAdam", source="title of DeepSpeed's tutorial",
        paper="Up to 5 times less communication and up to 3.4 times as fast as Adam.",
        row=row(NARROW, "OneBitAdam", {"rate": FOUR, "warmup": (30, 60, 120)}), against=ddp(NARROW), looks=(*SOONER, Look("bytes", 2.0)),
    ),
    Claim(
        method="AdaAlter", source="abstract of Xie et al., 2019",
        paper="Fewer rounds cut training time by up to 30 % (1B Word).",
        row=row(SLOW_WIRE, "AdaAlter", {"rate": (100.0, 200.0, 400.0, 800.0), "every": (4, 8, 16)}),
        against=row(SLOW_WIRE, "AdaAlter", {"rate": tuple(200 * r for r in RATES)}, fixed={"every": 1}), looks=SOONER,
    ),
    Claim(
        method="AsyncServer", source="logs that Sync-Switch's authors released",
        paper="Asynchronous training was 6.6 times as fast as synchronous, and 2.7 points less accurate.",
        row=row(UNEVEN, "AsyncServer", {"rate": FOUR, "weight": ("mean", "sum", "staleness")}), against=ddp(UNEVEN), looks=SOONER,
    ),
    Claim(
        method="SyncSwitch", source="abstract of Li et al., 2021, and its logs",
        paper="Up to 5.13 times the throughput of synchronous training at a similar accuracy.",
        row=row(UNEVEN, "DDP", {"rate": THREE, "policy.fraction": (0.0625, 0.125, 0.25, 0.5)}, policy={"SyncSwitch": {}}), against=ddp(UNEVEN), looks=SOONER,
    ),
    Claim(
        method="DABMD", source="abstract of Eshraghi and Liang, 2020",
        paper="Faster than the best alternative if nodes differ in speed.",
        row=row(UNEVEN, "DABMD", {"rate": THREE, "window": (25.0, 50.0), "rounds": (1, 2)}), against=ddp(UNEVEN), looks=SOONER,
    ),
    Claim(
        method="TEASQFed", source="abstract of Jia et al., 2023",
        paper="Up to 16.67 points more accurate and up to twice as fast as other federated training, with clients that see different classes.",
        row=row(SKEWED, "TEASQFed", {"rate": THREE, "mixing": (0.5, 0.8), "density": (0.25, 1.0)}),
        against=row(SKEWED, "LocalSGD", {"rate": FOUR, "every": (4, 8, 16)}), looks=(Look("points", 0.28),),
    ),
    Claim(
        method="AdaComm", source="abstract of Wang and Joshi, 2019",
        paper="Three times less time than fully synchronous SGD to the same training loss.",
        row=row(SLOW_WIRE, "LocalSGD", {"rate": FOUR, "every": (8, 16, 32)}, policy={"AdaComm": {}}), against=ddp(SLOW_WIRE), looks=SOONER,
    ),
    Claim(
        method="GraVAC", source="abstract of Tyagi and Swany, 2023",
        paper="2 to 6.7 times less time than with a fixed ratio, at the accuracy of dense SGD.",
        row=row(NARROW, "DDP", {"rate": FOUR, "policy.threshold": (0.5, 0.75, 0.9)}, codec={"TopK": {"density": 0.1}}, policy={"GraVAC": {}}),
        against=row(NARROW, "DDP", {"rate": FOUR, "codec.density": (0.01, 0.03, 0.1)}, codec={"TopK": {}}), looks=SOONER,
    ),
    Claim(
        method="Hogwild", source="abstract of Niu et al., 2011",
        paper="If gradients are sparse, ranks may overwrite each other: ten times as fast as with locks, with a nearly optimal convergence rate.",
        row=row(CLICKS, "Hogwild", {"rate": RATES}), against=ddp(CLICKS), looks=(Look("pace", 1.05), Look("loss", 0.99)),
    ),
    *(
        Claim(
            method=name, source="abstract of Zheng et al., 2020",
            paper="Throughput grows linearly with the trainers. Its loss against foreground averaging: [training methods](benchmarks/methods.md).",
            row=row(SIXTEEN, name, {}), against=row(TWO, name, {}), looks=(Look("pace", 7.6),),
        )
        for name in ("ShadowMA", "ShadowBMUF", "ShadowEASGD")
    ),
    Claim(
        method="DDP", source="abstract of Li et al., 2020", paper="Near-linear scaling to 256 GPUs.",
        row=ddp(FAST_SIXTEEN, bucket_mb=(0.25, 0.5, 1.0, 2.0)), against=ddp(FAST_TWO, bucket_mb=(0.25, 0.5, 1.0, 2.0)), looks=(Look("pace", 7.2),),
        because=Because(words="The part of the exchange that backward does not hide grows with the ranks: 30 latencies instead of 2, and nearly twice the bytes", regime=NO_WIRE_SIXTEEN, against=NO_WIRE_TWO),
    ),
    Claim(
        method="ByteScheduler", source="abstract of Peng et al., 2019",
        paper="Up to 2.96 times the speed of training that sends in the order of the backward.",
        row=row(EVEN, "ByteScheduler", {"bucket_mb": (0.25, 0.5, 1.0), "partition_mb": (0.1, 0.25), "credit_mb": (0.25, 0.5)}),
        against=ddp(EVEN, bucket_mb=tuple(0.05 * 2**n for n in range(12))), looks=(Look("pace", 1.05),),
    ),
    Claim(
        method="Wavelet", source="abstract of Wang et al., 2021", paper="Up to 6.7 times as fast as common ways of parallel training.",
        row=row(EVEN, "Wavelet", {"bucket_mb": tuple(0.05 * 2**n for n in range(6)), "lead": (1, 2)}),
        against=row(EVEN, "DDP", {"bucket_mb": tuple(0.05 * 2**n for n in range(12))}, fixed={"accumulate": 2}), looks=(Look("pace", 1.05),),
        because=Because(words="In the paper one wave uses what the other wave leaves idle on a GPU. Here the two waves take turns on one device, so two batches take twice the compute time of one", regime=NO_WIRE_EVEN, same=True),
    ),
)  # fmt: skip
