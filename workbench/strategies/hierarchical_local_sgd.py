"""Hierarchical local SGD: groups average more often than all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.rank import Bucket, Rank
from workbench.settings import knob
from workbench.strategies import _grouped
from workbench.strategies._mean import mean_of_all
from workbench.strategies._slots import combine_slots
from workbench.strategies.post_local_sgd import PostLocalSGD, PostLocalState


class _State(PostLocalState):
    """PostLocalState plus the steps since this rank's group averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.since_group = 0


@dataclass(frozen=True, kw_only=True)
class HierarchicalLocalSGD(PostLocalSGD):
    """Ranks train alone. Groups average every `group_every` steps, and all ranks average every `every` steps.

        params_i <- optimizer_i(params_i, grad_i)                        every step
        params_i <- (1/g) sum_j in group(i) params_j                     every `group_every` steps
        params_i <- anchor + (1/p) sum_j (params_j - anchor)             every H steps, in place of the group's

    Each g = `group` consecutive ranks are a group (the mesh is "between" p/g × "within" g). A group's averaging sends 2
    (g-1)/g of the model's bytes uncompressed. The averaging of all ranks sends 2 (p-1)/p of them through the compressor
    and resets both counts. With `warmup` it begins as PostLocalSGD does.

    When to use it: some links are faster than others, for example within a host and between hosts.

    Reference: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020, https://arxiv.org/abs/1808.07217,
    section 5.2 and appendix D
    """

    warmup: int = knob(0, 0, 10**6, unit="steps", log=True, doc="steps of DDP first (post-local SGD); 0: none")
    group: int = knob(2, 1, 4096, unit="ranks", doc="g: ranks that average among themselves more often; 1: no groups")
    group_every: int = knob(1, 1, 256, unit="steps", log=True, doc="steps between two averagings within a group")

    def refuses_size(self, size: int) -> str | None:
        return _grouped.refuses(self.group, size)

    def dims(self, size: int) -> tuple[tuple[str, int], ...]:
        return (("data", size),) if self.group == 1 else _grouped.dims(self.group, size)

    def init(self, rank: Rank, params: list[Bucket]) -> Any:
        return _State()

    async def apart(self, rank: Rank, state: Any) -> None:
        state.since_group += 1
        await super().apart(rank, state)
        if self.group > 1 and state.since_group >= self.group_every:
            group = rank.group("within")
            await mean_of_all(group, await rank.params())
            await combine_slots(group, self.momentum)
            state.since_group = 0

    async def average(self, rank: Rank, state: Any) -> None:
        await super().average(rank, state)
        state.since_group = 0
