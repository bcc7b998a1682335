"""Reads and updates a few rows of embedding tables.

A table is a parameter of shape (rows, width). The strategy decides which rank owns which table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.rank import StrategyError

Rows = Mapping[str, Tensor]  # by table
CopyOptimizer = Callable[[Optimizer, list[dict[str, Any]]], Optimizer]  # of the same kind, with these groups


class Lookups(Protocol):
    """A task's functions. lookups: (batch) -> the rows that it reads, by table. None: unknown"""

    @property
    def lookups(self) -> Callable[[Any], Mapping[str, Tensor]] | None: ...


class NamedParameter(Protocol):
    """A parameter and its name in the model."""

    @property
    def name(self) -> str: ...
    @property
    def param(self) -> nn.Parameter: ...


class TableLayout(Protocol):
    """A model's trained parameters."""

    @property
    def order(self) -> Sequence[NamedParameter]: ...


def find_rows(learner: Lookups, batch: object, layout: TableLayout) -> dict[str, Tensor]:
    """Returns the rows that a batch reads, by table: `(n,)` int64, distinct and ascending.

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


def take_gradients(layout: TableLayout, rows: Rows) -> dict[str, Tensor]:
    """Returns the gradients of `rows`, by table: `(n, width)`. Clears the tables' gradients."""
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


def outline_gradients(layout: TableLayout, rows: Rows) -> dict[str, Tensor]:
    """Does `take_gradients` for parameters without values."""
    like = {place.name: place.param.data for place in layout.order if place.name in rows}
    return {name: like[name].new_empty(len(mine), like[name].shape[1]) for name, mine in rows.items()}


def step_rows(
    layout: TableLayout,
    optimizer: Optimizer,
    copy_optimizer: CopyOptimizer,
    table: str,
    rows: Tensor,
    grad: Tensor,
    lr: float,
) -> None:
    """Steps the optimizer on `rows` of a table only.

    copy_optimizer: returns an optimizer without state

    Slots of the table's shape have rows, too. Other slots, such as step counters, belong to the whole table.
    """
    param = _find_table(layout, table).param
    own = nn.Parameter(param.data[rows])
    own.grad = grad.to(own.device, own.dtype).view_as(own)
    state, groups = optimizer.state[param], optimizer.param_groups
    its = next(group for group in groups for p in group["params"] if p is param)
    first = groups[0]["lr"]
    said = {**its, "params": [own], "lr": lr * (its["lr"] / first if first else 1.0)}
    other = copy_optimizer(optimizer, [said])
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


def _find_table(layout: TableLayout, name: str) -> NamedParameter:
    for place in layout.order:
        if place.name == name and place.param.dim() == 2:
            return place
    there = ", ".join(place.name for place in layout.order if place.param.dim() == 2)
    raise StrategyError(f"lookups: {name!r} is not the weight of a trained embedding; there are {there or 'none'}")
