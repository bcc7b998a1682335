"""Encodes rows for messages: a short header and plain column buffers, no pickle.

Text columns of few values travel as numbers, with their words. The header names the rank once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from workbench.record.timeline import KINDS, Coded, Table, Words

WORDS = np.dtype("u2")  # a word within its message


def _row_type(table: Table) -> np.dtype[Any]:
    """Returns a row's type in a message: the table's numbers, words as numbers, no rank or free text."""
    few = [(name, WORDS) for name in table.words]
    numbers = [(name, kind) for name, kind in table.types.items() if kind.kind != "O" and name != "rank"]
    return np.dtype(sorted(numbers + few, key=lambda field: -field[1].itemsize))


_TABLES = {kind: Table(kind) for kind in KINDS}
_ROWS = {kind: _row_type(table) for kind, table in _TABLES.items()}


class RowBatch(NamedTuple):
    """Rows of one rank's table, from row number `seq` on."""

    run_id: str
    kind: str
    rank: int
    seq: int
    columns: dict[str, Any]

    def __len__(self) -> int:
        return len(self.columns["rank"])


def encode_batch(batch: RowBatch) -> list[bytes]:
    """Returns a batch's two frames: header, then rows."""
    few = _TABLES[batch.kind].words
    rows = np.empty(len(batch), _ROWS[batch.kind])
    words: dict[str, list[str]] = {}
    for name in rows.dtype.names or ():
        if name in few:
            rows[name], words[name] = _number_values(batch.columns[name])
        else:
            rows[name] = batch.columns[name]
    if "detail" in batch.columns:
        words["detail"] = [str(v) for v in batch.columns["detail"]]
    head = {"g": batch.run_id, "k": batch.kind, "r": batch.rank, "s": batch.seq, "n": len(batch), "w": words}
    return [json.dumps(head).encode(), rows.tobytes()]


def _number_values(values: Sequence[str] | Coded) -> tuple[np.ndarray, list[str]]:
    """Returns (the number of each value's word, the used words)."""
    if isinstance(values, Coded):
        used, numbers = np.unique(values.codes, return_inverse=True)
        return numbers, [str(t) for t in values.words.texts[used]]
    words = Words()
    return words.encode(values), [str(t) for t in words.texts]


def decode_batches(frames: Sequence[bytes]) -> list[RowBatch]:
    """Decodes several batches."""
    return [decode_batch(frames[i : i + 2]) for i in range(0, len(frames), 2)]


def decode_batch(frames: Sequence[bytes]) -> RowBatch:
    """Decodes a batch from `encode_batch`. Its arrays view the message."""
    head = json.loads(bytes(frames[0]))
    few, words, n = _TABLES[head["k"]].words, head["w"], head["n"]
    rows = np.frombuffer(frames[1], _ROWS[head["k"]], n)
    columns: dict[str, Any] = {"rank": np.full(n, head["r"], "i2")}
    for name in rows.dtype.names or ():
        columns[name] = Coded(rows[name], _word_list(words[name])) if name in few else rows[name]
    if "detail" in words:
        columns["detail"] = words["detail"]
    return RowBatch(head["g"], head["k"], head["r"], head["s"], columns)


def _word_list(texts: list[str]) -> Words:
    words = Words()
    words.encode(texts)
    return words


def cut_columns(columns: Mapping[str, Any], start: int) -> dict[str, Any]:
    """Returns the rows from `start` on."""
    return {k: v[start:] for k, v in columns.items()}
