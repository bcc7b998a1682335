"""Facts about single compressors, in addition to their claims, for the laws.

An entry makes a law stricter (the paper's formula for bytes) or exempts a compressor with a reason. A compressor
without an entry must still pass every law.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.compressors import Dense
from workbench.fabric import traffic
from workbench.rank import Bucket, Part

# A compressor and a strategy only meet in `reduce`. So one compressor per kind of exchange runs with every strategy,
# the other compressors with DDP and LocalSGD.
KINDS = ("ByteGrad", "Cast", "Dense", "ErrorFeedback", "OneBit", "PowerSGD", "TopK", "Zen")

# delta of a contraction, ||x - C(x)||^2 <= (1 - delta) ||x||^2, for n elements with the usual knobs; else 1/n
DELTA: dict[str, Callable[[Any, int], float]] = {
    "E3M0": lambda codec, n: 1 - 1 / 9 - 1 / 64,
    "EFSignSGD": lambda codec, n: 1 / n,
    "SampledTopK": lambda codec, n: 0.98 * max(1, round(codec.density * n)) / n,
    "SIDCo": lambda codec, n: 1 / n,
    "TopK": lambda codec, n: max(1, round(codec.density * n)) / n,
}


def reduced(nbytes: int, p: int) -> int:
    """Returns the bytes of one all-reduce."""
    return traffic("all_reduce", nbytes, p)[0]


def largest(bucket: Bucket, density: float = 0.01) -> int:
    """Returns how many entries of a bucket are kept."""
    return max(1, round(density * bucket.data.numel()))


def two_hops(bucket: Bucket, p: int, bits: int, head: int) -> int:
    """Returns the bytes of codes of `bits` and `head` bytes per chunk, to the summing rank and from there to all
    ranks.
    """
    chunk = -(-bucket.data.numel() // p)
    return 2 * (p - 1) * (head + -(-chunk * bits // 8))


def scaled_bytes(bucket: Bucket, p: int, block: int) -> int:
    """Returns the bytes in two hops: one per element and 4 for each block of equal length."""
    chunk = -(-bucket.data.numel() // p)
    k = -(-chunk // block)
    return 2 * (p - 1) * (4 * k + k * -(-chunk // k))


def gathered_codes(bucket: Bucket, p: int, bits: int, block: int) -> int:
    """Returns the bytes of an all-to-all of codes of `bits`, with 4 bytes per block."""
    n = bucket.data.numel()
    blocks = -(-n // block)
    return (p - 1) * (4 * blocks + -(-blocks * -(-n // blocks) * bits // 8))


def few_bits(k: int, p: int, bits: int, block: int) -> int:
    """Returns the bytes of an all-to-all of k indices and k values as codes of `bits`, with 4 bytes per block."""
    blocks = -(-k // block)
    return (p - 1) * (4 * k + 4 * blocks + -(-blocks * -(-k // blocks) * bits // 8))


def sides(part: Part, worth: Callable[[int, int], bool]) -> tuple[int, int, bool]:
    """Returns a parameter's sides as a matrix, and whether ranks send it as factors."""
    n = part.shape[0]
    m = (part.stop - part.start) // n
    return n, m, worth(n, m)


def factors(bucket: Bucket, p: int, r: int) -> int:
    """Returns the bytes of two factors with r columns per matrix; parameters that factors would not halve go whole.

    The whole parameters travel with the first factors.
    """
    first = second = 0
    for part in bucket.parts:
        n, m, worth = sides(part, lambda n, m: r < min(n, m) and 2 * r * (n + m) < n * m)
        first += 4 * (n * r if worth else n * m)
        second += 4 * m * r * worth
    return reduced(first, p) + reduced(second, p)


def pairs(n: int, p: int, density: float) -> int:
    """Returns the bytes of an all-gather of the kept elements' indices and values."""
    return 2 * traffic("all_gather", 4 * max(1, round(density * n)), p)[0]


def by_layers(bucket: Bucket, p: int, smallest: int, density: float) -> int:
    """Returns the bytes of pairs for the large matrices together, with the remaining parameters whole."""
    sizes = [(part.stop - part.start, len(part.shape) > 1) for part in bucket.parts]
    large = sum(n for n, matrix in sizes if matrix and n >= smallest)
    rest = sum(n for n, matrix in sizes if not (matrix and n >= smallest))
    return (pairs(large, p, density) if large else 0) + (reduced(4 * rest, p) if rest else 0)


