"""A small GPT on the bytes of Python's standard library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.settings import knob
from workbench.tasks._base import Learner, TaskBase, shuffled
from workbench.tasks._shards import by_files, draw_from_shard
from workbench.tasks._source import ends, source
from workbench.tasks._split import Colwise, Plan, Rowwise, Scatter, Sequence

HELD_OUT = 48  # windows of an evaluation
AT_ONCE = 8  # windows per forward: an evaluation then needs no more memory than a step


@dataclass(frozen=True, kw_only=True)
class ByteGPT(TaskBase):
    """A small GPT that reads Python source, byte by byte.

    It begins at log(256) = 5.5 nats per byte. It knows the letters' frequencies at 3.2 and common words at 2. One in 10
    files of the standard library is held out. Nothing is downloaded. With `shards` = "files" each rank keeps its own
    files, of about equally many bytes. Otherwise the ranks share each epoch's examples.

    When to use it: by default. It is a transformer, and its held-out loss still falls after hundreds of steps.

    Reference: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019,
    https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
    """

    layers: int = knob(2, 1, 48, live=False, doc="transformer blocks")
    width: int = knob(160, 16, 4096, live=False, doc="features per byte; a multiple of `heads`")
    heads: int = knob(4, 1, 64, live=False, doc="attention heads")
    context: int = knob(64, 8, 4096, unit="bytes", live=False, doc="bytes read at once")

    shards: str = knob("iid", choices=("iid", "files"), live=False, doc="ranks read all files (iid), or each its own")

    lr: ClassVar[float] = 3e-3
    batch: ClassVar[int] = 8

    def build(self) -> Learner:
        return Learner(
            model=lambda: GPT(self.layers, self.width, self.heads, self.context),
            data=self._batches,
            loss=_loss,
            optimizer=lambda params, lr: torch.optim.AdamW(params, lr, betas=(0.9, 0.95), weight_decay=0.01),
            evaluate=partial(_held_out, self.context),
            parts=_parts,
            split=partial(_split, self.width // self.heads),
            indexed=self.shards == "iid",
            pure=True,
        )

    def refuses(self, batch: int) -> str | None:
        if self.width % self.heads:
            return f"width={self.width}: must be a multiple of heads={self.heads}"
        return None

    def _batches(self, rank: int, ranks: int, batch: int, seed: int, used: int = 0) -> Iterator[Tensor]:
        """Returns one rank's windows: (batch, context + 1) uint8."""
        windows = _windows(self.context, held_out=False)
        if self.shards == "iid":
            order = shuffled(len(windows), rank, ranks, batch, seed, used)
        else:
            order = draw_from_shard(_filed(self.context, ranks), rank, batch, seed)
        return (windows[index] for index in order)


class GPT(nn.Module):
    """A decoder-only transformer over bytes: `(B, T)` uint8 or int64 -> `(B, T, 256)` logits of the next byte."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.place = nn.Embedding(context, width)
        blocks = [Block(width, heads) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self._begin(blocks)

    def _begin(self, blocks: list[Block]) -> None:
        """Initialises every block as the identity and the head as zero, so that the loss falls fast."""
        nn.init.normal_(self.byte.weight, std=0.5)
        nn.init.normal_(self.place.weight, std=0.1)
        nn.init.zeros_(self.head.weight)
        for block in blocks:
            for into in (block.qkv, block.up):
                nn.init.normal_(into.weight, std=into.in_features**-0.5)
            for out in (block.attention_out, block.mlp_out):
                nn.init.zeros_(out.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = _embedded(self, x)
        for block in self.blocks:
            h = block(h)
        return _predicted(self, h)


def _parts(model: nn.Module) -> list[nn.Module]:
    """Returns the parts between which a GPT may be cut."""
    assert isinstance(model, GPT)
    return [Bytes(model), *model.blocks, Next(model)]


def _split(features: int, model: nn.Module) -> Plan:
    """Returns the tensor-parallel plan: splits heads of `features` features, hidden features and the vocabulary."""
    return {
        "byte": Rowwise(),
        "blocks.0": Scatter(),
        "blocks.*.norm_1": Sequence(),
        "blocks.*.norm_2": Sequence(),
        "norm": Sequence(),
        "blocks.*.qkv": Colwise(packed=3, together=features),
        "blocks.*.attention_out": Rowwise(),
        "blocks.*.up": Colwise(),
        "blocks.*.mlp_out": Rowwise(),
        "head": Colwise(gather=True),
    }


def _embedded(holds: GPT | Bytes, x: Tensor) -> Tensor:  # (B, T) -> (B, T, width)
    return holds.byte(x.long()) + holds.place.weight[: x.shape[1]]


def _predicted(holds: GPT | Next, h: Tensor) -> Tensor:  # (B, T, width) -> (B, T, 256)
    return holds.head(holds.norm(h))


class Bytes(nn.Module):
    """A GPT's layers before its blocks, with its parameters."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.byte, self.place = gpt.byte, gpt.place

    def forward(self, x: Tensor) -> Tensor:
        return _embedded(self, x)


class Next(nn.Module):
    """A GPT's layers after its blocks, with its parameters."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.norm, self.head = gpt.norm, gpt.head

    def forward(self, h: Tensor) -> Tensor:
        return _predicted(self, h)


class Block(nn.Module):
    """Causal attention, then a two-layer network on each byte. Each adds its output to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.features = width // heads  # per head
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.up, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:  # (B, T, width) -> (B, T, width)
        qkv = self.qkv(self.norm_1(h))
        b, t, _ = qkv.shape
        q, k, v = qkv.view(b, t, 3, -1, self.features).permute(2, 0, 3, 1, 4)  # (B, heads, T, features) each
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.attention_out(mixed.transpose(1, 2).reshape(b, t, -1))
        return h + self.mlp_out(F.gelu(self.up(self.norm_2(h))))


def _windows(context: int, held_out: bool) -> Tensor:
    """Returns windows of the text that overlap by one byte: (n, context + 1) uint8. Copies nothing."""
    return source(held_out).unfold(0, context + 1, context)


@cache
def _filed(context: int, ranks: int) -> list[Tensor]:
    """Returns windows by rank, each with the file of its first byte."""
    begin = torch.arange(len(_windows(context, held_out=False))) * context
    return by_files(torch.searchsorted(ends(held_out=False), begin, right=True), ranks)


def _loss(model: nn.Module, window: Tensor) -> Tensor:
    """Mean nats per byte."""
    logits = model(window[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].reshape(-1).long())


@torch.no_grad()
def _held_out(context: int, model: nn.Module) -> float:
    windows = _windows(context, held_out=True)
    place = torch.linspace(0, len(windows) - 1, HELD_OUT).long()
    where = next(model.parameters()).device
    return float(torch.stack([_loss(model, windows[some].to(where)) for some in place.split(AT_ONCE)]).mean())
