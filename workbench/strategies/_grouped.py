"""What strategies share whose ranks form groups of neighbours."""

from __future__ import annotations


def refuses(group: int, size: int) -> str | None:
    """Why `size` ranks cannot form groups of `group`, in a sentence that says what would do; or None."""
    if size % group == 0:
        return None
    fit = ", ".join(str(g) for g in range(1, size + 1) if size % g == 0)
    return f"group={group} does not divide {size} ranks into equal groups; use one of {fit}"


def dims(group: int, size: int) -> tuple[tuple[str, int], ...]:
    """The mesh of groups of `group` consecutive ranks."""
    return (("between", size // group), ("within", group))
