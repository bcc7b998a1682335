"""The root of every family: strategies, compressors, optimizers, faults, tasks, and views are families."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar, Self

from workbench.settings.plain import normalise


class Family(ABC):
    """The root of every family; `home` is the package whose files hold the members that ship."""

    __family__: ClassVar[bool] = True
    home: ClassVar[str] = ""
    known_as: ClassVar[tuple[str, ...]] = ()  # a member's other names in the field, for hints alone
    old: ClassVar[tuple[str, ...]] = ()  # knobs that it had in an earlier version; see `formerly`
    renamed: ClassVar[dict[str, str]] = {}  # what a member overrode by these names has other names today

    def __init_subclass__(cls, **rest: object) -> None:
        super().__init_subclass__(**rest)
        for name, now in cls.renamed.items():
            if name in vars(cls):
                raise TypeError(f"{cls.__name__}.{name}: is called `{now}` now; nobody would ask for it")
        _check_hooks(cls)

    def __post_init__(self) -> None:
        """Refuses values that are not allowed as soon as the object is made. Raises KnobError."""
        normalise(self)

    @classmethod
    def usual(cls) -> Self:
        """The member as its bare name means it: its defaults (a biased compressor adds error feedback)."""
        return cls()

    @classmethod
    def formerly(cls, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Settings with names that were knobs, as `old` has them -> today's member, by name, and its settings."""
        return cls.__name__, settings


def _check_hooks(cls: type) -> None:
    """Raises TypeError where a hook of `cls` is not called as its family's: async or not, and with what."""
    for name, mine in vars(cls).items():
        theirs = next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), None)
        if not (inspect.isfunction(mine) and inspect.isfunction(theirs)):
            continue
        is_driven = inspect.iscoroutinefunction(theirs)
        if inspect.iscoroutinefunction(mine) == is_driven and not inspect.isasyncgenfunction(mine):
            if name != "__init__" and not _takes(mine, theirs):
                wanted = ", ".join(inspect.signature(theirs).parameters)
                raise TypeError(f"{cls.__name__}.{name}: must take ({wanted}), since it is called with these")
            continue
        if is_driven:
            raise TypeError(f"{cls.__name__}.{name}: must be `async def {name}(...)` without `yield`: it is awaited")
        raise TypeError(
            f"{cls.__name__}.{name}: must be `def {name}(...)`, not `async def`: what it returns is used at once, and "
            f"nobody would await it"
        )


def _takes(mine: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Can `mine` be called with what `theirs` is called with?"""
    given = inspect.signature(theirs).parameters.values()
    try:
        inspect.signature(mine).bind(*[None for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)])
    except TypeError:
        return False
    return True
