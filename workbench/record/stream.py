"""One stream file of a run directory: the schema it must have, and what can be read of it.

It may be torn, damaged, hand-made, or made to do harm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from workbench.record.about import RunError
from workbench.record.timeline import SCHEMA, Coded, Table, Words

_READING = ipc.IpcReadOptions(use_threads=False)  # whole files are read side by side instead


def schema(kind: str, rank: int = 0, first: int = 0) -> pa.Schema:
    """The Arrow schema of a kind; its metadata say which rank, and which row comes first."""
    table = Table(kind)
    names = {"i2": pa.int16(), "i4": pa.int32(), "i8": pa.int64(), "f8": pa.float64(), "O": pa.string()}
    few = pa.dictionary(pa.int32(), pa.string())
    fields = [(k, few if k in table.words else names[t.str.lstrip("<|")]) for k, t in table.types.items()]
    about = {"schema": SCHEMA, "kind": kind, "rank": rank, "first": first}
    return pa.schema(fields, metadata={k: str(v) for k, v in about.items()})


def read_part(path: Path) -> tuple[int, dict[str, Any] | None, str]:
    """(number of its first row, its columns or None, what is wrong with it in words or "")."""
    batches, first, torn = [], 0, ""
    kind = path.name.split("-")[0]
    try:
        with pa.memory_map(str(path)) as source, ipc.open_stream(source, options=_READING) as stream:
            about = {k.decode(): v.decode() for k, v in (stream.schema.metadata or {}).items()}
            if int(about.get("schema", "0")) > SCHEMA:
                raise RunError(f"{path}: was written with schema {about['schema']}; this version reads up to {SCHEMA}")
            if not stream.schema.equals(schema(kind)):
                return 0, None, f"does not hold {kind} and was skipped"
            first = int(about.get("first", "0"))
            for batch in stream:
                batches.append(batch)
    except RunError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        said = (str(error).split(".")[0].splitlines() or [type(error).__name__])[0]
        torn = f"ends in a torn batch, which was skipped ({said[:100]})"
    if not batches:
        return first, None, torn
    table = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
    return first, {name: _column(table[name]) for name in table.column_names}, torn


def _column(chunked: pa.ChunkedArray) -> Any:
    """One column as numpy: text with few distinct values as Coded."""
    array = chunked.chunk(0)
    if not pa.types.is_dictionary(array.type):
        return array.to_numpy(zero_copy_only=False)
    words = Words()
    numbers = words.encode(array.dictionary.to_pylist())
    return Coded(numbers[array.indices.to_numpy()], words)
