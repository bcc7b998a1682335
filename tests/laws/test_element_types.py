"""Checks that strategies and compressors train each element type, or hosts refuse the type by name."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import exchange, experiment, live, make_fitting, placed, run, shipped, toy
from tests.sim.virtual import samples
from tests.thinned import thinned
from workbench import simulate
from workbench.compressors import Compressor, inside
from workbench.experiment import Experiment
from workbench.rank import COMPLEX, FLOATS, Memory, as_real
from workbench.settings import Change, KnobError
from workbench.sim.teach.laws import batch
from workbench.strategies import Strategy
from workbench.tasks import Colwise, Rowwise

STRATEGIES, COMPRESSORS = shipped(Strategy), shipped(Compressor)
RANKS, STEPS, RATE = 2, 6, 0.02
TYPES = {name: getattr(torch, name) for name in (*FLOATS, *COMPLEX)}


def cases(names: Any, types: tuple[str, ...], of: int = 12, long: int = 4) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "kind"), thinned(product(names, types), of=of, long=long))


class Pairs(nn.Module):
    """A complex layer stored as one real parameter of (real, imaginary) pairs: weight (n, m, 2)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.view_as_real(weight).clone())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, torch.view_as_complex(self.weight))


class Model(nn.Module):
    """Three layers of one element type; as_pairs: their parameters are pairs of real numbers."""

    def __init__(self, dtype: torch.dtype, as_pairs: bool) -> None:
        super().__init__()
        self.dtype, rng = dtype, torch.Generator().manual_seed(3)
        for name, (n, m) in {"a": (40, 8), "b": (40, 40), "c": (4, 40)}.items():
            weight = torch.randn(n, m, generator=rng, dtype=torch.complex128) / m**0.5
            layer: Any = nn.Linear(m, n, bias=False, dtype=dtype)
            layer.weight.data.copy_(weight if dtype.is_complex else weight.real)
            self.add_module(name, Pairs(layer.weight.data) if as_pairs else layer)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype) * (1 + 0.5j) if self.dtype.is_complex else x.to(self.dtype)
        for layer in (self.a, self.b, self.c):
            made = as_real(layer(x)).tanh()
            x = torch.view_as_complex(made).clone() if self.dtype.is_complex else made  # FSDP warns of views
        return x


