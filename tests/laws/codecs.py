"""What each shipped compressor must claim, and what it sends: the laws hold it to both. One line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.fabric import traffic
from workbench.ops import Bucket, Part

CLAIMS = ("linear", "unbiased", "contraction", "immediate", "varies")

# name: its claims among CLAIMS
EXPECTED = {
    "ACPSGD": "linear",
    "ByteGrad": "",
    "Cast": "linear",
    "Dense": "linear unbiased immediate",
    "ErrorFeedback": "",
    "OneBit": "",
    "PowerSGD": "linear",
    "TopK": "contraction",
}

# delta of a contraction, ||x - C(x)||^2 <= (1 - delta) ||x||^2, for n elements with the usual knobs
DELTA: dict[str, Callable[[Any, int], float]] = {
    "TopK": lambda codec, n: max(1, round(codec.density * n)) / n,
}


def reduced(nbytes: int, p: int) -> int:
    """One all-reduce."""
    return traffic("all_reduce", nbytes, p)[0]


def two_hops(bucket: Bucket, p: int, bits: int, head: int) -> int:
    """Codes of `bits` and `head` bytes per chunk, to the rank that adds up and from there to all."""
    chunk = -(-bucket.data.numel() // p)
    return 2 * (p - 1) * (head + -(-chunk * bits // 8))


def sides(part: Part, worth: Callable[[int, int], bool]) -> tuple[int, int, bool]:
    """The sides of a parameter as a matrix, and whether it crosses the wire as factors."""
    n = part.shape[0]
    m = (part.stop - part.start) // n
    return n, m, worth(n, m)


def factors(bucket: Bucket, p: int, r: int) -> int:
    """Two thin factors of each matrix, r columns each, and what would not halve whole, beside the first."""
    first = second = 0
    for part in bucket.parts:
        n, m, worth = sides(part, lambda n, m: r < min(n, m) and 2 * r * (n + m) < n * m)
        first += 4 * (n * r if worth else n * m)
        second += 4 * m * r * worth
    return reduced(first, p) + reduced(second, p)


def right_factors(bucket: Bucket, p: int, r: int) -> int:
    """The right one of the factors of each matrix, and what would not halve whole, in one all-reduce."""
    total = 0
    for part in bucket.parts:
        n, m, worth = sides(part, lambda n, m: r < min(n, m) and 2 * r * (n + m) / 2 < n * m)
        total += 4 * (m * r if worth else n * m)
    return reduced(total, p)


# bytes that one of p ranks sends for a bucket with the usual knobs; `kept` is the share of elements that it chose.
# A Codec needs no line: its formula is what `encode` returns, which a law of its own checks.
SENT: dict[str, Callable[[Bucket, int, float], int]] = {
    "ACPSGD": lambda b, p, kept: right_factors(b, p, 4),  # in the fourth step
    "ByteGrad": lambda b, p, kept: two_hops(b, p, 8, 8),
    "Dense": lambda b, p, kept: reduced(b.nbytes, p),
    "ErrorFeedback": lambda b, p, kept: reduced(b.nbytes, p),
    "OneBit": lambda b, p, kept: two_hops(b, p, 1, 4),
    "PowerSGD": lambda b, p, kept: factors(b, p, 4),
}

# (compressor, knob): settings without which the knob has nothing to act on, and the value that it is turned to
TURNED: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {
    ("ACPSGD", "rank"): ({}, 8),  # the highest is above every matrix of the model, and refused
    ("ACPSGD", "warm_start"): ({}, False),
    ("PowerSGD", "rank"): ({}, 8),
    ("PowerSGD", "warm_start"): ({}, False),
}

# (compressor, knob): why turning it shows nothing yet, and where it is tested that it acts
LATER: dict[tuple[str, str], str] = {
    ("ErrorFeedback", "off"): "acts when the compressor is left: tests/unit/test_leaving.py",
    ("ErrorFeedback", "over"): "acts when the compressor is left: tests/unit/test_leaving.py",
}

# compressors that are not put under error feedback, and why
NO_FEEDBACK: dict[str, str] = {
    "ErrorFeedback": "there is one residual, it is not fed back twice",
}

# compressors whose own sum rounds, which no rank's residual knows of: what error feedback may lose, relatively
ROUNDS: dict[str, float] = {"Cast": 5e-3}
