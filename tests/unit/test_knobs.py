"""Tests knobs: allowed values, errors, and settings as JSON."""

from __future__ import annotations

import gc
import json
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest

from workbench.compressors import Cast, Compressor, ErrorFeedback, TopK
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Fault, Freeze, Link, Noisy, Slow
from workbench.settings import (
    Knob,
    KnobError,
    checked,
    describe,
    find,
    from_plain,
    knob,
    knobs,
    members,
    resolve,
    to_plain,
    walk,
    with_value,
)
from workbench.strategies import (
    DDP,
    AsyncServer,
    HierarchicalLocalSGD,
    LocalSGD,
    OneBitAdam,
    PostLocalSGD,
    Strategy,
    SyncServer,
)
from workbench.tasks import Task, TaskBase

EVERY = Knob("every", int, 8, 1, 256, unit="steps")
FAMILIES = (Strategy, Compressor, Fault, TaskBase)


@pytest.mark.parametrize(
    ("given", "kept"), [(1, 1), (256, 256), (8.0, 8), ("16", 16)], ids=["low", "high", "whole float", "text"]
)
def test_an_integer_may_be_written_in_several_ways(given: Any, kept: int) -> None:
    assert EVERY.check(given) == kept
    assert type(EVERY.check(given)) is int


@pytest.mark.parametrize("wrong", [0, 257, -1, 1.5, "many", None, True, float("nan"), float("inf"), [8], {}])
def test_a_wrong_value_is_answered_with_name_value_and_range(wrong: Any) -> None:
    with pytest.raises(KnobError) as caught:
        EVERY.check(wrong)
    assert str(caught.value) == f"every={wrong!r}: must be an integer in [1, 256] steps"


@pytest.mark.parametrize("wrong", ["", "a", None, True, float("nan"), -0.1, 1.1])
def test_a_fraction_out_of_range_is_refused(wrong: Any) -> None:
    with pytest.raises(KnobError, match=r"density=.*: must be a number in \[0, 1\]"):
        Knob("density", float, 0.1, 0.0, 1.0).check(wrong)


def test_booleans_and_choices_take_only_their_values() -> None:
    switch = Knob("shared", bool, False)
    assert [switch.check(v) for v in (True, "false", "On", "1")] == [True, False, True, True]
    with pytest.raises(KnobError, match="shared=2: must be true or false"):
        switch.check(2)
    with pytest.raises(KnobError, match="to='fp8': must be one of fp16, bf16"):
        with_value(Cast(), "to", "fp8")


def test_setting_a_knob_makes_a_new_value_and_keeps_the_old() -> None:
    old = LocalSGD(every=4)
    new = with_value(old, "every", 16)
    assert (old.every, new.every) == (4, 16)
    with pytest.raises(FrozenInstanceError):
        old.every = 5  # type: ignore[misc]


def test_a_path_may_be_shortened_while_unambiguous() -> None:
    packed = Fabric(link=Link(bandwidth=10))
    assert resolve(packed, "bandwidth")[0] == resolve(packed, "link.bandwidth")[0] == "link.bandwidth"
    assert with_value(ErrorFeedback(of=TopK()), "density", 0.5).of.density == 0.5


def test_an_ambiguous_or_unknown_path_is_refused_with_candidates() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Pair:
        left: Link = knob(Link(), doc="one")
        right: Link = knob(Link(), doc="other")

    with pytest.raises(KnobError, match=r"is ambiguous between left.jitter, right.jitter"):
        resolve(_typed(Pair), "jitter")
    with pytest.raises(KnobError, match=r"bandwith: no such knob here; did you mean bandwidth"):
        resolve(Link(), "bandwith")


def _typed(cls: type) -> Any:
    cls.__annotations__ = {"left": Link, "right": Link}
    return cls()


