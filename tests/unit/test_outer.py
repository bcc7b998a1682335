"""Tests the outer optimizer that SlowMo, BMUF, DiLoCo and Streaming DiLoCo share: switches go on exactly."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch

from tests.ranks import experiment, net, run, toy, weights
from tests.unit.plain_outer import SGD
from workbench import simulate
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change, to_plain
from workbench.strategies import BMUF, DiLoCo, LocalSGD, SlowMo, StreamingDiLoCo

pytestmark = pytest.mark.ranks

CLASSICAL = [
    SlowMo(beta=0.6, alpha=0.8, every=3), BMUF(eta=0.6, zeta=0.8, every=3),
    DiLoCo(outer_momentum=0.6, outer_lr=0.8, every=3, form="heavy-ball"),
]  # fmt: skip
AHEAD = [
    BMUF(eta=0.6, zeta=0.8, every=3, form="nesterov"), DiLoCo(outer_momentum=0.6, outer_lr=0.8, every=3),
    StreamingDiLoCo(outer_momentum=0.6, outer_lr=0.8, every=3, fragments=1, delay=0, alpha=0.0, bits=32),
]  # fmt: skip
PAIRS = [*permutations(CLASSICAL, 2), *permutations(AHEAD, 2)]


def trained(strategy: Any, *others: Any) -> torch.Tensor:
    """Trains four rounds of three steps. After the second come the `others` in turn, and the last one stays."""
    changes = [Change(6, "strategy", to_plain(other)) for other in others]
    return weights(run(experiment(3, 12, task=toy(SGD), strategy=strategy), *changes)[0])


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda s: type(s).__name__)
def test_switching_after_a_round_goes_on_exactly(before: Any, after: Any) -> None:
    torch.testing.assert_close(trained(before, after), trained(before), rtol=1e-5, atol=1e-6)


def test_a_strategy_without_outer_momentum_drops_it() -> None:
    chosen = CLASSICAL[2]
    through = trained(chosen, LocalSGD(), chosen)
    assert (through - trained(chosen)).norm() > 1e-2
    assert not torch.equal(through, trained(LocalSGD(every=3)))


def test_a_round_cut_short_keeps_the_momentum_of_the_round_before() -> None:
    e = experiment(2, 9, task=toy(SGD), strategy=CLASSICAL[0])
    short = run(e, Change(8, "strategy", to_plain(CLASSICAL[2])), Change(8, "lr", 1e-30))
    kept = run(experiment(2, 6, task=toy(SGD), strategy=CLASSICAL[0]))
    for name, u in kept[0].state.memory.buffers["momentum"].items():
        torch.testing.assert_close(short[0].state.memory.buffers["momentum"][name], -0.02 * u)


def test_outer_momentum_is_handed_over_with_sizes_only() -> None:
    e = experiment(2, 12, strategy=AHEAD[0], pace=5.0)
    changes = [Change(6, "strategy", to_plain(AHEAD[2])), Change(8, "strategy", to_plain(CLASSICAL[0]))]
    assert simulate(e, changes=changes).state == "done"


class TwoPrecisions(torch.nn.Module):
    """A layer in float64 between two layers in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = torch.nn.Linear(8, 16), torch.nn.Linear(16, 16).double(), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)).double())).float())


@pytest.mark.parametrize("strategy", [
    SlowMo(buffers="average"), BMUF(), DiLoCo(every=4), StreamingDiLoCo(every=4, fragments=2), StreamingDiLoCo(
        every=4, fragments=2, bits=32)], ids=str)  # fmt: skip
def test_parameters_of_several_precisions_are_trained(strategy: Any) -> None:
    mixed = toy(model=lambda: net(TwoPrecisions))
    e = experiment(3, 17, task=mixed, strategy=strategy, eval_every=16)
    sessions = run(e, Change(16, "strategy", "DDP"))
    held = [v for _, name, _, v in sessions[0].record.samples if name == "held_out"]
    assert held[-1] < held[0]
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
