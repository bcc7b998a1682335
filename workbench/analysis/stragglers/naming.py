"""The phase in which a rank is slow, and the sentence about it.

If forward, backward and update slow by about the same factor, the phase is "compute". Then the processor is slower or
shared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

COMPUTE = ("forward", "backward", "update")
STEADY = (*COMPUTE, "outside its phases")  # in every step
MEETING = ("codec", "link")  # only when ranks meet
WHOLE = "compute"
ALIKE = (0.4, 2.5)  # all compute is slow if every phase's slowdown over the total's is within these limits
MIN_COMPUTE_SHARE = 0.02  # of all compute: shorter phases are not compared
ALSO_NAMED_SHARE = 0.4  # of the longest excess, above which phases are also reported


class Slowness(NamedTuple):
    """One rank's excess over the other ranks, and its phases."""

    phase: str  # with the longest excess, or "compute"
    phases: tuple[str, ...]  # covered by `seconds`
    seconds: float  # per step


def find_slowness(excess: np.ndarray, usual: np.ndarray) -> Slowness:
    """Finds the phases in which a rank is slow.

    excess: `(6,)` seconds per step of STEADY and MEETING beyond the other ranks'
    usual:  `(3,)` the other ranks' seconds in each phase of compute
    """
    k = int(np.argmax(excess))
    names = (*STEADY, *MEETING)
    if k >= len(COMPUTE):
        return Slowness(names[k], (names[k],), float(excess[k]))
    compute, asked = excess[: len(COMPUTE)], usual > MIN_COMPUTE_SHARE * usual.sum()
    if asked.sum() > 1:
        slower = np.divide(compute, usual, out=np.zeros(len(COMPUTE)), where=asked)[asked]
        overall = compute[asked].sum() / usual[asked].sum()
        if (slower >= ALIKE[0] * overall).all() and (slower <= ALIKE[1] * overall).all():
            phases = tuple(name for name, here in zip(COMPUTE, asked, strict=True) if here)
            return Slowness(WHOLE, phases, float(compute.sum()))
    with_it = compute >= ALSO_NAMED_SHARE * compute[k]
    phases = tuple(name for name, here in zip(COMPUTE, with_it, strict=True) if here)
    return Slowness(names[k], phases, float(compute[with_it].sum()))


def describe_straggler(rank: int, s: Slowness, share: float, harm: float, victims: tuple[int, ...]) -> str:
    """Describes the slow rank.

    >>> describe_straggler(2, Slowness("forward", ("forward",), 0.04), 0.29, 0.04, (0,))[:80]
    "Rank 2 is the cause: its forward takes 40 ms longer than other ranks', 29 % of i"
    """
    cause = f"Rank {rank} is the cause: {_describe_phase(s)}, {share * 100:.0f} % of its step's time."
    match len(victims):
        case 0:
            return f"{cause} No rank has waited for it yet; other ranks will if they meet."
        case 1:
            return f"{cause} Rank {victims[0]} is a victim: it waits {harm * 1e3:.3g} ms per step for it."
    return f"{cause} Ranks {', '.join(map(str, victims))} are victims: each waits {harm * 1e3:.3g} ms per step for it."


def _describe_phase(s: Slowness) -> str:
    ms = f"{s.seconds * 1e3:.3g} ms longer than other ranks"
    match s.phase:
        case "link":
            return f"its port is busy {ms}"
        case "codec":
            return f"its compressing takes {ms}'"
        case "outside its phases":
            return f"outside forward, backward and update it takes {ms}"
        case "compute":
            return f"its compute as a whole ({join_names(s.phases)}) takes {ms}'"
    return f"its {join_names(s.phases)} take{'s' * (len(s.phases) == 1)} {ms}'"


def join_names(names: tuple[str, ...]) -> str:
    """Joins names with commas and "and".

    >>> join_names(("a", "b", "c")), join_names(("a",))
    ('a, b and c', 'a')
    """
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
