"""One batch through a pipeline, as one of its stages lives it: the same coroutine on both hosts.

Two verbs of the hosts' own compute: Op("stage_forward", x, micro) answers with what the stage makes of a micro-batch,
on the last one its loss; Op("stage_backward", grad, micro) with the gradient of what came. All else are messages
between neighbours, posted as soon as they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from workbench.host.cutting import through
from workbench.partitions.schedules import Action
from workbench.rank import Op, Rank

LOSS = "loss"  # what the last stage tells the others of a batch


async def one_batch(rank: Rank, actions: list[Action], share: float) -> Tensor:
    """Forwards and backwards of one batch in the order of `actions`; the loss, the mean over its micro-batches.

    rank:  this rank among the stages of its replica
    share: what each micro-batch's loss counts, so that gradients add up to those of the batch
    """
    losses: list[Tensor] = []
    before, after, last = rank.index - 1, rank.index + 1, rank.size - 1
    for what, micro in actions:
        if what == "F":
            x = None if before < 0 else await _heard(rank, before, f"activation {micro}")
            made = await Op("stage_forward", x, micro)
            if rank.index == last:
                losses.append(made)
            else:
                await rank.send(made, after, f"activation {micro}")
        else:
            grad: Any = share if rank.index == last else await _heard(rank, after, f"gradient {micro}")
            came = await Op("stage_backward", grad, micro)
            if before >= 0:
                await rank.send(came, before, f"gradient {micro}")
    if rank.index < last:
        return await _heard(rank, last, LOSS)
    mean = sum(losses[1:], losses[0]) / len(losses)
    for other in range(last):
        await rank.send(mean, other, LOSS)
    return mean


async def evaluated(rank: Rank, parts: Sequence[nn.Module], *inputs: Any, **named: Any) -> Any:
    """What the whole model makes of these inputs, which all stages have: on all of them. Each computes its parts."""
    last = rank.size - 1
    if rank.index:
        x = through(parts, await _heard(rank, rank.index - 1, "activation"))
    else:
        x = through(parts, *inputs, **named)
    if rank.index < last:
        await rank.send(x, rank.index + 1, "activation")
        return await _heard(rank, last, "answer")
    for other in range(last):
        await rank.send(x, other, "answer")
    return x


async def _heard(rank: Rank, source: int, kind: str) -> Tensor:
    got = await rank.recv(None, source, kind)
    if got is None:
        raise ConnectionError(f"Connection closed by peer: stage {source}, of which {kind} was awaited")
    heard: Tensor = got[0]
    return heard
