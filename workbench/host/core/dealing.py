"""How the examples of data that have an index go on among others than before: behind those that are used up.

The data's order, epoch after epoch, depends on the seed alone; ranks draw from it in turn. So all that must be agreed
when ranks die, come or go, or batches have another size, is one number: how many of it are used up.
"""

from __future__ import annotations

from typing import Any


async def used_up(run: Any) -> int:
    """How many that is where all ranks stand at one boundary; 0 where the data have no index, or nothing is drawn.

    What ranks that were behind have not drawn, since they keep no step in common, is left out.
    """
    if not run.learner.indexed:
        return 0
    return max(await run.gather(run.reads.used if run.reads is not None else 0))


def may_come_again(why: str) -> dict[str, str]:
    """What a Mark "data" says where nobody can promise that no example comes twice in an epoch."""
    return {"text": f"{why}, so examples may come again or be left out"}


NO_INDEX = "the data begin anew on every rank, for they go on from no place in an order that all have in common"
