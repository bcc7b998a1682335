"""Generates docs/reference/cli.md from the functions that `workbench.cli` declares as commands."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from typer.models import ArgumentInfo

from tests.reference import prose, table
from workbench.cli import app

KINDS = {int: "integer", float: "number", str: "text", "Path": "path", bool: "yes or no"}


@dataclass(frozen=True)
class Parameter:
    """An argument or an option of a command, with Typer's description of it."""

    name: str
    kind: Any
    info: Any
    default: Any
    is_list: bool

    @property
    def is_argument(self) -> bool:
        return isinstance(self.info, ArgumentInfo)

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def spelling(self) -> str:
        """The words that a user types."""
        if self.is_argument:
            return self.name.upper()
        given = [self.info.default, *(self.info.param_decls or ())]  # Typer keeps the first spelling as `default`
        if given := [word for word in given if isinstance(word, str)]:
            return ", ".join(given)
        name = self.name.replace("_", "-")
        return f"--{name}, --no-{name}" if self.kind is bool else f"--{name}"

    @property
    def value(self) -> str:
        """The kind and the range of its value."""
        kind = KINDS.get(self.kind) or KINDS[self.kind.__name__]
        low, high = self.info.min, self.info.max
        if low is not None:
            kind += f", {low} to {high}" if high is not None else f", at least {low}"
        return f"{kind}, repeatable" if self.is_list else kind

    @property
    def standing(self) -> str:
        """Its default for readers."""
        if self.is_required:
            return "required"
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        return "" if self.default in (None, "") else f"`{self.default}`"


def commands() -> dict[str, Callable[..., Any]]:
    """Returns the functions of the commands by name, in the order of the source. Those of groups come last."""
    groups = [("", app), *((f"{group.name} ", group.typer_instance) for group in app.registered_groups)]
    found = [(prefix, c) for prefix, group in groups if group for c in group.registered_commands]
    return {prefix + (c.name or c.callback.__name__): c.callback for prefix, c in found if c.callback}


def parameters(command: Callable[..., Any]) -> Iterator[Parameter]:
    """Yields the arguments and options of a command."""
    hints = typing.get_type_hints(inspect.unwrap(command), include_extras=True)
    for p in inspect.signature(command).parameters.values():
        kind, info, *_ = typing.get_args(hints[p.name])
        if typing.get_origin(kind) is types.UnionType:
            kind = next(k for k in typing.get_args(kind) if k is not type(None))
        is_list = typing.get_origin(kind) is list
        yield Parameter(p.name, typing.get_args(kind)[0] if is_list else kind, info, p.default, is_list)


def page() -> str:
    """Returns a section for each command: its usage, purpose, arguments and options."""
    return "\n\n".join(section(name, command) for name, command in commands().items())


def section(name: str, command: Callable[..., Any]) -> str:
    """Describes one command."""
    every = sorted(parameters(command), key=lambda p: not p.is_argument)
    words = [p.spelling if p.is_required else f"[{p.spelling}]" for p in every if p.is_argument]
    needed = [f"{p.spelling} {p.name.upper()}" for p in every if not p.is_argument and p.is_required]
    more = ["[OPTIONS]"] if any(not p.is_argument and not p.is_required for p in every) else []
    rows = [[f"`{p.spelling}`", p.value, p.standing, prose(p.info.help or "")] for p in every]
    said = [prose(part) for part in (inspect.getdoc(command) or "").split("\n\n")]
    listed = table(["argument or option", "value", "default", "what it is"], rows) if rows else ""
    usage = f"```text\n{' '.join(['workbench', name, *words, *needed, *more])}\n```"
    return "\n\n".join(filter(None, [f"## workbench {name}", usage, *said, listed]))
