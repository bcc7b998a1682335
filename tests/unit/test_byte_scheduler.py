"""Tests ByteScheduler: bit-identical to DDP in another order, and the verbs that it needs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch

from tests.ranks import experiment, live, run, toy, weights
from tests.sim.virtual import comm, samples, stack
from tests.unit.test_zero_3 import many, seen
from workbench import Experiment, KnobError, simulate
from workbench.fabric import Fabric, Link, Slow
from workbench.partitions import Pipeline
from workbench.rank import Rank, StrategyError
from workbench.settings import Change
from workbench.sim.teach.laws import trained
from workbench.strategies import DDP, ByteScheduler, Strategy

pytestmark = pytest.mark.ranks

MOMENTUM, ADAMW = partial(torch.optim.SGD, lr=0.02, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)
SLOW = Fabric(link=Link(bandwidth=50.0))
PIECES = ByteScheduler(partition_mb=0.001, credit_mb=0.002)  # 17 pieces of the toy's largest layer


def ends(strategy: Strategy, ranks: int, *changes: Change, steps: int = 8, **rest: Any) -> list[torch.Tensor]:
    return [weights(s) for s in run(experiment(ranks, steps, strategy=strategy, **rest), *changes)]


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW], ids=["momentum", "AdamW"])
def test_two_real_ranks_are_bit_identical_to_ddp_after_any_step(optimizer: Any, steps: int) -> None:
    plain = ends(DDP(), 2, steps=steps, task=toy(optimizer))
    for strategy in (ByteScheduler(), PIECES, ByteScheduler(order="fifo")):
        for fabric in (Fabric(), SLOW):
            found = ends(strategy, 2, steps=steps, task=toy(optimizer), fabric=fabric)
            assert all(torch.equal(one, plain[0]) for one in found)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW], ids=["momentum", "AdamW"])
def test_four_real_ranks_equal_ddp_exactly_with_whole_buckets_and_nearly_with_pieces(optimizer: Any) -> None:
    plain = ends(DDP(), 4, task=toy(optimizer))
    assert all(torch.equal(one, plain[0]) for one in ends(ByteScheduler(), 4, task=toy(optimizer), fabric=SLOW))
    found = ends(PIECES, 4, task=toy(optimizer), fabric=SLOW)
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], plain[0], rtol=0, atol=1e-6)
    assert not torch.equal(found[0], plain[0]), "gloo adds the chunks of a ring up in an order of their own"


@pytest.mark.parametrize("ranks", [2, 4])
def test_virtual_ranks_are_bit_identical_to_ddp_with_any_pieces(ranks: int) -> None:
    plain = trained(DDP(), ranks, 6)[1]
    for strategy in (ByteScheduler(), PIECES, ByteScheduler(order="fifo", partition_mb=0.003)):
        found = trained(strategy, ranks, 6, fabric=SLOW)[1]
        assert len(found) == ranks and all(torch.equal(one, plain[0]) for one in found)


@pytest.mark.parametrize("compressor", ["Cast", "PowerSGD", "ErrorFeedback"])
def test_a_compressor_acts_on_whole_buckets_as_under_ddp(compressor: str) -> None:
    e = experiment(2, 8).set("compressor", compressor)
    plain, found = (run(e.set("strategy", s)) for s in (DDP(), PIECES))
    assert torch.equal(weights(found[0]), weights(plain[0])) and torch.equal(weights(found[1]), weights(plain[0]))
    assert sorted(found[0].record.comm()) == sorted(plain[0].record.comm())


def test_parameters_are_updated_before_any_kind_of_read() -> None:
    e = many(2, eval_every=4, turns=True)
    plain, ours = run(e), run(e.set("strategy", ByteScheduler(partition_mb=0.004)))
    assert len(ours[0].layout.buckets) > 10
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(weights(one), weights(other))
    assert seen(ours[0], "held_out") == seen(plain[0], "held_out") and len(seen(ours[0], "held_out")) == 4


@pytest.mark.parametrize("path", ["bucket_mb", "compressor", "lr", "strategy", "strategy.partition_mb", "lr_warmup"])
def test_a_live_change_acts_as_under_ddp(path: str) -> None:
    value = {"bucket_mb": 0.02, "compressor": "Cast", "lr": 0.05, "strategy": "DDP", "lr_warmup": 5,
             "strategy.partition_mb": 0.01}[path]  # fmt: skip
    for ranks, fabric in ((2, SLOW), (2, Fabric())):
        mine = ends(PIECES, ranks, Change(4, path, value), fabric=fabric)
        same = path.startswith("strategy")
        plain = ends(DDP(), ranks, *[] if same else [Change(4, path, value)], fabric=fabric)
        assert all(torch.equal(one, plain[0]) for one in mine)


def test_a_live_switch_during_warm_up_keeps_each_steps_learning_rate() -> None:
    rest = {"lr_warmup": 6, "fabric": SLOW}
    entered = Change(3, "strategy", {"ByteScheduler": {"partition_mb": 0.001}})
    assert torch.equal(ends(DDP(), 2, entered, **rest)[0], ends(DDP(), 2, **rest)[0])


@pytest.mark.parametrize("real", [True, False], ids=["engine", "simulator"])
def test_an_evaluation_sees_every_update(real: bool) -> None:
    found = []
    for strategy in (DDP(), PIECES):
        e = experiment(2, 7, strategy=strategy, eval_every=3, fabric=SLOW, pace=2.0)
        if real:
            found.append([v for _, name, _, v in run(e)[0].record.samples if name == "held_out"])
        else:
            found.append(samples(simulate(e, real=True), "held_out", 0).tolist())
    assert len(found[0]) == 3 and found[0] == found[1]


# -- what overlaps


def went(session: Any) -> list[tuple[int, str, int]]:
    """Returns (step, name, nbytes) of every collective in the order in which they ended."""
    return [(row[0], row[2], row[6]) for row in sorted(session.record, key=lambda row: row[5]) if row[1] == "comm"]


def spans(session: Any, lane: str, name: str = "") -> list[tuple]:
    return [row for row in session.record if row[1] == lane and row[2].startswith(name)]


def test_all_ranks_send_pieces_in_one_order_and_overlap_them_with_forward() -> None:
    link = Fabric(link=Link(bandwidth=10.0), faults=(Slow(rank=1, factor=1.5),))
    e = experiment(3, 5, strategy=PIECES, fabric=link, pace=10.0)
    sessions = run(e)
    orders = [went(s) for s in sessions]
    assert orders[0] == orders[1] == orders[2]
    of_step = [name for step, name, _ in orders[0] if step == 2]
    assert len(of_step) == len(set(of_step)) > 20, "each piece once"
    buckets = [int(name.split()[2]) for name in of_step]
    assert buckets != sorted(buckets), "later buckets, which have the first layers, overtake"
    begins = min(row[3] for row in spans(sessions[0], "compute", "forward") if row[0] == 3)
    sent = max(row[5] for row in spans(sessions[0], "comm") if row[0] == 2)
    assert begins < sent
    virtual = [[name for step, name, _ in comm(simulate(e, real=False), r) if step == 2] for r in range(3)]
    assert virtual[0] == virtual[1] == virtual[2] and sorted(virtual[0]) == sorted(of_step)


def order_of(strategy: Strategy, mbit: float = 20.0) -> list[tuple[int, int]]:
    """Returns (bucket, bytes) of each piece of a step in sending order, for 4 buckets of 40,000 bytes."""
    e = experiment(2, 3, strategy=strategy, task=stack(4, 100), bucket_mb=0.04, pace=20.0,
                   fabric=Fabric(link=Link(bandwidth=mbit)))  # fmt: skip
    return [(int(name.split()[2]), nbytes) for step, name, nbytes in comm(simulate(e, real=False), 0) if step == 1]


def test_no_piece_is_larger_than_delta_and_the_last_layers_go_last() -> None:
    found = order_of(ByteScheduler(partition_mb=0.012, credit_mb=0.001))
    assert len(found) == 4 * 4 and max(nbytes for _, nbytes in found) <= 12_000
    assert (found[0][0], found[-1][0]) == (0, 0), "bucket 0 is ready first, and is overtaken by all others"


def test_a_credit_of_a_bucket_sends_buckets_whole() -> None:
    def turns(credit_mb: float) -> int:
        buckets = [bucket for bucket, _ in order_of(ByteScheduler(partition_mb=0.01, credit_mb=credit_mb))]
        return sum(a != b for a, b in pairwise(buckets))

    assert turns(0.04) == 4 < turns(0.001), "but for the one piece that began before there was another"


def test_fifo_order_never_overtakes() -> None:
    e = experiment(2, 4, strategy=ByteScheduler(partition_mb=0.001, order="fifo"), fabric=SLOW, pace=10.0)
    for order in (went(run(e)[0]), comm(simulate(e, real=False), 0)):
        buckets = [int(name.split()[2]) for step, name, _ in order if step == 2]
        assert buckets == sorted(buckets) and len(buckets) > 20


def test_a_waiting_forward_does_not_count_as_compute_and_keeps_its_pace() -> None:
    e = experiment(2, 4, strategy=ByteScheduler(partition_mb=0.01), pace=60.0, fabric=Fabric(link=Link(bandwidth=2.0)))
    session = run(e)[0]
    least = {"forward": 1.0, "backward": 1.0, "update": 1.0}
    for step in (1, 2, 3):
        passes = [row for row in spans(session, "compute") if row[0] == step]
        passes.sort(key=lambda row: row[4])
        assert all(a[5] <= b[4] + 1e-3 for a, b in pairwise(passes)), "one after the other"
        for name, seconds in least.items():
            least[name] = min(seconds, sum(r[5] - r[4] for r in passes if r[2] == name))
    assert least["forward"] == pytest.approx(0.018, abs=0.004)
    assert least["backward"] == pytest.approx(0.036, abs=0.004)
    assert least["update"] == pytest.approx(0.006, abs=0.004)


# -- the verbs


@dataclass(frozen=True, kw_only=True)
class Credits(Strategy):
    """6 children of half a credit, later ones more urgent, and one without a priority."""

    share: ClassVar[float] = 0.5

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        begun, all_there = threading.Event(), threading.Event()
        first = _sum(rank, "first", begun, all_there)
        children = [await rank.start(first, name="first", priority=1, share=1.0)]
        begun.wait(60)
        for number in range(6):
            child = _sum(rank, f"child {number}")
            children.append(await rank.start(child, name=f"child {number}", priority=number + 1, share=self.share))
        children.append(await rank.start(_sum(rank, "last"), name="last"))
        children.append(await rank.start(_sum(rank, "behind"), name="behind", priority=9))
        all_there.set()
        for child in reversed(children):
            await rank.wait(child)
        await rank.backward()
        await rank.update()


async def _sum(rank: Rank, name: str, begun: threading.Event | None = None, go: threading.Event | None = None) -> None:
    """Signals that it has begun, and waits for `go`, because a busy machine may start other children late."""
    if begun is not None:
        begun.set()
    if go is not None:
        go.wait(60)
    await rank.all_reduce(torch.ones(2000), "sum", name)


def test_urgent_children_go_first_and_none_overtakes_one_without_priority() -> None:
    e = experiment(2, 3, strategy=Credits(), fabric=Fabric(link=Link(bandwidth=2.0)))  # 32 ms each
    want = ["first", *(f"child {n}" for n in (5, 4, 3, 2, 1, 0)), "last", "behind"]
    for s in run(e):
        for step in range(3):
            assert [name.removeprefix("all_reduce ") for at, name, _ in went(s) if at == step] == want


@dataclass(frozen=True, kw_only=True)
class Overtaking(Strategy):
    """4 ready children, and a most urgent one that arrives while the first is in flight."""

    share: ClassVar[float] = 1.0
    # whether children in flight wait until all have arrived; on a virtual clock they do anyway
    held: ClassVar[bool] = True

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        four_there, urgent_there = (threading.Event(), threading.Event()) if self.held else (None, None)
        children = [await rank.start(_sum(rank, "zero", go=four_there), name="zero")]
        for number in range(4):
            child = _sum(rank, f"child {number}", go=urgent_there if number == 1 else None)
            children.append(await rank.start(child, name=f"child {number}", priority=1, share=self.share))
        if four_there is not None:
            four_there.set()
        await rank.wait(children[0])
        await rank.wait(children[1])
        children.append(await rank.start(_sum(rank, "urgent"), name="urgent", priority=5, share=self.share))
        if urgent_there is not None:
            urgent_there.set()
        for child in children[2:]:
            await rank.wait(child)
        await rank.backward()
        await rank.update()


@pytest.mark.parametrize("credit", [2, 3, 4])
@pytest.mark.parametrize("real", [True, False], ids=["engine", "simulator"])
def test_nothing_overtakes_children_within_the_credit(credit: int, real: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(Overtaking, "share", 1.0 / credit)
    monkeypatch.setattr(Overtaking, "held", real)
    e = experiment(2, 2, strategy=Overtaking(), pace=5.0, fabric=Fabric(link=Link(bandwidth=2.0)))
    rows = went(run(e)[1]) if real else comm(simulate(e, real=False), 1)
    names = [name.removeprefix("all_reduce ") for step, name, _ in rows if step == 1]
    assert names.index("urgent") - names.index("child 0") == credit, "child 0 is the first of those"


class Misplaced(Strategy):
    """Calls a verb where it is not allowed."""

    asks: ClassVar[Any] = None

    async def step(self, rank: Rank, state: Any) -> None:
        await type(self).asks(rank)


async def _update_all(rank: Rank) -> None:
    async for _ in rank.forward():
        await rank.update()


async def _backward_inside(rank: Rank) -> None:
    async for _ in rank.forward():
        await rank.backward()


async def _forward_inside(rank: Rank) -> None:
    await rank.forward(micro=0)
    async for _ in rank.backward(micro=0):
        async for _ in rank.forward(micro=1):
            pass


async def _urgent_copy(rank: Rank) -> None:
    await rank.start(_sum(rank, "x"), lane="offload", priority=1)


@pytest.mark.parametrize(
    ("asks", "words"),
    [(_update_all, "update of the whole model cannot be requested between two buckets"),
     (_backward_inside, "backward cannot be requested between two buckets of a forward"),
     (_forward_inside, "begins a forward that stops before each bucket only in `step`"),
     (_urgent_copy, "priority: all ranks, each with a whole replica")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:coroutine '_sum' was never awaited")
def test_the_engine_rejects_misplaced_verbs(asks: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Misplaced, "asks", staticmethod(asks))
    (session,) = live(experiment(1, 2, strategy=Misplaced()))
    assert session.join(60)
    assert session.error is not None and words in session.error["text"]


class Half(Strategy):
    """Leaves its forward after the first bucket, and continues by awaiting it."""

    async def step(self, rank: Rank, state: Any) -> None:
        forward = rank.forward()
        async for _ in forward:
            break
        loss = await forward
        await rank.sample("told", float(loss))
        await rank.backward()
        await rank.update()


def test_a_partly_iterated_forward_may_be_awaited() -> None:
    (session,) = run(experiment(1, 3, strategy=Half()))
    told = [v for _, name, _, v in session.record.samples if name == "told"]
    assert told == session.record.losses() and len(told) == 3


def test_an_error_in_the_strategy_ends_the_run_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(rank: Rank) -> None:
        async for _ in rank.forward():
            raise StrategyError("no more of this")

    monkeypatch.setattr(Misplaced, "asks", staticmethod(fails))
    (session,) = live(experiment(1, 2, strategy=Misplaced()))
    assert session.join(60) and session.error is not None and session.error["text"].endswith("no more of this")


# -- refused in words


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"clip": 1.0}, "use clip=0 with it"), ({"compressor": "DGC"}, "use it with DDP"),
     ({"partition": Pipeline(stages=2, micros=2)}, "updated in the next forward")],
)  # fmt: skip
def test_unsupported_settings_are_refused_with_a_reason(settings: dict[str, Any], words: str) -> None:
    e = Experiment(strategy=ByteScheduler(), batch=8, ranks=4)
    with pytest.raises(KnobError, match=words):
        for path, value in settings.items():
            e.set(path, value)


# speed on a virtual clock

LAYERS, WIDTH, PACE = 16, 64, 100.0
LAYER = 4 * WIDTH * WIDTH  # bytes
P3 = ByteScheduler(partition_mb=LAYER / 8e6, credit_mb=0.001)  # one slice at a time
CHOSEN = ByteScheduler(partition_mb=LAYER / 4e6, credit_mb=LAYER / 2e6)


def over(strategy: Strategy, wire: float, ranks: int) -> float:
    """Returns a step's time relative to the larger of compute and communication, whose ratio is `wire`."""
    seconds = max(1.0, wire) * PACE * 1e-3
    mbit = 2 * (ranks - 1) / ranks * LAYERS * LAYER * 8e-6 / (wire * PACE * 1e-3)
    e = experiment(ranks, 8, strategy=strategy, pace=PACE, bucket_mb=LAYER / 1e6, task=stack(LAYERS, WIDTH),
                   fabric=Fabric(link=Link(bandwidth=mbit)))  # fmt: skip
    spans = simulate(e, real=False).spans
    begins = spans[(spans["rank"] == 0) & (spans.name == "forward")].groupby("step").t0.min().to_numpy()
    return float(begins[-1] - begins[3]) / (len(begins) - 4) / seconds


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("wire", [0.5, 1.0, 2.0])
def test_a_step_takes_little_more_than_the_longer_of_compute_and_communication(wire: float, ranks: int) -> None:
    plain, fifo = over(DDP(), wire, ranks), over(ByteScheduler(order="fifo", partition_mb=LAYER / 4e6), wire, ranks)
    for strategy in (P3, CHOSEN):
        found = over(strategy, wire, ranks)
        assert 1.0 - 1e-9 <= found <= 1.15
        assert found <= plain + 0.002 and (wire < 1.0 or found < plain - 0.15)
    tail = max(0.6 + wire / LAYERS, 0.6 / LAYERS + wire)  # from the first gradient to the last sum
    assert plain == pytest.approx((0.4 + tail) / max(1.0, wire), abs=2e-3), "DDP's own"
    assert fifo == pytest.approx(plain, abs=0.02), "beginning the forward at once gains nothing where it waits for all"


def test_small_pieces_lose_time_if_each_costs_a_latency() -> None:
    def step(partition: float) -> float:
        strategy = ByteScheduler(partition_mb=partition, credit_mb=0.001)
        e = experiment(2, 6, strategy=strategy, pace=PACE, bucket_mb=LAYER / 1e6, task=stack(LAYERS, WIDTH),
                       fabric=Fabric(link=Link(bandwidth=30.0, latency=0.5)))  # fmt: skip
        lane = simulate(e, real=False).spans
        begins = lane[(lane["rank"] == 0) & (lane.name == "forward")].groupby("step").t0.min().to_numpy()
        return float(begins[-1] - begins[-2])

    assert step(0.001) > 1.5 * step(LAYER / 2e6)
