"""What each shipped strategy must claim, and what it sends: the laws hold it to both. One line each."""

from __future__ import annotations

from collections.abc import Callable

from workbench.fabric import traffic

CLAIMS = ("exact", "lockstep", "periodic", "opaque", "shared", "staged")

# name: (its claims among CLAIMS, what it exchanges)
EXPECTED = {
    "AsyncModelAverage": ("periodic", "parameters"),
    "AsyncServer": ("periodic", "displacements"),
    "DDP": ("exact lockstep", "gradients"),
    "Gossip": ("lockstep periodic", "parameters"),
    "LocalSGD": ("lockstep periodic", "displacements"),
    "LowPrecisionDecentralized": ("lockstep periodic", "displacements"),
    "ShadowMA": ("periodic", "parameters"),
    "StochasticGradientPush": ("lockstep periodic", "parameters"),
    "TorchDDP": ("exact lockstep opaque", "gradients"),
}


def dense(sizes: list[int]) -> int:
    """One all-reduce of every bucket."""
    return sum(traffic("all_reduce", n, 4)[0] for n in sizes)


# bytes that rank 0 of 4 sends in step 7 with the usual knobs, from the buckets' bytes; dense for all others
SENT: dict[str, Callable[[list[int]], int]] = {
    "Gossip": lambda sizes: 2 * sum(sizes),
    "LowPrecisionDecentralized": lambda sizes: 2 * sum(n // 4 + 8 for n in sizes),
    "StochasticGradientPush": lambda sizes: sum(sizes) + 8,
}

# what the law of live knobs turns a knob to that takes any text, on two ranks
TEXTS = {"Gossip.edges": "0.9 0.1; 0.1 0.9", "StochasticGradientPush.edges": "0.9 0.3; 0.1 0.7"}

# strategies that are not the plain optimizer on one rank, and why
NOT_ALONE: dict[str, str] = {}

# strategies whose exit takes over an outer or centre value instead of the ranks' mean
ADOPTS: set[str] = set()

# strategies that round what they mix, so that the mean of the ranks moves while they come together
ROUNDS = {"LowPrecisionDecentralized"}