def squares(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the loss of a batch in at least float32."""
    made = model(pair[0])
    off = as_real(made - pair[1].to(made.dtype))
    return off.to(torch.promote_types(off.dtype, torch.float32)).square().mean()


def flat(model: nn.Module) -> Tensor:
    """Returns all parameters as real numbers: (n,) float64."""
    return torch.cat([as_real(p.detach()).reshape(-1).double() for _, p in sorted(model.named_parameters())])


class Ended(NamedTuple):
    """The end of a run: its losses, its held-out losses, and the model of each rank."""

    losses: list[float]
    held_out: list[float]
    models: list[nn.Module]


def chosen(kind: str, as_pairs: bool = False, loss: Any = squares, **rest: Any) -> Experiment:
    task = toy(
        model=partial(Model, TYPES[kind], as_pairs), loss=loss, evaluate=lambda model: squares(model, batch(9, 0)),
        data=lambda rank, ranks, seed: [batch(rank, step) for step in range(64)],
        split=lambda model: {"a": Colwise(), "b": Rowwise()},
        optimizer=partial(torch.optim.SGD, lr=RATE, momentum=0.9),
    )  # fmt: skip
    return experiment(RANKS, STEPS, **{"task": task, "pace": 2.0, "eval_every": 3, **rest})


TIMED = {"DABMD"}  # its batches depend on the real time that a rank took


def simulated(kind: str, *changes: Change, **rest: Any) -> Ended:
    models: dict[int, nn.Module] = {}

    def loss(model: nn.Module, pair: Any) -> Tensor:
        first = next(model.parameters())
        if model.training and not first.is_meta and not hasattr(first, "fake_mode"):  # these have sizes only
            models[id(model)] = model
        return squares(model, pair)

    done = simulate(chosen(kind, loss=loss, **rest), changes=changes, real=True)
    train = done.samples[done.samples["name"] == "loss"]["rank"].nunique()  # servers do not train
    assert len(models) == train
    return Ended(samples(done, "loss").tolist(), samples(done, "held_out").tolist(), list(models.values()))


def on_ranks(kind: str, *changes: Change, **rest: Any) -> Ended:
    sessions = run(chosen(kind, **rest), *changes, within=60.0)
    held_out = [value for _, name, _, value in sessions[0].record.samples if name == "held_out"]
    return Ended([v for s in sessions for v in s.record.losses()], held_out, [s.model for s in sessions])


def joined(kind: str) -> Tensor:
    """Returns plain torch's final parameters, trained on the joined batches of all ranks."""
    model = Model(TYPES[kind], as_pairs=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        xs, ys = zip(*(batch(rank, step) for rank in range(RANKS)), strict=True)
        optimizer.zero_grad()
        squares(model, (torch.cat(xs), torch.cat(ys))).backward()
        optimizer.step()
    return flat(model)


def require_trained(kind: str, ended: Ended) -> None:
    assert 1 <= len(ended.models) <= RANKS  # a simulated server's model does not train
    assert all(map(math.isfinite, ended.losses + ended.held_out))
    assert all(p.dtype == TYPES[kind] and p.isfinite().all() for m in ended.models for p in m.parameters())


def eps(kind: str) -> float:
    return torch.finfo(TYPES[kind]).eps


# -- compressors --


@pytest.mark.parametrize(("name", "kind"), list(product(COMPRESSORS, ("float16", "bfloat16", "float64"))))
def test_a_compressors_error_is_no_larger_with_other_float_types(name: str, kind: str) -> None:
    parts, rng = placed((16, 30), (20,)), torch.Generator().manual_seed(1)
    given = (torch.randn(3, 500, generator=rng, dtype=torch.float64) * 0.1).to(TYPES[kind])

    def error(x: Tensor) -> float:
        right = x.double().sum(0)
        made = exchange(COMPRESSORS[name].usual(), x.clone(), parts, [Memory(r) for r in range(3)])
        return float((made - right).norm() / right.norm())

    allowed = 4 * eps(kind) + (0.0 if COMPRESSORS[name].usual().lossless else 1.05 * error(given.float()))
    assert error(given) <= allowed


@pytest.mark.ranks
@cases(COMPRESSORS, FLOATS)
def test_a_compressor_trains_each_element_type_that_it_declares(name: str, kind: str) -> None:
    compressor = COMPRESSORS[name].usual()
    assert all(kind in held.dtypes for held in inside(compressor)), "every compressor takes floats"
    require_trained(kind, simulated(kind, compressor=compressor))


def test_dense_alone_takes_complex_gradients() -> None:
    """Dense sends them unchanged. A compressor that declares complex gradients needs more laws here."""
    assert [name for name, cls in COMPRESSORS.items() if set(COMPLEX) & set(cls.dtypes)] == ["Dense"]


@pytest.mark.parametrize(("name", "kind"), thinned(product(sorted(set(COMPRESSORS) - {"Dense"}), COMPLEX), of=4))
def test_a_compressor_refuses_complex_gradients_by_name(name: str, kind: str) -> None:
    compressor = COMPRESSORS[name].usual()
    with pytest.raises(KnobError, match=rf"compressor={type(compressor).__name__}: takes .* has {kind}"):
        simulated(kind, compressor=compressor)


def refused(e: Experiment, *changes: Change) -> list[str]:
    """Returns the reasons why real ranks refused each change."""
    sessions = run(e, *changes, within=60.0)
    return [str(mark[3]) for mark in sessions[0].record.noted("refused")]


@pytest.mark.ranks
@pytest.mark.parametrize("path", ["compressor", "strategy"])
def test_both_hosts_refuse_a_type_with_the_same_error(path: str) -> None:
    member = {"compressor": "Cast", "strategy": "KFAC"}[path]
    at_start = chosen("complex64").set(path, member)
    with pytest.raises(KnobError) as error:
        simulate(at_start, real=True)
    said = str(error.value)
    assert said.startswith(f"{path}={member}: takes parameters of float16")
    for s in live(at_start):
        assert s.join(60.0) and s.error is not None
        assert said in s.error["text"]
    change = Change(2, path, member)
    done = simulate(chosen("complex64"), changes=[change], real=True)
    assert [detail["reason"] for _, _, detail in done.details("refused")] == [said]
    (mark,) = refused(chosen("complex64"), change)
    assert said in mark


def test_the_error_for_an_unknown_type_suggests_converting_the_parameter() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.zeros(2, dtype=torch.complex32))

    with pytest.raises(KnobError, match=r"strategy=DDP: .*p has complex32; convert the parameter"):
        simulate(experiment(2, 2, task=toy(model=Half), pace=2.0), real=True)


# -- strategies --


@pytest.mark.ranks
@cases([name for name, cls in STRATEGIES.items() if not cls.opaque], FLOATS)
def test_a_strategy_trains_floats_or_refuses_them_by_name(name: str, kind: str) -> None:
    holds(simulated, name, kind)


@pytest.mark.ranks
@cases(STRATEGIES, FLOATS, of=40, long=10)
def test_a_strategy_trains_floats_on_real_ranks_or_refuses_them_by_name(name: str, kind: str) -> None:
    holds(on_ranks, name, kind)


def holds(host: Any, name: str, kind: str) -> None:
    """Checks a strategy; an exact one must end with plain torch's parameters, within rounding."""
    strategy = make_fitting(STRATEGIES[name], RANKS)
    if kind not in strategy.dtypes:
        with pytest.raises((KnobError, AssertionError), match=rf"strategy={name}: takes .* has {kind}"):
            host(kind, strategy=strategy)
        return
    ended = host(kind, strategy=strategy)
    require_trained(kind, ended)
    right = joined(kind)
    for model in ended.models if strategy.exact else ():
        assert (flat(model) - right).norm() <= 4 * eps(kind) * right.norm()


@pytest.mark.ranks
@cases([name for name, cls in STRATEGIES.items() if not cls.opaque], COMPLEX)
def test_a_complex_parameter_trains_as_its_real_and_imaginary_parts(name: str, kind: str) -> None:
    as_its_parts(simulated, name, kind)


SAME_EACH_TIME = [name for name, cls in STRATEGIES.items()
                  if cls.exact or (cls.periodic and cls.lockstep and name not in TIMED)]  # fmt: skip


@pytest.mark.ranks
@cases(SAME_EACH_TIME, COMPLEX, 20, 5)
def test_a_complex_parameter_trains_as_its_parts_on_real_ranks(name: str, kind: str) -> None:
    as_its_parts(on_ranks, name, kind)


def as_its_parts(host: Any, name: str, kind: str) -> None:
    """Checks a strategy, including a switch at the end, which hands over the optimizer's complex momentum."""
    strategy = make_fitting(STRATEGIES[name], RANKS)
    if kind not in strategy.dtypes:
        with pytest.raises((KnobError, AssertionError), match=rf"strategy={name}: takes .* has {kind}"):
            host(kind, strategy=strategy)
        return
    switch = Change(STEPS - 1, "strategy", "LocalSGD" if name == "DDP" else "DDP")
    one, other = (host(kind, switch, strategy=strategy, as_pairs=as_pairs) for as_pairs in (False, True))
    require_trained(kind, one)
    for mine, right in zip(map(flat, one.models), map(flat, other.models), strict=True):
        assert (mine - right).norm() <= 8 * eps(kind) * right.norm()
    assert one.held_out == pytest.approx(other.held_out, rel=8 * eps(kind))


def test_every_exact_strategy_takes_complex_parameters() -> None:
    assert all(set(COMPLEX) <= set(cls.dtypes) for cls in STRATEGIES.values() if cls.exact)


def test_the_norm_of_a_complex_gradient_counts_its_imaginary_part() -> None:
    for strategy in ("DDP", "ZeRO2", "ZeRO3"):
        ends = [simulated("complex64", strategy=STRATEGIES[strategy](), clip=0.05, as_pairs=p) for p in (False, True)]
        mine, right = (flat(ended.models[0]) for ended in ends)
        assert (mine - right).norm() <= 8 * eps("complex64") * right.norm(), strategy
