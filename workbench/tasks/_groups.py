"""Rebuilds a script's own optimizer and scheduler for the parameters on a rank."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.settings import KnobError
from workbench.tasks._base import TaskError

NOT_SETTINGS = {"defaults", "state", "param_groups", "step", "_opt_called", "_zero_grad_profile_name"}


class Groups:
    """(params) -> an Optimizer with the given one's class and settings, and empty state.

    of: group index by parameter name
    """

    def __init__(self, given: Any, model: nn.Module) -> None:
        """Raises KnobError if the optimizer cannot be rebuilt."""
        every = _optimizers(given)
        names = {id(p): name for name, p in model.named_parameters()}
        self.kind, self.of, self.groups = type(every[0]), dict[str, int](), list[dict[str, Any]]()
        self.defaults = copy.deepcopy(every[0].defaults)
        self.more = {k: copy.deepcopy(x) for k, x in every[0].__dict__.items()
                     if k not in NOT_SETTINGS and not k.startswith("_optimizer_")}  # fmt: skip
        for group in (group for one in every for group in one.param_groups):
            lost = [p for p in group["params"] if id(p) not in names]
            if lost:
                raise KnobError(
                    f"optimizer={self.kind.__name__}: {len(lost)} of its parameters are not in the model (such as one "
                    f"of shape {tuple(lost[0].shape)}); make it from the adopted model's parameters()"
                )
            self.of |= {names[id(p)]: len(self.groups) for p in group["params"]}
            kept = {k: copy.deepcopy(x) for k, x in group.items() if k not in ("params", "param_names")}
            own = kept.get("initial_lr", kept["lr"])  # before any scheduler step
            self.groups.append({**kept, "lr": float(own), "initial_lr": float(own)})
        if any(one.state for one in every):
            warnings.warn(f"optimizer={self.kind.__name__}: its state from earlier steps is not adopted; ranks begin "
                          f"with the model's weights and empty optimizer state", stacklevel=4)  # fmt: skip

    def __call__(self, params: Iterable[Any]) -> Optimizer:
        groups: list[dict[str, Any]] = [{**copy.deepcopy(group), "params": []} for group in self.groups]
        for p in params:
            number = 0 if len(groups) == 1 else getattr(p, "optimizer_group", None)
            if number is None:
                raise TaskError(f"the adopted optimizer lacks the parameter of shape {tuple(p.shape)}; add it there")
            groups[number]["params"].append(p)
        made = object.__new__(self.kind)
        made.__dict__.update(copy.deepcopy(self.more))
        made.__setstate__({"defaults": dict(self.defaults), "state": defaultdict(dict), "param_groups": groups})
        return made

    def __repr__(self) -> str:
        return f"adopted {self.kind.__name__} of {len(self.groups)} groups"


def _optimizers(given: Any) -> list[Optimizer]:
    every = list(given) if isinstance(given, list | tuple) else [given]
    for one in every:
        if not isinstance(one, Optimizer):
            told = "None" if one is None else f"a {type(one).__name__}"
            raise KnobError(f"optimizer={told}: must be a torch.optim.Optimizer of the model, or a list of them")
        closure = inspect.signature(type(one).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise KnobError(f"optimizer={type(one).__name__}: its step needs a closure that calls the model, but ranks "
                            f"exchange gradients before the step. Take SGD or AdamW")  # fmt: skip
    kinds = {type(one) for one in every}
    if len(kinds) != 1:
        told = ", ".join(type(one).__name__ for one in every) or "none"
        raise KnobError(f"optimizer=({told}): must be of one class because one update steps them all; use one "
                        f"optimizer with several groups of parameters")  # fmt: skip
    seen = [id(p) for one in every for group in one.param_groups for p in group["params"]]
    if len(seen) != len(set(seen)):
        raise KnobError(f"optimizer=({', '.join(type(one).__name__ for one in every)}): two of them step the same "
                        f"parameter; give each parameter to one optimizer")  # fmt: skip
    return every


class Schedule:
    """(step) -> the factor of an optimizer's rates, as its scheduler gives if it steps every `every` steps."""

    def __init__(self, scheduler: Any, given: Any, every: int) -> None:
        """Raises KnobError if the schedule is not supported."""
        name, owner = type(scheduler).__name__, _optimizers(given)[0]
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise KnobError(f"scheduler={name}: needs a measured loss; take one that depends on steps or a Policy")
        if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise KnobError(f"scheduler={name}: must be a torch.optim.lr_scheduler of the adopted optimizer")
        if isinstance(given, list | tuple) and len(given) > 1:
            raise KnobError(f"scheduler={name}: steps one of {len(given)} optimizers; adopt one with several groups")
        if scheduler.optimizer is not owner:
            raise KnobError(f"scheduler={name}: steps another optimizer; make it for the adopted one")
        self._name, self._every, self._lock = name, every, threading.Lock()
        self._known = [self._factor(self._twin(scheduler, owner))]
        self._scheduler = self._twin(scheduler, owner)
        self(2 * every)  # raises early if a first step shows no support

    def _twin(self, scheduler: Any, owner: Any) -> Any:
        """Returns a copy that steps only the rates of `owner`'s groups, without parameters."""
        made: Any = torch.optim.SGD([torch.zeros(1)], lr=0.0)
        made.param_groups = [{**{k: copy.deepcopy(x) for k, x in group.items() if k != "params"}, "params": []}
                             for group in owner.param_groups]  # fmt: skip
        return copy.deepcopy(scheduler, {id(owner): made})

    def _factor(self, scheduler: Any) -> float:
        groups = scheduler.optimizer.param_groups
        found = [float(group["lr"]) / float(group["initial_lr"]) for group in groups if float(group["initial_lr"])]
        if max(found) - min(found) > 1e-6 * max(map(abs, found)):
            raise KnobError(f"scheduler={self._name}: changes the rates of groups by different factors, but ranks "
                            f"apply one factor to all. Give all groups the same schedule")  # fmt: skip
        return found[0]

    def __call__(self, step: int) -> float:
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that no optimizer has stepped
            while len(self._known) <= step // self._every:
                was = _rest(self._scheduler)
                self._scheduler.step()
                if _rest(self._scheduler) != was:
                    raise KnobError(f"scheduler={self._name}: changes other settings of the optimizer than its rates; "
                                    f"give it cycle_momentum=False")  # fmt: skip
                self._known.append(self._factor(self._scheduler))
            return self._known[step // self._every]

    def __getstate__(self) -> dict[str, Any]:
        return {k: x for k, x in self.__dict__.items() if k != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"adopted {self._name}"


def _rest(scheduler: Any) -> list[dict[str, Any]]:
    groups = scheduler.optimizer.param_groups
    return [{k: x for k, x in group.items() if k not in ("lr", "initial_lr", "params")} for group in groups]
