"""A hash of state that adds up: equal however tensors are cut, spread over ranks or put into buckets.

Each element's bits count times a number from its name and place. The hash is the sum over all slices, with replicas
counted once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.host.placement.placement import Held
from workbench.host.placement.strided_slices import StridedSlice

WORD_BYTES = 4  # with 8, changes of two elements' highest bits could cancel out
CHUNK_WORDS = 1 << 16
Words = NDArray[np.uint8 | np.uint16 | np.uint32]
SUM_MASK = 2**63 - 1  # sums are modulo 2 ** 63, to fit an int64
_WEIGHTS = np.random.Generator(np.random.PCG64(63)).integers(0, 2**64, CHUNK_WORDS, dtype=np.uint64)


def compute_checksum(state: Mapping[str, Tensor], held: Held | None = None) -> int:
    """Returns the sum over all elements, from 0 to 2 ** 63 - 1; 0 without values.

    held: by name, a tensor's slices in order; None: each tensor is whole
    """
    if any(x.is_meta for x in state.values()):
        return 0
    total = 0
    for name, x in state.items():
        words, at, seed = _view_words(x), 0, _hash_name(name)
        each = words.size // max(1, x.numel())  # words per element
        for s in held[name] if held is not None else (StridedSlice(0, x.numel()),):
            for k in range(s.times):
                length = s.length * each
                total += _sum_words(words[at : at + length], (s.start + k * s.stride) * each, seed)
                at += length
    return total & SUM_MASK


def _view_words(x: Tensor) -> Words:
    raw = x.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return raw.view(f"u{min(WORD_BYTES, x.element_size())}")


def _sum_words(words: Words, start: int, seed: int) -> int:
    """start: the first word's number"""
    total = at = 0
    while at < words.size:
        chunk, low = divmod(start + at, CHUNK_WORDS)
        part = words[at : at + CHUNK_WORDS - low]
        weights = _WEIGHTS[low : low + part.size]
        total += int((part * weights).sum(dtype=np.uint64)) * _mix_bits(seed + chunk)
        at += part.size
    return total


@lru_cache(maxsize=4096)
def _hash_name(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


@lru_cache(maxsize=65536)
def _mix_bits(n: int) -> int:
    """Returns an odd 64-bit number that looks random.

    It is SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014, https://doi.org/10.1145/2660193.2660195).
    """
    n = (n ^ n >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    n = (n ^ n >> 27) * 0x94D049BB133111EB % 2**64
    return (n ^ n >> 31) | 1
