"""Foresees a step's reads and its order of gradients, from a step that computes nothing.

If a model looks at values, or calls code outside torch, the order is unknown before the first step.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from workbench.experiment import Experiment
from workbench.host.core.valueless import make_like, make_outline, put_on_cpu
from workbench.host.memory.batches import Chance, make_example
from workbench.host.passes.checkpointing import checkpoint_units
from workbench.host.sharding.access_trace import AccessTrace, TraceListener
from workbench.tasks import Learner

_Key = tuple[int, tuple[str, int], bool]  # what a trace depends on
_SEEN: WeakKeyDictionary[Learner, dict[_Key, AccessTrace | None]] = WeakKeyDictionary()


def foresee_trace(learner: Learner, e: Experiment, cheaply: bool = False) -> AccessTrace | None:
    """Returns a step's use of parameters; None if unknown.

    A function that is not pure may keep one of these tensors without values. The process's random numbers stay unused.

    cheaply: call only `pure` functions, and do not build the model again
    """
    if cheaply and not learner.pure:
        return None
    known, key = _SEEN.setdefault(learner, {}), (e.batch, e.partition.layers.recompute, cheaply)
    if key not in known:
        with torch.random.fork_rng(), Chance(e.seed):
            known[key] = _trace_step(learner, e, cheaply)
    return known[key]


def _trace_step(learner: Learner, e: Experiment, cheaply: bool) -> AccessTrace | None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        model, inputs = make_outline(learner, built=not cheaply), make_example(learner, e, "meta")
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            put_on_cpu(model)
            listening = TraceListener({n: p for n, p in model.named_parameters() if p.requires_grad})
            with checkpoint_units(model, learner, e.partition.layers):
                with listening.listen_to_forward():
                    loss = learner.loss(model, make_like(inputs))
                with listening.listen_to_backward():
                    loss.backward(torch.ones_like(loss))
    except Exception:
        return None
    return listening.heard_trace
