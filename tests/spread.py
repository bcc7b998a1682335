"""State of every dtype, random placements of it on up to 6 ranks, and the cost of moves."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from workbench.host.placement.placement import Placement
from workbench.host.placement.strided_slices import StridedSlice

SHAPES = {
    "embed": (6, 8), "qkv": (3, 4, 5), "up": (9, 4), "norm": (7,), "down": (4, 9), "ids": (5, 3), "mask": (6, 2),
    "wave": (3, 5), "exp_avg/embed": (6, 8), "exp_avg/qkv": (3, 4, 5), "exp_avg/up": (9, 4), "exp_avg/norm": (7,),
}  # fmt: skip
WHOLE = {"step": 1, "rng": 13, "running_mean": 7}  # tensors that are not elementwise are always whole
DTYPES = {
    "embed": torch.float32, "qkv": torch.bfloat16, "up": torch.float64, "norm": torch.float16, "down": torch.float32,
    "ids": torch.int64, "mask": torch.bool, "wave": torch.complex128, "exp_avg/embed": torch.float32,
    "exp_avg/qkv": torch.float32, "exp_avg/up": torch.float64, "exp_avg/norm": torch.float8_e4m3fn,
    "step": torch.int64, "rng": torch.uint8, "running_mean": torch.float64,
}  # fmt: skip
SIZES = {**{name: math.prod(shape) for name, shape in SHAPES.items()}, **WHOLE}
WIDTHS = {name: dtype.itemsize for name, dtype in DTYPES.items()}
RANKS = 6
Names = Collection[str]


def reference(seed: int) -> dict[str, torch.Tensor]:
    """Returns every tensor whole and flat, with random bits, including NaNs."""
    rng = torch.Generator().manual_seed(seed)
    raw = {n: torch.randint(0, 256, (SIZES[n] * WIDTHS[n],), generator=rng, dtype=torch.uint8) for n in SIZES}
    return {n: x > 127 if DTYPES[n] is torch.bool else x.view(DTYPES[n]) for n, x in raw.items()}


def elements(s: StridedSlice) -> list[int]:
    """Returns a Slice's elements in order: its definition."""
    return [s.start + k * s.stride + j for k in range(s.times) for j in range(s.length)]


def local(slices: Iterable[StridedSlice]) -> list[int]:
    """Returns the elements in the order in which a rank with these slices stores them."""
    return [e for s in slices for e in elements(s)]


def order(placement: Placement, rank: int, name: str) -> list[int]:
    """Returns the element at each position of a rank's own tensor."""
    return local(placement.slices_of_rank(rank).get(name, ()))


def held(placement: Placement, rank: int, name: str) -> np.ndarray:
    """Returns whether a rank holds each element: (size,)."""
    found = np.zeros(SIZES[name], dtype=bool)
    found[order(placement, rank, name)] = True
    return found


class Step(NamedTuple):
    """One move of a walk; lost: by tensor, the elements that no living rank has, if the move is impossible."""

    was: Placement
    to: Placement
    alive: tuple[int, ...]
    lost: dict[str, int]


def has(step: Step, rank: int, name: str) -> np.ndarray:
    return held(step.was, rank, name) & (rank in step.alive)


def least(step: Step) -> int:
    """Returns the fewest bytes of a move: each element that a rank needs and lacks, once."""
    return sum(WIDTHS[n] * int((held(step.to, r, n) & ~has(step, r, n)).sum()) for n in SIZES for r in range(RANKS))


def demands(step: Step) -> dict[tuple[int, ...], list[int]]:
    """Returns the widths of the elements to send, one by one, by the ranks that have them."""
    found: dict[tuple[int, ...], list[int]] = {}
    for name in sorted(SIZES):
        owned = np.array([has(step, r, name) for r in range(RANKS)])
        needs = sum((held(step.to, r, name) & ~owned[r]).astype(int) for r in range(RANKS))
        for element in np.nonzero(needs)[0]:
            owners = tuple(np.nonzero(owned[:, element])[0].tolist())
            found.setdefault(owners, []).extend([WIDTHS[name]] * int(needs[element]))
    return found


