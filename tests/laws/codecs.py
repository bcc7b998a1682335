"""What each shipped compressor must claim, and what it sends: the laws hold it to both. One line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.fabric import traffic
from workbench.ops import Bucket

CLAIMS = ("linear", "unbiased", "contraction", "immediate", "varies")

# name: its claims among CLAIMS
EXPECTED = {
    "ByteGrad": "",
    "Cast": "linear",
    "Dense": "linear unbiased immediate",
    "ErrorFeedback": "",
    "OneBit": "",
    "PowerSGD": "linear",
    "RandomK": "linear",
    "SIDCo": "contraction varies",
    "SampledTopK": "contraction varies",
    "Threshold": "varies",
    "TopK": "contraction",
    "Wangni": "unbiased varies",
}

# delta of a contraction, ||x - C(x)||^2 <= (1 - delta) ||x||^2, for n elements with the usual knobs
DELTA: dict[str, Callable[[Any, int], float]] = {
    "SIDCo": lambda codec, n: 1 / n,
    "SampledTopK": lambda codec, n: 0.98 * max(1, round(codec.density * n)) / n,
    "TopK": lambda codec, n: max(1, round(codec.density * n)) / n,
}


def reduced(nbytes: int, p: int) -> int:
    """One all-reduce."""
    return traffic("all_reduce", nbytes, p)[0]


def two_hops(bucket: Bucket, p: int, bits: int, head: int) -> int:
    """Codes of `bits` and `head` bytes per chunk, to the rank that adds up and from there to all."""
    chunk = -(-bucket.data.numel() // p)
    return 2 * (p - 1) * (head + -(-chunk * bits // 8))


def factors(bucket: Bucket, p: int, r: int) -> int:
    """Two thin factors of each matrix, r columns each, and what is not worth it whole."""
    first = second = 0
    for part in bucket.parts:
        numel = part.stop - part.start
        n = part.shape[0]
        m = numel // n
        worth = r * (n + m) < numel
        first += 4 * (n * r if worth else numel)
        second += 4 * m * r * worth
    return reduced(first, p) + reduced(second, p)


def pairs(bucket: Bucket, p: int, kept: float) -> int:
    """How many there are, then an index and a value for each, to every other rank."""
    return (p - 1) * (8 + 8 * round(kept * bucket.data.numel()))


def survivors(bucket: Bucket, p: int, kept: float, whole: float) -> int:
    """A head of 16 bytes, pairs for those that cross whole, an index and a bit for each of the others."""
    n = bucket.data.numel()
    pair = round(whole * n)
    rest = round(kept * n) - pair
    return (p - 1) * (16 + 8 * pair + 4 * rest + -(-rest // 8))


# what a compressor that varies notes of each bucket, as Samples, for its formula below; without a line: the density
NOTED: dict[str, tuple[str, ...]] = {"Wangni": ("density", "whole")}

# bytes that one of p ranks sends for a bucket with the usual knobs; `kept` is the share of elements that it chose.
# A Codec needs no line: its formula is what `encode` returns, which a law of its own checks.
SENT: dict[str, Callable[..., int]] = {
    "ByteGrad": lambda b, p, kept: two_hops(b, p, 8, 8),
    "Dense": lambda b, p, kept: reduced(b.nbytes, p),
    "ErrorFeedback": lambda b, p, kept: reduced(b.nbytes, p),
    "OneBit": lambda b, p, kept: two_hops(b, p, 1, 4),
    "PowerSGD": lambda b, p, kept: factors(b, p, 4),
    "RandomK": lambda b, p, kept: reduced(4 * max(1, round(0.01 * b.data.numel())), p),
    "SIDCo": lambda b, p, kept: pairs(b, p, kept),
    "SampledTopK": lambda b, p, kept: pairs(b, p, kept),
    "Threshold": lambda b, p, kept: pairs(b, p, kept),
    "Wangni": lambda b, p, kept, whole=0.0: survivors(b, p, kept, whole),
}

# (compressor, knob): settings without which the knob has nothing to act on, and the value that it is turned to
TURNED: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {
    ("RandomK", "scaled"): ({}, True),
    ("Wangni", "variance"): ({"rule": "variance"}, 4.0),
}

# compressors that are not put under error feedback, and why
NO_FEEDBACK: dict[str, str] = {
    "ErrorFeedback": "there is one residual, it is not fed back twice",
    "Wangni": "its noise is larger than the gradient, and would be fed back and grow",
}

# compressors whose own sum rounds, which no rank's residual knows of: what error feedback may lose, relatively
ROUNDS: dict[str, float] = {"Cast": 5e-3}
