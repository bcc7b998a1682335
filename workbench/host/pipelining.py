"""One batch through a pipeline, as one of its stages lives it: the same coroutine on both hosts.

Two verbs of the hosts' own compute: Op("stage_forward", x, micro, chunk) answers with what a piece of the model makes
of a micro-batch, the last piece with its loss; Op("stage_backward", grad, micro, chunk) with the gradient of what
came. All else are messages between neighbours, posted as soon as they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from workbench.host.cutting import through
from workbench.partitions.schedules import Action
from workbench.rank import Op, Rank

LOSS = "loss"  # what the last stage tells the others of a batch


async def one_batch(rank: Rank, actions: list[Action], share: float, pieces: int = 1) -> Tensor:
    """Forwards and backwards of one batch in the order of `actions`; the loss, the mean over its micro-batches.

    rank:   this rank among the stages of its replica
    share:  what each micro-batch's loss counts, so that gradients add up to those of the batch
    pieces: of the model, on each stage
    """
    losses: list[Tensor] = []
    before, after = (rank.index - 1) % rank.size, (rank.index + 1) % rank.size
    for what, micro, chunk in actions:
        piece = chunk * rank.size + rank.index
        first, last = piece == 0, piece == pieces * rank.size - 1
        if what == "F":
            x = None if first else await _heard(rank, before, _named("activation", micro, piece, pieces))
            made = await Op("stage_forward", x, micro, chunk)
            if last:
                losses.append(made)
            else:
                await rank.send(made, after, _named("activation", micro, piece + 1, pieces))
        else:
            grad: Any = share if last else await _heard(rank, after, _named("gradient", micro, piece + 1, pieces))
            came = await Op("stage_backward", grad, micro, chunk)
            if not first:
                await rank.send(came, before, _named("gradient", micro, piece, pieces))
    if rank.index < rank.size - 1:
        return await _heard(rank, rank.size - 1, LOSS)
    mean = sum(losses[1:], losses[0]) / len(losses)
    for other in range(rank.size - 1):
        await rank.send(mean, other, LOSS)
    return mean


async def evaluated(rank: Rank, pieces: Sequence[Sequence[nn.Module]], *inputs: Any, **named: Any) -> Any:
    """What the whole model makes of these inputs, which all stages have: on all of them. Each computes its `pieces`."""
    last = rank.size - 1
    x: Any = None
    for number, parts in enumerate(pieces):
        if number or rank.index:
            x = through(parts, await _heard(rank, (rank.index - 1) % rank.size, "activation"))
        else:
            x = through(parts, *inputs, **named)
        if rank.index < last or number < len(pieces) - 1:
            await rank.send(x, (rank.index + 1) % rank.size, "activation")
    if rank.index < last:
        return await _heard(rank, last, "answer")
    for other in range(last):
        await rank.send(x, other, "answer")
    return x


def pass_name(phase: str, micro: int, chunk: int, pieces: int) -> str:
    """The name of a pass's Span: "forward 3"; "forward 3.1" through a stage's second piece, where there are several."""
    return f"{phase} {micro}" if pieces == 1 else f"{phase} {micro}.{chunk}"


def _named(what: str, micro: int, piece: int, pieces: int) -> str:
    """A message into a piece of the model, or back out of it."""
    return f"{what} {micro}" if pieces == 1 else f"{what} {micro} of piece {piece}"


async def _heard(rank: Rank, source: int, kind: str) -> Tensor:
    got = await rank.recv(None, source, kind)
    if got is None:
        raise ConnectionError(f"Connection closed by peer: stage {source}, of which {kind} was awaited")
    heard: Tensor = got[0]
    return heard
