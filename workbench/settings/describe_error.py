"""Reads the text of foreign errors safely: `__str__` may raise or return 100 MB."""

from __future__ import annotations

import traceback

MAX_TEXT_LENGTH = 10_000  # characters of a text, or of a traceback's beginning
MAX_TRACEBACK_LENGTH = 50_000


def class_of(error: BaseException) -> str:
    """Returns the class's name, even if it defines its own `__name__`."""
    return str(type.__dict__["__name__"].__get__(type(error)))


def text_of(error: BaseException) -> str:
    """Returns the error's text as a plain str for any file or message."""
    try:
        text = str(error)
    except BaseException as wrong:  # even a SystemExit here must not hide the error
        return f"its text is not available: its __str__ raised {class_of(wrong)}"
    return _plain(text, MAX_TEXT_LENGTH, MAX_TEXT_LENGTH)


def said(error: BaseException) -> str:
    """Returns "class: text" of the error or only the class."""
    text = text_of(error)
    return f"{class_of(error)}: {text}" if text else class_of(error)


def traceback_of(error: BaseException) -> str:
    """Returns the traceback with its causes but without a long middle; else `said(error)`."""
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException:
        return said(error)
    return _plain(text, MAX_TEXT_LENGTH, MAX_TRACEBACK_LENGTH)


def speaks(error: BaseException) -> bool:
    """Whether the error's own text is safe to show unchanged."""
    try:
        return isinstance(error, Exception) and type(text := str(error)) is str and text == text_of(error)
    except BaseException:
        return False


def _plain(text: str, first: int, last: int) -> str:
    """Returns a plain str without lone surrogates and without a long middle."""
    if len(text := "".join((text,))) > first + last:  # a plain copy of a subclass of str
        text = f"{text[:first]} … {len(text) - first - last} characters omitted … {text[-last:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
