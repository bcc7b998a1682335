"""Runs ranks as threads of one process: the engine over loopback, for tests that need no processes."""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn

from workbench.compressors import Compressor
from workbench.engine.control import membership
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.host.placement import unmaterialized
from workbench.rank import Bucket, Memory, Op, Part, Rank
from workbench.settings import Change, members
from workbench.sim.teach.laws import Net, batch, flat, mse
from workbench.sim.teach.laws import make_fitting as make_fitting
from workbench.sim.teach.laws import train_joined as train_joined
from workbench.tasks import Colwise, Plan, Rowwise, Task

_CHANCE = threading.RLock()


def _one_at_a_time(ask: Callable[..., Any]) -> Callable[..., Any]:
    def locked(*args: Any) -> Any:
        with _CHANCE:
            return ask(*args)

    return locked


# Ranks on threads share torch's default generator. torch reads it with its mutex held. A garbage collection at that
# moment releases the GIL, and another thread that takes it and waits for the mutex blocks the process for good.
torch.manual_seed = torch.random.manual_seed = _one_at_a_time(torch.manual_seed)
torch.get_rng_state = torch.random.get_rng_state = _one_at_a_time(torch.get_rng_state)
torch.set_rng_state = torch.random.set_rng_state = _one_at_a_time(torch.set_rng_state)


class Rows(list):
    """A recorder that keeps its rows."""

    cpu_seconds = 0.0
    lost_rows = 0

    def __init__(self) -> None:
        self.samples: list[tuple] = []
        self.marks: list[tuple] = []

    def span(self, *row: Any) -> None:
        self.append(row)

    def sample(self, *row: Any) -> None:
        self.samples.append(row)

    def mark(self, *row: Any) -> None:
        self.marks.append(row)

    def close(self) -> None:
        pass

    def comm(self) -> list[tuple[int, str, int]]:
        """Returns (step, name, nbytes) of every collective and message in the order of their start."""
        return [(r[0], r[2], r[6]) for r in sorted(self, key=lambda r: r[3]) if r[1] == "comm"]

    def losses(self) -> list[float]:
        return [v for _, name, _, v in self.samples if name == "loss"]

    def noted(self, name: str) -> list[tuple]:
        return [m for m in self.marks if m[1] == name]


def shipped(base: type) -> dict[str, type]:
    """Returns the members in a family's folder, without the members that tests define."""
    return {name: cls for name, cls in members(base).items() if cls.__module__.startswith("workbench.")}


def live(experiment: Experiment, changes: tuple[Change, ...] = (), **more: Any) -> list[Session]:
    """Starts a run on threads. Returns the sessions by rank."""
    importlib.import_module("torch._dynamo")  # or every rank's optimizer would import it at once
    store, host, port = Session.host_store()
    rest = {
        "store": (host, port),
        "run_id": uuid.uuid4().hex,
        "secret": b"ours",
        "epoch": time.time(),
        "changes": changes,
        **more,
    }
    devices = rest.pop("devices", [rest.pop("device", "cpu")] * experiment.ranks)
    sessions = [Session(experiment, rank=r, size=experiment.ranks, device=d, **rest) for r, d in enumerate(devices)]
    for s in sessions:
        s.record.close()
        s.record = Rows()
        s._store = store
    for s in sessions:
        s.start()
    return sessions


def run(experiment: Experiment, *changes: Change, within: float = 300.0) -> list[Session]:
    """Runs to the end. Fails the test if a rank fails or hangs."""
    sessions = live(experiment, changes)
    for s in sessions:
        if not s.join(within):
            for other in sessions:
                other.abort()
            raise AssertionError(f"rank {s.rank.index} hangs: {s.status()}")
    require_no_error(sessions)
    assemble(sessions)
    return sessions


def require_no_error(sessions: list[Session]) -> None:
    """Fails the test if a rank failed. Shows the ranks with the original errors first."""
    errors = sorted((s.error for s in sessions if s.error), key=lambda error: error["consequence"])
    assert not errors, "\n".join(error["traceback"] for error in errors)


