"""Laws test a strategy's claims in simulations of a small model: `laws(Mine)`. No law names a strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from workbench.compressors import TopK
from workbench.experiment import Experiment
from workbench.host.core.dropped_state import UNDECLARED
from workbench.record.run import Run
from workbench.settings import Change, KnobError, knobs, short
from workbench.sim.run.simulate import simulate
from workbench.strategies import Strategy
from workbench.tasks import Colwise, Rowwise, Task

RANKS, STEPS = 3, 8
EXCHANGED_VALUES = ("gradients", "moments", "displacements", "parameters")  # see Strategy.exchanges
RATE, MOMENTUM, EXAMPLES = 0.02, 0.9, 4


class LawBroken(AssertionError):
    """A strategy does not keep a law."""


class Law(NamedTuple):
    """A law and its result. held: None if it does not apply to this strategy"""

    law: str
    held: bool | None
    said: str

    def __repr__(self) -> str:
        mark = {True: "kept", False: "BROKEN", None: "not asked"}[self.held]
        return f"{mark:9} {self.law}" + (f": {self.said}" if self.said else "")


class Laws(list[Law]):
    """The results of all laws."""

    @property
    def broken(self) -> list[str]:
        return [one.law for one in self if one.held is False]

    def __repr__(self) -> str:
        return "\n".join(map(repr, self))


class Net(nn.Module):
    """Three layers, for several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        rng = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=rng) * 0.5 / p.shape[-1] ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out


