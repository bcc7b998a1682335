"""Converts the state of strategies, compressors, optimizers and policies to JSON and tensors, and back.

An object becomes its class name and attributes. The ValueDecoder makes only classes of workbench's families or of the
run's own members' modules. It runs only `object.__new__`, never their code.
"""

from __future__ import annotations

import random
import sys
from abc import ABCMeta
from collections import Counter, deque
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from workbench.rank import Memory

PLAIN_TYPES = (bool, int, float, str, type(None))
LIST_TYPES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
SAVED_PACKAGES = (
    "strategies",
    "compressors",
    "optimizers",
    "policies",
    "partitions",
    "rank",
    "settings",
)  # of workbench
Keep = Callable[[Tensor], int]


class UnsavableValue(TypeError):
    """Raised with the place of a value that cannot be written."""


def encode_value(x: Any, keep: Keep, where: str) -> Any:
    """Returns `x`, named `where`, as JSON. Raises UnsavableValue.

    keep: stores a tensor and returns its number
    """
    if type(x) in PLAIN_TYPES:
        return x
    if isinstance(x, Tensor):
        return {"tensor": keep(x)}
    if isinstance(x, np.generic):
        return x.item()
    for kind, of in LIST_TYPES.items():
        if type(x) is of:
            every = sorted(x, key=repr) if kind.endswith("set") else x
            return {kind: [encode_value(one, keep, f"{where}[]") for one in every]}
    if type(x) in (dict, Counter):
        pairs = [[encode_value(k, keep, where), encode_value(v, keep, f"{where}[{k!r}]")] for k, v in x.items()]
        return {"counter" if type(x) is Counter else "dict": pairs}
    if isinstance(x, deque):
        return {"deque": [encode_value(one, keep, f"{where}[]") for one in x], "most": x.maxlen}
    if isinstance(x, Memory):
        return _encode_memory(x, keep, where)
    if isinstance(x, Generator):
        return {"generator": keep(x.get_state()), "on": str(x.device)}
    if isinstance(x, random.Random):
        version, numbers, gauss = x.getstate()
        return {"random": [version, list(numbers), gauss]}
    if isinstance(x, torch.dtype):
        return {"dtype": str(x)[6:]}
    return _encode_object(x, keep, where)


def _encode_memory(x: Memory, keep: Keep, where: str) -> Any:
    """Leaves out joined buffers."""
    said = {"buffers": x.buffers, "parts": x.parts, "seed": x.seed, "_generator": x._generator}
    return {"memory": {name: encode_value(value, keep, f"{where}.{name}") for name, value in said.items()}}


def _encode_object(x: Any, keep: Keep, where: str) -> Any:
    kind = type(x)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not _is_plain_class(kind) or "<locals>" in name or callable(x):
        raise UnsavableValue(f"{where} is a {kind.__qualname__}, which no checkpoint can hold")
    if isinstance(x, tuple):  # a named tuple
        fields: tuple[str, ...] = x._fields  # type: ignore[attr-defined]
        return {
            "named": name,
            "values": [encode_value(one, keep, f"{where}.{n}") for n, one in zip(fields, x, strict=True)],
        }
    values = {n: encode_value(value, keep, f"{where}.{n}") for n, value in list_attributes(x).items()}
    items = {"items": encode_value(dict(x), keep, where)} if isinstance(x, dict) else {}
    return {"object": name, "values": values} | items


def list_attributes(x: Any) -> dict[str, Any]:
    """Returns attributes, also those in slots."""
    slots = [n for kind in type(x).__mro__ for n in _list_slots(kind) if n not in ("__dict__", "__weakref__")]
    return {**getattr(x, "__dict__", {}), **{n: getattr(x, n) for n in slots if hasattr(x, n)}}


def _list_slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_plain_class(kind: type) -> bool:
    """Whether values hide no state, and run no code on creation or deletion."""
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    bases = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    others = [base for base in kind.__mro__ if base.__module__ != "builtins"]
    if type(kind) not in (type, ABCMeta) or (tuple in bases and not named):
        return False
    odd = [name for base in others for name in ("__del__", "__getattribute__") if name in base.__dict__]
    return not odd and all(base in (object, tuple, dict) for base in bases)