def assemble(sessions: list[Session]) -> None:
    """Gives each session the whole parameters if a run has left them in shards, as its ranks do before they read."""
    if not sessions[0].training.unsharder.sharded:
        return
    shards = [[(begin, _kept(s, index, own)) for index, (begin, own) in
               enumerate(zip(s.layout.begins, s.layout.weights, strict=True))] for s in sessions]  # fmt: skip
    for s in sessions:
        for bucket in s.layout.list_params():
            whole = shards[0][bucket.index][1].new_empty(bucket.data.numel())
            for begin, own in (rank[bucket.index] for rank in shards):
                whole[begin : begin + own.numel()] = own
            s.layout.hold_bucket(bucket.like(whole))
        for place in s.layout.order:
            unmaterialized.make_present(place.param)


def _kept(s: Session, index: int, own: Any) -> Any:
    """Returns a rank's shard of a bucket, which may be offloaded."""
    kept = s.training.away.kept.read_parameters(index)
    return own if kept is None else kept


def ended(sessions: list[Session], within: float = 120.0) -> None:
    """Waits until all sessions have ended. If one hangs, fails the test and prints every thread's stack."""
    until = time.monotonic() + within
    for s in sessions:
        over = s.join(max(0.0, until - time.monotonic()))
        where = [other.status() for other in sessions]
        if not over:
            faulthandler.dump_traceback(all_threads=True)
            for other in sessions:
                other.abort()
        assert over, f"rank {s.rank.index} hangs: {where}; {len(os.listdir('/dev/fd'))} descriptors"


def weights(session: Session) -> torch.Tensor:
    """Returns all parameters in the order of their names: (n,) float64."""
    return flat(session.model)


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """Returns a 63-bit hash of the bits of `tensors`."""
    digest = hashlib.blake2b(digest_size=8)
    for t in tensors:
        digest.update(t.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return int.from_bytes(digest.digest(), "big") >> 1


def net(make: Any = None) -> nn.Module:
    """Makes a model with the same parameters in every thread, because torch's random numbers are process-wide."""
    model = (make or Net)()
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=rng) * 0.5 / p.shape[-1] ** 0.5)
    return model


def _data(rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch(rank, step, seed) for step in range(64)]


def _evaluate(model: nn.Module) -> float:
    on = next(model.parameters()).device
    x, y = batch(1000, 0, 0, 64)
    return float(mse(model, (x.to(on), y.to(on))))


def _split(model: nn.Module) -> Plan:
    """Returns how to split a Net's features, for strategies that train sub-models."""
    return {"a": Colwise(), "b": Rowwise()}


def _none(batch: Any) -> dict[str, torch.Tensor]:
    """Returns the rows of embedding tables that a batch reads: none."""
    return {}


def toy(optimizer: Any = None, model: Any = net, loss: Any = mse, data: Any = _data, evaluate: Any = _evaluate,
        **rest: Any) -> Task:  # fmt: skip
    """Returns a task that takes a millisecond per step."""
    rest = {**({"split": _split} if model is net else {}), "lookups": _none, **rest}
    return Task(
        model=model,
        data=data,
        loss=loss,
        evaluate=evaluate,
        optimizer=optimizer or partial(torch.optim.SGD, lr=0.02, momentum=0.9),
        **rest,
    )


def experiment(ranks: int = 2, steps: int = 12, **rest: Any) -> Experiment:
    """Returns a toy experiment with small buckets, no evaluation by default, and no limit on the loss."""
    rest = {"eval_every": 0, "bucket_mb": 0.01, "task": toy(), "diverged": 0.0, **rest}
    return Experiment(ranks=ranks, steps=steps, **rest).checked()


def placed(*shapes: tuple[int, ...]) -> list[Part]:
    """Returns parameters of these shapes, one after the other."""
    ends = list(accumulate(math.prod(shape) for shape in shapes))
    return [Part(f"p{i}", s, end - math.prod(s), end) for i, (s, end) in enumerate(zip(shapes, ends, strict=True))]


