"""Experiment: one frozen value that describes a run completely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from workbench.compressors import Compressor, Dense, inside
from workbench.experiment import (
    mesh_rules,
    momentum_rules,
    non_finite_rules,
    own_loop_rules,
    partition_rules,
    rate_factor,
    sharding_rules,
)
from workbench.fabric import Fabric
from workbench.optimizers import Optimizer, TaskOwn
from workbench.partitions import Partition, Whole
from workbench.policies import ByHand, PolicyBase
from workbench.settings import KnobError, checked, each, from_plain, knob, normalise, short, to_plain, with_values
from workbench.strategies import DDP, Strategy
from workbench.tasks import ByteGPT, TaskBase

CLIP = "clip gradients to this global norm before an update (each rank its own, if ranks update alone); 0: off"
MEMORY = "memory of each rank's device; settings that need more are refused; 0: no limit"
DEATH = "after a rank is lost: end the run as failed, go on without the rank, or replace it"
HANG = "after a rank hangs: wait for it, evict it, or evict and replace it"
HANG_AFTER = "a rank hangs if other ranks wait for it this long in one operation; 0: 10 s, or 5 of its usual steps"
EVERY = "steps between checkpoints, written while training goes on; 0: only on request"
KEEP = "number of newest checkpoints to keep, in addition to the best one and to requested ones"
MEASURE = "steps between measurements of the compression error, which also send the dense sum; 0: never"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that a run depends on. `experiment.set` returns another experiment with a setting changed.

    >>> Experiment().set("every", 4)
    Traceback (most recent call last):
        ...
    workbench.KnobError: every: no such knob here; ...
    """

    task: TaskBase = knob(ByteGPT(), live=False, doc="what learns")
    strategy: Strategy = knob(DDP(), doc="how ranks agree")
    partition: Partition = knob(Whole(), doc="how one replica of the model is spread over ranks")
    compressor: Compressor = knob(Dense(), doc="encoding of the buckets that ranks send")
    fabric: Fabric = knob(Fabric(), doc="the network and its faults")
    optimizer: Optimizer = knob(TaskOwn(), doc="how gradients become steps")
    policy: PolicyBase = knob(ByHand(), doc="a program that changes knobs during a run, in addition to people")
    lr: float = knob(0.0, 0.0, 100.0, log=True, doc="learning rate; 0: the task's own")
    lr_scaled: bool = knob(False, doc="scale the rate with the global batch: lr times global batch / `lr_base`")
    lr_base: int = knob(
        0, 0, 2**20, unit="examples", doc="global batch that lr is meant for; 0: the usual batch of one rank"
    )
    lr_warmup: int = knob(0, 0, 10**6, unit="steps", doc="warm-up steps until the rate reaches lr; 0: none")
    clip: float = knob(0.0, 0.0, 1e6, log=True, doc=CLIP)
    batch: int = knob(0, 0, 65536, unit="examples", doc="batch per rank; 0: the task's own")
    bucket_mb: float = knob(1.0, 0.01, 1024.0, unit="MB", log=True, doc="bucket size of the gradient exchange")
    memory_mb: float = knob(0.0, 0.0, 1e7, unit="MB", log=True, doc=MEMORY)
    pace: float = knob(0.0, 0.0, 60000.0, unit="ms", doc="emulated compute time per step; 0: off")
    ranks: int = knob(4, 1, 4096, live=False, doc="how many ranks train")
    steps: int = knob(0, 0, 10**9, live=False, unit="steps", doc="stop after this step; 0: run until stopped")
    seed: int = knob(0, 0, 2**31 - 1, live=False, doc="random seed of the model and the data")
    eval_every: int = knob(20, 0, 10**6, unit="steps", doc="steps between evaluations of the held-out loss; 0: never")
    measure_every: int = knob(0, 0, 10**6, unit="steps", doc=MEASURE)
    on_death: str = knob("end", choices=("end", "go on", "replace"), doc=DEATH)
    on_hang: str = knob("wait", choices=("wait", "evict", "replace"), doc=HANG)
    hang_after: float = knob(0.0, 0.0, 86400.0, unit="s", log=True, doc=HANG_AFTER)
    on_nan: str = knob("auto", choices=non_finite_rules.ACTIONS, doc=non_finite_rules.ON_NAN)
    diverged: float = knob(10.0, 0.0, 1e6, log=True, doc=non_finite_rules.DIVERGED)
    precise: bool = knob(False, live=False, doc="check every collective for mismatches (slow)")
    save_every: int = knob(0, 0, 10**6, unit="steps", doc=EVERY)
    saves: int = knob(2, 1, 1000, doc=KEEP)

    def __post_init__(self) -> None:
        if self.policy is None:
            object.__setattr__(self, "policy", ByHand())
        normalise(self, "")

    def set(self, path: str | Mapping[str, Any], value: Any = None) -> Experiment:
        """Returns the experiment with one knob changed, or several. Checks them together.

        path:   the knob, such as "strategy.every". Or a dict of values by path
        value:  the new value, a member's name or plain JSON. `policy` may be None: only people decide

        Raises KnobError if a value or the combination is invalid. `experiment.turn` is the old name for one release.
        """
        settings = each(path, value)
        if "policy" in settings and settings["policy"] is None:
            settings["policy"] = ByHand()
        return with_values(self, settings.items()).checked()

    turn = set

    def checked(self) -> Experiment:
        """Returns this experiment if every knob and their combination are valid.

        Raises KnobError if one is not. The message names an alternative.
        """
        good = checked(self)
        for compressor in inside(good.compressor):
            if reason := compressor.refuses():
                raise KnobError(reason)
        if reason := own_loop_rules.explain_refusal(good) or good.strategy.refuses(good.compressor):
            raise KnobError(reason)
        if reason := partition_rules.explain_refusal(good):
            raise KnobError(reason)
        misfit = good.strategy.refuses_size(good.replicas)
        if reason := misfit or mesh_rules.explain_refusal(good.strategy, good.ranks, good.partition):
            raise KnobError(reason)
        if reason := good.task.refuses(good.batch):
            raise KnobError(reason)
        if good.strategy.tables and not good.task.looks_up:
            raise KnobError(
                f"task={type(good.task).__name__}: does not declare which rows of embedding tables a batch reads, "
                f"and {type(good.strategy).__name__} needs this; take ClickThrough, give your own Task `lookups`, or "
                f"use ShadowEASGD"
            )
        if good.clip and not good.strategy.clips:
            raise KnobError(
                f"clip={good.clip:g}: under {type(good.strategy).__name__} an update does not see all gradients, so "
                f"their norm is not known; use clip=0 with it, or DDP or LocalSGD"
            )
        if reason := good.optimizer.refuses():
            raise KnobError(reason)
        if (
            reason := momentum_rules.explain_refusal(good)
            or sharding_rules.explain_refusal(good)
            or non_finite_rules.explain_refusal(good)
        ):
            raise KnobError(reason)
        if reason := mesh_rules.explain_algorithm_refusal(good.fabric.algorithm, good.strategy):
            raise KnobError(reason)
        for fault in good.fabric.faults:
            if getattr(fault, "rank", 0) >= good.ranks:
                raise KnobError(f"rank={fault.rank}: there are ranks 0 to {good.ranks - 1}")
        good = good.filled()
        if reason := partition_rules.explain_refusal(good) or rate_factor.explain_refusal(good):
            raise KnobError(reason)
        return good

    @property
    def replicas(self) -> int:
        """The number of replicas of the model, a strategy's number of training ranks."""
        return partition_rules.count_replicas(self)

    def filled(self) -> Experiment:
        """Returns this experiment with the task's learning rate and batch in place of 0."""
        return replace(self, lr=self.lr or self.task.lr, batch=self.batch or self.task.batch)

    def evaluates(self, before: int, step: int) -> bool:
        """Whether the held-out loss is due at `step`.

        before:  the step that it follows
        step:    the present step, from 0
        """
        return bool(self.eval_every) and step // self.eval_every > before // self.eval_every

    def plain(self) -> dict[str, Any]:
        """Returns it as JSON for `Experiment.read`."""
        return to_plain(self)["Experiment"]

    @classmethod
    def read(cls, plain: dict[str, Any], task: TaskBase | None = None) -> Experiment:
        """Reads what `plain` wrote.

        plain:  settings by name
        task:   the original task, because `plain` keeps only the names of your own functions

        Raises KnobError if `plain` is no dict or holds an invalid setting.
        """
        if not isinstance(plain, dict):
            raise KnobError(f"experiment={short(plain)}: must be a dict of settings, as Experiment().plain() makes")
        found = from_plain({"Experiment": plain}, cls)
        return found if task is None else replace(found, task=task)
