"""Groups of neighbouring ranks: which sizes they divide, and their mesh."""

from __future__ import annotations


def refuses(group: int, size: int) -> str | None:
    """Returns why `size` ranks cannot form groups of `group`, with an alternative, or None."""
    if size % group == 0:
        return None
    fit = ", ".join(str(g) for g in range(1, size + 1) if size % g == 0)
    return f"group={group} does not divide {size} ranks into equal groups; use one of {fit}"


def dims(group: int, size: int) -> tuple[tuple[str, int], ...]:
    """Returns the mesh of groups of `group` consecutive ranks."""
    return (("between", size // group), ("within", group))
