"""Rows as bytes: what an engine publishes and a kernel reads. A short header and plain column buffers, no pickle.

Text columns with few distinct values travel as numbers, with the words that this one message uses. The rank
is said once. Nothing here knows sockets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from workbench.record.timeline import KINDS, Coded, Table, Words

WORDS = np.dtype("u2")  # the number of a word within its message


def _row(table: Table) -> np.dtype[Any]:
    """One row on the wire: numbers as in the table, words as their numbers; the rank and free text apart."""
    few = [(name, WORDS) for name in table.words]
    numbers = [(name, kind) for name, kind in table.types.items() if kind.kind != "O" and name != "rank"]
    return np.dtype(sorted(numbers + few, key=lambda field: -field[1].itemsize))


_TABLES = {kind: Table(kind) for kind in KINDS}
_ROWS = {kind: _row(table) for kind, table in _TABLES.items()}


class Batch(NamedTuple):
    """Some rows of one rank's table: `seq` is the number of the first of them in that table."""

    generation: str
    kind: str
    rank: int
    seq: int
    columns: dict[str, Any]

    def __len__(self) -> int:
        return len(self.columns["rank"])


def encode(batch: Batch) -> list[bytes]:
    """The two frames of a batch: header, then the rows."""
    few = _TABLES[batch.kind].words
    rows = np.empty(len(batch), _ROWS[batch.kind])
    words: dict[str, list[str]] = {}
    for name in rows.dtype.names or ():
        if name in few:
            rows[name], words[name] = _numbered(batch.columns[name])
        else:
            rows[name] = batch.columns[name]
    if "detail" in batch.columns:
        words["detail"] = [str(v) for v in batch.columns["detail"]]
    head = {"g": batch.generation, "k": batch.kind, "r": batch.rank, "s": batch.seq, "n": len(batch), "w": words}
    return [json.dumps(head).encode(), rows.tobytes()]


def _numbered(values: Sequence[str] | Coded) -> tuple[np.ndarray, list[str]]:
    """(the number of each value's word, the words in that order), only with words that are used."""
    if isinstance(values, Coded):
        used, numbers = np.unique(values.codes, return_inverse=True)
        return numbers, [str(t) for t in values.words.texts[used]]
    words = Words()
    return words.encode(values), [str(t) for t in words.texts]


def batches(frames: Sequence[bytes]) -> list[Batch]:
    """All batches of a message that is several of them, one after the other."""
    return [decode(frames[i : i + 2]) for i in range(0, len(frames), 2)]


def decode(frames: Sequence[bytes]) -> Batch:
    """The batch that `encode` wrote; its arrays view the message."""
    head = json.loads(bytes(frames[0]))
    few, words, n = _TABLES[head["k"]].words, head["w"], head["n"]
    rows = np.frombuffer(frames[1], _ROWS[head["k"]], n)
    columns: dict[str, Any] = {"rank": np.full(n, head["r"], "i2")}
    for name in rows.dtype.names or ():
        columns[name] = Coded(rows[name], _word_list(words[name])) if name in few else rows[name]
    if "detail" in words:
        columns["detail"] = words["detail"]
    return Batch(head["g"], head["k"], head["r"], head["s"], columns)


def _word_list(texts: list[str]) -> Words:
    words = Words()
    words.encode(texts)
    return words


def cut(columns: Mapping[str, Any], start: int) -> dict[str, Any]:
    """The rows from `start` on."""
    return {k: v[start:] for k, v in columns.items()}
