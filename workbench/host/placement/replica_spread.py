"""One replica of a model on several ranks: its layers in stages, its matrices in slices, or both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import nn

from workbench.experiment import Experiment
from workbench.host.placement.placement import Placement
from workbench.host.placement.stage_cuts import StageCuts, cut_model
from workbench.host.placement.strided_slices import StridedSlice
from workbench.host.placement.tensor_split import TensorSplit, split_model
from workbench.partitions import Partition
from workbench.tasks import Learner

_SPLITS = "workbench splits"  # the model's attribute


@dataclass(frozen=True)
class ReplicaSpread:
    """How a replica is spread over ranks.

    stages: None: every rank has all layers
    split:  how matrices are cut over a stage's ranks, which are neighbours; None: they are whole
    """

    stages: StageCuts | None = None
    split: TensorSplit | None = None

    def __len__(self) -> int:
        return (len(self.stages) if self.stages else 1) * (self.split.ways if self.split else 1)

    def __str__(self) -> str:
        ways = f"{self.split.ways} slices of each matrix" if self.split else ""
        ways += " and of each sequence" if self.split and self.split.splits_sequences else ""
        return f"{len(self.stages)} stages: {self.stages}{', and ' if ways else ''}{ways}" if self.stages else ways

    def locate_rank(self, rank: int) -> tuple[int, int]:
        return divmod(rank % len(self), self.split.ways if self.split else 1)

    def select_trained(self, rank: int, names: set[str]) -> set[str]:
        stage, index = self.locate_rank(rank)
        here = names & self.stages.names[stage] if self.stages else names
        return here & self.split.names[index] if self.split else here

    def select_followed(self, rank: int, names: set[str]) -> set[str]:
        """Returns parameters that this rank holds and another trains."""
        stage, index = self.locate_rank(rank)
        here = names & self.stages.names[stage] if self.stages else names
        return here - self.split.names[index] if self.split else set()

    def shape_of_part(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.split.shape_of_part(name, shape) if self.split else shape


def find_spread(e: Experiment, model: nn.Module, learner: Learner) -> ReplicaSpread | None:
    """Returns None if a replica is whole. Raises KnobError if `model` cannot be cut."""
    way = e.partition
    if way.size == 1:
        return None
    return ReplicaSpread(cut_model(e, model, learner) if way.depth > 1 else None,
                  _find_split(way, model, learner) if way.slices > 1 else None)  # fmt: skip


def _find_split(way: Partition, model: nn.Module, learner: Learner) -> TensorSplit:
    made: dict[tuple[int, bool], TensorSplit] = model.__dict__.setdefault(_SPLITS, {})  # simulated ranks share it
    key = way.slices, way.sequences
    if key not in made:
        made[key] = split_model(way.slices, model, learner, way.sequences)
    return made[key]


@lru_cache(maxsize=8)  # simulated ranks share it
def place_replica(named: tuple[tuple[str, int], ...], spread: ReplicaSpread | None, size: int) -> Placement:
    """Returns the placement of tensors (name, number of elements).

    A sliced parameter's state is in slices if it has as many elements. A step counter is on every rank with part of
    its parameter. A parameter that a split leaves whole is on its owner. Buffers and tensors of no stage are on every
    rank of a stage or replica.
    """
    sizes = dict(named)
    if spread is None:
        return Placement.place_whole(sizes, range(size))
    places = [spread.locate_rank(rank) for rank in range(size)]
    cut = _list_slices(spread.split) if spread.split else {}
    held: dict[int, dict[str, tuple[StridedSlice, ...]]] = {rank: {} for rank in range(size)}
    for name, n in sizes.items():
        of = name.partition("/")[2] or name
        in_slices = of in cut and n == sizes[of]
        for rank in _list_holders(spread, of, places):
            held[rank][name] = cut[of][places[rank][1]] if in_slices else (StridedSlice(0, n),)
    return Placement(sizes, held)


def _list_slices(split: TensorSplit) -> dict[str, list[tuple[StridedSlice, ...]]]:
    found: dict[str, list[tuple[StridedSlice, ...]]] = {}
    for dim in {made.dim for made in split.sliced.values()}:
        views = {name: made.view for name, made in split.sliced.items() if made.dim == dim}
        placement = Placement.place_slices(views, range(split.ways), dim)
        found |= {name: [placement.slices_of_rank(index)[name] for index in range(split.ways)] for name in views}
    return found


def _list_holders(spread: ReplicaSpread, of: str, places: list[tuple[int, int]]) -> list[int]:
    """places: each rank's (stage, slice)"""
    stages, split = spread.stages, spread.split
    stage = next((k for k, names in enumerate(stages.names) if of in names), None) if stages else None
    owner = split.owners.get(of) if split else None
    return [r for r, (s, k) in enumerate(places) if stage in (None, s) and owner in (None, k)]
