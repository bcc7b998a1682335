"""Reads and updates a few rows of embedding tables.

A table is a parameter of shape (rows, width). The strategy decides which rank owns which table.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.experiment import Experiment
from workbench.host.memory.batches import make_example
from workbench.host.placement.optimizer_slots import copy_optimizer, read_settings
from workbench.host.placement.parameter_layout import ParameterLayout, ParameterPlace
from workbench.rank import StrategyError
from workbench.tasks import Learner

Rows = Mapping[str, Tensor]  # by table


def list_tables(learner: Learner, e: Experiment, layout: ParameterLayout) -> tuple[str, ...]:
    """Returns the tables that batches read, if the strategy keeps tables on servers."""
    if not e.strategy.tables:
        return ()
    return tuple(find_rows(learner, make_example(learner, e, "cpu"), layout))


def find_rows(learner: Learner, batch: object, layout: ParameterLayout) -> dict[str, Tensor]:
    """Returns the rows that a batch reads, by table: (n,) int64, distinct and ascending.

    Raises StrategyError if a table or a row does not exist.
    """
    said = learner.lookups(batch) if learner.lookups is not None else {}
    found = {}
    for name, rows in said.items():
        height = _find_table(layout, name).param.shape[0]
        found[name] = own = rows.detach().reshape(-1).long().unique()
        if own.numel() and not 0 <= int(own[0]) <= int(own[-1]) < height:
            raise StrategyError(
                f"lookups: {name} has rows 0 to {height - 1}, and a batch reads {int(own[0])} to {int(own[-1])}"
            )
    return found


def take_gradients(layout: ParameterLayout, rows: Rows) -> dict[str, Tensor]:
    """Returns the gradients of `rows`, by table: (n, width). Clears the tables' gradients."""
    return take_named_gradients({name: _find_table(layout, name).param for name in rows}, rows)


def take_named_gradients(params: Mapping[str, nn.Parameter], rows: Rows) -> dict[str, Tensor]:
    """Does `take_gradients` with parameters by name."""
    found = {}
    for name, mine in rows.items():
        param = params[name]
        grad, param.grad = param.grad, None
        if grad is None:
            found[name] = param.data.new_zeros(len(mine), param.shape[1])
        else:
            found[name] = (grad.to_dense() if grad.is_sparse else grad)[mine]
    return found


def step_rows(layout: ParameterLayout, optimizer: Optimizer, table: str, rows: Tensor, grad: Tensor, lr: float) -> None:
    """Steps the optimizer on `rows` of a table only.

    Slots of the table's shape have rows, too. Other slots, such as step counters, belong to the whole table.
    """
    param = _find_table(layout, table).param
    own = nn.Parameter(param.data[rows])
    own.grad = grad.to(own.device, own.dtype).view_as(own)
    other, state = copy_optimizer(optimizer), optimizer.state[param]
    by, groups = read_settings(optimizer), [group["params"] for group in optimizer.param_groups]
    number = next(n for n, params in enumerate(groups) for p in params if p is param)
    first = by[0]["lr"]
    said = {**by[number], "params": [own], "lr": lr * (by[number]["lr"] / first if first else 1.0)}
    other.param_groups = [said]
    cut = {slot for slot, x in state.items() if isinstance(x, Tensor) and x.shape == param.shape}
    other.state[own] = {slot: x[rows] if slot in cut else x for slot, x in state.items()}
    other.step()
    param.data[rows] = own.detach()
    for slot, x in other.state[own].items():
        if isinstance(x, Tensor) and x.shape == own.shape and x.dim():
            if slot not in cut:  # its first step
                state[slot] = torch.zeros_like(param.data, dtype=x.dtype)
            state[slot][rows] = x
        else:
            state[slot] = x


def _find_table(layout: ParameterLayout, name: str) -> ParameterPlace:
    for place in layout.order:
        if place.name == name and place.param.dim() == 2:
            return place
    there = ", ".join(place.name for place in layout.order if place.param.dim() == 2)
    raise StrategyError(f"lookups: {name!r} is not the weight of a trained embedding; there are {there or 'none'}")