def lost(was: Placement, to: Placement, alive: Collection[int]) -> dict[str, int]:
    found = {}
    for name in sorted(SIZES):
        there = np.any([held(was, r, name) for r in alive] or [np.zeros(SIZES[name], bool)], axis=0)
        wanted = np.any([held(to, r, name) for r in range(RANKS)], axis=0)
        found[name] = int((wanted & ~there).sum())
    return {name: n for name, n in found.items() if n}


@cache
def walk(seed: int, moves: int) -> tuple[Step, ...]:
    """Returns `moves` possible moves among random placements, and some impossible ones with too many deaths."""
    rng = random.Random(seed)
    was, found, made = placement(rng), list[Step](), 0
    while made < moves:
        to = placement(rng)
        # after an impossible move the dead ranks are back
        few = 0 if found and found[-1].lost else rng.choice([0, 1, 1, 2])
        dead = rng.sample(was.holding_ranks, min(few, len(was.holding_ranks) - 1))
        alive = tuple(r for r in range(RANKS) if r not in dead)
        found.append(Step(was, to, alive, lost(was, to, alive)))
        if not found[-1].lost:
            was, made = to, made + 1
    return tuple(found)


def placement(rng: random.Random) -> Placement:
    """Returns a random spread of the state over random ranks. The moments may have another spread."""
    ranks = rng.sample(range(RANKS), rng.randint(1, RANKS))
    params = [n for n in SHAPES if "/" not in n]
    moments = [n for n in SHAPES if "/" in n]
    if rng.random() < 0.5:
        spread = _any(rng, [*params, *moments], ranks)
    else:
        spread = _any(rng, params, ranks) | _any(rng, moments, ranks)
    return spread | Placement.place_whole(WHOLE, ranks)


def _any(rng: random.Random, names: Sequence[str], ranks: list[int]) -> Placement:
    kinds = [_whole, _sharded, _shared_out, _layers, _split]
    one = rng.choice(kinds)
    if len(ranks) % 2 or rng.random() < 0.5:
        return one(rng, names, ranks)
    first, other = ranks[::2], ranks[1::2]
    spread, groups = one(rng, names, first), {r: [r, s] for r, s in zip(first, other, strict=True)}
    how = rng.random()
    if how < 0.6:
        return spread.copy_to_groups(groups)
    if how < 0.8:
        return spread.shard_to_groups(groups)
    middle = rng.randint(1, len(names) - 1)
    return one(rng, names[:middle], first) | rng.choice(kinds)(rng, names[middle:], other)


def _sizes(names: Names) -> dict[str, int]:
    return {name: SIZES[name] for name in names}


def _whole(rng: random.Random, names: Names, ranks: list[int]) -> Placement:
    return Placement.place_whole(_sizes(names), ranks)


def _sharded(rng: random.Random, names: Names, ranks: list[int]) -> Placement:
    return Placement.sharded(_sizes(names), ranks)


def _shared_out(rng: random.Random, names: Names, ranks: list[int]) -> Placement:
    return Placement.sharded(_sizes(names), ranks, [rng.randint(1, 5) for _ in ranks])


def _layers(rng: random.Random, names: Names, ranks: list[int]) -> Placement:
    parts: list[list[str]] = [[] for _ in range(rng.randint(1, 2) * len(ranks))]
    for name in names:
        for part in rng.sample(parts, 1 if rng.random() < 0.8 or len(parts) == 1 else 2):
            part.append(name)
    return Placement.place_layers(_sizes(names), ranks, parts)


def _split(rng: random.Random, names: Names, ranks: list[int]) -> Placement:
    found = Placement.place_whole({}, ranks)
    for name in names:
        shape = SHAPES[name]
        found |= Placement.place_slices({name: shape}, ranks, rng.randint(0, len(shape) - 1))
    return found
