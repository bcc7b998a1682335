"""Family, the base class of every family, such as strategies or tasks."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar, Self

from workbench.settings.plain import normalise


class Family(ABC):
    """The base class of every family. `home` is the package with the shipped members."""

    __family__: ClassVar[bool] = True
    home: ClassVar[str] = ""
    known_as: ClassVar[tuple[str, ...]] = ()  # other names of a member in the field (for hints)
    old: ClassVar[tuple[str, ...]] = ()  # names of knobs in earlier versions; see `formerly`
    renamed: ClassVar[dict[str, str]] = {}  # old name of an overridable method -> its name today

    def __init_subclass__(cls, **rest: object) -> None:
        super().__init_subclass__(**rest)
        for name, now in cls.renamed.items():
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__}.{name}: is now called `{now}`, and nothing calls it by the old name; rename it"
                )
        _check_hooks(cls)

    def __post_init__(self) -> None:
        """Raises KnobError for an invalid value."""
        normalise(self)

    @classmethod
    def usual(cls) -> Self:
        """Returns the member that its bare name means: its defaults. A biased compressor adds error feedback."""
        return cls()

    @classmethod
    def formerly(cls, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Translates settings with old knob names (`old`) into today's member name and its settings."""
        return cls.__name__, settings


def _check_hooks(cls: type) -> None:
    """Raises TypeError if a method differs from its family's: async or not, or in parameters."""
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
            f"{cls.__name__}.{name}: must be `def {name}(...)`, not `async def`: its caller uses the returned value "
            f"at once and does not await it"
        )


def _takes(mine: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether `mine` accepts the arguments of `theirs`."""
    given = inspect.signature(theirs).parameters.values()
    try:
        inspect.signature(mine).bind(*[None for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)])
    except TypeError:
        return False
    return True
