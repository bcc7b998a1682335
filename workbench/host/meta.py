"""A task's model on torch's meta device: shapes and no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workbench.tasks import Learner


def outline(learner: Learner) -> nn.Module:
    """The model on the meta device: built there, or, if it does not let itself be, built and then emptied."""
    try:
        with torch.device("meta"):
            model = learner.model()
    except Exception:
        model = learner.model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"task.model() must return a torch Module, not a {type(model).__name__}")
    known: dict[int, Any] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:  # one that is tied stays tied
                empty = known.setdefault(id(p), nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad))
                module._parameters[name] = empty
                known[id(empty)] = empty
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else torch.empty_like(b, device="meta")
    return model.train()
