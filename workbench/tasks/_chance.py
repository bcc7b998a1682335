"""Swaps the random number generators of a process for a while."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

Numbers = tuple[Any, Any, Any]  # states of torch's, numpy's and Python's generators


def numbers() -> Numbers:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


class Chance:
    """Random states that torch, numpy and Python draw from inside the context."""

    def __init__(self, seed: int | Numbers) -> None:
        self._mine: Numbers = seed if isinstance(seed, tuple) else (
            torch.Generator().manual_seed(seed).get_state(), np.random.RandomState(seed % 2**32).get_state(),
            random.Random(seed).getstate(),
        )  # fmt: skip
        self._theirs: Any = ()

    @property
    def numbers(self) -> Numbers:
        return self._mine

    def begin(self) -> None:
        """Sets the process's generators to these states for good."""
        self._swapped(self._mine)

    def __enter__(self) -> None:
        self._theirs = self._swapped(self._mine)

    def __exit__(self, *_: object) -> None:
        self._mine = self._swapped(self._theirs)

    def _swapped(self, states: Numbers) -> Numbers:
        was = numbers()
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        return was
