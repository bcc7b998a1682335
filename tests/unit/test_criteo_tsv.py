"""Tests CriteoTSV: parsing of lines, plain or packed, and all errors in files."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path

import pytest
import torch

from workbench.experiment import Experiment
from workbench.settings import KnobError
from workbench.tasks import CriteoTSV, TaskError
from workbench.tasks.criteo_tsv import COLUMNS, read


def line(number: int, **other: str) -> str:
    """Returns a line in Criteo's format, with these columns changed."""
    values = {"label": str(int(number % 3 == 0))}
    values |= {f"I{i}": str((number * i) % 50 - 2) for i in range(1, 14)}
    values |= {f"C{i}": f"{zlib.crc32(f'{i} {number % (3 if i == 2 else 7)}'.encode()):08x}" for i in range(1, 27)}
    return "\t".join((values | other)[name] for name in COLUMNS)


def written(tmp_path: Path, lines: list[str], name: str = "train.txt", end: str = "\n") -> Path:
    path = tmp_path / name
    text = (end.join(lines) + end).encode()
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    return path


LINES = [line(n) for n in range(200)]


def test_a_line_becomes_logs_flags_and_rows_of_tables(tmp_path: Path) -> None:
    odd = line(3, I1="", I2="-2", I3="0", I4="1000000", C1="", C26="")
    table = read(written(tmp_path, [odd, *LINES]), 0, 1000, 100)
    assert len(table.clicked) == 201 and float(table.clicked[0]) == 1.0
    numbers = table.numbers[0]
    assert numbers[:4].tolist() == pytest.approx([0.0, -math.log(3), 0.0, math.log(1_000_001)])
    assert numbers[13:].tolist() == [1.0, *[0.0] * 12], "a flag for what is missing"
    ids = table.ids[0].tolist()
    assert ids[0] == ids[25] == 0, "row 0 is for missing ones"
    assert ids[1] == 1 + zlib.crc32(odd.split("\t")[15].encode()) % 99
    assert 1 <= int(table.ids[1:].min()) and int(table.ids.max()) <= 99
    assert table.clicked[1:].tolist() == [float(n % 3 == 0) for n in range(200)]


@pytest.mark.parametrize(("name", "end"), [("train.txt", "\r\n"), ("train.gz", "\n"), ("train.gz", "\r\n")])
def test_gzip_and_other_ends_of_lines_read_the_same(tmp_path: Path, name: str, end: str) -> None:
    last_empty = [*LINES, line(5, C26="")]
    want = read(written(tmp_path, last_empty, "plain.tsv"), 0, 1000, 100)
    got = read(written(tmp_path, last_empty, name, end), 0, 1000, 100)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_reading_stops_at_the_limit_and_holds_out_the_last_tenth(tmp_path: Path) -> None:
    table = read(written(tmp_path, [*LINES[:150], "not in the format"]), 0, 150, 100)
    train, held = table.part(held_out=False), table.part(held_out=True)
    assert (len(train.clicked), len(held.clicked)) == (135, 15)
    assert torch.equal(torch.cat([train.ids, held.ids]), table.ids)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (line(1, label="2"), r"line 11, column 1 \(label\) = '2': must be 0 or 1"),
        (line(1, label=""), r"line 11, column 1 \(label\) = '': must be 0 or 1"),
        (line(1, I4="1.5"), r"line 11, column 5 \(I4\) = '1.5': must be an integer, or empty"),
        (line(1, I13="68fd1e64"), r"line 11, column 14 \(I13\) = '68fd1e64': must be an integer"),
        (line(1, I2="9" * 400), r"line 11, column 3 \(I2\) = '9+': must be an integer"),
        (line(1) + "\t", r"line 11: has 41 fields; must have 40 with a tab between"),
        (line(1).replace("\t", ","), r"line 11: has 1 fields; must have 40"),
        (line(1).split("\t", 1)[1], r"line 11: has 39 fields; must have 40"),
    ],
)
def test_malformed_lines_are_refused_with_line_and_column(tmp_path: Path, wrong: str, words: str) -> None:
    path = written(tmp_path, [*LINES[:10], wrong, *LINES[10:]])
    with pytest.raises(TaskError, match=rf"train.txt, {words}"):
        read(path, 0, 1000, 100)


def test_binary_truncated_and_short_files_are_refused(tmp_path: Path) -> None:
    packed = gzip.compress(("\n".join(LINES) + "\n").encode())
    for name, data, words in (
        ("torn.gz", packed[: len(packed) // 2], r"torn.gz, after line \d+: is truncated or damaged gzip"),
        ("spoilt.gz", packed[:200] + b"spoilt" + packed[206:], r"spoilt.gz, .*"),
        ("image.png", b"\x89PNG\r\n\xff\xfe\x00", r"image.png, after line 0: is not text; must be plain or gzip"),
        ("short.txt", "\n".join(LINES[:9]).encode(), r"short.txt: has 9 lines; must have at least 10"),
        ("empty.txt", b"", r"empty.txt: has 0 lines"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TaskError, match=words):
            read(tmp_path / name, 0, 1000, 100)


def test_a_missing_path_is_refused_at_start_and_a_missing_file_when_read() -> None:
    with pytest.raises(KnobError, match=r"path='': must name a file in Criteo's format; .* take task=ClickThrough"):
        Experiment(task=CriteoTSV()).checked()
    learner = CriteoTSV(path="/nowhere/train.txt").build()
    with pytest.raises(TaskError, match=r"path='/nowhere/train.txt': no such file here"):
        learner.data(0, 1, 8, 0)


def test_the_task_learns_from_the_file_and_reads_its_replacement(tmp_path: Path) -> None:
    path = written(tmp_path, LINES)
    learner = CriteoTSV(path=str(path), ids=50, width=4, hidden=16).build()
    torch.manual_seed(0)
    model = learner.model()
    optimizer = learner.optimizer(model.parameters(), 0.01)
    before = learner.evaluate(model)
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-4) and before["auc"] == 0.5
    stream = iter(learner.data(0, 1, 32, 0))
    for _ in range(60):
        learner.loss(model, next(stream)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = learner.evaluate(model)
    assert after["loss"] < 0.6 and after["auc"] > 0.6
    written(tmp_path, [line(n, label="1") for n in range(100)])
    os.utime(path, ns=(1, 1))
    assert learner.evaluate(model)["auc"] == 0.5


def test_ranks_see_different_lines(tmp_path: Path) -> None:
    lines = [line(n, C1=f"{n:08x}") for n in range(100)]
    task = CriteoTSV(path=str(written(tmp_path, lines)), ids=100_000, width=2, hidden=2)
    seen = [next(iter(task.build().data(rank, 3, 30, 0)))[0][:, 0] for rank in range(3)]
    assert len(torch.cat(seen).unique()) == 90
