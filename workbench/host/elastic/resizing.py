"""The first half of a resize: assembles the state while all old ranks are still present.

It is the leaving half of a switch of strategy. Then a generation begins (`host/elastic/reentry.py`): the ranks that
stay hold the whole state, and new ranks receive it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.compressors import inside
from workbench.compressors._range import wide
from workbench.host.passes.pipelining import drained
from workbench.host.transfer import handover, own
from workbench.host.transfer.lying import WHOLE, Lying
from workbench.host.transfer.repartition import repartition
from workbench.host.transfer.views import Changing
from workbench.rank import Bucket


async def come_together(run: Changing, stay: tuple[int, ...]) -> None:
    """Gives every rank the whole model and completes what its strategy has in flight. stay: places that go on"""
    was = run.experiment
    await drained(run.flow)
    if was.strategy.in_flight:
        await was.strategy.drain(run.rank.replicas, run.state)
    with run.switching(was, was):
        if was.strategy.opaque:
            await run.leave_opaque()
        else:
            lies = handover.cut(run, was.strategy)
            await was.strategy.recall(run.rank.replicas, run.state)
            await run.reading.unshard()
            await run.leave(was.strategy)
            await handover.reshard(run, lies, None)
            await handover.consolidate(run, was.strategy)
            await handover.spread(run, was.strategy)
        if run.spread is not None:
            await own.carry(run, run.spread, None)
            await repartition(run, Lying(run.spread), WHOLE)
        await bequeath(run, stay)


async def bequeath(run: Changing, stay: tuple[int, ...]) -> None:
    """Moves the residuals of leaving ranks, which are parts of a sum, to the ranks that `stay` in turn."""
    rank, memory = run.rank, run.rank.memory
    rules = {buffer: rule for one in inside(run.experiment.compressor) for buffer, rule in one.own.items()}
    for buffer in sorted(name for name, rule in rules.items() if rule == "sum"):
        if not any(await run.gather(int(buffer in memory.buffers))):
            continue
        for number, source in enumerate(place for place in range(rank.size) if place not in stay):
            for bucket in run.layout.params():
                owed = _owed(memory.buffers.get(buffer, {}), bucket)
                await rank.broadcast(owed, source, buffer)
                if rank.id == stay[number % len(stay)]:
                    memory.flat(buffer, bucket, owed.dtype).add_(owed)


def _owed(pieces: dict[str, Tensor], bucket: Bucket) -> Tensor:
    """Returns a copy of this rank's part of a buffer for a bucket: (n,) in fp32 at least; 0 if it has none."""
    whole = torch.zeros_like(bucket.data, dtype=wide(bucket.data.dtype))
    for part in bucket.parts:
        if part.name in pieces:
            whole[part.start : part.stop] = pieces[part.name]
    return whole