def batch(rank: int, step: int, seed: int = 0, size: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    """Equal examples for equal arguments: (size, 8) and (size, 4)."""
    rng = torch.Generator().manual_seed(seed * 1_000_003 + step * 101 + rank)
    x = torch.randn(size, 8, generator=rng)
    return x, torch.stack([x[:, 0], x[:, 1] * x[:, 2], x.sum(1), x[:, 3].abs()], 1)


def mse(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Returns a batch's loss."""
    return nn.functional.mse_loss(model(pair[0]), pair[1])


def flat(model: nn.Module) -> Tensor:
    """Returns parameters in the order of names: (n,) float64."""
    return torch.cat([p.detach().reshape(-1).double() for _, p in sorted(model.named_parameters())])


def small_task(loss: Any = mse, momentum: float = MOMENTUM) -> Task:
    """Returns a task with SGD and the examples of `batch`."""
    return Task(
        model=Net, data=lambda rank, ranks, seed: [batch(rank, step) for step in range(64)], loss=loss,
        optimizer=partial(torch.optim.SGD, lr=RATE, momentum=momentum),
        split=lambda model: {"a": Colwise(), "b": Rowwise()}, lookups=lambda pair: {},
    )  # fmt: skip


def trained(strategy: Strategy, ranks: int = RANKS, steps: int = STEPS, changes: Iterable[Change] = (),
            momentum: float = MOMENTUM, **rest: Any) -> tuple[Run, list[Tensor]]:  # fmt: skip
    """Returns a simulated run with real tensors, and every rank's parameters at its end, by `flat`."""
    models: dict[int, nn.Module] = {}

    def loss(model: nn.Module, pair: Any) -> Tensor:
        first = next(model.parameters())
        if model.training and not first.is_meta and not hasattr(first, "fake_mode"):  # not a model of sizes
            models[id(model)] = model
        return mse(model, pair)

    task = small_task(loss, momentum)
    done = simulate(_make_experiment(strategy, ranks, steps, task=task, **rest), changes=changes, real=True)
    return done, [flat(model) for model in models.values()]


def train_joined(ranks: int, steps: int) -> Tensor:
    """Trains one process on the batches of all ranks with torch's optimizer. Returns parameters by `flat`."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for step in range(steps):
        pairs = [batch(rank, step) for rank in range(ranks)]
        optimizer.zero_grad()
        mse(model, (torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]))).backward()
        optimizer.step()
    return flat(model)


def _make_experiment(strategy: Strategy, ranks: int, steps: int, **rest: Any) -> Experiment:
    rest = {"task": small_task(), "pace": 5.0, "bucket_mb": 0.01, "eval_every": 0, "diverged": 0.0, **rest}
    return Experiment(strategy=strategy, ranks=ranks, steps=steps, **rest).checked()


def make_fitting(cls: type[Strategy], ranks: int) -> Strategy:
    """Returns the strategy with default knobs. If it refuses `ranks`, sets an integer knob to `ranks`."""
    if cls().refuses_size(ranks) is None:
        return cls()
    every = (replace(cls(), **{k.name: ranks}) for k in knobs(cls) if k.kind is int)
    return next(chosen for chosen in every if chosen.refuses_size(ranks) is None)


def _require_kept(kept: bool, said: str) -> None:
    if not kept:
        raise LawBroken(said)


def _are_equal(found: list[Tensor]) -> bool:
    return all(torch.equal(one, found[0]) for one in found)


def trains_and_is_left(cls: type[Strategy]) -> str | None:
    """The strategy trains. After a switch to DDP, ranks have the same parameters. Each entry in `own` has a rule."""
    done, found = trained(make_fitting(cls, RANKS), changes=[Change(STEPS - 1, "strategy", "DDP")])
    _require_kept([change.path for change in done.changes] == ["strategy"], "the switch to DDP was not made")
    samples = done.timeline.samples.rows()
    losses = samples[samples.equal("name", "loss")].value
    _require_kept(len(losses) > 0 and all(map(math.isfinite, losses)), "a loss is not finite")
    _require_kept(_are_equal(found), "ranks differ after the switch to DDP")
    rules = {name: rule for _, _, detail in done.details("own") for name, rule in detail["rules"].items()}
    loose = sorted(name for name, rule in rules.items() if rule == UNDECLARED)
    _require_kept(not loose, f"`own` has no rule for {', '.join(loose)}")
    return None


def asks_alike(cls: type[Strategy]) -> str | None:
    """In lockstep, all ranks request the same collectives in the same order, with sizes only."""
    if not cls.lockstep:
        return "it is not in lockstep"
    run = simulate(_make_experiment(make_fitting(cls, RANKS), RANKS, STEPS + 1), real=False)
    rows = run.timeline.spans.rows()
    rows = rows[rows.equal("lane", "comm")]
    asked = []
    for rank in range(RANKS):
        own = rows[rows.rank == rank]
        own = own[np.argsort(own.t0, kind="stable")]
        names = [str(name).split(" to ")[0] for name in own.name]
        asked.append(list(zip(own.step.tolist(), names, own.nbytes.tolist(), strict=True)))
    _require_kept(asked[0] == asked[1] == asked[2], "ranks request different collectives")
    return None


def never_apart(cls: type[Strategy]) -> str | None:
    """Unless the strategy is `periodic`, all ranks have the same parameters after every step."""
    if cls.periodic or not cls.lockstep:
        return "periodic = True: ranks may differ between rounds" if cls.periodic else "it is not in lockstep"
    for steps in (1, 2, 5):
        said = f"ranks differ after step {steps}; if that is intended, set periodic = True"
        _require_kept(_are_equal(trained(make_fitting(cls, RANKS), steps=steps)[1]), said)
    return None


def one_process(cls: type[Strategy]) -> str | None:
    """A step of an `exact` strategy equals one process's step on the examples of all ranks."""
    if not cls.exact:
        return "it does not set exact = True"
    for one in trained(make_fitting(cls, RANKS))[1]:
        _require_kept(torch.allclose(one, train_joined(RANKS, STEPS), rtol=1e-5, atol=1e-6), "its step is different")
    return None


def plain_alone(cls: type[Strategy]) -> str | None:
    """With a `plain` strategy (the default), one rank makes only the optimizer's steps."""
    if not cls.plain:
        return "plain = False: its step may differ"
    (found,) = trained(make_fitting(cls, 1), ranks=1)[1]
    _require_kept(torch.allclose(found, train_joined(1, STEPS), rtol=1e-6, atol=1e-7),
             "one rank steps unlike the optimizer; if that is intended, set plain = False")  # fmt: skip
    return None


def compresses_or_says_why_not(cls: type[Strategy], compressor: Any = None) -> str | None:
    """With a compressor (default: TopK), the strategy trains, or refuses with a remedy.

    Its `exchanges` must be in EXCHANGED_VALUES, because compressors depend on it.
    """
    _require_kept(
        cls.exchanges in EXCHANGED_VALUES,
        f"exchanges = {short(cls.exchanges)}: must be one of {', '.join(EXCHANGED_VALUES)}",
    )
    try:
        done, _ = trained(make_fitting(cls, 2), ranks=2, steps=4, compressor=compressor or TopK.usual())
    except KnobError as refusal:
        _require_kept("use " in str(refusal), f"its refusal suggests no remedy: {refusal}")
        return "it refuses, and suggests a remedy"
    samples = done.timeline.samples.rows()
    _require_kept(all(map(math.isfinite, samples[samples.equal("name", "loss")].value)), "a loss is not finite")
    return None


LAWS: dict[str, Callable[[type[Strategy]], str | None]] = {
    "it trains, is left, and all ranks agree": trains_and_is_left,
    "all ranks request the same collectives, also with sizes only": asks_alike,
    "ranks are equal after every step": never_apart,
    "its step is what one process would make of all examples": one_process,
    "on one rank it is the optimizer": plain_alone,
    "it takes a compressor, or says why not": compresses_or_says_why_not,
}


def laws(cls: type[Strategy]) -> Laws:
    """Returns every law's result. An error of the strategy breaks the law.

    Raises KnobError if `cls` is not the class of a strategy.
    """
    if not (isinstance(cls, type) and issubclass(cls, Strategy)):
        raise KnobError(f"strategy={short(cls)}: must be the class of a strategy, such as LocalSGD")
    found = Laws()
    for name, law in LAWS.items():
        try:
            why_not = law(cls)
        except Exception as broken:
            said = str(broken) if isinstance(broken, LawBroken) else f"{type(broken).__name__}: {broken}"
            found.append(Law(name, False, said))
        else:
            found.append(Law(name, None if why_not and law is not compresses_or_says_why_not else True, why_not or ""))
    return found
