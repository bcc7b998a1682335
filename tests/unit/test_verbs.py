"""Tests the verbs of a Rank: their operations, shards of a bucket, and the engine's refusals."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from tests.ranks import batch, experiment, live, mse, net
from workbench.rank import Bucket, Part, Rank
from workbench.strategies import DDP, Strategy


def test_shards_cover_a_bucket_once_and_keep_its_places() -> None:
    parts = (Part("a", (2, 3), 0, 6), Part("b", (4,), 6, 10))
    whole = Bucket(2, torch.arange(10.0), parts, 100)
    shards = [whole.shard(i, 4) for i in range(4)]
    assert torch.equal(torch.cat([s.data for s in shards]), whole.data)
    assert [s.offset for s in shards] == [100, 103, 106, 109]
    assert [len(s.data) for s in shards] == [3, 3, 3, 1]
    assert shards[1].parts == (Part("a", (3,), 0, 3),)
    assert shards[2].parts == (Part("b", (3,), 0, 3),)
    shards[3].data.fill_(-1)
    assert whole.data[9] == -1, "a shard is a view"


def test_more_shards_than_elements_are_empty() -> None:
    whole = Bucket(0, torch.arange(2.0), (Part("a", (2,), 0, 2),), 0)
    assert [len(whole.shard(i, 3).data) for i in range(3)] == [1, 1, 0]
    assert whole.shard(2, 3).parts == ()


def test_forward_is_awaited_whole_or_iterated_bucket_by_bucket() -> None:
    rank = Rank(0, 2)
    asked = []

    async def step() -> None:
        await rank.forward(micro=3)
        both = rank.forward("x")
        async for bucket in both:
            asked.append(bucket)
        asked.append(both.loss)
        third = rank.forward()
        asked.append(await anext(third))
        asked.append(await third)

    coro = step()
    first = coro.send(None)
    assert (first.verb, first.args) == ("forward", (None, 3))
    begin = coro.send(None)
    assert begin.verb == "forward_buckets"
    assert coro.send("bucket 1").verb == "next_params"
    begin.args[0].loss = 7.0
    begin = coro.throw(StopAsyncIteration())
    assert coro.send("bucket 1").verb == "next_params", "what is left is computed"
    begin.args[0].loss = 8.0
    with pytest.raises(StopIteration):
        coro.throw(StopAsyncIteration())
    assert asked == ["bucket 1", 7.0, "bucket 1", 8.0]


class AsksForTooMuch(Strategy):
    """Requests a verb that only the simulator performs."""

    asks: ClassVar[Any] = None

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await type(self).asks(rank, await rank.params())


REFUSED = [
    (lambda rank, params: rank.hold(params[0].shard(0, 2)), "a strategy that shards them must claim"),
    (lambda rank, params: rank.backward(torch.ones(3)), "begins with its loss"),
]


@pytest.mark.parametrize(("asks", "words"), REFUSED, ids=["hold", "stages"])
def test_the_engine_refuses_a_verb_with_the_reason(asks: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsksForTooMuch, "asks", staticmethod(asks))
    (session,) = live(experiment(1, 2, strategy=AsksForTooMuch()))
    assert session.join(60)
    assert session.error is not None
    assert words in session.error["text"]
    assert session.error["step"] == 0


class LooksAtItsBatch(Strategy):
    """Reads the batch itself and the clock."""

    seen: ClassVar[list[float]] = []

    async def step(self, rank: Rank, state: Any) -> None:
        self.seen.append(await rank.clock())
        await rank.forward(await rank.batch())
        await rank.backward()
        await rank.update()


def test_a_strategy_can_read_the_batch_and_the_clock() -> None:
    LooksAtItsBatch.seen.clear()
    looked, plain = (live(experiment(1, 3, strategy=s))[0] for s in (LooksAtItsBatch(), DDP()))
    assert looked.join(60)
    assert plain.join(60)
    assert looked.record.losses() == plain.record.losses()
    assert LooksAtItsBatch.seen == sorted(set(LooksAtItsBatch.seen))
    assert len(LooksAtItsBatch.seen) == 3


class TwoForwards(Strategy):
    """Keeps two forwards open and makes their backwards in the other order."""

    seen: ClassVar[list[torch.Tensor]] = []

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward(micro=0)
        await rank.forward(micro=1)
        for micro in (1, 0):
            async for bucket in rank.backward(micro=micro):
                self.seen.append(bucket.data.clone())
        await rank.update()


def test_a_backward_belongs_to_the_forward_of_its_micro_batch() -> None:
    TwoForwards.seen.clear()
    (session,) = live(experiment(1, 1, bucket_mb=1.0, strategy=TwoForwards()))
    assert session.join(60)
    assert session.error is None
    second, both = TwoForwards.seen
    for step, expected in ((1, second), (0, both - second)):
        model = net()
        mse(model, batch(0, step, 0)).backward()
        grads = [p.grad.view(-1) for p in reversed(list(model.parameters())) if p.grad is not None]
        torch.testing.assert_close(torch.cat(grads), expected)


def test_a_backward_without_its_forward_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsksForTooMuch, "asks", staticmethod(lambda rank, params: rank.backward(micro=3)))
    (session,) = live(experiment(1, 1, strategy=AsksForTooMuch()))
    assert session.join(60)
    assert session.error is not None
    assert "backward of micro-batch 3 has no open forward: await rank.forward" in session.error["text"]


def test_one_of_several_workers_may_not_request_the_ranks_own_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsksForTooMuch, "workers", 2)
    monkeypatch.setattr(AsksForTooMuch, "asks", staticmethod(lambda rank, params: rank.grads()))
    (session,) = live(experiment(1, 2, strategy=AsksForTooMuch()))
    assert session.join(60)
    assert session.error is not None
    assert "`grads`: one of several workers cannot request it; take workers=1" in session.error["text"]


def test_only_a_strategy_that_declares_it_has_a_background() -> None:
    class WithShadow(DDP):
        """DDP with a shadow."""

        async def background(self, rank: Rank, state: Any) -> None:
            while await rank.again():
                pass

    assert not DDP().has_background
    assert WithShadow().has_background
    assert DDP().trains(0, 4)
