"""A transformer for tensor parallelism, and how to assemble its parameters from ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks import experiment, toy
from workbench.experiment import Experiment
from workbench.optimizers import SGD
from workbench.tasks import Colwise, Plan, Rowwise, Scatter, Sequence

WIDTH, HEADS, LAYERS, WORDS, CONTEXT, ROWS = 16, 4, 2, 32, 6, 8
PLAN: Plan = {
    "words": Rowwise(),
    "blocks.*.q": Colwise(together=WIDTH // HEADS),
    "blocks.*.k": Colwise(together=WIDTH // HEADS),
    "blocks.*.v": Colwise(together=WIDTH // HEADS),
    "blocks.*.o": Rowwise(),
    "blocks.*.up": Colwise(),
    "blocks.*.down": Rowwise(),
    "head": Colwise(gather=True),
    "blocks.0": Scatter(),  # from here on for sequence parallelism only
    "blocks.*.norms.*": Sequence(),
    "norm": Sequence(),
}


class Block(nn.Module):
    """Attention and a two-layer network as in GPT-2, with separate matrices for q, k and v."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # its gradient would be nothing but rounding
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inside, self.outside = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](h)
        made = [each(x) for each in (self.q, self.k, self.v)]
        q, k, v = (each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in made)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.o(mixed.transpose(1, 2).flatten(2))
        return h + self.outside(self.down(self.inside(F.gelu(self.up(self.norms[1](h))))))


class Small(nn.Module):
    """(B, T) int64 -> (B, T, WORDS) logits."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        rng = torch.Generator().manual_seed(5)
        for p in self.parameters():
            p.data = 0.3 * torch.randn(p.shape, generator=rng)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def texts(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(0, WORDS, (ROWS, CONTEXT + 1), generator=rng) for _ in range(8)]


def entropy(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def held_out(model: nn.Module) -> float:
    return float(entropy(model, texts(99, 1, 0)[0].to(next(model.parameters()).device)))


def small(**rest: Any) -> Any:
    """Returns a task that trains it."""
    own = {"model": Small, "data": texts, "loss": entropy, "evaluate": held_out, "split": lambda _: PLAN}
    return toy(**{**own, **rest})


def spread(ranks: int, steps: int = 6, **rest: Any) -> Experiment:
    known = {"task": small(), "optimizer": SGD(momentum=0.0), "lr": 0.1, "bucket_mb": 0.01}
    return experiment(ranks, steps, **{**known, **rest})


def together(sessions: list[Any], replica: int = 0) -> dict[str, torch.Tensor]:
    """Returns all parameters of one replica by name, whole, from the ranks that hold them, which have a Spread."""
    lies = next(s.spread if hasattr(s, "spread") else s.training.spread for s in sessions)
    if lies is None:
        return {place.name: place.param.data for place in sessions[replica].layout.order}
    parts: dict[str, list[torch.Tensor]] = {}
    for s in sessions[replica * len(lies) : (replica + 1) * len(lies)]:
        for place in s.layout.order:
            parts.setdefault(place.name, []).append(place.param.data)
    whole = {}
    for name, found in parts.items():
        if lies.split and name in lies.split.sliced:
            made = lies.split.sliced[name]
            view = [n // (lies.split.ways if k == made.dim else 1) for k, n in enumerate(made.view)]
            whole[name] = torch.cat([x.view(view) for x in found], made.dim).view(made.shape)
        else:
            assert len(found) == 1, f"{name} is looked after by one rank"
            (whole[name],) = found
    return whole


def alone(e: Experiment, replicas: int, steps: int = 6, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Returns the result of one process that averages the replicas' gradients."""
    model = model or Small()
    params = list(model.parameters())
    optimizer = e.optimizer.make(params, e.lr, lambda lr: torch.optim.SGD(params, lr))
    for step in range(steps):
        model.zero_grad()
        for replica in range(replicas):
            (entropy(model, texts(replica, replicas, 0)[step % 8]) / replicas).backward()
        if e.clip:
            nn.utils.clip_grad_norm_(params, e.clip)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def near(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(found[name], x, rtol=10 * tolerance, atol=tolerance)