@pytest.mark.parametrize("base", FAMILIES, ids=lambda b: b.__name__)
def test_every_member_survives_json_and_has_documented_knobs(base: type) -> None:
    for name, member in members(base).items():
        own = member is Task or getattr(member, "has_own_loop", False)  # made of a user's own objects
        if own or not member.__module__.startswith("workbench."):
            continue
        value = member()
        assert from_plain(json.loads(json.dumps(to_plain(value))), base) == value
        assert describe(member)["doc"], f"{name} says what it is"
        for path, k in walk(value):
            assert k.doc, f"{name}.{path} has no doc"
            assert k.low is None or k.low <= k.default <= k.high, f"{name}.{path}"


def test_nested_settings_and_tuples_survive_json() -> None:
    value = Fabric(link=Link(bandwidth=100.0, jitter=0.1), faults=(Slow(rank=1), Freeze(), Noisy(spread=0.2)))
    assert from_plain(json.loads(json.dumps(to_plain(value))), Fabric) == value


def test_a_bare_name_means_the_usual_member() -> None:
    assert from_plain("TopK", Compressor) == ErrorFeedback(of=TopK())
    assert from_plain("DDP", Strategy) == DDP()


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ("LocalSDG", "did you mean LocalSGD"),
        ({"LocalSGD": {"evry": 3}}, "LocalSGD has no knob 'evry'; did you mean every?"),
        ({"LocalSGD": {}, "DDP": {}}, "must be one name with its settings"),
    ],
)
def test_unreadable_settings_are_refused_with_a_reason(plain: Any, words: str) -> None:
    with pytest.raises(KnobError, match=words):
        from_plain(plain, Strategy, "strategy")


@pytest.mark.parametrize("plain", ["x" * 10**5, {"x" * 10**5: {}}, {"LocalSGD": {"x" * 10**5: 1}},
                                   {"LocalSGD": ["x"] * 10**5}, {f"{i}": {} for i in range(10**4)}])  # fmt: skip
def test_long_input_is_shortened_in_errors(plain: Any) -> None:
    with pytest.raises(KnobError) as caught:
        from_plain(plain, Strategy, "strategy")
    assert len(str(caught.value)) < 5000, "at most a list of all names"


FORMERLY: list[tuple[dict[str, Any], Strategy]] = [
    (
        {"LocalSGD": {"every": 4, "start": 0, "group": 1, "group_every": 1, "momentum": "zero"}},
        LocalSGD(every=4, momentum="zero"),
    ),
    ({"LocalSGD": {"every": 4, "start": 7}}, PostLocalSGD(every=4, warmup=7)),
    ({"LocalSGD": {"start": 7, "group": 3, "group_every": 2}}, HierarchicalLocalSGD(warmup=7, group=3, group_every=2)),
    ({"AsyncServer": {"push": 2, "synchronous": False}}, AsyncServer(push=2)),
    (
        {"AsyncServer": {"servers": 1, "weight": "staleness", "synchronous": True}},
        SyncServer(servers=1, weight="staleness"),
    ),
    ({"OneBitAdam": {"freeze_step": 9, "scaled": False}}, OneBitAdam(warmup=9, scaled=False)),
]


@pytest.mark.parametrize(("recorded", "today"), FORMERLY)
def test_older_recorded_settings_keep_their_meaning(recorded: dict[str, Any], today: Strategy) -> None:
    assert from_plain(recorded, Strategy) == today
    assert from_plain(to_plain(today), Strategy) == today


@pytest.mark.parametrize(
    ("was", "path", "value", "now"),
    [
        (LocalSGD(every=4), "strategy.start", 6, PostLocalSGD(every=4, warmup=6)),
        (PostLocalSGD(warmup=6), "start", 0, PostLocalSGD(warmup=0)),
        (HierarchicalLocalSGD(group=4), "start", 5, HierarchicalLocalSGD(group=4, warmup=5)),
        (LocalSGD(), "group", 2, HierarchicalLocalSGD(group=2)),
        (LocalSGD(), "group_every", 4, HierarchicalLocalSGD(group=1, group_every=4)),
        (HierarchicalLocalSGD(group=1, group_every=4), "group", 2, HierarchicalLocalSGD(group=2, group_every=4)),
        (AsyncServer(push=3), "strategy.synchronous", True, SyncServer(push=3)),
        (SyncServer(push=3), "synchronous", False, AsyncServer(push=3)),
        (AsyncServer(weight="staleness"), "synchronous", True, SyncServer(weight="staleness")),
        (OneBitAdam(), "freeze_step", 3, OneBitAdam(warmup=3)),
    ],
)
def test_an_older_recorded_change_keeps_its_meaning(was: Strategy, path: str, value: Any, now: Strategy) -> None:
    assert Experiment(strategy=was).set(path, value).strategy == now


