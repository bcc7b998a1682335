"""Makes one image of the whole run, for another number of ranks.

All ranks leave their strategy and gather the whole model into the first rank's image. Heirs inherit compression
residuals by their owner's rule (see "The hand-over" in workbench/DESIGN.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from workbench.compressors import inside
from workbench.host.checkpoint.checkpoint_view import CheckpointView
from workbench.host.checkpoint.rank_image import RankImage, list_untrained, locate_parameters
from workbench.host.checkpoint.restore import OUTER_MOMENTUM, OWED_RESIDUALS
from workbench.host.checkpoint.value_encoding import encode_value
from workbench.host.passes.pipelining import drain_pipeline
from workbench.host.placement.optimizer_slots import read_settings, read_slots
from workbench.host.reconfigure import changes
from workbench.host.reconfigure.validation import has_other_layout
from workbench.host.transfer import handover, rank_state
from workbench.host.transfer.handover import average_tensors
from workbench.host.transfer.repartition import repartition_state
from workbench.host.transfer.state_layout import WHOLE, StateLayout
from workbench.partitions import Whole

Shares = dict[str, dict[str, Tensor]]  # by buffer, parameter


async def gather_model(run: CheckpointView) -> tuple[Any, dict[str, str], Shares]:
    """Gathers the whole model on all ranks, and resets the strategy.

    Returns an outer momentum, each compressor buffer's rule, and this rank's share of each buffer.
    """
    was, replicas = run.experiment, run.rank.replicas
    wanted = replace(was, partition=Whole())
    await drain_pipeline(run.micros_in_flight)
    if was.strategy.in_flight:
        await was.strategy.drain(replicas, run.state)
    await changes.make_state_canonical(run, was, wanted, handover.find_shards(run, was.strategy), ())
    momentum = was.strategy.hands_on(replicas, run.state)
    if has_other_layout(was, wanted):
        await rank_state.migrate_rank_state(run, run.spread, None)
        momentum = (await repartition_state(run, StateLayout(run.spread), WHOLE, momentum)).outer
    elif run.rank.size > 1:
        await average_tensors(run.rank, [b for _, b in run.model.named_buffers() if b.numel()], "buffers")
    run.experiment = wanted
    rules = {
        name: rule for one in inside(was.compressor) for name, rule in one.own.items() if rule in rank_state.MOVED_RULES
    }
    shares = {name: {of: x.clone() for of, x in run.rank.memory.buffers[name].items()}
              for name in rules if name in run.rank.memory.buffers}  # fmt: skip
    run.enter_strategy(was, wanted)
    return momentum, rules, shares


def make_whole_image(run: CheckpointView, momentum: Any, rules: dict[str, str], shares: Sequence[Shares], size: int,
             used: int) -> RankImage:  # fmt: skip
    """Returns an image for `size` ranks to resume from.

    shares: of each former rank
    used:   examples used up
    """
    image = RankImage(run.rank.step)
    said, optimizer = image.entries, run.optimizer
    said["step"], said["used"] = image.step, used
    said["parameters"] = {
        name: image.add_tensor(f"model.{name}", x, tuple(x.shape)) for name, x, _ in locate_parameters(run)
    }
    said["beside"] = {name: image.add_tensor(f"model.{name}", x, tuple(x.shape)) for name, x in list_untrained(run)}
    said["slots"] = {name: [image.add_tensor(f"optimizer.{name}", x, tuple(x.shape)), list(x.shape), x.device.type]
                     for name, x in read_slots(run.layout, optimizer).items()}  # fmt: skip
    owed = {rank: inherit_shares(rank, size, rules, shares) for rank in range(size)}
    said["frozen"] = run.layout.frozen_names
    rest = {"groups": read_settings(optimizer), "others": {}, "rate": vars(run.rate),
            "first": run.non_finite_guard.first,
            "more": {OUTER_MOMENTUM: momentum,
                     OWED_RESIDUALS: {rank: found for rank, found in owed.items() if found}}}  # fmt: skip
    for name, x in rest.items():
        said[name] = encode_value(x, image.add_own, name)
    return image


def find_heir(number: int, count: int, size: int) -> int:
    """Returns which of `size` ranks inherits the share of replica `number` of `count`."""
    return number * size // count


def inherit_shares(rank: int, size: int, rules: dict[str, str], shares: Sequence[Shares]) -> Shares:
    """Returns the shares that rank `rank` of `size` inherits.

    shares: of each former replica
    """
    found: Shares = {}
    for number, share in enumerate(shares):
        for name, pieces in share.items():
            mine = find_heir(number, len(shares), size) == rank
            part = 1.0 / len(shares) if rules[name] == "mean" else 1.0
            for of, x in pieces.items() if mine or rules[name] == "mean" else ():
                known = found.setdefault(name, {})
                known[of] = known[of] + part * x if of in known else part * x
    return found
