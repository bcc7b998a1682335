"""Tests that `laws` reports exactly the broken laws and by how much."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tests.laws.test_quick import STRATEGIES
from workbench import KnobError
from workbench.entrypoints.laws import laws
from workbench.sim.teach.laws import LAWS
from workbench.strategies import DDP, LocalSGD


class Apart(DDP):
    """Claims to be DDP, but ranks exchange nothing."""

    async def step(self, rank: Any, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()


class Partial(LocalSGD):
    """Rank 0 requests one sum more than the other ranks."""

    plain: ClassVar[bool] = False

    async def step(self, rank: Any, state: Any) -> None:
        await super().step(rank, state)
        if rank.index == 0:
            await rank.send((await rank.params())[0].data, 1, "more")


def test_only_broken_laws_are_reported() -> None:
    assert laws(LocalSGD).broken == [] and len(laws(LocalSGD)) == len(LAWS)
    found = laws(Apart)
    assert found.broken == [
        "it trains, is left, and all ranks agree",
        "ranks are equal after every step",
        "its step is what one process would make of all examples",
    ]
    assert "BROKEN    ranks are equal after every step: ranks differ after step 1" in repr(found)
    assert laws(Partial).broken == ["all ranks request the same collectives, also with sizes only"]


def test_a_strategy_exchanges_one_of_four_kinds() -> None:
    class Odd(LocalSGD):
        exchanges: ClassVar[str] = "anything"

    (found,) = (one for one in laws(Odd) if one.law == "it takes a compressor, or says why not")
    assert not found.held and "must be one of gradients, moments, displacements, parameters" in found.said


def test_laws_take_only_a_class_of_strategy() -> None:
    assert {"Apart", "Partial"}.isdisjoint(STRATEGIES), "the laws of the house are asked of what it ships"
    for wrong in (LocalSGD(), "LocalSGD", dict):
        with pytest.raises(KnobError, match="must be the class of a strategy"):
            laws(wrong)  # type: ignore[arg-type]
