"""Continues indexed data after the ranks or the batch size have changed.

The order of examples depends only on the seed. Ranks draw from it in turn, so they only agree on the number of used
examples.
"""

from __future__ import annotations

from typing import Protocol

from workbench.tasks import Learner


class ReaderView(Protocol):
    """A data reader. used: examples that all ranks used"""

    @property
    def used(self) -> int: ...


class LearningView(Protocol):
    """A learning rank. reads: None if it draws no examples"""

    @property
    def learner(self) -> Learner: ...
    @property
    def reads(self) -> ReaderView | None: ...
    async def gather(self, number: int) -> list[int]: ...


async def count_used_up(run: LearningView) -> int:
    """Counts used examples at a common boundary; 0 if data have no index or no rank draws.

    The run leaves out examples that slower ranks have not drawn.
    """
    if not run.learner.indexed:
        return 0
    return max(await run.gather(run.reads.used if run.reads is not None else 0))


def describe_repeats(why: str) -> dict[str, str]:
    """Describes that an epoch may repeat examples."""
    return {"text": f"{why}, so examples may repeat or be skipped"}


NO_INDEX_TEXT = "the data start again on every rank, because ranks have no common order of examples to continue"
