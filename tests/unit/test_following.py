"""What an evaluation's calls of torch make is followed, whoever calls."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from workbench.host.following import Following

WIDTH, BATCH = 256, 32


def test_a_compiled_model_answers_as_before_and_nobody_is_warned() -> None:
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    compiled, x = torch.compile(model, backend="eager"), torch.ones(BATCH, 64)
    with torch.no_grad(), warnings.catch_warnings(action="error"):
        plain = model(x)
        with Following() as following:
            assert torch.equal(compiled(x), plain)
    assert following.most[0] >= 2 * BATCH * WIDTH * 4, "both activations of the hidden layer are there at a time"
