"""Finds the members of a family: a file in the family's folder or a class in a notebook cell is enough.

Another installed package adds members by an entry point of the group `workbench.members` that names its module.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import warnings
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

M = TypeVar("M")
FORMER = re.compile(r"^    formerly_called: ClassVar\[tuple\[str, \.\.\.\]\] = \((.*?)\)$", re.M)
MEMBER = re.compile(r"^@dataclass\(frozen=True, kw_only=True\)\nclass ([A-Z]\w*)\(", re.M)


def members(base: type[M]) -> dict[str, type[M]]:
    """Returns a family's concrete members by name; a class defined again replaces the old."""
    if not getattr(base, "__family__", False):
        return {base.__name__: base}
    if home := getattr(base, "home", ""):
        _look(home)
        _look_elsewhere()
    found: dict[str, type[M]] = {}
    todo: list[type[M]] = list(base.__subclasses__())
    while todo:
        cls = todo.pop(0)
        todo += cls.__subclasses__()
        if not inspect.isabstract(cls) and not cls.__name__.startswith("_"):
            found[cls.__name__] = cls
    return dict(sorted(found.items()))


@cache
def _look(home: str) -> None:
    """Imports every file of a package once, to register its classes."""
    package = importlib.import_module(home)
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{home}.{info.name}")
    for name in shipped(home).values():  # in sub-packages, too
        importlib.import_module(name)


@cache
def _look_elsewhere() -> None:
    """Imports the modules that other packages name, once. Failures only cause a warning."""
    for entry in entry_points(group="workbench.members"):
        try:
            entry.load()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            warnings.warn(f"workbench.members: {entry.name} = {entry.value} is ignored ({said})", stacklevel=3)


@cache
def shipped(home: str) -> Mapping[str, str]:
    """Returns the members in the files of package `home`: name -> module. Imports none of them.

    A member is a frozen, keyword-only dataclass in a file without a leading `_`. Sub-packages with a `verbs.py` count:
    these members need verbs of their own. Reads the files once.
    """
    found = {name: module for path, module in _files(home).items() for name in MEMBER.findall(path.read_text("utf8"))}
    return MappingProxyType(found)


@cache
def renamed(home: str) -> Mapping[str, str]:
    """Returns old name -> new name for the members of package `home` (`formerly_called`), without imports."""
    found = dict[str, str]()
    for path in _files(home):
        _, *members = MEMBER.split(path.read_text("utf8"))
        for name, body in zip(members[::2], members[1::2], strict=True):
            found |= {old: name for olds in FORMER.findall(body) for old in re.findall(r'"(\w+)"', olds)}
    return MappingProxyType(found)


def _files(home: str) -> dict[Path, str]:
    """Returns a package's files that may hold members, with the names of their modules."""
    spec = importlib.util.find_spec(home)
    folders = {Path(folder): home for folder in (spec and spec.submodule_search_locations) or ()}
    folders |= {at.parent: f"{home}.{at.parent.name}" for folder in folders for at in folder.glob("*/verbs.py")}
    found = {path: f"{name}.{path.stem}" for folder, name in folders.items() for path in folder.glob("[!_]*.py")}
    return dict(sorted(found.items()))


def member(home: str, name: str) -> Any:
    """Returns the member `name` of package `home`, for its `__getattr__`. Raises AttributeError."""
    if name[:1].isupper() and name in (files := shipped(home)):
        return getattr(importlib.import_module(files[name]), name)
    raise AttributeError(f"module {home!r} has no attribute {name!r}")


def short(value: Any, most: int = 100) -> str:
    """Returns `repr(value)` for a message. Cuts it after `most` characters."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[:most]}…"


class KnobError(ValueError):
    """An invalid setting or argument. The message gives the name, the value and the allowed range.

    What to do: give a value in this range. If settings conflict, take an alternative that the message names.
    """

    __module__ = "workbench"  # for tracebacks
