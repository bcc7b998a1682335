"""The random numbers of a process, and others in their place for a while."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

Numbers = tuple[Any, Any, Any]  # how torch's, numpy's and Python's random numbers go on


def numbers() -> Numbers:
    """How the process's go on now."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


class Chance:
    """Random numbers of its own: inside it torch's, numpy's and Python's draw from here, and go on where they were."""

    def __init__(self, seed: int | Numbers) -> None:
        self._mine: Numbers = seed if isinstance(seed, tuple) else (
            torch.Generator().manual_seed(seed).get_state(), np.random.RandomState(seed % 2**32).get_state(),
            random.Random(seed).getstate(),
        )  # fmt: skip
        self._theirs: Any = ()

    @property
    def numbers(self) -> Numbers:
        """How they go on."""
        return self._mine

    def begin(self) -> None:
        """The process's go on from here, for good."""
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
