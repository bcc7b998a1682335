"""The first half of a resize: assembles the state while all old ranks are present.

Then a generation begins (`host/elastic/reentry.py`), and new ranks receive the state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.compressors import inside
from workbench.compressors._range import wide
from workbench.host.passes.pipelining import drain_pipeline
from workbench.host.transfer import handover, rank_state
from workbench.host.transfer.change_view import ChangeView
from workbench.host.transfer.repartition import repartition_state
from workbench.host.transfer.state_layout import WHOLE, StateLayout
from workbench.rank import Bucket


async def gather_state(run: ChangeView, stay: tuple[int, ...]) -> None:
    """Gives every rank the whole model, with nothing in flight. stay: places that go on"""
    was = run.experiment
    await drain_pipeline(run.micros_in_flight)
    if was.strategy.in_flight:
        await was.strategy.drain(run.rank.replicas, run.state)
    with run.record_switch(was, was):
        if was.strategy.opaque:
            await run.leave_opaque()
        else:
            lies = handover.find_shards(run, was.strategy)
            await was.strategy.recall(run.rank.replicas, run.state)
            await run.unsharder.unshard_all()
            await run.leave(was.strategy)
            await handover.reshard_slots(run, lies, None)
            await handover.consolidate_state(run, was.strategy)
            await handover.spread_state(run, was.strategy)
        if run.spread is not None:
            await rank_state.migrate_rank_state(run, run.spread, None)
            await repartition_state(run, StateLayout(run.spread), WHOLE)
        await bequeath_residuals(run, stay)


async def bequeath_residuals(run: ChangeView, stay: tuple[int, ...]) -> None:
    """Moves leaving ranks' residuals with the rule "sum" to the ranks that `stay`, in turn."""
    rank, memory = run.rank, run.rank.memory
    rules = {buffer: rule for one in inside(run.experiment.compressor) for buffer, rule in one.own.items()}
    for buffer in sorted(name for name, rule in rules.items() if rule == "sum"):
        if not any(await run.gather(int(buffer in memory.buffers))):
            continue
        for number, source in enumerate(place for place in range(rank.size) if place not in stay):
            for bucket in run.layout.list_params():
                owed = _copy_residual(memory.buffers.get(buffer, {}), bucket)
                await rank.broadcast(owed, source, buffer)
                if rank.id == stay[number % len(stay)]:
                    memory.flat(buffer, bucket, owed.dtype).add_(owed)


def _copy_residual(pieces: dict[str, Tensor], bucket: Bucket) -> Tensor:
    """Returns (n,) in fp32 at least."""
    whole = torch.zeros_like(bucket.data, dtype=wide(bucket.data.dtype))
    for part in bucket.parts:
        if part.name in pieces:
            whole[part.start : part.stop] = pieces[part.name]
    return whole
