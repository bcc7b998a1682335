"""Tests the checksums of a record's batches: a reader stops at damage and warns."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

from tests import damage
from tests.damaged_record import BATCHES, DamagedRecord, rows_of
from workbench import Run
from workbench.record import checksums, frames, store
from workbench.record.stream import read_part, schema
from workbench.record.timeline import KINDS


@pytest.fixture(scope="module")
def subject() -> DamagedRecord:
    return DamagedRecord()


@pytest.fixture(scope="module")
def good(subject: DamagedRecord, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("record") / "good"
    subject.make(folder)
    return folder


def messages(data: bytes) -> list[tuple[int, int]]:
    """Returns the start and the end of each message of a stream."""
    ends = [after for _, _, after in frames._messages(data)]
    return list(zip([0, *ends], ends, strict=False))


@pytest.mark.parametrize("kind", KINDS)
def test_reading_stops_at_a_flipped_bit_with_a_warning(kind: str, good: Path, subject: Any, tmp_path: Path) -> None:
    """Flips a bit in the values of the fifth batch; `make damage` flips other bits."""
    path = shutil.copytree(good, tmp_path / "run")
    file = path / f"{kind}-0.arrow"
    data = bytearray(file.read_bytes())
    end = [end for begin, end in messages(data) if _is_batch(data, begin)][4]
    whole, warned = subject.good[kind, 0], 0
    for at in range(end - 40, end - 8, 3):
        data[at] ^= 1
        file.write_bytes(data)
        run = Run.open(path)
        rows = rows_of(run).get((kind, 0), [])
        assert rows == whole[: len(rows)] and (len(rows) == len(whole)) == (not run.warnings)
        warned += bool(run.warnings)
        data[at] ^= 1
    assert warned, "none of these bytes is a value's"


def _is_batch(data: bytes, begin: int) -> bool:
    meta = begin + 8
    return frames._number(data, frames._field(data, frames._root(data, meta), 1), "<B") == frames.BATCH


def test_a_missing_or_repeated_batch_is_noticed(good: Path, tmp_path: Path) -> None:
    file = tmp_path / "samples-0.arrow"
    data = (good / "samples-0.arrow").read_bytes()
    begin, end = [(b, e) for b, e in messages(data) if _is_batch(data, b)][3]
    for changed in (data[:begin] + data[end:], data[:end] + data[begin:]):
        file.write_bytes(changed)
        first, columns, wrong = read_part(file)
        assert columns is not None and 0 < len(columns["rank"]) and first == 0
        assert wrong.startswith("is damaged: a checksum does not match after row "), wrong


def test_a_changed_number_of_the_first_row_is_noticed(tmp_path: Path) -> None:
    """Otherwise a reader would place the rows elsewhere, or count some as lost."""
    data = []
    for first in (0, 7):
        (tmp_path / f"{first}").mkdir()
        writer = store.Writer(tmp_path / f"{first}", "samples", 0, first)
        writer.append({"rank": [0], "step": [1], "name": ["loss"], "t": [0.5], "value": [0.25]})
        writer.close()
        data.append(writer.path.read_bytes())
    schemas = [messages(each)[0][1] for each in data]
    (tmp_path / "samples-0.arrow").write_bytes(data[1][: schemas[1]] + data[0][schemas[0] :])
    _, columns, wrong = read_part(tmp_path / "samples-0.arrow")
    assert columns is None and "is damaged" in wrong


def test_a_file_without_checksums_is_read_and_one_that_lost_them_is_not(tmp_path: Path) -> None:
    plain = schema("samples", 0)
    n = 4
    columns = {"rank": np.zeros(n, "i2"), "step": np.arange(n, dtype="i4"), "name": ["loss"] * n,
               "t": np.arange(n, dtype="f8"), "value": np.ones(n)}  # fmt: skip
    for lost, about in ((False, plain), (True, plain.with_metadata({**plain.metadata, checksums.MARK: b"1"}))):
        arrays = [pa.array(columns[f.name]).dictionary_encode() if f.name == "name"
                  else pa.array(columns[f.name], f.type) for f in plain]  # fmt: skip
        with ipc.new_stream(tmp_path / "samples-0.arrow", about) as stream:
            stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=about))
        _, found, wrong = read_part(tmp_path / "samples-0.arrow")
        assert (found is None) == lost and bool(wrong) == lost


def test_every_complete_prefix_of_a_file_is_read_without_a_warning(good: Path, tmp_path: Path) -> None:
    data = (good / "spans-1.arrow").read_bytes()
    counts = []
    for end in [end for begin, end in messages(data) if _is_batch(data, begin)]:
        (tmp_path / "spans-1.arrow").write_bytes(data[:end])
        _, columns, wrong = read_part(tmp_path / "spans-1.arrow")
        assert not wrong
        counts.append(len(columns["rank"]) if columns else 0)
    assert counts == sorted(counts) and len(set(counts)) == BATCHES


def test_a_writer_that_appends_one_row_at_a_time_agrees_with_the_reader(tmp_path: Path) -> None:
    writer = store.Writer(tmp_path, "samples", 0, first=9)
    for n in range(30):
        writer.append({"rank": [0], "step": [n], "name": [f"name {n % 7}"], "t": [n * 0.5], "value": [n / 3]})
    writer.close()
    first, columns, wrong = read_part(tmp_path / "samples-0.arrow", 0)
    assert columns is not None and (first, len(columns["rank"]), wrong) == (9, 30, "")


def test_random_damage_never_changes_rows_without_a_warning(subject: Any, good: Path, tmp_path: Path) -> None:
    """A part of `make damage`, whose other seeds are in docs/project/reliability.md."""
    found = [damage.play(subject, good, tmp_path / "case", seed) for seed in range(1, 30)]
    assert not [one for one in found if one["outcome"] not in damage.GOOD]
    assert {"warned", "refused"} <= {one["outcome"] for one in found}
