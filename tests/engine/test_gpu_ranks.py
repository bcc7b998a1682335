"""Tests ranks over NCCL and gloo: order, switches, late and lost ranks, and every family.

Each rank is a process. On a machine with one GPU the ranks share it (see tests/gpu_ranks.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from multiprocessing import current_process
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.test_gpu import TURNS, note, overlap
from tests.gpu_ranks import Ranks, Told
from tests.ranks import experiment, make_fitting, mse, shipped, toy
from tests.ranks import run as on_cpus
from tests.split import small, spread
from tests.unit.test_tensor import parts
from workbench.compressors import Compressor
from workbench.optimizers import AdamW
from workbench.partitions import Partition, Pipeline, Tensor
from workbench.partitions.schedules import ZeroBubble
from workbench.settings import Change
from workbench.strategies import Strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.device_count(), reason="gpu: no NVIDIA GPU on this machine"),
    pytest.mark.timeout(90),
]


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[int, Ranks]]:
    made: dict[int, Ranks] = {}
    yield made
    for ranks in made.values():
        ranks.close()


@pytest.fixture
def pair(kept: dict[int, Ranks]) -> Iterator[Ranks]:
    yield from _of(kept, 2)


@pytest.fixture
def three(kept: dict[int, Ranks]) -> Iterator[Ranks]:
    yield from _of(kept, 3)


def _of(kept: dict[int, Ranks], size: int) -> Iterator[Ranks]:
    """Yields processes that tests share; makes new ones after a test that lost one or left them hanging."""
    if size not in kept:
        kept[size] = Ranks(size)
    try:
        yield kept[size]
    finally:
        if not kept[size].idle():
            kept.pop(size).close()


def agree(found: list[Told]) -> None:
    assert len({told.state for told in found}) == 1
    assert all(np.isfinite(x).all() for x in found[0].params.values())


def near_enough(ours: Mapping[str, np.ndarray], plain: Mapping[str, np.ndarray]) -> None:
    assert ours.keys() == plain.keys()
    for name, want in plain.items():
        np.testing.assert_allclose(ours[name], want, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("ranks", ["pair", "three"])
def test_ranks_agree_over_nccl_through_live_switches(ranks: str, request: pytest.FixtureRequest) -> None:
    each: Ranks = request.getfixturevalue(ranks)
    agree(each.run(experiment(each.size), *TURNS))


CANNOT = {"ByteScheduler": "it has priorities", "TorchFSDP": "take ZeRO3", "Hogwild": "take"}


@pytest.mark.parametrize("name", sorted(shipped(Strategy)))
def test_every_strategy_trains_over_nccl_or_raises_a_knob_error_with_advice(name: str, pair: Ranks) -> None:
    e = experiment(2, 10, strategy=make_fitting(shipped(Strategy)[name], 2))
    if name in CANNOT:
        pair.start(e)
        assert all(CANNOT[name] in told.error and "KnobError" in told.error for told in pair.ended())
        return
    found = pair.run(e)
    assert all(told.phase == "done" for told in found) and len(found[0].losses()) == 10  # some ranks serve
    assert np.isfinite(found[0].losses()).all()


@pytest.mark.parametrize("name", sorted(shipped(Compressor)))
def test_every_compressor_gives_all_ranks_the_same_over_nccl(name: str, pair: Ranks) -> None:
    agree(pair.run(experiment(2, 10, compressor=shipped(Compressor)[name]())))


def test_nccl_gives_the_parameters_of_gloo_on_cpus(pair: Ranks) -> None:
    e = experiment(2, 12, optimizer=AdamW())
    plain = on_cpus(e)[0]
    near_enough(pair.run(e)[0].params, {n: p.detach().numpy() for n, p in plain.model.named_parameters()})


SHARED_OUT = (
    Change(3, "strategy", "ZeRO2"), Change(6, "bucket_mb", 1.0), Change(9, "strategy", "ZeRO1"),
    Change(11, "strategy", "ZeRO3"), Change(13, "strategy", "ZeROInfinity"), Change(15, "strategy", "ZeROOffload"),
    Change(17, "strategy", "DDP"),
)  # fmt: skip


@pytest.mark.parametrize("kind", ["gloo", "nccl"])
def test_sharded_strategies_train_as_ddp_does(kind: str, pair: Ranks) -> None:
    """ZeRO frees a bucket's memory while the lane's stream may still read it. The values must stay intact."""
    e = experiment(2, 19, task=toy(model=Deep), bucket_mb=16.0, optimizer=AdamW())
    ours, plain = pair.run(e, *SHARED_OUT, kind=kind), pair.run(e, kind=kind)
    assert not ours[0].noted("refused")
    near_enough(ours[0].params, plain[0].params)


WAYS = [Pipeline(micros=2), Pipeline(micros=4, schedule=ZeroBubble()), Tensor(), Tensor(sequence=True)]


@pytest.mark.parametrize("kind", ["gloo", "nccl"])
@pytest.mark.parametrize("way", WAYS, ids=["1F1B", "ZB-H1", "slices", "positions"])
def test_a_partitioned_replica_gives_the_parameters_of_a_run_on_cpus(way: Partition, kind: str, pair: Ranks) -> None:
    """Switches to the partition and back live, so that each rank has the whole model at the end."""
    e = spread(2, 8, task=small(parts=parts))
    turns = (Change(2, "partition", way), Change(6, "partition", "Whole"))
    found, plain = pair.run(e, *turns, kind=kind), on_cpus(e, *turns)[0]
    assert not found[0].noted("refused") and len(found[0].noted("partition")) == 2
    near_enough(found[0].params, {n: p.detach().numpy() for n, p in plain.model.named_parameters()})


class Deep(nn.Module):
    """A model with enough matrices that backward takes longer than the exchange of one bucket."""

    def __init__(self) -> None:
        super().__init__()
        middle = [nn.Linear(2048, 2048) for _ in range(16)]
        self.layers = nn.ModuleList([nn.Linear(8, 2048), *middle, nn.Linear(2048, 4)])
        rng = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data.normal_(0.0, 0.02, generator=rng)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x.repeat(64, 1) if x.shape[1] == 8 else x))
        return self.layers[-1](x).view(64, -1, 4).mean(0)


class Late:
    """The toy's loss, in which rank 1 is late once."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.calls = seconds, 0

    def __call__(self, model: nn.Module, pair: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 4 and current_process().name == "rank 1":
            time.sleep(self.seconds)
        return mse(model, pair)


@pytest.mark.parametrize("seconds", [0.15, 2.0])
def test_a_late_rank_does_not_end_a_run_over_nccl(seconds: float, pair: Ranks) -> None:
    found = pair.run(experiment(2, task=toy(loss=Late(seconds))))
    agree(found)
    rows = [r for r in found[1].rows if r[:3] == (3, "compute", "forward")]
    assert max(r[5] - r[4] for r in rows) > seconds / 2, "else nobody was late; the GPU is behind the host by a while"


def test_a_stop_frees_a_rank_whose_peer_does_not_come_over_nccl(pair: Ranks) -> None:
    pair.start(experiment(2, 50, task=toy(loss=Late(3.0))))
    pair.at(3)
    time.sleep(0.5)
    began = time.monotonic()
    pair.ask(0, "abort")
    (told,) = pair.ended(20, of=[0])
    note("seconds until a rank was freed from a collective that its peer never entered", time.monotonic() - began)
    pair.ask(1, "abort")
    assert told.phase == "stopped" and pair.ended(20)[1].phase == "stopped"


@pytest.mark.parametrize("strategy", ["DDP", "LocalSGD", "ZeRO3"])
def test_survivors_go_on_when_a_rank_dies_over_nccl(strategy: str, three: Ranks) -> None:
    """The survivors abort their communicator, make a new one and train to the end."""
    e = experiment(3, 400, on_death="go on", strategy=shipped(Strategy)[strategy](), pace=20.0)
    three.start(e)
    three.at(30)
    three.kill(2)
    found = three.ended(60, of=[0, 1])
    assert [told.phase for told in found] == ["done", "done"], found[0].error


def test_collectives_overlap_with_backward_over_nccl(pair: Ranks) -> None:
    told = pair.run(experiment(2, 20, task=toy(model=Deep), bucket_mb=16.0))[0]
    shares = [share for step in range(5, 20) if (share := overlap(told.rows, step)) is not None]
    note("share of the exchange's time that lies within backward (median of 15 steps)", statistics.median(shares))
    assert statistics.median(shares) > 0.3
