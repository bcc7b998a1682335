"""Formulas for the bytes of sparse sums. The tests of Zen and its page use them."""

from __future__ import annotations


def by_formula(scheme: str, p: int, d: float) -> float:
    """Returns bytes per element if each rank has a share d of all elements at independent places."""

    def together(j: int) -> float:
        return 1 - (1 - d) ** j

    return {
        "dense": 8 * (p - 1) / p,
        "gather": 8 * d * (p - 1),
        "tree": 8 * sum(together(2**i) for i in range(p.bit_length() - 1)),
        "ring": 8 * (sum(map(together, range(1, p))) + (p - 1) * together(p)) / p,
        "owners": (p - 1) / p * (8 * d + 4 * together(p) + 1 / 8),
    }[scheme]
