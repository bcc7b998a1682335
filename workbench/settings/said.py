"""What an error says, whatever its own `__str__` does: it may raise, return no text, or say a hundred megabytes.

The one place where the words of an error that others' code may have raised are asked for.
"""

from __future__ import annotations

import traceback

LONGEST = 10_000  # letters of a text, and of the beginning of a traceback
LONGEST_TRACEBACK = 50_000


def class_of(error: BaseException) -> str:
    """The name of its class, which may have a `__name__` of its own."""
    return str(type.__dict__["__name__"].__get__(type(error)))


def text_of(error: BaseException) -> str:
    """What `error` says, in plain text that any file and any wire takes."""
    try:
        text = str(error)
    except BaseException as wrong:  # its author's code, of which even an exit must not hide what went wrong
        return f"it cannot be put into words: its __str__ raised {class_of(wrong)}"
    return _plain(text, LONGEST, LONGEST)


def said(error: BaseException) -> str:
    """The same behind the name of its class."""
    text = text_of(error)
    return f"{class_of(error)}: {text}" if text else class_of(error)


def traceback_of(error: BaseException) -> str:
    """Its traceback with that of what caused it, of which the middle may be left out; what it says if there is none."""
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException:
        return said(error)
    return _plain(text, LONGEST, LONGEST_TRACEBACK)


def speaks(error: BaseException) -> bool:
    """Does it say something by itself that others can take as it is?"""
    try:
        return isinstance(error, Exception) and type(text := str(error)) is str and text == text_of(error)
    except BaseException:
        return False


def _plain(text: str, first: int, last: int) -> str:
    """`text` as a plain str without half characters, and without its middle where it is longer than all that."""
    if len(text := "".join((text,))) > first + last:  # a copy, if it is of a class of its own
        text = f"{text[:first]} … {len(text) - first - last} letters left out … {text[-last:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
