"""A model as sizes: buckets, optimizer, memory and outputs of passes. All ranks of a simulation share it."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.experiment import Experiment
from workbench.host.core.valueless import make_outline
from workbench.host.memory import storages as memory
from workbench.host.passes.tensor_parallel import copy_slice, list_common
from workbench.host.passes.tensor_schedule import PassPlan, find_arrival_order, find_plans
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.replica_spread import ReplicaSpread
from workbench.host.placement.stage_cuts import StageCuts, cut_model
from workbench.host.placement.tensor_split import TensorSplit
from workbench.host.sharding.access_trace import AccessTrace, assume_trace
from workbench.host.transfer.handover import count_slot_bytes
from workbench.host.transfer.shard_layout import ShardLayout as Shards
from workbench.optimizers import Optimizer
from workbench.sim.fake.shaped import shape_bucket
from workbench.sim.model.known_memory import KeptBytes
from workbench.sim.model.model_passes import ModelPasses
from workbench.tasks import Learner, same_groups

if TYPE_CHECKING:
    from workbench.partitions import Partition


class BucketCut:
    """A layout of the model in buckets.

    ready:  by bucket, the share of backward after which it is full
    needed: by bucket in the order of forward (the last bucket first), the share of forward before its use
    """

    def __init__(self, layout: ParameterLayout, arrival: list[str]) -> None:
        self.layout = layout
        self.buckets = layout.buckets
        self.params = layout.list_params()
        self.ready = compute_ready_shares(layout, arrival)
        self.needed, before = [], 0
        for bucket in reversed(self.params):
            self.needed.append(before / layout.element_count)
            before += bucket.data.numel()
        self.nbytes = {b.name: b.nbytes for b in self.params}

    def note_arrival(self, arrival: list[str]) -> None:
        """Notes the order of gradients that a backward has shown."""
        self.ready = compute_ready_shares(self.layout, arrival)


def compute_ready_shares(layout: ParameterLayout, arrival: list[str], there: Collection[str] = ()) -> list[float]:
    """Returns by bucket the share of gradient elements so far when it and all buckets before it are full.

    there: parameters with earlier gradients
    """
    numel = {p.name: 0 if p.name in there else p.numel for p in layout.order}
    share, done, total = {}, 0, sum(numel.values())
    for name in arrival:
        done += numel[name]
        share[name] = 0.0 if name in there else done / total
    found, last = [], 0.0
    for bucket in layout.buckets:
        last = max([last, *(share.get(part.name, 1.0) for part in bucket.parts)])
        found.append(last)
    return found


class Outline:
    """split: how the model's matrices are split; seen: see `ModelPasses`"""

    split: TensorSplit | None = None

    def __init__(self, experiment: Experiment, learner: Learner, seen: dict[Any, Any] | None) -> None:
        torch.manual_seed(experiment.seed)
        random.seed(experiment.seed)
        self.cheap = True  # whether the model can be built and run on the meta device
        try:
            self.model = _build_outline(learner, seen)
        except Exception:
            self.model, self.cheap = make_outline(learner), False
        first = ParameterLayout(self.model, experiment.bucket_mb)
        self._names = names = [p.name for p in first.order]
        self._stages: dict[tuple[StageCuts, int], StageOutline] = {}
        self._slices: dict[tuple[ReplicaSpread, tuple[int, int]], SliceOutline] = {}
        self.learner, self._made = learner, dict[Optimizer, Any]()
        self.optimizer = self.make_optimizer(experiment)
        self.passes, layers = ModelPasses(experiment, learner, seen), experiment.partition.layers
        heard = self.passes.trace_reads(self.model, layers)
        _prime_optimizer(self.model, self.optimizer)
        self.cheap = self.cheap and heard is not None
        self.trial = heard or assume_trace(reversed(names))
        came = set(arrival := self.trial.gradient_order)
        self.arrival = arrival + [n for n in names if n not in came]
        self._cuts: dict[tuple[float, bool], BucketCut] = {}
        self._standing: dict[Any, dict[str, memory.Storages]] = {}
        self.alike: dict[Any, Any] = {}  # memory results that equal ranks share

    def kept(self, batch: int, count: int, layers: Partition, counts: tuple[int, ...] = ()) -> list[KeptBytes] | None:
        """Returns by piece on this rank what one of `count` micro-batches keeps for its backward; None if unknown.

        counts: hidden units of a sub-model
        """
        found = self.passes.kept(self.model, batch, layers, self.split, counts)
        return None if found is None else [found]

    def measure_evaluation(self) -> int | None:
        """Peak bytes of computing the held-out metrics here; None if unknown."""
        found = self.passes.measure_evaluation(self.model, None, self.split)
        return None if found is None else found[0]

    def find_rows(self, batch: int, layout: ParameterLayout) -> dict[str, torch.Tensor]:
        return self.passes.find_rows(batch, layout)

    def trace_reads(self, layers: Partition) -> AccessTrace:
        return self.passes.trace_reads(self.model, layers) or self.trial

    def list_standing(
        self, layout: ParameterLayout, optimizer: Any, roomy: bool, cut: Shards | None
    ) -> dict[str, memory.Storages]:
        """Returns the memory that stays between steps on a rank. optimizer: None until it has stepped

        cut: buckets with sharded optimizer state, counted for the first rank, which has the largest shards
        """
        key = id(layout), roomy, id(optimizer), len(optimizer.state) if optimizer else 0, cut and len(cut.groups[0])
        if key not in self._standing:
            kept = memory.find_optimizer_state(optimizer) if optimizer else {}
            if optimizer and cut is not None:
                nbytes = count_slot_bytes(layout, optimizer, cut, 0)
                kept = memory.find_storages(torch.empty(nbytes, dtype=torch.uint8, device="meta"))
            self._standing[key] = {
                "parameters": memory.find_parameters(self.model, layout, self.list_followed()),
                "gradients": memory.find_storages(memory.list_bucket_vectors(layout)) if roomy else {},
                "optimizer state": kept,
            }
        return self._standing[key]

    def list_followed(self) -> list[torch.Tensor]:
        return []

    def get_stage(self, names: set[str], stages: StageCuts, stage: int) -> StageOutline:
        if (stages, stage) not in self._stages:
            self._stages[stages, stage] = StageOutline(self, names, stages, stage)
        return self._stages[stages, stage]

    def get_slice(self, names: set[str], spread: ReplicaSpread, place: tuple[int, int], e: Experiment) -> SliceOutline:
        """place: (stage, index of the slice)"""
        if (spread, place) not in self._slices:
            self._slices[spread, place] = SliceOutline(self, names, spread, place, e)
        return self._slices[spread, place]

    def make_optimizer(self, experiment: Experiment) -> Any:
        """All ranks share it."""
        wanted, here = experiment.optimizer, set(self._names)
        if wanted not in self._made:
            params = [p for name, p in self.model.named_parameters() if name in here]
            self._made[wanted] = wanted.build(self.learner.optimizer, params, experiment.lr)
        return self._made[wanted]

    @property
    def names(self) -> list[str]:
        """Names of trained parameters here."""
        return list(self._names)

    def cut_buckets(self, bucket_mb: float, learned: bool) -> BucketCut:
        """learned: in the learned order of gradients, else in the original one"""
        key = bucket_mb, learned
        if key not in self._cuts:
            layout = ParameterLayout(self.model, bucket_mb, self.arrival if learned else self._names)
            layout.allocate_gradients()
            for place in layout.order:
                layout.store_gradient(place, torch.empty_like(place.param))
            for p in self.list_followed():  # in no bucket
                p.data = torch.empty_like(p)
            self._cuts[key] = BucketCut(layout, self.arrival)
            for bucket in (*layout.buckets, *self._cuts[key].params):
                shape_bucket(bucket)
        return self._cuts[key]


