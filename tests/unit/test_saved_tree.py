"""Tests state saved as JSON and read back; a file may choose values, never code to run."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from workbench.compressors import ErrorFeedback, TopK
from workbench.host.checkpoint.value_encoding import UnsavableValue, ValueDecoder, encode_value
from workbench.rank import Memory, Part


@dataclass(frozen=True)
class Known:
    """State like that of a notebook's own member."""

    at: int
    cuts: tuple[float, ...]


class Slotted:
    """State partly in slots."""

    __slots__ = ("levels", "mine")

    def __init__(self) -> None:
        self.levels, self.mine = deque([1.5, float("inf")], 3), {(0, "a"): {2, 1}}


class Ends:
    """Runs code when it is deleted."""

    def __del__(self) -> None:
        ran.append("end")


class Makes:
    """Runs code when it is created."""

    def __new__(cls) -> Makes:
        ran.append("new")
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        ran.append("set")

    @property
    def size(self) -> int:
        return 0

    @size.setter
    def size(self, value: int) -> None:
        ran.append("property")


ran: list[str] = []


def there_and_back(x: Any, modules: set[str]) -> Any:
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> int:
        kept.append(x.clone())
        return len(kept) - 1

    said = json.loads(json.dumps(encode_value(x, keep, "x")))
    return ValueDecoder(lambda n: kept[n], modules).decode_value(said)


def test_values_round_trip_unchanged() -> None:
    plain = {"a": [1, 2.5, None, True, "x"], 3: (float("-inf"), frozenset({1})), "c": Counter("aab")}
    assert there_and_back(plain, set()) == plain
    assert there_and_back(Known(2, (0.1, 1e-300)), {__name__}) == Known(2, (0.1, 1e-300))
    assert there_and_back(Part("w", (2, 3), 0, 6), set()) == Part("w", (2, 3), 0, 6)
    assert there_and_back(ErrorFeedback(of=TopK(density=0.3)), set()) == ErrorFeedback(of=TopK(density=0.3))
    back = there_and_back(Slotted(), {__name__})
    assert (back.levels, back.mine) == (deque([1.5, float("inf")]), {(0, "a"): {1, 2}}) and back.levels.maxlen == 3
    drawn = random.Random(4)
    drawn.random()
    assert there_and_back(drawn, set()).random() == drawn.random()


def test_a_memory_round_trips_with_its_random_generators() -> None:
    memory = Memory(7)
    memory.buffers["owed"] = {"w": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16)}
    memory.parts["q"] = {"w": (torch.zeros(0, 3), 4)}
    generator = memory.generator()
    assert generator is not None
    torch.rand(5, generator=generator)
    back = there_and_back(memory, set())
    assert torch.equal(back.buffers["owed"]["w"].view(torch.int16), memory.buffers["owed"]["w"].view(torch.int16))
    assert back.parts["q"]["w"][0].shape == (0, 3) and back.parts["q"]["w"][1] == 4 and back.seed == 7
    assert torch.equal(torch.rand(3, generator=back.generator()), torch.rand(3, generator=generator))


@pytest.mark.parametrize("x", [object, lambda: 1, ValueError("x"), Ends(), open, iter(())], ids=type)
def test_a_value_that_cannot_be_saved_is_refused_with_its_path(x: Any) -> None:
    with pytest.raises(UnsavableValue, match=r"state\.anchor is an? .*which no checkpoint can hold"):
        encode_value({"k": x}["k"], lambda _: 0, "state.anchor")


class Row(NamedTuple):
    """A class with other fields than the file has."""

    a: int


CLASSES = [
    "os:system", "builtins:eval", "subprocess:Popen", "workbench.settings:Change.read", "workbench.rank:", ":", "x",
    "workbench.engine.rank.session:Session", "workbench.cluster.api.launch:start_sessions", "workbench.strategies:os",
    "tests.kept:nn",
    "workbench.rank.bucket:Memory.__init__", f"{__name__}:Ends", f"{__name__}:ran", "workbench.compressors._base:ABC",
    f"{__name__}:test_values_round_trip_unchanged", "workbench.rank.bucket:Memory.clear.__globals__",
]  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", ["object", "named"])
def test_only_the_members_state_classes_are_created(name: str, kind: str) -> None:
    reader = ValueDecoder(lambda n: torch.zeros(1), {__name__})
    with pytest.raises(ValueError, match=r"which is not a class of a run's state|has other fields"):
        reader.decode_value({kind: name, "values": {} if kind == "object" else []})


@pytest.mark.parametrize("module", ["workbench.rank_x", "workbench.strategiesx.mine", "workbench", "x.rank"])
def test_a_module_whose_name_only_begins_like_a_family_is_refused(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = ModuleType(module)
    vars(there)["Known"] = type("Known", (), {"__module__": module})
    monkeypatch.setitem(sys.modules, module, there)
    reader = ValueDecoder(lambda n: torch.zeros(1), set())
    with pytest.raises(ValueError, match="which is not a class of a run's state"):
        reader.decode_value({"object": f"{module}:Known", "values": {}})
    reader = ValueDecoder(lambda n: torch.zeros(1), {module})  # a module of the run's own members
    assert type(reader.decode_value({"object": f"{module}:Known", "values": {}})) is vars(there)["Known"]


def test_an_object_is_created_without_running_its_code() -> None:
    reader = ValueDecoder(lambda n: torch.zeros(1), {__name__})
    made = reader.decode_value({"object": f"{__name__}:Makes", "values": {"size": 3, "other": {"list": [1]}}})
    assert type(made) is Makes and made.__dict__ == {"size": 3, "other": [1]} and ran == []


ODD = [
    [1], {}, {"call": "f"}, {"tensor": "0"}, {"tensor": -1}, {"tensor": True}, {"list": 3}, {"dict": [1]},
    {"dtype": "load"},
    {"memory": {"seed": 0}}, {"generator": {"tensor": 0}}, {"random": [3, [1, 2], None]}, {"deque": [], "most": "x"},
    {"named": f"{__name__}:Row", "values": [1, 2]}, {"object": f"{__name__}:Known", "values": [1]}, {"object": None},
    {"_find_class": "os:system"}, {"decode_value": 1}, {"load_memory": 1},
]  # fmt: skip


@pytest.mark.parametrize("said", ODD, ids=str)
def test_invalid_input_raises_an_error_and_runs_nothing(said: Any) -> None:
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError, RuntimeError)):
        ValueDecoder(lambda n: torch.zeros(1), {__name__}).decode_value(said)
