"""Pipeline stages, sizes only: consecutive parts of a Sequential model, and the activations between them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from workbench.experiment import Experiment
from workbench.host.batches import Batches
from workbench.rank import StrategyError
from workbench.settings import KnobError
from workbench.sim.sizes import Outline, Sizes
from workbench.tasks import Learner


class Part(Outline):
    """One stage of the model, as sizes."""

    def __init__(self, whole: Outline, layers: list[tuple[str, nn.Module]], learner: Learner, e: Experiment) -> None:
        self.model = nn.Sequential(OrderedDict(layers))
        named = [n for n, p in self.model.named_parameters() if p.requires_grad]
        self.learner, self._made = learner, {}
        self.optimizer = self.made(e)
        self.arrival, self.trial = [n for n in whole.arrival if n in set(named)], whole.trial
        self._names = named[::-1]
        self._cuts, self._standing, self.alike = {}, {}, {}


class Stage(Sizes):
    """What one rank of a pipeline computes with: its part, the share of the model that it is, and what it hands on.

    hands_on: the activation that leaves this stage, without data; None for the last one, whose forward is the loss
    """

    def __init__(self, part: Part, bucket_mb: float, share: float, hands_on: Tensor | None) -> None:
        super().__init__(part, bucket_mb)
        self.share, self.hands_on = share, hands_on
        self._open: dict[int, Any] = {}  # what went into the forwards whose backward is to come

    def kept(self, batch: int) -> None:
        """A stage's share of what is kept is not known."""

    def forward(self, x: Any, micro: int) -> Tensor | None:
        self._open[micro] = x
        return self.hands_on

    def backward(self, grad: Any, micro: int, exchanged: bool) -> Tensor | None:
        if micro not in self._open:
            raise StrategyError(f"backward of micro-batch {micro} was asked for before its forward")
        super().backward(grad, micro, exchanged)
        x = self._open.pop(micro)
        return torch.empty_like(x) if isinstance(x, Tensor) else None


def staged(whole: Outline, experiment: Experiment, learner: Learner) -> list[Stage]:
    """The model in as many stages as there are ranks, each of as many layers as can be. Raises KnobError."""
    name, ranks = type(experiment.strategy).__name__, experiment.ranks
    if not isinstance(whole.model, nn.Sequential):
        raise KnobError(
            f"strategy={name}: stages are cut from a torch Sequential and this task's model is a "
            f"{type(whole.model).__name__}; take a task whose model is a Sequential"
        )
    cuts = _cuts(whole.model, ranks)
    crossing = _crossing(whole.model, cuts, experiment, learner)
    layers = list(whole.model.named_children())
    parts = [Part(whole, layers[a:b], learner, experiment) for a, b in zip(cuts, [*cuts[1:], None], strict=True)]
    numels = [sum(p.numel() for p in part.model.parameters()) for part in parts]
    return [
        Stage(part, experiment.bucket_mb, n / sum(numels), x)
        for part, n, x in zip(parts, numels, [*crossing, None], strict=True)
    ]


def _cuts(model: nn.Sequential, ranks: int) -> list[int]:
    """Where each stage begins: layers with parameters are dealt out evenly, the others go with the one before."""
    heavy = [i for i, layer in enumerate(model) if any(p.requires_grad for p in layer.parameters())]
    if len(heavy) < ranks:
        raise KnobError(
            f"ranks={ranks}: the model has {len(heavy)} parts with parameters, so there are at most {len(heavy)} "
            f"stages; take ranks={len(heavy)} or fewer, or a deeper model"
        )
    return [0] + [heavy[-(-stage * len(heavy) // ranks)] for stage in range(1, ranks)]


def _crossing(model: nn.Sequential, cuts: list[int], experiment: Experiment, learner: Learner) -> list[Tensor]:
    """The activation that enters each stage but the first, seen in one pass on the meta device."""
    seen: list[Tensor] = []
    hooks = [model[i].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for i in cuts[1:]]
    batches = Batches(learner.data, 0, experiment.ranks, "meta")
    batches.restart(experiment.batch, experiment.seed, 0)
    try:
        learner.loss(model, batches.next())
    except Exception as reason:
        raise KnobError(
            f"strategy={type(experiment.strategy).__name__}: what stages hand on cannot be told, for the model does "
            f"not run on the meta device ({reason}); take a task whose model does"
        ) from reason
    finally:
        for hook in hooks:
            hook.remove()
    return [x.detach() for x in seen]
