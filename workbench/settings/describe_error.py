"""Reads an error's text safely: its `__str__` may raise, return no text, or return 100 MB.

Only this module reads the text of errors that foreign code may raise.
"""

from __future__ import annotations

import traceback

LONGEST = 10_000  # characters of a text, and of the beginning of a traceback
LONGEST_TRACEBACK = 50_000


def class_of(error: BaseException) -> str:
    """Returns the class's name, even if the class defines its own `__name__`."""
    return str(type.__dict__["__name__"].__get__(type(error)))


def text_of(error: BaseException) -> str:
    """Returns the error's text as a plain str that any file or message can hold."""
    try:
        text = str(error)
    except BaseException as wrong:  # foreign code: even a SystemExit here must not hide the error
        return f"it cannot be put into words: its __str__ raised {class_of(wrong)}"
    return _plain(text, LONGEST, LONGEST)


def said(error: BaseException) -> str:
    """Returns "class: text" of the error; only the class if it has no text."""
    text = text_of(error)
    return f"{class_of(error)}: {text}" if text else class_of(error)


def traceback_of(error: BaseException) -> str:
    """Returns the traceback with its causes, without a long middle; else `said(error)`."""
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException:
        return said(error)
    return _plain(text, LONGEST, LONGEST_TRACEBACK)


def speaks(error: BaseException) -> bool:
    """Whether the error has its own text that is safe to show unchanged."""
    try:
        return isinstance(error, Exception) and type(text := str(error)) is str and text == text_of(error)
    except BaseException:
        return False


def _plain(text: str, first: int, last: int) -> str:
    """Returns `text` as a plain str without lone surrogates, and without its middle if it is too long."""
    if len(text := "".join((text,))) > first + last:  # a plain copy of a subclass of str
        text = f"{text[:first]} … {len(text) - first - last} letters left out … {text[-last:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
