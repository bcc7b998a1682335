"""Tests what turning compression off does with the residual: send at once, in shares, or drop."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.piped import piped
from tests.ranks import experiment, run, shipped
from tests.sim.insides import simulated
from tests.sim.virtual import begun, comm
from widgets.views.log import _read_mark
from workbench.compressors import ACPSGD, DGC, Compressor, Dense, ErrorFeedback, Layers, PowerSGD, TopK
from workbench.compressors._leaving import _Leaving
from workbench.compressors._sketch import SIGNS, WIDTH, sketch
from workbench.partitions import Pipeline
from workbench.rank import Bucket, Rank
from workbench.settings import Change, KnobError, to_plain
from workbench.strategies import DDP

pytestmark = pytest.mark.ranks


class Books:
    """Sums of what ranks put into the exchange, got out, and dropped, and rank 0's residual after each step."""

    def __init__(self) -> None:
        self.put: dict[str, Any] = {}
        self.got: dict[str, Any] = {}
        self.dropped: dict[str, Any] = {}
        self.drops: set[int] = set()  # steps before which a residual was dropped
        self.lengths: dict[int, float] = {}  # step -> length of the sum of all ranks' residuals after the step
        self.owed: dict[int, dict[str, Any]] = {}
        self.gradients: dict[int, dict[str, Any]] = {}
        self.ended: dict[int, dict[str, torch.Tensor]] = {}  # rank -> its residual after its last step

    def add(self, column: dict[str, Any], name: str, x: torch.Tensor) -> None:
        column[name] = column.get(name, 0.0) + x.detach().double()

    def begins(self, rank: Rank) -> None:
        """Counts as dropped the residual that a rank held after its last step and does not hold now."""
        for name, before in self.ended.pop(rank.id, {}).items():
            gone = before - residual(rank).get(name, torch.zeros(()))
            if gone.any():
                self.drops.add(rank.step)
                self.add(self.dropped, name, gone)

    def ends(self, rank: Rank) -> None:
        self.ended[rank.id] = {name: x.clone() for name, x in residual(rank).items()}

    def missing(self, left: dict[str, Any]) -> float:
        """Returns the relative size of gradients that are neither received, dropped nor left."""
        off = [self.put[n] - self.got[n] - self.dropped.get(n, 0.0) - left.get(n, 0.0) for n in self.put]
        return float(torch.cat(off).norm() / torch.cat(list(self.put.values())).norm())


BOOKS = Books()


@pytest.fixture(autouse=True)
def books() -> Books:
    BOOKS.__init__()  # type: ignore[misc]
    return BOOKS


def residual(rank: Rank) -> dict[str, torch.Tensor]:
    """Returns a rank's residual by parameter; empty if tensors have shapes only."""
    return {n: x for n, x in rank.memory.buffers.get("residual", {}).items() if not x.is_meta}


@dataclass(frozen=True, kw_only=True)
class BookkeepingDDP(DDP):
    """Averages gradients in every step and records what goes in and out. Runs on the simulator, on one thread."""

    async def step(self, rank: Rank, state: Any) -> None:
        BOOKS.begins(rank)
        await rank.forward()
        pending = []
        async for bucket in rank.backward(1.0 / rank.size):
            pending.append(await rank.start(self.noted(rank, bucket), name=bucket.name))
        for handle in pending:
            await rank.wait(handle)
        await rank.update()
        BOOKS.ends(rank)

    async def noted(self, rank: Rank, bucket: Bucket) -> None:
        if bucket.data.is_meta:
            return await rank.compressor.reduce(rank, bucket, rank.memory)
        mine = BOOKS.gradients.setdefault(rank.step, {})
        for part in bucket.parts:
            BOOKS.add(BOOKS.put, part.name, bucket.data[part.start : part.stop])
            BOOKS.add(mine, part.name, bucket.data[part.start : part.stop])
        await rank.compressor.reduce(rank, bucket, rank.memory)
        owed = BOOKS.owed.setdefault(rank.step, {})
        for part in bucket.parts:
            if rank.index == 0:
                BOOKS.add(BOOKS.got, part.name, bucket.data[part.start : part.stop])
            BOOKS.add(owed, part.name, rank.memory.buffers.get("residual", {}).get(part.name, torch.zeros(())))


def length(column: dict[str, Any]) -> float:
    return float(sum(x.square().sum() for x in column.values())) ** 0.5


