"""SelSync against its paper and its authors' norm: the same decisions in the same steps, and the same parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.golden.driven import NEAR, agree, recorded
from tests.golden.problem import SGD, STEPS, Problem
from tests.golden.selsync import selsync
from tests.sim.virtual import samples
from workbench.strategies import SelSync

pytestmark = pytest.mark.ranks

plain = partial(SGD, lr=0.1)
heavy = partial(SGD, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(("ranks", "inner", "delta", "window", "bucket_mb", "more"), [
    (4, heavy, 0.6, 3, 0.01, {}),
    (3, plain, 0.5, 2, 1.0, {"smoothing": 0.4}),
    (3, plain, 0.5, 5, 0.01, {"gradients": True}),
    (4, heavy, 0.1, 4, 1.0, {"norm_window": 6, "smoothing": 0.2}),
    (4, plain, 0.45, 3, 0.01, {"givers": 0.5, "share": 0.25}),
], ids=["parameters", "smoothed", "gradients", "mean norms", "examples shared"])  # fmt: skip
def test_it_is_its_papers_algorithm(
    ranks: int, inner: Any, delta: float, window: int, bucket_mb: float, more: dict[str, Any]
) -> None:
    """The norm is the layers', however they lie in buckets."""
    problem = Problem(ranks)
    want, changes, synchronised = selsync(problem, inner, delta, window, **more)
    assert window + 4 < synchronised.sum() < STEPS - 8, "some steps beyond the first synchronise, and some do not"
    chosen = SelSync(
        delta=delta, window=window, aggregate="gradients" if more.get("gradients") else "parameters",
        norm_window=more.get("norm_window", 1), smoothing=more.get("smoothing", 0.01),
        inject_ranks=more.get("givers", 0.0), inject_share=more.get("share", 0.0),
    )  # fmt: skip
    mine, run = recorded(problem, chosen, inner, bucket_mb=bucket_mb)
    agree(mine, want)
    for r in range(ranks):
        np.testing.assert_array_equal(samples(run, "synchronised", r)[:STEPS], synchronised)
        np.testing.assert_allclose(samples(run, "gradient change", r)[: STEPS - 1], changes[r], rtol=NEAR)