def exchange(compressor: Compressor, g: torch.Tensor, group: list[Part], memories: list[Memory]) -> torch.Tensor:
    """Reduces one bucket on all ranks at once, without a connection. Returns the sum: (n,)."""
    lo, hi = group[0].start, group[-1].stop
    parts = tuple(Part(p.name, p.shape, p.start - lo, p.stop - lo) for p in group)
    buckets = [Bucket(0, g[r, lo:hi].clone(), parts, lo) for r in range(len(memories))]
    ranks = [Rank(r, len(memories)) for r in range(len(memories))]
    together([compressor.reduce(k, b, m) for k, b, m in zip(ranks, buckets, memories, strict=True)])
    assert all(torch.allclose(b.data, buckets[0].data, rtol=0, atol=0, equal_nan=True) for b in buckets)
    return buckets[0].data.double()


def together(coros: list[Any], seen: list[Op] | None = None) -> list[Any]:
    """Drives one coroutine per rank, collective by collective, without a connection. Returns their results.

    `seen` records rank 0's Ops.
    """
    returned: list[Any] = [None] * len(coros)
    asked = [_next(c, None, returned, r, seen if r == 0 else None) for r, c in enumerate(coros)]
    while any(asked):
        whole = [tuple(range(len(coros))) if op is None or op.group is None else op.group.ranks for op in asked]
        ready = {ranks for ranks in whole if all(asked[r] and whole[r] == ranks for r in ranks)}
        assert ready, asked
        for ranks in ready:
            ops = [asked[r] for r in ranks]
            assert len({op.verb for op in ops}) == 1, asked
            answers = _answers(ops[0].verb, [op.args[0] for op in ops], ops[0].args)
            for r, answer in zip(ranks, answers, strict=True):
                asked[r] = _next(coros[r], answer, returned, r, seen if r == 0 else None)
    return returned


def _next(coro: Any, answer: Any, returned: list[Any], r: int, seen: list[Op] | None) -> Op | None:
    """Returns a coroutine's next collective, or None at its end. Samples take no partner."""
    try:
        op = coro.send(answer)
        while op.verb == "sample":
            if seen is not None:
                seen.append(op)
            op = coro.send(None)
    except StopIteration as stop:
        returned[r] = stop.value
        return None
    if seen is not None:
        seen.append(op)
    return op


def _answers(verb: str, xs: list[Any], args: tuple) -> list[Any]:
    """Returns each rank's result of a collective. Adds in rank order."""
    p = len(xs)
    match verb:
        case "all_reduce":
            total = xs[0].clone()
            for x in xs[1:]:
                total = torch.maximum(total, x) if args[1] == "max" else total + x
            if args[1] == "mean":
                total /= p
            for x in xs:
                x.copy_(total)
            return xs
        case "broadcast":
            first = xs[args[1]].clone()
            for x in xs:
                x.copy_(first)
            return xs
        case "all_to_all":
            return list(torch.stack(xs, 1))
        case "all_to_allv":
            assert [[row.numel() for row in x] for x in xs] == [list(row) for row in args[1]]
            return [[xs[i][j].clone() for i in range(p)] for j in range(p)]
        case "all_gather":
            return [torch.stack(xs) for _ in xs]
    raise AssertionError(verb)


def poisoned(rank: int, step: int) -> Task:
    """A task whose loss raises ValueError("a bad example") at one batch of one rank."""
    poison = batch(rank, step, 0)[0]

    def loss(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if torch.equal(pair[0], poison):
            raise ValueError("a bad example")
        return mse(model, pair)

    return toy(loss=loss)


def gone_before_it_meets(patch: pytest.MonkeyPatch, member: int, where: str = "meet") -> None:
    """Makes a rank die after its vote, before the generation has formed, or at another wait `where`."""
    gather = membership.await_reports

    def gathered(store: Any, what: str, place: int | None, processes: Any, look: Any, *more: Any) -> None:
        if what == where and look.args[0].member == member:
            look.args[0]._must_leave = True
            look()
        gather(store, what, place, processes, look, *more)

    patch.setattr(membership, "await_reports", gathered)