class StageOutline(Outline):
    """A stage of the model. All its ranks share it.

    stages, number: the cut of the model, and the index of this stage
    there:          parameters with gradients before a batch's last backward, which runs through the first piece
    """

    def __init__(self, whole: Outline, names: set[str], stages: StageCuts, stage: int) -> None:
        self.model, self.learner, self.trial, self.split = whole.model, whole.learner, whole.trial, whole.split
        self.stages, self.number, self._of = stages, stage, whole
        self._names = [n for n in whole._names if n in names]
        first = {id(p) for part in stages.pieces_of_stage(stage)[0] for p in part.parameters()}
        self.there = [n for n in self._names if id(self.model.get_parameter(n)) not in first]
        self.arrival = self.there + [n for n in whole.arrival if n in names and n not in set(self.there)]
        self.passes = whole.passes
        self._made, self._cuts, self._standing, self.alike = {}, {}, {}, {}

    def list_followed(self) -> list[torch.Tensor]:
        return self._of.list_followed()

    def hands_on(self, batch: int, count: int, chunk: int) -> torch.Tensor:
        """Returns a piece's output for a micro-batch. The model's last piece returns the loss."""
        made = self.passes.list_piece_outputs(self.model, self.stages, batch, count, self.split)
        return made[chunk * len(self.stages) + self.number]

    def measure_evaluation(self) -> int | None:
        found = self.passes.measure_evaluation(self.model, self.stages, self.split)
        return None if found is None else found[self.number]

    def kept(self, batch: int, count: int, layers: Partition, counts: tuple[int, ...] = ()) -> list[KeptBytes] | None:
        every = self.passes.measure_kept_pieces(self.model, self.stages, batch, count, layers, self.split)
        here = [each for each in every[self.number :: len(self.stages)] if each is not None]
        return here if len(here) * len(self.stages) == len(every) else None


