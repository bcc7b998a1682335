"""Tests that absent parameters request their values before any read, and only then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from workbench.host.placement import unmaterialized


class Away:
    """Absent parameters that come on request, and the requests."""

    def __init__(self, *params: nn.Parameter) -> None:
        self.values = {id(p): p.data.clone() for p in params}
        self.asked: list[list[nn.Parameter]] = []
        for p in params:
            p.data = torch.full((1,), torch.nan).expand(p.shape)
            unmaterialized.make_absent(p, self.bring)

    def bring(self, params: list[nn.Parameter], others: list[nn.Parameter]) -> None:
        self.asked.append(params)
        for p in params:
            unmaterialized.make_present(p)
            p.data = self.values[id(p)]


class Kind(nn.Parameter):
    """A user's subclass of Parameter."""


@pytest.mark.parametrize("read", [
    lambda w, x: F.linear(x, w), lambda w, x: x @ w, lambda w, x: torch.cat([x, w]), lambda w, x: w[0] + 1,
    lambda w, x: torch.einsum("ij,jk->ik", x, w), lambda w, x: torch.linalg.norm(w), lambda w, x: w.sum(),
    lambda w, x: w.data.clone(), lambda w, x: w.detach(), lambda w, x: w.T @ x, lambda w, x: torch.stack([x, (w * 2)]),
    lambda w, x: torch.add(input=x, other=w), lambda w, x: checkpoint(F.linear, x, w, use_reentrant=False),
    lambda w, x: x.addmm(x, w), lambda w, x: copy.deepcopy(w), lambda w, x: w.clone(), lambda w, x: w.tolist(),
])  # fmt: skip
def test_any_read_of_a_value_requests_it_first(read: Callable[..., Any]) -> None:
    w, x = nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4)
    want = read(w, x)
    away = Away(w)
    got = read(w, x)
    assert away.asked == [[w]] and type(w) is nn.Parameter
    assert want == got if isinstance(want, list) else torch.equal(want, got)


def test_metadata_requests_no_value() -> None:
    w = nn.Parameter(torch.randn(4, 3))
    away = Away(w)
    told = [w.shape, w.size(0), w.numel(), w.dim(), w.dtype, w.device, w.requires_grad, w.is_leaf, w.grad, w.ndim,
            w.element_size(), w.is_floating_point(), torch.zeros_like(w).sum().item(), len(w), w.is_meta]  # fmt: skip
    assert told[:4] == [(4, 3), 4, 12, 2] and not away.asked
    assert "not on this rank" in repr(w) and isinstance(w, nn.Parameter) and hash(w) == id(w)
    w.grad = torch.ones(4, 3)
    w.requires_grad_(False)
    assert not away.asked and not w.requires_grad
    optimizer = torch.optim.AdamW([w])
    optimizer.zero_grad()
    assert not away.asked and w.grad is None


def test_one_call_requests_all_its_parameters_at_once() -> None:
    attention = nn.MultiheadAttention(8, 2)
    x = torch.randn(3, 2, 8)
    want = attention(x, x, x)[0]
    away = Away(*attention.parameters())
    assert torch.equal(attention(x, x, x)[0], want)
    assert [len(params) for params in away.asked] == [4]


def test_gradients_reach_their_parameters_and_subclasses_survive() -> None:
    cell, kind = nn.LSTM(4, 4), Kind(torch.randn(4))
    x = torch.randn(5, 2, 4)
    (cell(x)[0] * kind).sum().backward()
    params = [*cell.parameters(), kind]
    want = [p.grad.clone() for p in params]
    for p in params:
        p.grad = None
    away = Away(*params)
    (cell(x)[0] * kind).sum().backward()
    assert [len(asked) for asked in away.asked] == [4, 1] and type(kind) is Kind
    assert all(torch.equal(p.grad, g) for p, g in zip(params, want, strict=True))


def test_a_request_hook_may_only_observe() -> None:
    w, seen = nn.Parameter(torch.randn(4, 4)), []
    unmaterialized.make_absent(w, lambda params, others: seen.append(params))
    y = F.linear(torch.ones(4), w) + w.sum()
    y.sum().backward()
    assert seen == [[w], [w]] and w.grad is not None and type(y) is torch.Tensor
    twin = copy.deepcopy(nn.ParameterList([w, w]))
    assert type(twin[0]) is nn.Parameter and twin[0] is twin[1] and torch.equal(twin[0], w) and len(seen) == 4
    unmaterialized.make_present(w)
    assert type(w) is nn.Parameter and not vars(w)
