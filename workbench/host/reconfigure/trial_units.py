"""Tries one batch before ranks train sub-models: hidden units must be interchangeable."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import nn

from workbench.experiment import Experiment
from workbench.host.passes.hidden_units import find_units
from workbench.host.passes.submodel import make_smaller, place_smaller
from workbench.host.reconfigure.policy_view import TryingView
from workbench.host.reconfigure.trial_slices import move_to_cpu
from workbench.rank import Units
from workbench.settings import KnobError
from workbench.settings.describe_error import text_of
from workbench.tasks import Learner

NOISE = 0.02  # a layer of zeros would hide errors before it
TOLERANCE = {True: 1e-9, False: 2e-2}  # relative loss change by double precision
_TRIED: WeakKeyDictionary[Learner, dict[Hashable, str]] = WeakKeyDictionary()  # a refusal's reason, or ""


def require_submodels(run: TryingView, wanted: Experiment) -> None:
    """Raises KnobError if `wanted`'s strategy trains sub-models and this model has none.

    One batch must have the same loss with the units in another order.
    """
    if not wanted.strategy.narrows:
        return
    sizes = run.layout.order[0].param.is_meta
    made, key = _TRIED.setdefault(run.learner, {}), (wanted.batch, sizes)
    if key not in made:
        try:
            units, made[key] = find_units(run.model, run.learner), ""
            if not sizes:
                _try_units(run.learner, units, run.make_example(wanted), wanted.seed)
        except KnobError as error:
            made[key] = str(error)
    if made[key]:
        raise KnobError(f"strategy={type(wanted.strategy).__name__}: {made[key]}")


def _try_units(learner: Learner, units: list[Units], batch: object, seed: int) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = copy.deepcopy(learner.model()).cpu().eval()  # it may be training
        for p in model.parameters():
            if p.is_floating_point():
                p.add_(NOISE * torch.randn_like(p))
        double, loss = _make_loss(model, learner, batch)
        try:
            whole = loss()
            place_smaller(make_smaller(model, units, [torch.randperm(each.size) for each in units]))
            other = loss()
            place_smaller(make_smaller(model, units, [torch.arange(max(1, each.size // 2)) for each in units]))
            loss()
        except Exception as error:
            raise KnobError(
                f"in a trial on one batch, a sub-model fails: {text_of(error)}; take sizes in the model from the "
                f"outputs of layers, and do not name a layer whose outputs several layers read"
            ) from error
    if math.isfinite(whole) and not abs(whole - other) <= TOLERANCE[double] * abs(whole):
        raise KnobError(
            f"with its hidden units in another order the model has the loss {other:.6g} in place of {whole:.6g}, so "
            f"a sub-model cannot omit these units. Declare in the task's `split` which outputs stay `together`, such "
            f"as an attention head's. Remove layers with outputs that more than the next layer reads"
        )


def _make_loss(model: nn.Module, learner: Learner, batch: object) -> tuple[bool, Callable[[], float]]:
    """Returns whether double precision works, and the loss."""
    state = torch.get_rng_state()

    def loss(inputs: object) -> float:
        torch.set_rng_state(state)
        return float(learner.loss(model, inputs))

    dtypes = [x.dtype for x in (*model.parameters(), *model.buffers())]
    try:
        wide = partial(loss, move_to_cpu(batch, torch.float64))
        model.double()
        wide()
        return True, wide
    except Exception:
        for x, dtype in zip((*model.parameters(), *model.buffers()), dtypes, strict=True):
            x.data = x.data.to(dtype)
    return False, partial(loss, move_to_cpu(batch, None))
