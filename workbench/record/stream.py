"""Reads a stream file of a run directory. It may be torn or malicious: checks bytes, then batches."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from workbench.record import checksums, frames
from workbench.record.check_run_json import RunError
from workbench.record.marks import well_formed
from workbench.record.timeline import SCHEMA, Coded, Table, Words

_READING = ipc.IpcReadOptions(use_threads=False)  # files are read in parallel instead
MAX_SPARSE_BYTES = 1 << 20  # by which a file may exceed its blocks on disk
MAX_SECONDS = 1e10  # about 300 years
MAX_EXACT_INTEGER = 2**53  # rows and bytes: floats are exact up to here

Part = tuple[int, dict[str, Any] | None, str]  # `(number of its first row, columns or None, the problem or "")`


def schema(kind: str, rank: int = 0, first: int = 0) -> pa.Schema:
    """Returns a kind's Arrow schema; metadata: rank and first row's number."""
    table = Table(kind)
    names = {"i2": pa.int16(), "i4": pa.int32(), "i8": pa.int64(), "f8": pa.float64(), "O": pa.string()}
    few = pa.dictionary(pa.int32(), pa.string())
    fields = [(k, few if k in table.words else names[t.str.lstrip("<|")]) for k, t in table.types.items()]
    about = {"schema": SCHEMA, "kind": kind, "rank": rank, "first": first}
    return pa.schema(fields, metadata={k: str(v) for k, v in about.items()})


def read_part(path: Path, rank: int | None = None) -> Part:
    """Reads one file. With `rank`, drops rows that cannot be of this rank.

    Raises RunError for a later version.
    """
    kind = path.name.split("-")[0]
    try:
        data = _bytes(path)
    except (OSError, ValueError) as error:
        return 0, None, f"cannot be read ({getattr(error, 'strerror', None) or error})"
    end, wrong = frames.find_whole_messages(data)
    first, batches, damage = 0, list[pa.RecordBatch](), ""
    try:
        with ipc.open_stream(pa.py_buffer(data[:end]), options=_READING) as stream:
            about = {k.decode("utf8", "replace"): v.decode("utf8", "replace") for k, v in _metadata(stream).items()}
            if _whole(about.get("schema", "0")) > SCHEMA:
                raise RunError(f"{path}: was written with schema {about['schema']}; this version reads up to {SCHEMA}")
            if not stream.schema.equals(schema(kind)):
                return 0, None, f"does not hold {kind} and was skipped"
            first = _whole(about.get("first", "0"))
            for batch in _checked_batches(stream):
                batches.append(batch)  # one by one: batches before a damaged one count
    except RunError:
        raise
    except checksums.Damaged as error:
        rows = sum(batch.num_rows for batch in batches)
        damage = f"is damaged: {error} after row {first + rows}, and no later row was read"
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        said = (str(error).split(".")[0].splitlines() or [type(error).__name__])[0]
        wrong = wrong or said
    wrong = damage or (f"ends in a torn batch, which was skipped ({wrong[:100]})" if wrong else "")
    if not batches:
        return first, None, wrong
    table = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
    columns = {name: _column(table[name]) for name in table.column_names}
    good = _good(kind, columns, rank) if rank is not None else np.ones(table.num_rows, bool)
    if not good.all():
        bad = len(good) - int(good.sum())
        columns = {name: values[good] for name, values in columns.items()}
        wrong = f"{bad} rows are invalid and were skipped" + (f"; it {wrong}" if wrong else "")
    return first, columns, wrong


def _bytes(path: Path) -> bytes:
    """Reads a regular file; only the beginning of a sparse one. Raises OSError or ValueError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is not a regular file")
        held = getattr(about, "st_blocks", about.st_size) * 512
        return file.read(min(about.st_size, held + MAX_SPARSE_BYTES))


def _checked_batches(stream: Any) -> Iterator[pa.RecordBatch]:
    """A stream's batches. Raises Damaged, ArrowException or ValueError at the first bad one."""
    checksum, required = checksums.begin(stream.schema.metadata), checksums.MARK in _metadata(stream)
    for batch, metadata in stream.iter_batches_with_custom_metadata():
        _check(batch)
        checksum = checksums.check(batch, metadata, checksum, required)
        yield batch


def _metadata(stream: Any) -> dict[bytes, bytes]:
    return stream.schema.metadata or {}


def _whole(text: str) -> int:
    """Parses a number of rows or of a schema. Raises ValueError."""
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise ValueError(f"{text[:20]!r} is not a number of rows")
    return int(text)


def _check(batch: pa.RecordBatch) -> None:
    """Raises ArrowException or ValueError for invalid offsets, codes, text or nulls."""
    batch.validate(full=True)
    for array in batch.columns:
        if array.null_count or (isinstance(array, pa.DictionaryArray) and array.dictionary.null_count):
            raise ValueError("a value is missing")


def _good(kind: str, columns: Mapping[str, Any], rank: int) -> np.ndarray:
    """Returns a mask of rows that a rank may have written. Losses may have any value, times may not."""
    good = (columns["step"] >= 0) & (columns["rank"] == rank)
    for name in {"t", "asked", "t0", "t1"} & set(columns):
        good &= np.abs(columns[name]) < MAX_SECONDS  # False for NaN
    if kind == "spans":
        good &= (columns["nbytes"] >= 0) & (columns["nbytes"] < MAX_EXACT_INTEGER) & (columns["t1"] >= columns["t0"])
    if kind == "marks":
        names = columns["name"].decode()
        good &= np.fromiter(map(well_formed, names, columns["detail"]), bool, len(names))
    return np.asarray(good)


def _column(chunked: pa.ChunkedArray) -> Any:
    """Converts one column to numpy; text with few distinct values to Coded."""
    array = chunked.chunk(0)
    if not pa.types.is_dictionary(array.type):
        return array.to_numpy(zero_copy_only=False)
    words = Words()
    numbers = words.encode(array.dictionary.to_pylist())
    return Coded(numbers[array.indices.to_numpy()], words)
