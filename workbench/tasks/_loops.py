"""Loops that are not ours: which threads are in one, and what such a loop may ask of the workbench."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar, cast

from workbench.settings import KnobError, short

B = TypeVar("B")


class Led(Protocol):
    """The rank to which a loop belongs, as the loop sees it.

    place:   which rank it is, and of how many
    changes: made so far
    settled: are its steps over, and is its model what all ranks have together?
    """

    changes: list[Any]
    settled: bool

    @property
    def place(self) -> tuple[int, int]: ...

    def dealt(self, loader: Iterable[Any], model: Any, accumulate: int) -> Iterator[Any]:
        """This rank's share of one pass; `model` is what it trains."""

    def enter(self) -> None:
        """A block begins, at whose end `model` is to be what all ranks have together."""

    def leave(self, error: BaseException | None) -> bool:
        """It ends, by this `error`: waits until that is so. Is `error` how a rank that is done ends a loop?"""


LEADS: dict[int, Led] = {}  # by thread, whose loop runs on it


def leads() -> Any:
    """The rank whose loop runs on this thread; None where it is nobody's."""
    return LEADS.get(threading.get_ident())


def steps(loader: Iterable[B], model: Any, accumulate: int = 1) -> Iterator[B]:
    """One pass over `loader` in a loop of your own, which ranks then run together: `for x, y in steps(loader, model):`.

    In a process by itself that is `loader`, and nothing else. Under `workbench run train.py`, or in a `Loop`, each rank
    is given every so-manieth batch of the pass, in rank 0's order, and what `model` learns is exchanged: at the
    backward and the step of its optimizers, which the loop makes as ever. Batches that do not suffice for all ranks are
    left out at the end of a pass.

    loader:     a DataLoader, or anything that can be iterated again and yields the same on every rank
    model:      the Module that the loop calls; the first one that is given here, and no other
    accumulate: batches after which the loop's optimizers step: only the last one's backward is exchanged
    """
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or not 1 <= accumulate <= 10**6:
        raise KnobError(f"accumulate={short(accumulate)}: must be an integer in [1, 1000000] batches")
    rank = leads()
    return iter(loader) if rank is None else cast(Iterator[B], rank.dealt(loader, model, accumulate))
