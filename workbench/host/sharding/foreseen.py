"""What a step is going to read, and in which order gradients will come: from one that computes nothing, beforehand.

The model of that step has shapes and no memory, so that a rank need not hold all of it to know. Where a model does
not run on such tensors (it looks at values, or calls code that is not torch's) nobody knows before the first step.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from workbench.experiment import Experiment
from workbench.host.core.meta import like, outline, put_on_cpu
from workbench.host.memory.batches import Chance, example
from workbench.host.passes.checkpointing import checkpointing
from workbench.host.sharding.trial import Listening, Trial

_SEEN: WeakKeyDictionary[Any, dict[Any, Trial | None]] = WeakKeyDictionary()  # by a task's functions


def foreseen(learner: Any, e: Experiment, cheaply: bool = False) -> Trial | None:
    """What one step of `learner`'s model does with its parameters; None where that cannot be told, or not `cheaply`:
    without building the model itself once more, of functions that are `pure`. Random numbers go on as if nobody had
    looked.

    What is not pure may keep a tensor of this step, which has no values: asked without need it is not looked at.
    """
    if cheaply and not learner.pure:
        return None
    known, key = _SEEN.setdefault(learner, {}), (e.batch, e.partition.layers.recompute, cheaply)
    if key not in known:
        with torch.random.fork_rng(), Chance(e.seed):
            known[key] = _looked(learner, e, cheaply)
    return known[key]


def _looked(learner: Any, e: Experiment, cheaply: bool) -> Trial | None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        model, inputs = outline(learner, built=not cheaply), example(learner, e, "meta")
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
