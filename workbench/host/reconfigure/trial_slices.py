"""Tries one batch before a model is sliced: all slices must learn what the whole model does.

Double precision, if the model can compute in it, keeps rounding from hiding errors. The trial runs on the CPU: there a
pass can wait for another in the middle of autograd.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workbench.host.passes.coded_exchange import Ask
from workbench.host.passes.local_runner import run_together
from workbench.host.passes.tensor_parallel import compute_together, copy_slice
from workbench.host.placement.tensor_split import TensorSplit
from workbench.rank import as_real
from workbench.settings import KnobError
from workbench.settings.describe_error import text_of
from workbench.tasks import Learner

# By double precision or not: a gradient may differ by TOLERANCE of its norm plus TOTAL_TOLERANCE of the norm of all.
TOLERANCE = {True: 1e-6, False: 2e-2}
TOTAL_TOLERANCE = {True: 1e-9, False: 1e-5}
NOISE = 0.02  # a layer of zeros would hide errors before it


class _NoRandomness(TorchFunctionMode):
    """Removes randomness, because slices draw other numbers."""

    NAMES = frozenset("rand randn rand_like randn_like normal bernoulli normal_ uniform_ bernoulli_".split())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "dropout":
            return args[0] if args else kwargs["input"]
        made = func(*args, **kwargs)
        return made.fill_(0.5) if name in self.NAMES and isinstance(made, Tensor) else made


def check_slices(model: nn.Module, learner: Learner, split: TensorSplit, batch: object) -> None:
    """Raises KnobError if ranks with slices would compute other gradients or another loss.

    model: whole; the trial changes it
    """
    rng, twin, batch = torch.Generator().manual_seed(0), model.cpu().eval(), move_to_cpu(batch, None)
    with torch.no_grad():
        for p in twin.parameters():
            if p.is_floating_point():
                p.add_(NOISE * torch.randn(p.shape, generator=rng).to(p))
    parts = [copy_slice(twin, split, k) for k in range(split.ways)]  # a pass may change the model
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        double, (loss, whole), batch = _compute_whole(twin, learner, batch)
        works = [partial(_compute_slices, part.double() if double else part, learner, split, k, batch)
                 for k, part in enumerate(parts)]  # fmt: skip
        try:
            found = run_together(works)
        except Exception as error:
            raise KnobError(
                f"partition=Tensor: in a trial on one batch, the slices of a rank fail: {text_of(error)}"
            ) from error
    _compare_gradients(split, loss, whole, [one[0] for one in found], [one[1] for one in found], double)


def _compute_whole(
    twin: nn.Module, learner: Learner, batch: object
) -> tuple[bool, tuple[float, dict[str, Tensor]], Any]:
    """Returns whether double precision works, the results, and the batch."""
    dtypes = [x.dtype for x in (*twin.parameters(), *twin.buffers())]
    try:
        wide = move_to_cpu(batch, torch.float64)
        return True, _compute_gradients(twin.double(), learner, wide), wide
    except Exception:
        for x, dtype in zip((*twin.parameters(), *twin.buffers()), dtypes, strict=True):
            x.data = x.data.to(dtype)
    try:
        return False, _compute_gradients(twin, learner, batch), batch
    except Exception as error:
        said = f"partition=Tensor: in a trial on one batch on the CPU, the model itself fails: {text_of(error)}"
        raise KnobError(said) from error


def _compute_gradients(model: nn.Module, learner: Learner, batch: object) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    with _NoRandomness():
        loss = learner.loss(model, batch)
        loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _compute_slices(part: nn.Module, learner: Learner, split: TensorSplit, k: int, batch: object,
               ask: Ask) -> tuple[float, dict[str, Tensor]]:  # fmt: skip
    with compute_together(part, split, k, ask, draws=False) as slices, slices.sum_partials():
        return _compute_gradients(part, learner, batch)


def _compare_gradients(
    split: TensorSplit,
    loss: float,
    whole: dict[str, Tensor],
    losses: list[float],
    found: list[dict[str, Tensor]],
    double: bool,
) -> None:
    """Raises KnobError if the slices' results differ. Skips results that are not finite in the whole model."""
    near, ways = TOLERANCE[double], f"split over {split.ways} ranks"
    norms = {name: float(as_real(grad).float().norm()) for name, grad in whole.items()}
    compared = {name: whole[name] for name, norm in norms.items() if math.isfinite(norm)}
    least = TOTAL_TOLERANCE[double] * math.hypot(*(norms[name] for name in compared))
    for name, grad in compared.items():
        off = float((_join_gradient(name, split, found, grad) - grad).norm())
        if not off <= near * float(grad.norm()) + least:
            share = f"its gradient is off by {off / (float(grad.norm()) or 1.0):.0%}"
            raise KnobError(
                f"partition=Tensor: {ways} {name} would get another gradient than in the whole model: {share}. "
                f"Follow each Colwise by the Rowwise that reads its outputs, with only operations by feature or by "
                f"head between them (`packed`, `together`). Use Partial() for a whole module that works on a rank's "
                f"heads. Use Sequence() for one that works on a rank's positions"
            )
    odd = [x for x in losses if math.isfinite(loss) and not abs(x - loss) <= near * max(1.0, abs(loss))]
    if odd:
        raise KnobError(
            f"partition=Tensor: {ways} the loss is {odd[0]:.6g}, and that of the whole model is {loss:.6g}, although "
            f"gradients agree: the loss reads parameters, and a rank has only slices of them. Use only the model's "
            f"output in the loss, and take weight decay from the optimizer"
        )


def _join_gradient(name: str, split: TensorSplit, found: list[dict[str, Tensor]], like: Tensor) -> Tensor:
    """Returns a whole gradient; missing ones are zero."""
    if name not in split.sliced:
        return found[split.owners[name]].get(name, torch.zeros_like(like))
    made = split.sliced[name]
    view = [n // (split.ways if k == made.dim else 1) for k, n in enumerate(made.view)]
    zero = like.new_zeros(made.shape_of_slice(split.ways))
    return torch.cat([each.get(name, zero).reshape(view) for each in found], made.dim).view(made.shape)


def move_to_cpu(batch: object, dtype: torch.dtype | None) -> Any:
    """Also converts floats to `dtype`."""
    if isinstance(batch, Tensor):
        return batch.to("cpu", dtype if dtype and batch.is_floating_point() else batch.dtype)
    if isinstance(batch, dict):
        moved = {k: move_to_cpu(v, dtype) for k, v in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)
    if isinstance(batch, list | tuple):
        each = [move_to_cpu(v, dtype) for v in batch]
        return type(batch)(*each) if hasattr(batch, "_fields") else type(batch)(each)
    return copy.copy(batch)
