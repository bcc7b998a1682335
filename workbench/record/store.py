"""The run directory: `run.json`, and an append-only Arrow IPC stream per rank and kind.

    run.json            schema, experiment, environment, start time
    spans-0.arrow       rank 0's spans, next to samples-0.arrow and marks-0.arrow
    spans-0.1.arrow     its next part, begun after a failed write (a full disk)

A stream needs no footer. So any Arrow library can read flushed rows after SIGKILL. Readers skip a torn last batch and
all rows from a wrong checksum on. They warn about both.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from workbench.record import checksums
from workbench.record.check_run_json import RunError as RunError
from workbench.record.check_run_json import find_fault
from workbench.record.folders import ALLOW, make_private_folder, reason_to_refuse
from workbench.record.free_memory import release_free_memory as release_free_memory
from workbench.record.stream import read_part as read_part
from workbench.record.stream import schema
from workbench.record.timeline import KINDS, SCHEMA, Timeline, Words
from workbench.settings import short

_PART = re.compile(r"(spans|samples|marks)-([0-9]{1,5})(?:\.([0-9]{1,9}))?\.arrow")
MAX_RUN_JSON_BYTES = 16 << 20
_OPTIONS = {"compression": "lz4", "emit_dictionary_deltas": True, "use_threads": False}


class Part(NamedTuple):
    """One stream file: part `number` of one rank's rows of `kind`."""

    kind: str
    rank: int
    number: int
    path: Path


class Loaded(NamedTuple):
    """A run directory's content: tables, next row per `(kind, rank)`, lost rows and warnings."""

    timeline: Timeline
    following: dict[tuple[str, int], int]
    missing: int
    warnings: tuple[str, ...]


