"""Laws over all all-reduce algorithms: strategies train under each one as under the backend's own."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from tests.ranks import experiment, make_fitting, shipped
from tests.sim.virtual import comm, samples
from tests.thinned import thinned
from workbench import simulate
from workbench.fabric import Algorithm, Fabric, Link
from workbench.run import Run
from workbench.settings import Change
from workbench.strategies import Strategy

STRATEGIES = {name: cls for name, cls in shipped(Strategy).items() if cls.lockstep and not cls.opaque}
ALGORITHMS = {name: cls() for name, cls in shipped(Algorithm).items()}
OTHERS = [name for name in ALGORITHMS if name != "Native"]
LINK = Link(bandwidth=80.0, latency=0.5)
RANKS, STEPS = 3, 9


def trained(strategy: str, algorithm: str, ranks: int = RANKS, change: bool = False) -> Run:
    e = experiment(ranks, STEPS, strategy=make_fitting(STRATEGIES[strategy], ranks), pace=2.0,
                   fabric=Fabric(link=LINK, site=2))  # fmt: skip
    chosen = ALGORITHMS[algorithm]
    if change:
        return simulate(e, changes=[Change(4, "fabric.algorithm", chosen)], real=True)
    return simulate(e.set("fabric.algorithm", chosen), real=True)


@cache
def native(strategy: str, change: bool) -> tuple[float, ...]:
    """Returns the losses under the backend's own all-reduce."""
    return tuple(samples(trained(strategy, "Native", change=change), "loss", 0))


@pytest.mark.parametrize(("strategy", "algorithm"), thinned(product(STRATEGIES, OTHERS), of=6, long=8))
def test_a_strategy_learns_the_same_under_every_algorithm_from_the_start_or_by_a_change(
    strategy: str, algorithm: str
) -> None:
    for change in (False, True):  # any change drains exchanges in flight, also in the native run
        found = samples(trained(strategy, algorithm, change=change), "loss", 0)
        assert len(found) == len(native(strategy, change)) == STEPS
        np.testing.assert_allclose(found, native(strategy, change), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [n for n, chosen in ALGORITHMS.items() if not chosen.native and n != "ByGroup"])
def test_no_all_reduce_is_left_to_the_backend(name: str) -> None:
    names = [what for _, what, _ in comm(trained("DDP", name), 1)]
    assert names and all(what.startswith("send all_reduce bucket ") for what in names)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_with_sizes_only_messages_and_times_are_the_same(name: str) -> None:
    e = experiment(4, 3, pace=2.0, fabric=Fabric(link=LINK, site=2, algorithm=ALGORITHMS[name]))
    real, sizes = simulate(e, real=True), simulate(e, real=False)
    assert [comm(real, r) for r in range(4)] == [comm(sizes, r) for r in range(4)]
    assert sizes.timeline.spans.rows().t1.max() == pytest.approx(real.timeline.spans.rows().t1.max())