class ValueDecoder:
    """Reads the result of `encode_value`.

    tensor:  returns the tensor of a number
    modules: where to find classes outside workbench's families
    """

    def __init__(self, tensor: Callable[[int], Tensor], modules: set[str]) -> None:
        self._tensor, self._modules = tensor, modules

    def decode_value(self, said: Any) -> Any:
        """Raises ValueError if `said` is invalid."""
        if type(said) in PLAIN_TYPES:
            return said
        if not isinstance(said, dict) or not said:
            raise ValueError("it has a list in place of a kind of value")
        kind = next(iter(said))
        if kind in LIST_TYPES:
            return LIST_TYPES[kind](map(self.decode_value, self._require_list(said, kind)))
        if kind not in DECODERS:
            raise ValueError(f"it has the unknown kind of value {kind!r}")
        return getattr(self, DECODERS[kind])(said)

    def _require_list(self, said: dict[str, Any], kind: str) -> list[Any]:
        if not isinstance(said[kind], list):
            raise ValueError(f"its {kind} is none")
        return list(said[kind])

    def _read_tensor(self, number: Any) -> Tensor:
        if type(number) is not int or number < 0:
            raise ValueError("a tensor has no name")
        return self._tensor(number)

    def _decode_tensor(self, said: dict[str, Any]) -> Tensor:
        return self._read_tensor(said["tensor"])

    def _decode_dict(self, said: dict[str, Any]) -> dict[Any, Any]:
        return {self.decode_value(k): self.decode_value(v) for k, v in self._require_list(said, next(iter(said)))}

    def _decode_counter(self, said: dict[str, Any]) -> Counter[Any]:
        return Counter(self._decode_dict(said))

    def _decode_deque(self, said: dict[str, Any]) -> deque[Any]:
        return deque(map(self.decode_value, self._require_list(said, "deque")), said.get("most"))

    def _decode_dtype(self, said: dict[str, Any]) -> torch.dtype:
        found = getattr(torch, str(said["dtype"]), None)
        if not isinstance(found, torch.dtype):
            raise ValueError("a dtype has no name")
        return found

    def _decode_random(self, said: dict[str, Any]) -> random.Random:
        version, numbers, gauss = self._require_list(said, "random")
        made = random.Random()
        made.setstate((version, tuple(numbers), gauss))
        return made

    def _decode_generator(self, said: dict[str, Any]) -> Generator:
        made = Generator(str(said["on"]))
        made.set_state(self._read_tensor(said["generator"]))
        return made

    def _decode_memory(self, said: dict[str, Any]) -> Memory:
        return self.load_memory(Memory(), said)

    def load_memory(self, memory: Memory, said: dict[str, Any]) -> Memory:
        values = {name: self.decode_value(value) for name, value in said["memory"].items()}
        memory.restore(values["buffers"], values["parts"], values["seed"], values["_generator"])
        return memory

    def _decode_named_tuple(self, said: dict[str, Any]) -> Any:
        kind, values = self._find_class(said["named"]), list(map(self.decode_value, self._require_list(said, "values")))
        if not issubclass(kind, tuple) or len(values) != len(kind._fields):  # type: ignore[attr-defined]
            raise ValueError(f"{said['named']!r} has other fields")
        return tuple.__new__(kind, values)

    def _decode_object(self, said: dict[str, Any]) -> Any:
        kind = self._find_class(said["object"])
        if issubclass(kind, tuple):
            raise ValueError(f"{said['object']!r} has other fields")
        made = dict.__new__(kind) if issubclass(kind, dict) else object.__new__(kind)
        if isinstance(made, dict):
            dict.update(made, self._decode_dict(said["items"]))
        slots = [name for base in kind.__mro__ for name in _list_slots(base)]
        for name, value in said["values"].items():
            if name in slots:
                object.__setattr__(made, name, self.decode_value(value))
            else:
                made.__dict__[name] = self.decode_value(value)
        return made

    def _find_class(self, name: Any) -> type:
        module, _, path = str(name).partition(":")
        package, _, room = module.partition(".")
        known = module in self._modules or (package == "workbench" and room.split(".")[0] in SAVED_PACKAGES)
        if known and module in sys.modules and all(part.isidentifier() for part in path.split(".")):
            try:
                found = reduce(_get_member, path.split("."), sys.modules[module])
            except KeyError:
                found = None
            if isinstance(found, type) and found.__module__ == module and _is_plain_class(found):
                return found
        raise ValueError(f"it names {str(name)[:100]!r}, which is not a class of a run's state")


def _get_member(of: Any, name: str) -> Any:
    return vars(of)[name]


DECODERS = {
    "tensor": "_decode_tensor",
    "dict": "_decode_dict",
    "counter": "_decode_counter",
    "deque": "_decode_deque",
    "dtype": "_decode_dtype",
    "random": "_decode_random",
    "generator": "_decode_generator",
    "memory": "_decode_memory",
    "named": "_decode_named_tuple",
    "object": "_decode_object",
}
