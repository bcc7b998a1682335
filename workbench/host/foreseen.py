"""What a step is going to read, and in which order gradients will come: from one that computes nothing, beforehand.

The model of that step has shapes and no memory, so that a rank need not hold all of it to know. Where a model does
not run on such tensors (it looks at values, or calls code that is not torch's) nobody knows before the first step.
"""

from __future__ import annotations

import random
from typing import Any
from weakref import WeakKeyDictionary

import torch

from workbench.experiment import Experiment
from workbench.host.batches import Batches
from workbench.host.checkpointing import checkpointing
from workbench.host.meta import like, outline, put_on_cpu
from workbench.host.trial import Listening, Trial

_SEEN: WeakKeyDictionary[Any, dict[Any, Trial | None]] = WeakKeyDictionary()  # by a task's functions


def foreseen(learner: Any, e: Experiment) -> Trial | None:
    """What one step of `learner`'s model does with its parameters; None where that cannot be told."""
    known, key = _SEEN.setdefault(learner, {}), (e.batch, e.partition.layers.recompute)
    if key not in known:
        state = random.getstate()
        with torch.random.fork_rng():
            known[key] = _looked(learner, e)
        random.setstate(state)
    return known[key]


def _looked(learner: Any, e: Experiment) -> Trial | None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        batches = Batches(learner.data, 0, e.ranks, "meta")
        batches.restart(e.batch, e.seed, 0)
        model, inputs = outline(learner), batches.next()
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            put_on_cpu(model)
            listening = Listening({n: p for n, p in model.named_parameters() if p.requires_grad})
            with checkpointing(model, learner, e.partition.layers):
                with listening.forward():
                    loss = learner.loss(model, like(inputs))
                with listening.backward():
                    loss.backward(torch.ones_like(loss))
    except Exception:
        return None
    return listening.heard