def test_a_knob_that_never_existed_is_refused() -> None:
    with pytest.raises(KnobError, match="LocalSGD has no knob 'begin'"):
        from_plain({"LocalSGD": {"begin": 3, "start": 0}}, Strategy)
    for today in ("LocalSGD", "PostLocalSGD", "HierarchicalLocalSGD", "SyncServer"):
        with pytest.raises(KnobError, match=f"{today} has no knob 'typo'"):
            from_plain({today: {"typo": 3}}, Strategy)
    for strategy in (PostLocalSGD(warmup=0), HierarchicalLocalSGD(group=1)):
        with pytest.raises(KnobError, match="density: no such knob here"):
            Experiment(strategy=strategy).set("density", 0.1)
    with pytest.raises(KnobError, match=r"strategy\.begin: no such knob here"):
        Experiment(strategy=LocalSGD()).set("strategy.begin", 3)
    with pytest.raises(KnobError, match=r"PostLocalSGD\.warmup=-1: must be an integer"):
        Experiment(strategy=LocalSGD()).set("strategy.start", -1)


def test_checks_include_nested_settings_and_name_the_whole_path() -> None:
    @dataclass(frozen=True)
    class Inner:
        share: float = knob(0.0, 0.0, 1.0, doc="a share")

    body = {"inner": knob(Inner(7), doc="x"), "__annotations__": {"inner": Inner}}
    outer = dataclass(frozen=True)(type("Outer", (), body))
    with pytest.raises(KnobError, match=r"^inner.share=7: must be a number in \[0, 1\]"):
        checked(outer())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(density=float("nan")), r"TopK.density=nan: must be a number in \["),
        (lambda: LocalSGD(every=[8]), r"LocalSGD.every=\[8\]: must be an integer in \["),
        (lambda: LocalSGD(every=8.5), r"LocalSGD.every=8.5: must be an integer"),
        (lambda: Slow(rank=1, factor="x"), r"Slow.factor='x': must be a number in"),
        (lambda: Link(latency=-1), r"Link.latency=-1: must be a number in"),
        (lambda: Fabric(faults="abc"), r"Fabric.faults='abc': must be"),
        (lambda: Fabric(faults=(DDP(),)), r"Fabric.faults=\(DDP.*: must be"),
        (lambda: Experiment(strategy=3), r"^strategy=3: must be a strategy"),
        (lambda: Experiment(lr=10**400), r"^lr=10+…: must be a number in"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused_at_construction(make: Any, words: str) -> None:
    with pytest.raises(KnobError, match=words):
        make()


def test_values_have_their_knobs_type() -> None:
    made = LocalSGD(every="8")  # type: ignore[arg-type]
    assert made == LocalSGD(every=8) and type(made.every) is int


def test_a_redefined_member_of_a_cell_replaces_the_older_one() -> None:
    def cell(doc: str) -> type:
        body = {"__doc__": doc, "__module__": "cell", "step": DDP.step}
        return dataclass(frozen=True, kw_only=True)(type("FromACell", (Strategy,), body))

    first, second = cell("First."), cell("Second.")
    assert find(Strategy, "FromACell") is second
    del first, second
    gc.collect()
    assert "FromACell" not in members(Strategy)


def test_knobs_of_an_instance_have_its_current_values() -> None:
    assert [k.default for k in knobs(LocalSGD(every=3)) if k.name == "every"] == [3]
    assert [k.default for k in knobs(LocalSGD) if k.name == "every"] == [8]
