"""The record of a run: 3 append-only tables.

A Span is an operation with a duration, a Sample a number at a time and a Mark an event. Times are float seconds since
the run began. Only hosts write.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1  # increases when a column changes its meaning
MIN_MAPPED_BYTES = 1 << 20  # above which a column is mapped


class Span(NamedTuple):
    """An operation with a duration. `asked` <= `t0` <= `t1`.

    rank, step:  the rank that recorded it, and its step
    lane:        the row of the timeline, such as "compute" or "comm"
    name:        the operation
    asked:       when the rank asked for it, in seconds since the run began
    t0, t1:      when it began and ended, in seconds since the run began
    nbytes:      bytes that this rank sent
    """

    rank: int
    step: int
    lane: str
    name: str
    asked: float
    t0: float
    t1: float
    nbytes: int


class Sample(NamedTuple):
    """A number at a time.

    rank, step:  the rank that recorded it, and its step
    name:        the measured quantity, such as "loss"
    t:           seconds since the run began
    value:       the number
    """

    rank: int
    step: int
    name: str
    t: float
    value: float


class Mark(NamedTuple):
    """An event.

    rank, step:  the rank that recorded it, and its step
    name:        the kind of event, such as "change"
    t:           seconds since the run began
    detail:      JSON text
    """

    rank: int
    step: int
    name: str
    t: float
    detail: str


_TYPES: dict[Any, np.dtype[Any]] = {int: np.dtype("i8"), float: np.dtype("f8"), str: np.dtype("O")}
_NARROW: dict[str, np.dtype[Any]] = {"rank": np.dtype("i2"), "step": np.dtype("i4")}
_FEW = {"lane", "name"}  # text of few values, stored as numbers and a word list
KINDS: dict[str, type] = {"spans": Span, "samples": Sample, "marks": Mark}


class Words:
    """A column's distinct texts, numbered by appearance."""

    def __init__(self) -> None:
        self._code: dict[str, int] = {}
        self._texts = np.empty(0, "O")

    def __len__(self) -> int:
        return len(self._code)

    @property
    def texts(self) -> np.ndarray:
        """All words in order, as objects."""
        if len(self._texts) != len(self._code):
            words = list(self._code)
            texts = np.empty(len(words), "O")
            texts[:] = words
            self._texts = texts
        return self._texts

    def code(self, text: str) -> int:
        """Returns the number of `text`, or -1."""
        return self._code.get(text, -1)

    def encode(self, values: Coded | Iterable[str]) -> np.ndarray:
        """Returns `values` as numbers (int32). New words get the next numbers."""
        if isinstance(values, Coded):
            known: np.ndarray = self.encode(values.words.texts)[values.codes] if len(values) else np.empty(0, "i4")
            return known
        code = self._code
        return np.array([code[v] if v in code else code.setdefault(str(v), len(code)) for v in values], "i4")


class Coded:
    """A text column as numbers into a word list."""

    __slots__ = ("codes", "words")

    def __init__(self, codes: np.ndarray, words: Words) -> None:
        self.codes = codes
        self.words = words

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, which: Any) -> Coded:
        return Coded(self.codes[which], self.words)

    def decode(self) -> np.ndarray:
        out: np.ndarray = self.words.texts[self.codes] if len(self.codes) else np.empty(0, "O")
        return out


class Rows:
    """Some rows by column: `rows.t0`, `rows.rank`. Text columns are object arrays."""

    def __init__(self, columns: Mapping[str, np.ndarray | Coded]) -> None:
        self._columns = columns

    @property
    def columns(self) -> dict[str, np.ndarray]:
        return {k: getattr(self, k) for k in self._columns}

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            column = self.__dict__["_columns"][name]
        except KeyError:
            raise AttributeError(name) from None
        return column.decode() if isinstance(column, Coded) else column

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, which: Any) -> Rows:
        return Rows({k: v[which] for k, v in self._columns.items()})

    def replaced(self, **columns: np.ndarray) -> Rows:
        return Rows({**self._columns, **columns})

    def equal(self, name: str, text: str) -> np.ndarray:
        """Returns a mask of rows with `text` in column `name`, much faster than on decoded text."""
        column = self._columns[name]
        if isinstance(column, Coded):
            return np.asarray(column.codes == column.words.code(text))
        return np.array([v == text for v in column], bool)

    def phase(self, text: str) -> np.ndarray:
        """Returns a mask of names that begin with `text`: "backward" finds "backward 3.1" and "backward weights 3"."""
        names = self.coded("name")
        alike = np.array([word == text or word.startswith(f"{text} ") for word in names.words.texts], bool)
        return alike[names.codes] if len(names) else np.zeros(0, bool)

    def coded(self, name: str) -> Coded:
        """Returns a text column as numbers into its word list."""
        column = self._columns[name]
        if isinstance(column, Coded):
            return column
        words = Words()
        return Coded(words.encode(column), words)


