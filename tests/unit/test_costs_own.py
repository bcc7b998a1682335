"""Tests the cost of codecs inside models and of strategies' arithmetic, simulated and measured."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.piped import ROWS, WIDTH, piped
from tests.ranks import batch, experiment, net, run, toy
from tests.sim.virtual import rows, samples, seconds, stack
from tests.split import small, spread
from tests.unit.test_kfac import Mixed, made
from tests.unit.test_tensor import parts
from workbench import Costs, simulate
from workbench.compressors import Cast, Dense
from workbench.experiment import Experiment
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.settings import Change
from workbench.sim import AlphaBeta, Line
from workbench.strategies import DDP, KFAC, AsyncServer, Newton

pytestmark = pytest.mark.ranks

CODER = {"Cast": (3e-6, 5e-6)}  # seconds per byte
BYTES = ROWS * WIDTH * 4  # bytes of an activation


def longer(e: Experiment, costs: Costs, steps: slice = slice(2, None), **more: Any) -> list[float]:
    """Returns how much longer each step is than without these costs."""
    given = {"forward": 0.01, "backward": 0.02, "update": 0.001}
    own = {name: getattr(costs, name) for name in ("coder", "flop", "asked") if getattr(costs, name)}
    with_, without = (simulate(e, costs=Costs(**given, **also), **more) for also in (own, {}))
    return (seconds(with_) - seconds(without))[steps].tolist()


@pytest.mark.parametrize("pace", [0.0, 90.0])
def test_a_codec_between_two_stages_takes_time_on_both_ends(pace: float) -> None:
    """One micro-batch needs 4 codings in sequence, at any pace of the passes."""
    way = Pipeline(micros=1, activations=Cast(to="bf16"), gradients=Cast(to="bf16"))
    extra = longer(piped(2, 6, pace=pace, partition=way), Costs(coder=CODER))
    assert extra == pytest.approx([2 * (3e-6 + 5e-6) * BYTES] * 4)
    one_way = way.__class__(micros=1, activations=Cast(to="bf16"), gradients=Dense())
    assert longer(piped(2, 6, pace=pace, partition=one_way), Costs(coder=CODER)) == pytest.approx([8e-6 * BYTES] * 4)


def test_costs_of_codecs_between_stages_are_measured() -> None:
    way = Pipeline(micros=2, activations=Cast(to="bf16"), gradients=Cast(to="fp16"))
    e = piped(2, 12, partition=way)
    given = Costs(forward=0.01, backward=0.02, coder=CODER)
    record = simulate(e, costs=given, changes=[Change(6, "partition", Whole())])
    assert Costs.measured(record).coder["Cast"] == pytest.approx(CODER["Cast"])
    (first, last) = run(e)
    for rank, session in enumerate((first, last)):
        # a bucket that no codec encodes is kept only if it took long, on a busy machine
        done = {r[2]: r[6] for r in session.record if r[1] == "codec" and r[6]}
        ways = ("encode", "decode") if rank == 0 else ("decode", "encode")
        assert done == {f"{how} {what} {micro}": BYTES // 2 for micro in range(2)
                        for how, what in zip(ways, ("activation", "gradient"), strict=True)}  # fmt: skip


def test_micro_batches_of_two_sizes_give_the_cost_per_piece() -> None:
    way = Pipeline(micros=2, activations=Cast(to="bf16"), gradients=Cast(to="bf16"))
    line = {"Cast": (Line(4e-4, 3e-6), Line(1e-4, 5e-6))}
    given = Costs(forward=0.01, backward=0.02, coder=line)
    turns = [Change(6, "partition.micros", 4), Change(12, "partition", Whole())]
    found = Costs.measured(simulate(piped(2, 18, partition=way), costs=given, changes=turns))
    assert [found.coder["Cast"][k] == pytest.approx(line["Cast"][k]) for k in (0, 1)] == [True, True]
    one = piped(2, 6, partition=way.__class__(micros=1, activations=Cast(to="bf16"), gradients=Cast(to="bf16")))
    assert longer(one, found) == pytest.approx([2 * (5e-4 + 8e-6 * BYTES)] * 4)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_codec_inside_a_layer_makes_passes_longer(sequence: bool) -> None:
    """They grow by the work that the engine records in passes, or by nothing if a pace leaves time for it."""
    way = Tensor(activations=Cast(to="bf16"), gradients=Cast(to="bf16"), sequence=sequence)
    e = spread(2, 6, task=small(parts=parts), partition=way, pace=0.0)
    session = run(e)[0]
    work = [(r[2], r[6]) for r in session.record if r[1] == "codec" and r[0] == 4]
    assert work
    want = sum(CODER["Cast"][name.startswith("decode")] * nbytes for name, nbytes in work)
    assert longer(e, Costs(coder=CODER)) == pytest.approx([want] * 4)
    assert longer(e.set("pace", 1e4), Costs(coder=CODER)) == pytest.approx([0.0] * 4)


FLOP = {"inverses": 1e-5, "preconditioning": 2e-6}


def test_inverses_take_the_time_of_the_rank_with_the_most_work() -> None:
    """Layers of 9 x 6 and 6 x 4 with biases: two ranks have one each, and meet."""
    e = made(2, KFAC(warmup=2, factors_every=2, inverses_every=3), pace=5.0).set("steps", 8)
    extra = longer(e, Costs(flop=FLOP), slice(None))
    cubes, products = 9**3 + 6**3, 2 * (9 * 6 * 15 + 6 * 4 * 10)
    each = products * FLOP["preconditioning"]
    assert extra == pytest.approx([0, 0, *[cubes * FLOP["inverses"] * due + each for due in (1, 0, 0, 1, 0, 0)]])
    alone = longer(made(1, e.strategy, pace=5.0).set("steps", 4), Costs(flop=FLOP), slice(None))
    assert alone[2] == pytest.approx((9**3 + 2 * 6**3 + 4**3) * FLOP["inverses"] + each)


def test_a_strategys_arithmetic_is_measured_and_recorded_by_the_engine() -> None:
    e = made(2, KFAC(warmup=2, factors_every=2, inverses_every=3), pace=5.0)
    given = Costs(forward=0.01, backward=0.02, flop=FLOP, asked={"factors": 3e-3, "collect": 2e-3})
    record = simulate(e.set("pace", 0.0), costs=given)
    found = Costs.measured(record)
    assert found.flop == pytest.approx(FLOP) and found.asked == pytest.approx(given.asked)
    assert found.backward[0].seconds == pytest.approx(0.02) and found.between == 0.0
    for session in run(e):
        rank = session.rank.index
        for name in FLOP:
            mine = [value for _, what, _, value in session.record.samples if what == f"flops {name}"]
            assert mine == samples(simulate(e), f"flops {name}", rank).tolist() and mine


def test_a_product_of_newton_takes_its_measured_time() -> None:
    task = toy(model=partial(net, Mixed), data=_data, evaluate=None)
    e = experiment(2, 8, task=task, strategy=Newton(iterations=3, tries=2), lr=1.0)
    costs = Costs(asked={"curve": 0.1, "value": 0.03})
    assert longer(e, costs) == pytest.approx([3 * (0.1 - 0.03) + 2 * (0.03 - 0.01)] * 6)
    record = simulate(e, costs=Costs(forward=0.01, backward=0.02, asked=costs.asked))
    assert Costs.measured(record).asked == pytest.approx(costs.asked)
    assert longer(e.set("pace", 1e3), costs) == pytest.approx([0.0] * 6), "a pace says more than that"


def test_a_message_without_a_link_takes_its_measured_time() -> None:
    """Messages do not take the time of a collective of the same size, which ranks join at different times."""
    task = stack(4)
    e = experiment(3, 10, task=task, strategy=AsyncServer(), bucket_mb=0.03)
    given = Costs(forward=0.01, backward=0.02, wire=AlphaBeta(1e-3, 5e-8), post=AlphaBeta(1e-5, 1e-8))
    found = Costs.measured(simulate(e, costs=given))
    assert found.post == pytest.approx(given.post, rel=1e-3)
    rest: dict[str, Any] = {"forward": 0.01, "backward": 0.02, "wire": given.wire}
    known, usual, other = (seconds(simulate(e, costs=Costs(**rest, **also)), 1)
                           for also in ({"post": found.post}, {"post": given.post}, {}))  # fmt: skip
    assert known.tolist() == pytest.approx(usual.tolist(), rel=1e-3)
    assert known[4] < 0.8 * other[4]


def test_costs_of_two_runs_can_be_merged() -> None:
    both = Costs(flop={"a": 1.0}, codec={"TopK": (1.0,)}) | Costs(flop={"b": 2.0}, coder=CODER, asked={"curve": 1.0})
    assert both.flop == {"a": 1.0, "b": 2.0} and both.codec == {"TopK": (1.0,)}
    assert both.coder == CODER and both.asked == {"curve": 1.0}


def test_ddp_has_none_of_these_costs() -> None:
    e = experiment(2, 6, strategy=DDP(), pace=5.0)
    assert longer(e, Costs(coder=CODER, flop=FLOP, asked={"collect": 1.0})) == [0.0] * 4
    assert not len(rows(simulate(e, costs=Costs(coder=CODER)), "codec"))


def _data(rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(x.double() for x in batch(rank, step, seed, 16)) for step in range(8)]