class SliceOutline(Outline):
    """A slice of a model with split matrices. All ranks with this slice share it.

    stages: the cut of this slice's model
    plans:  by piece of the model, when ranks meet
    common: by owner, parameters that all ranks of a group have
    """

    plans: tuple[PassPlan, ...]

    def __init__(
        self, whole: Outline, names: set[str], spread: ReplicaSpread, place: tuple[int, int], e: Experiment
    ) -> None:
        assert spread.split is not None
        self.learner, self.trial, self.split = whole.learner, whole.trial, spread.split
        self.model = copy_slice(whole.model, self.split, 0)  # a copy, because its buckets are this rank's
        self.stages = cut_model(e, self.model, self.learner) if spread.stages else None
        self.plans = find_plans(e, self.learner, self.split)
        stage, index = place
        here = names | spread.select_followed(stage * self.split.ways + index, set(whole._names))
        self.common = list_common(self.model, self.split, here)
        self._followed = [p for owner, each in enumerate(self.common) for p in each if owner != index]
        came = find_arrival_order(self.plans)
        self._names = [n for n in whole._names if n in names]
        self.arrival = [n for n in (*came, *(n for n in self._names if n not in came)) if n in names]
        self.passes = whole.passes
        self._stages, self._made, self._cuts, self._standing, self.alike = {}, {}, {}, {}, {}

    def list_followed(self) -> list[torch.Tensor]:
        return list(self._followed)


def _build_outline(learner: Learner, seen: dict[Any, Any] | None) -> nn.Module:
    """A copy, if experiments with the same learner and seed share the model."""
    if seen is None:
        return make_outline(learner, built=False)
    if "model" not in seen:
        seen["model"] = make_outline(learner, built=False)
    return same_groups(copy.deepcopy(seen["model"]), seen["model"])


def _prime_optimizer(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = torch.empty_like(p) if p.requires_grad else None
    try:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    except Exception:
        optimizer.state.clear()
