"""Tests the campaign of compressed activations: rows, resumption and page."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench import activations, activations_tuned
from tests.bench.activations import Row
from workbench.experiment import Experiment


def cell(row: Row, seed: int, **more: Any) -> dict[str, Any]:
    return {**row._asdict(), "seed": seed, "loss": 2.0, "held_out": 2.5, "activation": 1000, "gradient": 1000, **more}


def test_every_row_is_a_valid_experiment() -> None:
    rows = activations.rows()
    assert len(set(rows)) == len(rows) == 30
    for row in rows:
        Experiment(ranks=2, partition=row.partition).checked()


def test_the_campaign_continues_where_it_stopped() -> None:
    rows = activations.rows()
    there = [cell(rows[0], 0), cell(rows[3], 1)]
    left = list(activations.todo(there))
    assert len(left) == 30 * activations.SEEDS - 2
    assert (rows[0], 0) not in left and (rows[3], 1) not in left and left[0] == (rows[1], 0)


SENT = [
    (Row("2 stages", "none", ""), 1.0, 1.0), (Row("2 stages", "fp16", "forward"), 0.5, 1.0),
    (Row("2 stages", "Top-k 10 %", "both"), 0.2, 0.2), (Row("2 stages", "Top-k 10 %", "both, one choice"), 0.2, 0.1),
    (Row("2 slices", "Top-k 10 %", "both, one choice"), 0.2, 0.2), (Row("2 slices", "fp16", "backward"), 1.0, 0.5),
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize(("row", "ahead", "back"), SENT, ids=[" ".join(row) for row, *_ in SENT])
def test_bytes_are_those_of_the_direction_that_is_compressed(row: Row, ahead: float, back: float) -> None:
    floats = 4 * activations.TASK.batch * activations.TASK.context * activations.TASK.width
    whole = (1, 1) if row.way == "2 stages" else (2 * 2 * 2, 2 * (2 * 2 + 1))  # 2 ranks, 2 layers; the head's input
    found = activations.measured(row, 0, steps=2)
    assert found["activation"] == pytest.approx(ahead * whole[0] * floats, rel=1e-3)
    assert found["gradient"] == pytest.approx(back * whole[1] * floats, rel=1e-3)


def test_the_page_shows_each_rows_difference() -> None:
    plain, row = Row("2 stages", "none", ""), Row("2 stages", "fp16", "both")
    cells = [cell(plain, 0), cell(plain, 1, loss=3.0), cell(row, 0, loss=2.25, activation=500), cell(row, 1, loss=3.25)]
    timed = {"fp16": {"seconds": 1e-3, "nbytes": 500, "dense": 1000}}
    page = activations.text({"steps": 7, "cells": cells, "timed": timed})
    assert "| 2 stages | fp16 | both | 2.750 (2.250 to 3.250) | +0.250 |" in page and "0 kB, 50%" in page
    assert "| fp16 | 1.00 | 50% | 4 |" in page and "7 steps" in page
    assert "without a codec the seeds differ by 1.00. Rows with a larger rise of the training loss: no row." in page
    assert "Rows with a larger fall: no row." in page and activations.find_costly_codecs({"cells": cells}) == ([], 0.0)
    cells += [cell(Row("2 stages", "8 bits", "forward"), seed, loss=4.0 + seed) for seed in (0, 1)]
    assert "rise of the training loss: 8 bits forward (+2.00)." in activations.text({"steps": 7, "cells": cells})
    assert activations.find_costly_codecs({"cells": cells}) == (["8 bits"], 2.0)
    cells += [cell(Row("2 stages", "8 bits", "backward"), seed, loss=2.0 + seed) for seed in (0, 1)]
    said = "All other rows are within this spread. 8 bits costs more forward (+2.00 forward, +0.00 backward)."
    assert said in activations.text({"steps": 7, "cells": cells})


def tuned(row: str, rate: float, seed: int, loss: float) -> dict[str, Any]:
    return {"row": row, "rate": rate, "seed": seed, "loss": loss, "held_out": loss}


def test_each_row_is_tuned_until_its_best_rate_has_neighbours_then_runs_all_seeds() -> None:
    """The best rates are known: 25 % of the task's for no codec, the task's own for the other rows."""
    cells: list[dict[str, Any]] = []
    while one := activations_tuned.wanted(cells):
        row, rate, seed = one
        activations_tuned.experiment(*one).checked()
        cells.append(tuned(*one, loss=2.0 + abs(rate - (0.25 if row == activations_tuned.NONE else 1.0)) + seed / 100))
    for row in activations_tuned.TUNED:
        rate = 0.25 if row == activations_tuned.NONE else 1.0
        assert activations_tuned.best(cells, row) == (rate, False)
        assert len(activations_tuned.of(cells, row, rate)) == activations_tuned.SEEDS
    page = activations_tuned.text({"cells": cells})
    assert "0.000375, 0.00075, 0.0015, 0.003, 0.006 | 0.00075 | 5 | 2.020 (2.000 to 2.040)" in page
    assert "| rank 20 | none | the task's | -0.750 ± 0.000 |" in page