def left(sessions: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for s in sessions:
        for name, piece in s.rank.memory.buffers.get("residual", {}).items():
            BOOKS.add(found, name, piece)
    return found


def kept(ranks: int, steps: int, compressor: Compressor, *turns: Change, **rest: Any) -> tuple[Any, list[Any]]:
    """Runs a simulation with books. The learning rate is nearly 0, so gradients keep their size."""
    e = experiment(ranks, steps, strategy=BookkeepingDDP(), compressor=compressor, lr=1e-9, pace=1, **rest)
    return simulated(e, *turns)


def marks(found: Any) -> list[dict[str, Any]]:
    return [detail for _, _, detail in found.details("residual")]


SPARSE = {"density": 0.01}


def test_by_default_one_uncompressed_step_sends_the_whole_residual() -> None:
    found, sessions = kept(3, 12, TopK.usual(), Change(8, "compressor", "Dense"))
    lengths = {step: length(owed) for step, owed in BOOKS.owed.items()}
    assert lengths[7] > 0 and lengths[8] == 0 and not left(sessions)
    assert BOOKS.missing({}) < 1e-6 and not BOOKS.dropped
    (mark,) = marks(found)
    assert mark["steps"] == 1 and mark["unit"] == "gradients"
    assert mark["sent"] == pytest.approx(lengths[7], rel=0.15)
    assert mark["gradient"] == pytest.approx(length(BOOKS.gradients[8]), rel=0.15)


@pytest.mark.parametrize("off", ["flush", "bleed", "drop"])
def test_two_residuals_of_different_layers_both_leave(off: str) -> None:
    biases = ErrorFeedback(of=TopK(density=0.1), off=off, over=3)
    mixed = Layers(of=DGC(momentum=0.0, density=0.05), rest=biases, smallest=30)
    found, sessions = kept(2, 14, mixed, Change(8, "compressor", "Dense"))
    assert all(not s.rank.memory.buffers for s in sessions)
    assert BOOKS.missing({}) < 1e-6 and bool(BOOKS.dropped) == (off == "drop")
    assert ("dropped" in marks(found)[0]) == (off == "drop")


@pytest.mark.parametrize("after", [Dense(), TopK(density=0.5)], ids=str)
def test_bleed_sends_the_residual_in_equal_shares_over_the_chosen_steps(after: Compressor) -> None:
    before = ErrorFeedback(of=TopK(**SPARSE), off="bleed", over=5)
    found, sessions = kept(2, 16, before, Change(8, "compressor", to_plain(after)))
    full = length(BOOKS.owed[7])
    for step, share in zip(range(8, 13), (0.8, 0.6, 0.4, 0.2, 0.0), strict=True):
        assert length(BOOKS.owed[step]) == pytest.approx(share * full, rel=1e-4, abs=1e-5 * full), step
    assert not left(sessions) and not BOOKS.dropped
    assert all(s.rank.compressor == after for s in sessions)
    assert marks(found)[0]["steps"] == 5 and len(marks(found)) == 1
    if after == Dense():
        assert BOOKS.missing({}) < 1e-6


def test_drop_discards_the_residual_and_records_its_length() -> None:
    found, sessions = kept(3, 12, ErrorFeedback(of=TopK(**SPARSE), off="drop"), Change(8, "compressor", "Dense"))
    assert not left(sessions) and BOOKS.missing({}) < 1e-6
    assert length(BOOKS.dropped) == pytest.approx(length(BOOKS.owed[7]))
    every = marks(found)
    assert BOOKS.drops == {8} == {step for step, _, _ in found.details("residual")}
    assert len(every) == 3 and all(m["dropped"] > 0 and m["unit"] == "gradients" for m in every)
    assert all(m["mean"] == pytest.approx(length(BOOKS.dropped), rel=0.15) for m in every)
    (text,) = [m["text"] for m in every if "text" in m]
    assert text.startswith("dropped the residual of the compression: gradients of length")
    assert _read_mark("residual", every[0]) == ("residual", text)
    assert _read_mark("residual", every[1]) is None


def test_flushing_warns_of_a_long_residual_only() -> None:
    tiny = ErrorFeedback(of=TopK(density=0.0001))
    found, _ = kept(2, 40, tiny, Change(30, "compressor", "Dense"))
    exact = length(BOOKS.owed[29]) / length(BOOKS.gradients[30])
    (mark,) = marks(found)
    assert exact > 4 and mark["sent"] / mark["gradient"] == pytest.approx(exact, rel=0.2)
    assert "times as long as its gradient" in mark["text"] and "off='bleed'" in mark["text"]
    assert _read_mark("residual", mark) == ("residual", mark["text"])
    short, _ = kept(2, 40, ErrorFeedback(of=TopK(density=0.6)), Change(30, "compressor", "Dense"))
    assert "text" not in marks(short)[0]
    slow = ErrorFeedback(of=TopK(density=0.0001), off="bleed", over=50)
    bled, _ = kept(2, 90, slow, Change(30, "compressor", "Dense"))
    assert "text" not in marks(bled)[0], "fifty steps with a fiftieth each are none of them long"


def test_bleeding_survives_other_changes_and_new_error_feedback_takes_the_rest() -> None:
    bleeding = ErrorFeedback(of=TopK(**SPARSE), off="bleed", over=6)
    turns = [
        Change(8, "compressor", "Dense"),
        Change(10, "compressor", {"ByteGrad": {}}),
        Change(11, "bucket_mb", 0.05),
    ]
    _, sessions = kept(2, 16, bleeding, *turns)
    full = length(BOOKS.owed[7])
    for step, share in zip(range(8, 14), (5, 4, 3, 2, 1, 0), strict=True):
        assert length(BOOKS.owed[step]) == pytest.approx(share / 6 * full, rel=1e-4, abs=1e-5 * full), step
    assert all(type(s.rank.compressor).__name__ == "ByteGrad" for s in sessions)
    BOOKS.__init__()  # type: ignore[misc]
    again = Change(10, "compressor", to_plain(ErrorFeedback(of=TopK(density=0.0001))))
    _, sessions = kept(2, 13, bleeding, turns[0], again)
    assert BOOKS.missing(left(sessions)) < 1e-6
    assert length(left(sessions)) > 0.5 * length(BOOKS.owed[7]), "what was not bled yet is fed back"


def test_without_a_residual_the_next_compressor_starts_at_once() -> None:
    found, sessions = kept(2, 4, TopK.usual(), Change(0, "compressor", "Dense"))
    assert not marks(found) and all(s.rank.compressor == Dense() and not s.flushing for s in sessions)
    found, _ = kept(2, 8, ErrorFeedback(of=Dense()), Change(4, "compressor", "Dense"))
    assert not marks(found), "all was sent"


@pytest.mark.parametrize("seed", [1, 2])
def test_random_live_changes_lose_no_gradient_with_any_off_mode(seed: int) -> None:
    """The sum of sent, dropped and left gradients is right over 250 changes in each of two sequences."""
    rng = random.Random(seed)
    lossless = [Dense(), ErrorFeedback(of=Dense())]
    turns: list[Change] = []
    for step in range(2, 252):
        if rng.random() < 0.2:
            turns.append(Change(step, "bucket_mb", rng.choice([0.02, 0.05, 1.0])))
            continue
        of = rng.choice([TopK(density=rng.uniform(0.01, 0.3)), PowerSGD(rank=rng.randint(1, 9)), ACPSGD(rank=2)])
        feeding = ErrorFeedback(of=of, off=rng.choice(["flush", "bleed", "drop"]), over=rng.randint(2, 4))
        turns.append(Change(step, "compressor", to_plain(rng.choice([*lossless, feeding, feeding]))))
    found, sessions = kept(2, 256, TopK.usual(), *turns, bucket_mb=1.0)
    assert found.state == "done" and not found.details("refused")
    assert {*("dropped" if "dropped" in m else m["steps"] for m in marks(found))} >= {"dropped", 1, 2, 3}
    assert BOOKS.drops == {step for step, _, detail in found.details("residual") if "dropped" in detail}
    assert length(BOOKS.dropped) > 0 and BOOKS.missing(left(sessions)) < 1e-4


@pytest.mark.parametrize("off", ["flush", "bleed", "drop"])
def test_engine_and_simulator_agree_and_shapes_alone_give_the_bytes(off: str) -> None:
    e = experiment(3, 14, compressor=ErrorFeedback(of=TopK(**SPARSE), off=off, over=3))
    turns = [Change(6, "compressor", "Dense")]
    sessions = run(e, *turns)
    for real in (True, False):
        found, _ = simulated(e.set("pace", 1), *turns, real=real)
        for s in sessions:
            assert comm(found, s.rank.index) == begun(s.record)
        if real:
            theirs = [json.loads(m[-1]) for s in sessions for m in s.record.noted("residual")]
            assert [set(m) for m in theirs] == [set(m) for m in marks(found)]
            for a, b in zip(theirs, marks(found), strict=True):
                assert {k: v for k, v in a.items() if isinstance(v, float)} == pytest.approx(
                    {k: v for k, v in b.items() if isinstance(v, float)}, rel=1e-3
                )


def test_a_residual_in_another_unit_is_dropped_with_any_off_mode() -> None:
    for off in ("flush", "bleed"):
        before = ErrorFeedback(of=TopK(**SPARSE), off=off)
        found, sessions = kept(2, 10, before, Change(6, "strategy", {"LocalSGD": {}}))
        assert [m["unit"] for m in marks(found)] == ["gradients"] * 2 and all("dropped" in m for m in marks(found))
    # also while bleeding
    bleeding = ErrorFeedback(of=TopK(**SPARSE), off="bleed", over=8)
    turns = [Change(4, "compressor", "Dense"), Change(6, "strategy", {"LocalSGD": {}})]
    found, sessions = kept(2, 10, bleeding, *turns)
    assert [set(m) >= {"dropped"} for m in marks(found)] == [False, True, True]
    assert all(s.rank.compressor == Dense() and not s.flushing for s in sessions) and not left(sessions)


@pytest.mark.parametrize(("knob", "value", "words"), [
    ("compressor.off", "keep", "one of flush, bleed, drop"),
    ("compressor.over", 1, r"an integer in \[2, 10000\] steps"),
])  # fmt: skip
def test_invalid_settings_are_refused_with_the_allowed_values(knob: str, value: object, words: str) -> None:
    with pytest.raises(KnobError, match=rf"{knob}={value!r}: must be {words}"):
        experiment(compressor=TopK.usual()).set(knob, value)


def test_users_cannot_choose_the_leaving_compressor() -> None:
    assert _Leaving.__name__ not in shipped(Compressor)
    with pytest.raises(KnobError, match="no such compressor"):
        experiment().set("compressor", "_Leaving")


def rank_one(n: int, m: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    return (torch.randn(n, 1, generator=rng) * torch.randn(1, m, generator=rng)).view(-1)


@pytest.mark.parametrize(("x", "spread"), [
    (torch.randn(50_000, generator=torch.Generator().manual_seed(2)), 0.05), (rank_one(300, 64), 0.15),
    (rank_one(300, 2 * WIDTH), (2 / SIGNS) ** 0.5), (torch.ones(WIDTH * 40), (2 / SIGNS) ** 0.5),
], ids=["noise", "rank one", "the worst", "ones"])  # fmt: skip
def test_a_sketch_keeps_the_mean_squared_length_with_bounded_spread(x: torch.Tensor, spread: float) -> None:
    draws = 400
    ratio = torch.stack([sketch(x, f"p{i}").square().sum() / x.square().sum() for i in range(draws)])
    assert abs(float(ratio.mean()) - 1) < 5 * spread / draws**0.5
    assert float(ratio.std()) < 1.25 * spread


def test_a_sketch_is_linear_deterministic_and_exact_for_few_elements() -> None:
    x, y = rank_one(30, 40), torch.randn(1200)
    torch.testing.assert_close(sketch(x, "p") + 2 * sketch(y, "p"), sketch(x + 2 * y, "p"), rtol=1e-4, atol=1e-4)
    assert torch.equal(sketch(x, "p"), sketch(x, "p")) and not torch.equal(sketch(x, "p"), sketch(x, "q"))
    for few in (torch.arange(5.0), torch.ones(WIDTH), torch.zeros(0)):
        torch.testing.assert_close(sketch(few, "p").norm(), few.norm())


def test_a_pipeline_stage_compares_its_residual_with_its_own_gradient() -> None:
    """Runs two stages, the second one small, and compares each residual with runs that end at the change."""
    e = piped(4, 6, partition=Pipeline(cuts=(6,)), compressor=ErrorFeedback(of=TopK(density=0.02)))
    owing, sent = run(e), run(replace(e, steps=8), Change(6, "compressor", "Dense"))
    lengths = []
    for stage, off in ((0, 0.25), (1, 0.02)):  # a sketch of few numbers has nearly the exact length
        held = [owing[rank].training.rank.memory.buffers["residual"] for rank in (stage, stage + 2)]
        owed = torch.cat([(held[0][name] + held[1][name]).view(-1) for name in held[0]]).norm()
        lengths.append(float(owed))
        (mark,) = sent[stage].record.noted("residual")
        assert json.loads(mark[3])["sent"] == pytest.approx(float(owed), rel=off)
    assert math.hypot(*lengths) > 1.1 * lengths[1], "that of the whole model is another"
