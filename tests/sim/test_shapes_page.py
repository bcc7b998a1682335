"""Checks that docs/project/shapes.md shows exactly the code that the tests run."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.sim import more_shapes
from workbench.partitions.schedules import OneFOneB
from workbench.settings import Family
from workbench.strategies import DABMD, ByteScheduler, Hogwild, ShadowSync, Wavelet, ZeRO3

pytestmark = pytest.mark.ranks

PAGE = (Path(__file__).parent.parent.parent / "docs" / "project" / "shapes.md").read_text()
SHOWN = [
    cls
    for _, cls in inspect.getmembers(more_shapes, inspect.isclass)
    if cls.__module__ == more_shapes.__name__ and issubclass(cls, Family)
] + [DABMD, ByteScheduler, Hogwild, OneFOneB, ShadowSync, Wavelet, ZeRO3]  # these come first on the page


@pytest.mark.parametrize("shape", SHOWN, ids=lambda c: c.__name__)
def test_the_page_shows_the_shape_as_it_is(shape: type) -> None:
    source = inspect.getsource(shape)
    assert source.startswith("@dataclass(frozen=True, kw_only=True)\n")
    assert source in PAGE


def test_the_page_shows_all_eight_shapes() -> None:
    assert {c.__name__ for c in SHOWN} == {
        "ByteScheduler", "Wavelet", "ZeRO3", "OneFOneB", "ShadowSync", "DABMD", "Hogwild", "TwoHop",
    }  # fmt: skip
