"""The interface between a user's own training loop and its rank."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar, cast

from workbench.settings import KnobError, short

B = TypeVar("B")


class LedRank(Protocol):
    """A loop's rank, as the loop sees it.

    rank_and_size: its rank and the number of ranks
    changes:       the changes made so far
    settled:       whether its steps are over and its model is the common result
    """

    changes: list[Any]
    settled: bool

    @property
    def rank_and_size(self) -> tuple[int, int]: ...

    def share_out_batches(self, loader: Iterable[Any], model: Any, accumulate: int) -> Iterator[Any]:
        """Returns this rank's share of one pass; `model` is the model that it trains."""

    def enter_block(self) -> None:
        """Begins a block, whose end makes `model` the common result of all ranks."""

    def leave_block(self, error: BaseException | None) -> bool:
        """Ends the block, by this `error` if any. Returns whether `error` only stops the loop."""


LED_RANKS: dict[int, LedRank] = {}  # by thread, the rank whose loop runs on it


def find_led_rank() -> Any:
    """Returns the rank whose loop runs on this thread, or None."""
    return LED_RANKS.get(threading.get_ident())


def steps(loader: Iterable[B], model: Any, accumulate: int = 1) -> Iterator[B]:
    """Returns one pass over `loader` in your own loop, which ranks run together: `for x, y in steps(loader, model):`.

    In a process alone this is `loader` itself. Under `workbench run train.py` or in a `Loop`, each of n ranks gets
    every n-th batch of the pass in rank 0's order. The ranks exchange what `model` learns at backward and at its
    optimizers' steps, which the loop calls as usual. A pass drops last batches that do not suffice for all ranks.

    loader:     a DataLoader, or an iterable that can be read again and yields the same on every rank
    model:      the Module that the loop calls, the same in every call
    accumulate: batches per step of the loop's optimizers; ranks exchange only in the last one's backward

    Raises KnobError if `accumulate` is no integer from 1 to 1,000,000.
    """
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or not 1 <= accumulate <= 10**6:
        raise KnobError(f"accumulate={short(accumulate)}: must be an integer in [1, 1000000] batches")
    rank = find_led_rank()
    return iter(loader) if rank is None else cast(Iterator[B], rank.share_out_batches(loader, model, accumulate))