def _room(n: int, of: np.dtype[Any]) -> np.ndarray:
    """Maps a large array. Otherwise malloc keeps up to 10 % of the record from outgrown columns."""
    if of == np.dtype("O") or n * of.itemsize < MIN_MAPPED_BYTES:
        return np.empty(n, of)
    return np.frombuffer(mmap.mmap(-1, n * of.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), of)


class Table:
    """An append-only table of one kind. One thread may append while another reads.

    >>> table = Table("samples")
    >>> table.add([Sample(0, 1, "loss", 0.5, 5.4), Sample(1, 1, "loss", 0.6, 5.6)])
    >>> len(table), float(table.rows().value.mean())
    (2, 5.5)
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.row = KINDS[kind]
        hints = get_type_hints(self.row).items()
        self.types: dict[str, np.dtype[Any]] = {k: _NARROW.get(k, _TYPES[t]) for k, t in hints}
        self.words = {k: Words() for k in self.types if k in _FEW}
        self._columns = {k: np.empty(1024, "i4" if k in _FEW else t) for k, t in self.types.items()}
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def extend(self, columns: Mapping[str, Any]) -> None:
        """Appends columns of equal length: arrays or sequences of values, for text also Coded."""
        n = len(columns[next(iter(self.types))])
        for k, have in self._columns.items():
            if len(columns[k]) != n:
                raise ValueError(f"{self.kind}.{k}: {len(columns[k])} values where other columns have {n}")
            if self._n + n > len(have):
                room = _room(len(have) + max(len(have), n), have.dtype)
                room[: self._n] = have[: self._n]
                have = self._columns[k] = room
            have[self._n : self._n + n] = self.words[k].encode(columns[k]) if k in self.words else columns[k]
        self._n += n

    def gather(self, pieces: Sequence[Mapping[str, Any]], by: str) -> None:
        """Fills the empty table with all `pieces` (arrays by column), sorted by column `by`.

        One buffer serves all columns, because touching new memory costs more than copying.
        """
        count = sum(len(piece[by]) for piece in pieces)
        stretch = np.empty(count, "i8")
        order = np.argsort(self._together(pieces, by, stretch), kind="stable")
        for k, have in self._columns.items():
            if count > len(have):
                have = self._columns[k] = np.empty(count, have.dtype)
            np.take(self._together(pieces, k, stretch), order, out=have[:count], mode="clip")  # "raise" copies twice
        self._n = count

    def _together(self, pieces: Sequence[Mapping[str, Any]], name: str, stretch: np.ndarray) -> np.ndarray:
        """Concatenates column `name`, in the buffer `stretch` unless of objects."""
        kind, count = self._columns[name].dtype, len(stretch)
        out = np.empty(count, kind) if kind == "O" else stretch.view(kind)[:count]
        end = 0
        for piece in pieces:
            column = piece[name]
            begin, end = end, end + len(column)
            if isinstance(column, Coded):
                known = self.words[name].encode(column.words.texts)
                np.take(known, column.codes, out=out[begin:end], mode="clip")
            else:
                out[begin:end] = column
        return out

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        rows = list(rows)
        if rows:
            self.extend(columns_of(self.kind, rows))

    def rows(self, start: int = 0, stop: int | None = None) -> Rows:
        """Returns rows `[start, stop)` as views. `rows(cursor)`: all since `len(table)` was `cursor`."""
        stop = self._n if stop is None else min(stop, self._n)
        cut = {k: v[start:stop] for k, v in self._columns.items()}
        return Rows({k: Coded(v, self.words[k]) if k in self.words else v for k, v in cut.items()})

    def frame(self) -> pd.DataFrame:
        """Returns a pandas frame. Columns of few distinct texts are categorical."""
        import pandas as pd

        rows, columns = self.rows(), {}
        for k in self.types:
            if k in self.words:
                coded = rows.coded(k)
                columns[k] = pd.Categorical.from_codes(coded.codes, categories=pd.Index(coded.words.texts))
            else:
                columns[k] = getattr(rows, k).copy()
        return pd.DataFrame(columns)


def columns_of(kind: str, rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """Converts tuples of one kind to columns."""
    names = KINDS[kind]._fields  # type: ignore[attr-defined]
    return {k: list(column) for k, column in zip(names, zip(*rows, strict=True), strict=True)}


class Timeline:
    """The 3 tables of a run."""

    def __init__(self) -> None:
        self.spans = Table("spans")
        self.samples = Table("samples")
        self.marks = Table("marks")

    def table(self, kind: str) -> Table:
        """Returns one table.

        kind:  "spans", "samples" or "marks"
        """
        return {"spans": self.spans, "samples": self.samples, "marks": self.marks}[kind]

    def __repr__(self) -> str:
        return f"Timeline({len(self.spans)} spans, {len(self.samples)} samples, {len(self.marks)} marks)"
