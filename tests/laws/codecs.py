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
    "TopK": "contraction",
    "Zen": "unbiased varies",
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
    """Zen: counts, then what the cheapest of its schemes sends if ranks choose at random; p is a power of two."""
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


# bytes that one of p ranks sends for a bucket with the usual knobs; `kept` is the share of elements that it chose.
# A Codec needs no line: its formula is what `encode` returns, which a law of its own checks.
SENT: dict[str, Callable[[Bucket, int, float], int]] = {
    "ByteGrad": lambda b, p, kept: two_hops(b, p, 8, 8),
    "Dense": lambda b, p, kept: reduced(b.nbytes, p),
    "ErrorFeedback": lambda b, p, kept: reduced(b.nbytes, p),
    "OneBit": lambda b, p, kept: two_hops(b, p, 1, 4),
    "PowerSGD": lambda b, p, kept: factors(b, p, 4),
    "Zen": lambda b, p, kept: pairs(b, p, kept),
}

# (compressor, knob): settings without which the knob has nothing to act on, and the value that it is turned to
TURNED: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {
    ("Zen", "rows"): ({"scheme": "gather"}, "elements"),  # a dense sum has no index that could stand for more or less
}

# compressors that are not put under error feedback, and why
NO_FEEDBACK: dict[str, str] = {
    "ErrorFeedback": "there is one residual, it is not fed back twice",
}

# compressors whose own sum rounds, which no rank's residual knows of: what error feedback may lose, relatively
ROUNDS: dict[str, float] = {"Cast": 5e-3}
