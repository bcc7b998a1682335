"""Tests the three tables: appending, reading by cursor, conversion to frames."""

from __future__ import annotations

import threading

import numpy as np
import psutil
import pytest

from workbench.record.timeline import Coded, Mark, Sample, Span, Table, Timeline, Words


def span(i: int, lane: str = "comm") -> Span:
    return Span(i % 4, i // 4, lane, f"bucket {i % 3}", float(i), i + 0.1, i + 0.2, 100 * i)


def test_rows_are_read_back_as_added() -> None:
    tl = Timeline()
    tl.spans.add([span(i) for i in range(10)])
    rows = tl.spans.rows()
    assert [Span(*r) for r in zip(*(c.tolist() for c in rows.columns.values()), strict=True)] == [
        span(i) for i in range(10)
    ]


def test_a_cursor_gives_only_what_is_new() -> None:
    table = Table("samples")
    table.add([Sample(0, 0, "loss", 0.0, 5.0)])
    cursor = len(table)
    table.add([Sample(1, 0, "drift", 0.1, 4.0)])
    assert table.rows(cursor).rank.tolist() == [1]
    assert table.rows(cursor).name.tolist() == ["drift"]


def test_growing_leaves_earlier_views_unchanged() -> None:
    table = Table("spans")
    table.add([span(i) for i in range(1000)])
    view = table.rows()
    table.add([span(i) for i in range(1000, 5000)])
    assert len(view) == 1000 and view.t0[-1] == pytest.approx(999.1)
    assert len(table) == 5000 and table.rows().t0[-1] == pytest.approx(4999.1)


def test_masks_by_text_agree_with_the_text() -> None:
    table = Table("spans")
    table.add([span(i, lane) for i, lane in enumerate(["comm", "compute", "wait", "comm"])])
    rows = table.rows()
    assert rows.equal("lane", "comm").tolist() == [True, False, False, True]
    assert rows.equal("lane", "never seen").tolist() == [False] * 4
    assert rows[rows.equal("lane", "comm")].lane.tolist() == ["comm", "comm"]


def test_coded_text_of_another_table_is_renumbered() -> None:
    words = Words()
    codes = words.encode(["b", "a", "b"])
    table = Table("samples")
    table.add([Sample(0, 0, "a", 0.0, 1.0)])
    columns = {"rank": [0] * 3, "step": [1] * 3, "name": Coded(codes, words), "t": [1.0] * 3, "value": [0.0] * 3}
    table.extend(columns)
    assert table.rows().name.tolist() == ["a", "b", "a", "b"]


def test_room_for_later_rows_takes_no_memory_before_they_arrive() -> None:
    """As many rows as leave half of the room empty."""
    table, process = Table("spans"), psutil.Process()
    rows = 1024 * 2**10 // 16
    piece = {k: np.ones(rows, v) for k, v in table.types.items() if k not in table.words}
    words = {k: ["word"] * rows for k in table.words}
    before = process.memory_info().rss
    for _ in range(17):
        table.extend(piece | words)
    held = sum(17 * rows * column.dtype.itemsize for column in table._columns.values())
    assert process.memory_info().rss - before < 1.4 * held


def test_columns_of_unequal_length_are_refused() -> None:
    table = Table("marks")
    with pytest.raises(ValueError, match=r"marks.name: 1 values where other columns have 2"):
        table.extend({"rank": [0, 1], "step": [0, 0], "name": ["x"], "t": [0.0, 0.0], "detail": ["{}", "{}"]})
    assert len(table) == 0


def test_frames_of_empty_and_of_full_tables_have_the_same_columns() -> None:
    tl = Timeline()
    empty = tl.marks.frame()
    tl.marks.add([Mark(0, 3, "change", 1.5, '{"path": "lr"}')])
    full = tl.marks.frame()
    assert list(empty.columns) == list(full.columns) == ["rank", "step", "name", "t", "detail"]
    assert full.name.tolist() == ["change"] and full.detail.tolist() == ['{"path": "lr"}']


def test_a_table_may_be_read_while_another_thread_appends() -> None:
    table, wrong = Table("spans"), []

    def write() -> None:
        for i in range(300):
            table.add([span(j, f"lane {i % 50}") for j in range(20)])

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        rows = table.rows()
        if len(rows) and (rows.lane == None).any():  # noqa: E711
            wrong.append(len(rows))
    writer.join()
    assert not wrong and len(table) == 6000 and np.all(table.rows().t1 > 0)


def test_pieces_with_any_texts_and_dtypes_are_gathered_in_order_of_time() -> None:
    first, second = Table("marks"), Table("marks")
    first.add([Mark(0, 1, "change", 1.0, "a"), Mark(0, 3, "end", 3.0, "b")])
    second.add([Mark(1, 1, "end", 1.0, "c"), Mark(1, 2, "start", 2.0, "d"), Mark(1, 0, "end", 0.5, "e")])
    coded = {k: second.rows().coded(k) if k == "name" else v for k, v in second.rows().columns.items()}
    whole = Table("marks")
    whole.gather([first.rows().columns | {"name": first.rows().coded("name")}, coded], by="t")
    assert whole.rows().detail.tolist() == ["e", "a", "c", "d", "b"]  # at equal times the first piece comes first
    assert whole.rows().name.tolist() == ["end", "change", "end", "start", "end"]
    assert whole.rows().rank.tolist() == [1, 0, 1, 1, 0] and whole.rows().rank.dtype == np.int16
    whole.add([Mark(2, 9, "late", 9.0, "f")])
    assert whole.rows().detail.tolist()[-1] == "f" and len(whole) == 6
    empty = Table("spans")
    empty.gather([], by="t1")
    assert len(empty) == 0
