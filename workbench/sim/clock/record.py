"""Records a simulated run as numbers, and sorts them into tables by end time after the run.

A collective's spans are one block; other spans are rows. A span takes 46 bytes in the tables. The engine records waits
of zero length, the simulator does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from struct import Struct
from typing import Any

import numpy as np

from workbench.record.timeline import Coded, Timeline, Words

_COLUMNS = ("rank", "step", "lane", "name", "asked", "t0", "t1", "nbytes")
_OF_SAMPLES = ("rank", "step", "name", "t", "value")
_KINDS = {"rank": "i2", "step": "i4", "lane": "i4", "name": "i4", "nbytes": "i8"}  # of columns; others: f8
_packed = Struct(f"{len(_COLUMNS)}d").pack
_packed_sample = Struct(f"{len(_OF_SAMPLES)}d").pack


Numbers = Sequence[float] | np.ndarray


def iterate_numbers(numbers: float | np.ndarray) -> Iterable[Any]:
    """Yields an array's entries, or one number forever."""
    return numbers.tolist() if isinstance(numbers, np.ndarray) else repeat(numbers)


class Record:
    """The spans, samples and marks of a simulated run or generation."""

    def __init__(self, members: Sequence[int]) -> None:
        """members: by place, each rank's number in the record"""
        self._code: dict[str, int] = {}  # of lanes and span names
        self._named: dict[str, int] = {}  # of sample names
        self._single = bytearray()  # spans, a number per column
        self._blocks: list[tuple[int, int, Sequence[int], Numbers, Numbers, np.ndarray | float, Any]] = []
        self._samples = bytearray()  # as above
        self._marks: list[tuple[int, int, str, float, str]] = []
        self._ranks = np.array(members, dtype="i2")

    def encode_text(self, text: str) -> int:
        found = self._code.get(text)
        if found is None:
            found = self._code[text] = len(self._code)
        return found

    def span(self, rank: int, step: int, lane: str, name: str, asked: float, t0: float, t1: float, nbytes: int) -> None:
        known, code = self._code, self.encode_text
        which = known[lane] if lane in known else code(lane)
        what = known[name] if name in known else code(name)
        self._single += _packed(rank, step, which, what, asked, t0, t1, nbytes)

    def add_block(
        self,
        lane: str,
        name: str,
        steps: Sequence[int],
        asked: Numbers,
        t0: Numbers,
        t1: np.ndarray | float,
        nbytes: float | np.ndarray,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Records one span on every rank, or on each of `ranks`. steps, asked, t0: (p,); t1: (p,) or one for all"""
        if ranks is None:
            return self._blocks.append((self.encode_text(lane), self.encode_text(name), steps, asked, t0, t1, nbytes))
        for rank, step, since, begun, end, n in zip(
            ranks, steps, asked, t0, iterate_numbers(t1), iterate_numbers(nbytes), strict=False
        ):
            self.span(rank, step, lane, name, since, begun, end, n)

    def sample(self, rank: int, step: int, name: str, t: float, value: float) -> None:
        self._samples += _packed_sample(rank, step, self._named.setdefault(name, len(self._named)), t, value)

    def mark(self, rank: int, step: int, name: str, t: float, detail: str) -> None:
        self._marks.append((rank, step, name, t, detail))

    @staticmethod
    def make_timeline(records: Sequence[Record]) -> Timeline:
        """Returns the tables of consecutive generations, and frees the rows."""
        out = Timeline()
        for record in records:
            record._write_rows(out)
        return out

    def _write_rows(self, out: Timeline) -> None:
        spans, words = _sort_columns(self._collect_spans(), "t1"), _make_words(self._code)
        if len(spans["t1"]):
            out.spans.extend({**spans, **{k: Coded(spans[k], words) for k in ("lane", "name")}})
        single = _unpack_rows(self._samples, _OF_SAMPLES)
        columns = {name: single[:, k].astype(_KINDS.get(name, "f8")) for k, name in enumerate(_OF_SAMPLES)}
        samples = _sort_columns(columns | {"rank": self._ranks[columns["rank"]]}, "t")
        if len(single):
            out.samples.extend({**samples, "name": Coded(samples["name"], _make_words(self._named))})
        marks = sorted(self._marks, key=lambda row: row[3])
        out.marks.add([(int(self._ranks[row[0]]), *row[1:]) for row in marks])

    def _collect_spans(self) -> dict[str, np.ndarray]:
        single = _unpack_rows(self._single, _COLUMNS)
        blocks, p = self._blocks, len(self._ranks)
        columns = {}
        for k, name in enumerate(_COLUMNS):
            whole = np.empty(len(single) + p * len(blocks), _KINDS.get(name, "f8"))
            whole[: len(single)] = single[:, k] if k else self._ranks[single[:, 0].astype(int)]
            rest = whole[len(single) :].reshape(len(blocks), p)
            for row, (lane, text, steps, asked, t0, t1, nbytes) in zip(rest, blocks, strict=True):
                row[:] = (self._ranks, steps, lane, text, asked, t0, t1, nbytes)[k]
            columns[name] = whole
        self._blocks, self._single = [], bytearray()
        return columns


def _unpack_rows(packed: bytearray, columns: Sequence[str]) -> np.ndarray:
    """Returns (rows, columns)."""
    return np.frombuffer(packed, "f8").reshape(-1, len(columns)) if packed else np.empty((0, len(columns)))


def _make_words(codes: dict[str, int]) -> Words:
    words = Words()
    words.encode(list(codes))
    return words


def _sort_columns(columns: dict[str, np.ndarray], by: str) -> dict[str, np.ndarray]:
    order = np.argsort(columns[by], kind="stable")
    return {name: column[order] for name, column in columns.items()}
