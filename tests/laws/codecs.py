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
    "DGC": "varies",
    "Dense": "linear unbiased immediate",
    "ErrorFeedback": "",
    "GTopK": "",
    "OkTopK": "varies",
    "OneBit": "",
    "PowerSGD": "linear",
    "ScaleCom": "",
    "TopK": "contraction",
}

# delta of a contraction, ||x - C(x)||^2 <= (1 - delta) ||x||^2, for n elements with the usual knobs
DELTA: dict[str, Callable[[Any, int], float]] = {
    "TopK": lambda codec, n: max(1, round(codec.density * n)) / n,
}


def reduced(nbytes: int, p: int) -> int:
    """One all-reduce."""
    return traffic("all_reduce", nbytes, p)[0]


def largest(bucket: Bucket, density: float = 0.01) -> int:
    """How many entries of a bucket are kept."""
    return max(1, round(density * bucket.data.numel()))


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


# bytes that one of p ranks sends for a bucket with the usual knobs; `kept` is the share of elements that it chose.
# A Codec needs no line: its formula is what `encode` returns, which a law of its own checks.
SENT: dict[str, Callable[[Bucket, int, float], int]] = {
    "ByteGrad": lambda b, p, kept: two_hops(b, p, 8, 8),
    "DGC": lambda b, p, kept: (p - 1) * (8 + 8 * round(kept * b.data.numel())),
    "Dense": lambda b, p, kept: reduced(b.nbytes, p),
    "ErrorFeedback": lambda b, p, kept: reduced(b.nbytes, p),
    "GTopK": lambda b, p, kept: 8 * largest(b) * (p.bit_length() - 1),  # p is a power of two
    "OkTopK": lambda b, p, kept: 8 * (p - 1) * (p + 2) + 8 * round(kept * b.data.numel() * (2 * (p - 1) / p)),
    "OneBit": lambda b, p, kept: two_hops(b, p, 1, 4),
    "PowerSGD": lambda b, p, kept: factors(b, p, 4),
    "ScaleCom": lambda b, p, kept: traffic("broadcast", 4 * largest(b), p)[0] + reduced(4 * largest(b), p),
}

# (compressor, knob): settings without which the knob has nothing to act on, and the value that it is turned to
TURNED: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {
    ("DGC", "nesterov"): ({}, True),
    ("DGC", "masking"): ({}, False),
    ("DGC", "sample"): ({"density": 0.05}, 1.0),
    ("DGC", "local_clip"): ({}, 1e-3),
    ("OkTopK", "threshold_every"): ({}, 1),
    ("OkTopK", "region_every"): ({}, 1),
    ("ScaleCom", "beta"): ({}, 0.1),
}

# compressors that are not put under error feedback, and why
NO_FEEDBACK: dict[str, str] = {
    "DGC": "its velocity is the residual, in units of steps: tests/unit/test_dgc.py",
    "ErrorFeedback": "there is one residual, it is not fed back twice",
}

# compressors whose own sum rounds, which no rank's residual knows of: what error feedback may lose, relatively
ROUNDS: dict[str, float] = {"Cast": 5e-3}