def cheapest(bucket: Bucket, p: int, kept: float) -> int:
    """Returns Zen's bytes: counts, then its cheapest scheme if ranks choose at random; p is a power of two."""
    n = bucket.data.numel()
    units = sum(part.shape[0] if len(part.shape) > 1 else part.stop - part.start for part in bucket.parts)
    k, v = max(1, round(kept * units)), max(1, round(kept * n))
    u = [units * (1 - (1 - k / units) ** j) for j in range(1, p + 1)]

    def message(count: float, slices: int = 1) -> int:
        return round(4 + 4 * count / slices + 4 * v * count / k / slices)

    told = 8 * (p - 1)
    return 4 * told + min(
        reduced(bucket.nbytes, p),
        (p - 1) * message(u[0]),
        sum(told + message(u[2**i - 1]) for i in range(p.bit_length() - 1)),
        sum(told + message(count, p) for count in u[:-1]) + told + (p - 1) * message(u[-1], p),
        p * told + (p - 1) * message(u[0], p) + told + (p - 1) * (-(-units // p // 8) + round(4 * v * u[-1] / k / p)),
    )


def chosen(bucket: Bucket, p: int, kept: float) -> int:
    """Returns the bytes of a count, then an index and a value for each kept entry, to every other rank."""
    return (p - 1) * (8 + 8 * round(kept * bucket.data.numel()))


def survivors(bucket: Bucket, p: int, kept: float, whole: float) -> int:
    """Returns the bytes: a head of 16, pairs for entries sent whole, an index and a bit for each other entry."""
    n = bucket.data.numel()
    pair = round(whole * n)
    rest = round(kept * n) - pair
    return (p - 1) * (16 + 8 * pair + 4 * rest + -(-rest // 8))


def right_factors(bucket: Bucket, p: int, r: int) -> int:
    """Returns the bytes of one all-reduce of each matrix's right factor and of whole parameters."""
    total = 0
    for part in bucket.parts:
        n, m, worth = sides(part, lambda n, m: r < min(n, m) and 2 * r * (n + m) / 2 < n * m)
        total += 4 * (m * r if worth else n * m)
    return reduced(total, p)


# Samples that a varying compressor records per bucket, for its formula below; default: the density
NOTED: dict[str, tuple[str, ...]] = {"Wangni": ("density", "whole")}

# bytes that one of p ranks sends for a bucket with the usual knobs; `kept` is the share of elements that it chose.
# A Codec needs no line: its formula is what `encode` returns, and another law checks it.
SENT: dict[str, Callable[..., int]] = {
    "Accordion": lambda b, p, kept: factors(b, p, 2),
    "ACPSGD": lambda b, p, kept: right_factors(b, p, 4),  # in the fourth step
    "ALQ": lambda b, p, kept: gathered_codes(b, p, 3, 8192),
    "AMQ": lambda b, p, kept: gathered_codes(b, p, 3, 8192),
    "ByteGrad": lambda b, p, kept: two_hops(b, p, 8, 8),
    "Dense": lambda b, p, kept: reduced(b.nbytes, p),
    "DGC": lambda b, p, kept: (p - 1) * (8 + 8 * round(kept * b.data.numel())),
    "EFSignSGD": lambda b, p, kept: (p - 1) * (4 + -(-b.data.numel() // 8)),
    "ErrorFeedback": lambda b, p, kept: reduced(b.nbytes, p),
    "Float8": lambda b, p, kept: scaled_bytes(b, p, 256),
    "GTopK": lambda b, p, kept: 8 * largest(b) * (p.bit_length() - 1),  # p is a power of two
    "Layers": lambda b, p, kept: by_layers(b, p, 1024, 0.01),
    "LGreCo": lambda b, p, kept: pairs(b.data.numel(), p, 0.01),
    "NUQSGD": lambda b, p, kept: gathered_codes(b, p, 4, 512),
    "OkTopK": lambda b, p, kept: 8 * (p - 1) * (p + 2) + 8 * round(kept * b.data.numel() * (2 * (p - 1) / p)),
    "OneBit": lambda b, p, kept: two_hops(b, p, 1, 4),
    "PowerSGD": lambda b, p, kept: factors(b, p, 4),
    "QSGD": lambda b, p, kept: gathered_codes(b, p, 4, 512),
    "Quantised": lambda b, p, kept: few_bits(largest(b), p, 4, 64),
    "RandomK": lambda b, p, kept: reduced(4 * max(1, round(0.01 * b.data.numel())), p),
    "SampledTopK": lambda b, p, kept: chosen(b, p, kept),
    "ScaleCom": lambda b, p, kept: traffic("broadcast", 4 * largest(b), p)[0] + reduced(4 * largest(b), p),
    "SIDCo": lambda b, p, kept: chosen(b, p, kept),
    "SignSGD": lambda b, p, kept: two_hops(b, p, 1, 2),
    "TernGrad": lambda b, p, kept: reduced(4 * len(b.parts), p) + reduced(-(-b.data.numel() // 2), p),
    "Threshold": lambda b, p, kept: chosen(b, p, kept),
    "Wangni": lambda b, p, kept, whole=0.0: survivors(b, p, kept, whole),
    "WarmUp": lambda b, p, kept: reduced(b.nbytes, p),
    "Zen": lambda b, p, kept: cheapest(b, p, kept),
}

FITTED = ("ALQ", "AMQ")
ONE_HOP = ("E3M0", "EFSignSGD", "NUQSGD", "Projection", "QSGD", "Quantised", "TopK")  # each payload goes to all ranks
FEATURES = ("Projection",)  # a tensor's last dimension has features, so a flat tensor is a different one

# (compressor, knob): other settings that the knob needs to have an effect, and the value to set
TURNED: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {
    ("BetweenSites", "of"): ({"site": 1}, Dense()),  # two ranks are one site, which compresses nothing
    **{(name, knob): ({knob: 6}, 10**6) for name in FITTED for knob in ("fit_first", "fit_second", "fit_every")},
    **{(name, "samples"): ({"fit_first": 6, "block": 64}, 1) for name in FITTED},
    ("Accordion", "every"): ({"threshold": 1e6}, 1),
    ("Accordion", "harsh"): ({"every": 1, "threshold": 1e6}, "TopK"),
    ("Accordion", "threshold"): ({"every": 1, "threshold": 0.0}, 1e6),
    ("ACPSGD", "rank"): ({}, 8),  # the highest value exceeds every matrix of the model and is refused
    ("ACPSGD", "warm_start"): ({}, False),
    ("ByteGrad", "stochastic"): ({}, True),  # a switch has no far end
    ("DGC", "local_clip"): ({}, 1e-3),
    ("DGC", "masking"): ({}, False),
    ("DGC", "nesterov"): ({}, True),
    ("DGC", "sample"): ({"density": 0.05}, 1.0),
    ("Float8", "stochastic"): ({}, True),
    ("Layers", "only"): ({}, "bias"),
    ("Layers", "vectors"): ({"smallest": 0}, True),
    ("LGreCo", "budget"): ({"every": 2}, 10.0),
    ("LGreCo", "every"): ({"budget": 10.0}, 1),
    ("LGreCo", "spread"): ({"every": 2, "budget": 10.0}, 64.0),
    ("OkTopK", "region_every"): ({}, 1),
    ("OkTopK", "threshold_every"): ({}, 1),
    ("PowerSGD", "rank"): ({}, 8),
    ("PowerSGD", "warm_start"): ({}, False),
    ("Quantised", "by"): ({}, "ByteGrad"),
    ("Quantised", "of"): ({}, "Cast"),
    ("Quantised", "scaled"): ({}, True),
    ("RandomK", "scaled"): ({}, True),
    ("ScaleCom", "beta"): ({}, 0.1),
    ("TernGrad", "clip_rms"): ({}, 1.0),  # ten root mean squares clip nothing in a small layer
    ("TernGrad", "one_scale"): ({}, False),
    ("Wangni", "variance"): ({"rule": "variance"}, 4.0),
    ("WarmUp", "of"): ({"steps": 1}, "TopK"),
    ("WarmUp", "schedule"): ({}, "exponential"),
    ("WarmUp", "stages"): ({"schedule": "exponential"}, 1),
    ("WarmUp", "steps"): ({}, 1),
    ("Zen", "rows"): ({"scheme": "gather"}, "elements"),  # a dense sum has no index for one or several elements
}

# (compressor, knob): why the knob has no effect yet, and the test that shows its effect
LATER: dict[tuple[str, str], str] = {
    ("ErrorFeedback", "off"): "acts when the compressor is left: tests/unit/test_leaving.py",
    ("ErrorFeedback", "over"): "acts when the compressor is left: tests/unit/test_leaving.py",
}

# compressors that lose nothing at first, or in a small bucket: settings with which they do
LOSING: dict[str, dict[str, Any]] = {
    "Layers": {"smallest": 0},
    "Threshold": {"threshold": 10.0},
    "WarmUp": {"steps": 1},
}

# compressors with a rounded sum that no residual knows: the relative loss allowed to error feedback
ROUNDS: dict[str, float] = {"Cast": 5e-3}