def create(path: Path, about: Mapping[str, Any]) -> None:
    """Creates the run directory `path`.

    Raises RunError if it holds a run, belongs to another user or is writable for other users.

    about: the plain values `experiment`, `environment`, `started`, `epoch` and `name`.
    """
    try:
        make_private_folder(path)
        if reason := reason_to_refuse(path):
            raise RunError(f"{path}: {reason}; choose another folder or set {ALLOW}=1 if you trust these users")
        if (path / "run.json").exists():
            raise RunError(f"{path}: already holds a run; choose another directory for this one")
        whole = {"schema": SCHEMA, **about, "run_dir": str(path.resolve())}
        write_atomically(path / "run.json", json.dumps(whole, indent=1, default=str))
    except (FileExistsError, NotADirectoryError):
        raise RunError(f"{path}: is a file; a run needs a directory of its own") from None
    except OSError as error:
        raise RunError(f"{path}: a run cannot be written there ({error.strerror}); choose another directory") from error


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yields a draft that replaces `path` after the block. An error or an interrupt removes it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that readers see whole or not at all. Raises OSError."""
    with replace_file(path) as draft, open(draft, "w", opener=private) as file:
        file.write(text)


def private(path: str, flags: int) -> int:
    """An `opener` for `open`: only this user can read new files."""
    return os.open(path, flags, 0o600)


def about(path: Path) -> dict[str, Any]:
    """Returns run.json's content. Raises RunError if this version cannot read it."""
    try:
        there, whole = path.exists(), (path / "run.json").is_file()
    except OSError as error:
        raise RunError(f"path={short(str(path))}: cannot be a run directory ({error.strerror})") from None
    if not there:
        raise RunError(f"{path}: there is no such run directory")
    if not whole:
        raise RunError(f"{path}: is not a run directory (it has no run.json)")
    try:
        if (size := (path / "run.json").stat().st_size) > MAX_RUN_JSON_BYTES:
            raise RunError(f"{path}: its run.json has {size} bytes, which must be at most {MAX_RUN_JSON_BYTES}")
        found = json.loads((path / "run.json").read_text("utf8"))
        schema = found["schema"] if type(found["schema"]) is int else int(str(found["schema"]))
    except RunError:
        raise
    except OSError as error:
        raise RunError(f"{path}: its run.json cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RunError(f"{path}: its run.json is truncated or not one that workbench wrote") from None
    if schema > SCHEMA:
        raise RunError(
            f"{path}: was written with schema {schema}; this version reads up to schema {SCHEMA}, "
            f"so install a newer training-workbench to open it"
        )
    if reason := find_fault(found):
        raise RunError(f"{path}: its run.json is not one that workbench wrote: {reason}")
    return found


def parts(path: Path) -> list[Part]:
    """Returns a run directory's stream files, by age."""
    found = [(m, file) for file in path.iterdir() if (m := _PART.fullmatch(file.name))]
    return sorted(Part(m[1], int(m[2]), int(m[3] or 0), file) for m, file in found)


class Writer:
    """Appends batches to a new part by one write each, so that a file holds only whole batches."""

    def __init__(self, path: Path, kind: str, rank: int, first: int = 0, number: int | None = None) -> None:
        if number is None:  # after the existing parts
            taken = [p.number for p in parts(path) if (p.kind, p.rank) == (kind, rank)]
            number = max(taken) + 1 if taken else 0
        self.path = path / f"{kind}-{rank}{f'.{number}' if number else ''}.arrow"
        self.nbytes = 0
        plain = schema(kind, rank, first)
        self._schema = plain.with_metadata({**plain.metadata, checksums.MARK: b"1"})
        self._checksum = checksums.begin(self._schema.metadata)  # of the file up to the last batch
        self._words = {f.name: Words() for f in self._schema if pa.types.is_dictionary(f.type)}
        self._buffer = io.BytesIO()
        self._stream = ipc.new_stream(self._buffer, self._schema, options=ipc.IpcWriteOptions(**_OPTIONS))
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        made = os.fstat(self._fd)
        self.identity = made.st_dev, made.st_ino  # tells whether this file was replaced

    def append(self, columns: Mapping[str, Any]) -> None:
        """Writes one batch, or cuts the file back and raises OSError."""
        batch = self._batch(columns)
        checksum = checksums.extend(self._checksum, batch)
        self._stream.write_batch(batch, custom_metadata=checksums.written(checksum))
        self._flush()
        self._checksum = checksum

    def close(self) -> None:
        """Ends the stream and closes the file."""
        try:
            self._stream.close()
            self._flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Leaves the stream without an end, but readable."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _flush(self) -> None:
        data = memoryview(self._buffer.getvalue())
        self._buffer.seek(0)
        self._buffer.truncate()
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError:
            os.ftruncate(self._fd, self.nbytes)
            raise
        self.nbytes += done

    def _batch(self, columns: Mapping[str, Any]) -> pa.RecordBatch:
        arrays = []
        for f in self._schema:
            if (words := self._words.get(f.name)) is not None:
                codes = _array(words.encode(columns[f.name]), pa.int32())
                arrays.append(pa.DictionaryArray.from_arrays(codes, _array(words.texts, pa.string())))
            else:
                arrays.append(_array(columns[f.name], f.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def keep(path: Path, about: Mapping[str, Any], timeline: Timeline) -> int:
    """Writes a whole record into a new run directory and returns its rows.

    Raises RunError if it does not fit. A failure leaves nothing removable.
    """
    is_new = not path.exists()
    create(path, about)
    before = set(parts(path))
    try:
        return write(path, timeline)
    except BaseException as error:
        _remove_record(path, set(parts(path)) - before, is_new)
        if not isinstance(error, OSError):
            raise
        raise RunError(f"{path}: the run does not fit there ({error.strerror}); choose another directory") from error


def _remove_record(path: Path, written: Collection[Part], is_new: bool) -> None:
    """Removes `run.json`, the `written` parts and an empty folder that `is_new`."""
    for file in [path / "run.json", *(part.path for part in written)]:
        with suppress(OSError):
            file.unlink()
    if is_new:
        with suppress(OSError):  # another process may have put a file there
            path.rmdir()


def write(path: Path, timeline: Timeline) -> int:
    """Writes a record, a stream per rank and kind. Returns its rows."""
    written = 0
    for kind in KINDS:
        table = timeline.table(kind)
        rows = table.rows()
        if not len(rows):
            continue
        order = np.argsort(rows.rank, kind="stable")
        ranks, begins = np.unique(rows.rank[order], return_index=True)
        written += len(rows)
        whole = {k: rows.coded(k) if k in table.words else getattr(rows, k) for k in table.types}
        for rank, mine in zip(ranks.tolist(), np.split(order, begins[1:]), strict=True):
            writer = Writer(path, kind, rank, number=0)
            writer.append({k: v[mine] for k, v in whole.items()})
            writer.close()
    return written


def counts(path: Path) -> dict[tuple[str, int], int]:
    """Returns a run directory's rows by (kind, rank)."""
    held: dict[tuple[str, int], int] = {}
    for part in parts(path):
        _, columns, _ = read_part(part.path)
        if columns is not None:
            key = part.kind, part.rank
            held[key] = held.get(key, 0) + len(columns["rank"])
    return held


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    """Makes an Arrow array from buffers: `pa.array` would import pandas into every engine."""
    if kind != pa.string():
        data = np.ascontiguousarray(values, kind.to_pandas_dtype())
        return pa.Array.from_buffers(kind, len(data), [None, pa.py_buffer(data)])
    texts = [str(v).encode() for v in values]
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    return pa.Array.from_buffers(kind, len(texts), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])


def read(path: Path) -> Loaded:
    """Reads all rows of a run directory, ordered by their end."""
    timeline, warnings, missing = Timeline(), [], 0
    following: dict[tuple[str, int], int] = {}
    found: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in KINDS}
    every = parts(path)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        read_parts = list(pool.map(read_part, [part.path for part in every], [part.rank for part in every]))
    for part, (first, columns, wrong_with_it) in zip(every, read_parts, strict=True):
        if wrong_with_it:
            warnings.append(f"{part.path.name}: {wrong_with_it}")
        if columns is None:
            continue
        key = part.kind, part.rank
        missing += max(first - following.get(key, 0), 0)
        following[key] = first + len(columns["rank"])
        found[part.kind].append(columns)
    for kind, pieces in found.items():
        table = timeline.table(kind)
        table.gather(pieces, by="t1" if "t1" in table.types else "t")
    if missing:
        warnings.append(f"{missing} rows were lost while the disk was full or could not be written")
    return Loaded(timeline, following, missing, tuple(warnings))
