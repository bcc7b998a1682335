# ruff: noqa: E501
"""The regimes of home_claims.py: a task, ranks, a network with faults, and the target loss of times."""

from __future__ import annotations

from dataclasses import replace

from tests.bench.home_rows import Regime
from workbench.fabric import Fabric, Link, Slow, TransientStraggler
from workbench.tasks import ByteGPT, ClickThrough, Digits

GPT = ByteGPT(layers=1, width=32, heads=4, context=32)
SMALL = Digits(width=8, hidden=64)
FASTEST = Link(bandwidth=10_000.0, latency=0.05)

SLOW_WIRE = Regime(
    name="slow wire",
    words="ByteGPT, 4 ranks, 100 Mbit/s and 5 ms",
    task=GPT,
    goal=2.3,
    fabric=Fabric(link=Link(bandwidth=100.0, latency=5.0)),
)
LATENCY = Regime(
    name="latency",
    words="ByteGPT, 8 ranks, 1 Gbit/s and 20 ms",
    task=GPT,
    ranks=8,
    steps=240,
    goal=2.3,
    fabric=Fabric(link=Link(bandwidth=1000.0, latency=20.0)),
)
NARROW = Regime(
    name="narrow wire",
    words="ByteGPT, 8 ranks, 10 Mbit/s and 0.1 ms",
    task=GPT,
    ranks=8,
    steps=240,
    goal=2.3,
    fabric=Fabric(link=Link(bandwidth=10.0, latency=0.1)),
)
STUMBLING = Regime(name="stumbles", words="ByteGPT, 8 ranks, 10 Gbit/s; a rank computes five times as long in a random 10 % of its steps", task=GPT, ranks=8, steps=240, goal=2.3,
                   fabric=Fabric(link=FASTEST, faults=(TransientStraggler(probability=0.1, factor=5.0),)))  # fmt: skip
UNEVEN = Regime(name="one slow rank", words="ByteGPT, 4 ranks, 10 Gbit/s; one computes four times as long", task=GPT, goal=2.3,
                fabric=Fabric(link=FASTEST, faults=(Slow(rank=1, factor=4.0),)))  # fmt: skip
SKEWED = Regime(name="skewed shards", words="Digits, 8 ranks, two or three digits per rank (Dirichlet, 0.1), 100 Mbit/s and 5 ms",
                task=Digits(width=8, hidden=64, shards="dirichlet", alpha=0.1), ranks=8, steps=240, looks=6, fabric=Fabric(link=Link(bandwidth=100.0, latency=5.0)))  # fmt: skip
BYTES = Regime(
    name="much to send",
    words="Digits with 0.4 M parameters, 4 ranks, 100 Mbit/s and 0.5 ms",
    task=Digits(),
    steps=200,
    goal=0.15,
    fabric=Fabric(link=Link(bandwidth=100.0, latency=0.5)),
)
NO_LATENCY = replace(
    BYTES,
    name="no latency",
    words="the same wire without latency",
    fabric=Fabric(link=Link(bandwidth=100.0, latency=0.0)),
)
LARGE = Regime(
    name="large batch",
    words="Digits, 16 ranks; a global batch has 512 of the 1,438 examples",
    task=SMALL,
    ranks=16,
    steps=90,
    looks=6,
    fabric=Fabric(link=FASTEST),
)
WARM = Regime(
    name="warm start",
    words="ByteGPT, 4 ranks, 2,000 steps after 500 of DDP, 100 Mbit/s and 5 ms",
    task=GPT,
    after=500,
    steps=2000,
    looks=6,
    fabric=SLOW_WIRE.fabric,
)
SITES = Regime(name="two sites", words="ByteGPT, 4 ranks on two sites; 10 Gbit/s within a site, 100 Mbit/s and 20 ms between the sites", task=GPT, goal=2.3,
               fabric=Fabric(link=FASTEST, site=2, between_bandwidth=100.0, between_latency=20.0))  # fmt: skip
CLICKS = Regime(
    name="sparse clicks",
    words="ClickThrough, where a batch touches few rows of the tables; 4 ranks on one host, 10 Gbit/s for DDP",
    task=ClickThrough(ids=2000),
    steps=300,
    goal=0.0,
    looks=6,
    fabric=Fabric(link=FASTEST),
)
ONE = Regime(
    name="one rank",
    words="ByteGPT, one rank, 1,280 steps",
    task=GPT,
    ranks=1,
    steps=1280,
    looks=6,
    fabric=Fabric(link=Link(bandwidth=1000.0, latency=0.1)),
)
EIGHT = Regime(
    name="eight ranks",
    words="ByteGPT, 8 ranks against one rank: as many examples in total, the same batch per rank, 1 Gbit/s and 0.1 ms",
    task=GPT,
    ranks=8,
    steps=160,
    looks=6,
    fabric=ONE.fabric,
)
ONE_LONGER = replace(ONE, name="one rank, longer", words="one rank, 5,120 steps", steps=5120)
EIGHT_LONGER = replace(EIGHT, name="eight ranks, longer", words="four times as many examples", steps=640)
TWO = Regime(
    name="two trainers",
    words="the same with 2",
    task=ByteGPT(),
    ranks=2,
    steps=60,
    real=False,
    fabric=Fabric(link=Link(bandwidth=1000.0, latency=0.1)),
)
SIXTEEN = Regime(
    name="sixteen trainers",
    words="ByteGPT with 0.7 M parameters, sizes only; 16 ranks against 2, 1 Gbit/s and 0.1 ms",
    task=ByteGPT(),
    ranks=16,
    steps=60,
    real=False,
    fabric=TWO.fabric,
)
EVEN = Regime(
    name="wire as long as compute",
    words="ByteGPT with 0.7 M parameters, sizes only; 4 ranks; an all-reduce takes about as long as the compute of a step",
    task=ByteGPT(),
    steps=60,
    real=False,
    fabric=Fabric(link=Link(bandwidth=4000.0, latency=0.02)),
)
FAST_TWO = replace(TWO, name="two ranks, fast wire", fabric=Fabric(link=Link(bandwidth=10_000.0, latency=0.02)))
FAST_SIXTEEN = replace(
    SIXTEEN,
    name="sixteen ranks, fast wire",
    words="ByteGPT with 0.7 M parameters, sizes only; 16 ranks against 2, 10 Gbit/s and 0.02 ms; the exchange takes about as long as backward",
    fabric=FAST_TWO.fabric,
)
NO_WIRE_TWO = replace(
    TWO, name="two ranks, hardly any wire", fabric=Fabric(link=Link(bandwidth=100_000.0, latency=0.002))
)
NO_WIRE_EVEN = replace(
    EVEN,
    name="hardly any wire",
    words="100 Gbit/s and 0.002 ms, where only compute is left",
    fabric=NO_WIRE_TWO.fabric,
)
NO_WIRE_SIXTEEN = replace(
    SIXTEEN, name="sixteen ranks, hardly any wire", words="100 Gbit/s and 0.002 ms", fabric=NO_WIRE_TWO.fabric
)
