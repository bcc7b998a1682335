"""The memory budget of a rank's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workbench.experiment import Experiment
from workbench.experiment.memory_hints import suggest_less_memory
from workbench.host.core.rank_view import RankView

MB = 1e6
WHEN_STEP, WHEN_BETWEEN, WHEN_EVALUATED = "in a step", "between two steps", "while the model is evaluated"


class OutOfMemory(RuntimeError):
    """A device needs more than `memory_mb`. On real ranks it arrives as a RankError.

    What to do: raise `memory_mb`, or take settings that need less. `plan` lists pairs that fit.
    """

    def __init__(self, said: str, lack: MemoryShortage | None = None) -> None:
        super().__init__(said)
        self.lack = lack


@dataclass(frozen=True)
class MemoryShortage:
    """Missing memory.

    wanted: the experiment that needs it
    needed: bytes
    said:   the same as text
    enough: a sufficient budget
    when:   the moment of the peak
    """

    wanted: Experiment
    needed: int
    said: str
    enough: str
    when: str

    def make_message(self, now: Experiment | None = None, fits: Callable[[str, object], bool] | None = None) -> str:
        """Names settings that need less.

        now:  the experiment in force
        fits: whether a setting fits; None: cannot be tried
        """
        ways = ", ".join(suggest_less_memory(self.wanted, self.when != WHEN_STEP, now, fits))
        return f"{self.said}; take {f'{ways}, or ' if ways else ''}{self.enough}"


def require_fits(run: RankView, needed: int, of: Mapping[str, int], when: str) -> None:
    """Raises OutOfMemory if `needed` bytes exceed a rank's budget; of: bytes by category.

    The message names a sufficient budget only after the first step.
    """
    rank, e = run.rank.number(), run.experiment
    limit_mb = e.memory_mb
    if not limit_mb or needed <= limit_mb * MB:
        return
    parts = ", ".join(f"{name} {format_mb(nbytes)}" for name, nbytes in of.items() if nbytes >= 0.005 * needed)
    more = f"memory_mb={format_mb(1.05 * needed)}"
    if when != WHEN_STEP and (run.rank.step == 0 or not when.endswith(WHEN_EVALUATED)):
        more = f"memory_mb above {format_mb(needed)}; a step may need more"
    said = f"memory_mb={limit_mb:g}: rank {rank} needs {format_mb(needed)} MB {when} ({parts})"
    lack = MemoryShortage(e, needed, said, more, when)
    raise OutOfMemory(lack.make_message(), lack)


def format_mb(nbytes: float) -> str:
    """Returns MB with 3 significant digits or more.

    >>> format_mb(44_710_000), format_mb(1_234_900_000)
    ('44.7', '1235')
    """
    mb = nbytes / MB
    return f"{mb:.3g}" if mb < 999.5 else f"{mb:.0f}"
