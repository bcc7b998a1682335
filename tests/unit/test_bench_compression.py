"""Tests the campaign over compressors: times as steps times step time, and the page's verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench import codecs, compression, compression_page, compression_studies, studies_page
from tests.bench.cells import Results
from workbench.compressors import Compressor
from workbench.fabric import Link
from workbench.settings import from_plain

LINK = "1 Gbit/s"


def write(folder: Path, part: str, row: str, where: str, seed: int, **found: Any) -> None:
    about = {"part": part, "row": row, "where": where, "seed": seed, "method": "DDP", "key": ""}
    (folder / f"{part}-{row}-{seed}.json").write_text(json.dumps({**about, "found": found}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Dense reaches 3.0 after 200 of 300 steps of 0.1 s; QSGD after 210 steps of half the time; SIDCo never."""
    for row, middle, step in (("Dense", 3.0, 0.1), ("QSGD", 3.05, 0.05), ("SIDCo", 3.5, 0.01)):
        for seed in (0, 1, 2):
            curve = [[0, 0.0, 5.0], [200, 1.0, middle], [220, 1.1, middle - 0.1], [300, 1.5, middle - 0.2]]
            write(tmp_path, "loss", row, "any link", seed, curve=curve, bytes=1e6 if row == "Dense" else 1e5)
        write(tmp_path, "step", row, LINK, 0, step_s=step, bytes=1e5, codec_s=0.001, wait_s=0.0)
    return tmp_path


def test_time_to_the_loss_is_steps_times_step_time(folder: Path) -> None:
    found = Results.of(folder)
    assert compression_page.target(found) == 3.0
    rows = compression_page.ranking(found, LINK)
    assert [r.label for r in rows] == ["QSGD", "Dense", "SIDCo"]
    assert [r.time for r in rows] == pytest.approx([210 * 0.05, 200 * 0.1, 0.0])


def test_the_page_lists_winners_losers_and_missing_rows(folder: Path) -> None:
    page = compression_page.text(folder, folder)
    assert f"At {LINK}, QSGD is the fastest to the loss: 1.90 times the speed of dense fp32." in page.split("\n## ")[0]
    assert f"| {LINK} | QSGD | 1.90 | 1 of 2: QSGD | 1 of 2: SIDCo |" in page
    assert (
        "| SIDCo | 10.0 | never: 3 of 3 seeds |" in page and "Not measured yet: `python -m tests.bench.codecs" in page
    )
    write(folder, "step", compression_page.AGAIN, LINK, 0, step_s=0.11, bytes=1e5, codec_s=0.0, wait_s=0.0)
    page = compression_page.text(folder, folder)
    assert "Dense, timed again after every other row: 110 ms, 1.10 times as long as before (A/A)." in page
    assert "| Dense again" not in page
    assert "| QSGD | 50 ms | 2.00 | 100.0 kB | 1.0 ms | 1.90 |  |" in page, "bf16 was not measured, so nothing is said"


def test_every_shipped_compressor_has_a_valid_row() -> None:
    rows = compression.rows()
    assert {"Dense", "Cast(to=bf16)", "PowerSGD", "Zen", "DGC(momentum=0)"} <= set(rows)
    assert all(isinstance(from_plain(plain, Compressor), Compressor) for plain in rows.values())
    assert len(compression.possible(compression.losses())) == 3 * len(rows)


def ending(folder: Path, part: str, row: str, loss: float, nbytes: float = 1e5) -> None:
    for seed, luck in enumerate((-0.001, 0.0, 0.001)):
        write(folder, part, row, "any link", seed, curve=[[0, 0.0, 5.0], [300, 1.0, loss + luck]], bytes=nbytes)


def test_accordions_row_is_between_its_two_ratios(tmp_path: Path) -> None:
    for word, loss, nbytes in (("gentle", 2.0, 1e6), ("Accordion", 2.1, 4e5), ("harsh", 2.4, 2e5)):
        ending(tmp_path, "accordion", f"TopK: {word}", loss, nbytes)
        ending(tmp_path, "accordion", f"PowerSGD: {word}", 2.0, nbytes)
    page = studies_page.text(Results.of(tmp_path), tmp_path)
    assert "TopK: Accordion saves 75% of the bytes that the harsh ratio saves and pays 25% of the loss" in page
    assert "that the harsh ratio saves. The two ratios' losses differ by less than seeds do" in page


def test_variance_of_rounding_is_measured_by_block_size(tmp_path: Path) -> None:
    grads = [torch.randn(40_000, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    found = compression_studies.variances(grads, last=2)
    assert set(found) == set(compression_studies.rounders()) and all(len(each) == 2 for each in found.values())
    assert found["QSGD, blocks of 16384"][1] > 50 * found["ALQ, blocks of 16384"][1]
    (tmp_path / "variance.json").write_text(json.dumps({"rows": found}))
    row = next(line for line in studies_page.text(Results([]), tmp_path).splitlines() if line.startswith("| ALQ"))
    assert f" {sum(found['ALQ, blocks of 64']) / 2:.3g} " in row


def test_losses_with_wrongly_fitted_levels_are_left_out_and_marked(tmp_path: Path) -> None:
    for row in ("ALQ, blocks of 64", "ALQ, blocks of 1024", "QSGD, blocks of 64"):
        ending(tmp_path, "levels", row, 2.0)
    page = studies_page.text(Results.of(tmp_path), tmp_path, ["ALQ, blocks of 64", "QSGD, blocks of 64"])
    assert "| ALQ |  |  |  | before the fix | 2.000 ± 0.001 |  |" in page
    assert "| QSGD |  |  |  | 2.000 ± 0.001 |" in page, "which fits nothing"
    assert 'In the cells "before the fix" (1), some seeds ran before the first step fitted levels.' in page
    assert page.count("| before the fix |") == 1


def test_every_setting_of_the_studies_is_valid() -> None:
    for part in ("accordion", "levels"):
        cells = compression.losses(part)
        assert compression.possible(cells) == cells and len({cell.path for cell in cells}) == len(cells)
    sizes = {compression_studies.clicks(n, "auto", Link()).checked().task.ids for n in compression_studies.IDS[200.0]}
    assert sizes == set(compression_studies.IDS[200.0])


def test_the_page_names_the_fastest_scheme_and_the_formulas_choice(tmp_path: Path) -> None:
    took = {"gather": 3.0, "tree": 4.0, "owners": 1.0, "ring": 5.0, "dense": 2.0, "auto": 1.1}
    about = {"mbit": 200.0, "ids": 400, "density": 0.15, "nbytes": 1, "model": 4 * 64 * 3200}
    rows = [{**about, "scheme": s, "wire": t / 1e3} for s, t in took.items()]
    (tmp_path / "schemes.json").write_text(json.dumps({"rows": rows}))
    page = studies_page.text(Results([]), tmp_path)
    assert "| 1.1 ms | owners | tree |" in page and "200 Mbit/s: in 0 of 1 rows the formulas' choice" in page


def test_timed_codecs_are_not_timed_again() -> None:
    there = set(compression.rows()) - {"TopK", "SignSGD"} | {"DGC", "ErrorFeedback", "Layers", "WarmUp", "Cast"}
    rows = list(codecs.every(10_000, 1, there))
    assert [r["name"] for r in rows] == ["SignSGD", "TopK"] and all(len(r["codec"]) == 1 for r in rows)


def test_a_seed_that_missed_the_loss_is_slower_than_all_others(folder: Path) -> None:
    late = [[0, 0.0, 5.0], [200, 1.0, 3.2], [250, 1.3, 3.0], [300, 1.5, 2.8]]
    write(folder, "loss", "QSGD", "any link", 1, curve=[[0, 0.0, 5.0], [300, 1.5, 3.5]], bytes=1e5)
    write(folder, "loss", "QSGD", "any link", 2, curve=late, bytes=1e5)
    page = compression_page.text(folder, folder)
    assert "| QSGD | 10.0 | 250 (never: 1 of 3 seeds) |" in page, "210, 250 and never"
    row = next(r for r in compression_page.ranking(Results.of(folder), LINK) if r.label == "QSGD")
    assert row.steps == 250 and row.time == pytest.approx(250 * 0.05)


def test_the_page_names_the_bucket_size_and_rows_of_older_code(folder: Path) -> None:
    page = compression_page.text(folder, folder)
    assert f"buckets of {compression.BUCKET:g} MB" in page and compression.losses()[0].bucket_mb == compression.BUCKET
    older = "Some or all seeds of these rows ran before their code or shared code changed:\n\n"
    older += "| rows with older code |\n| --- |\n"
    assert f"{older}| Dense, QSGD, SIDCo |\n" in page
    assert "were not timed again:" in page
    assert "| Dense, QSGD, SIDCo | ? |" in page, "none of the made-up cells has a key"
    for cell in compression.losses():
        if cell.row == "QSGD":
            compression.keep(cell, compression.COSTS, {"curve": [[0, 0, 5.0], [300, 1, 2.0]], "bytes": 1.0}, folder)
            (folder / f"loss-QSGD-{cell.seed}.json").unlink()
    assert f"{older}| Dense, SIDCo |\n" in compression_page.text(folder, folder)


def test_a_product_checked_with_older_code_shows_its_current_value(folder: Path) -> None:
    for label, product in (("Dense", 200 * 0.1), ("QSGD", 99.0)):
        write(folder, "full", label, LINK, 0, target=3.0, product_s=product, time_s=21.0)
    page = compression_page.text(folder, folder)
    assert "| QSGD | 99.0 s (now 10.5 s: predicted before the code changed) | 21.0 s |" in page
    assert "| Dense | 20.0 s | 21.0 s | 1.05 |" in page


def test_variance_of_fitted_levels_on_long_tails_is_measured() -> None:
    found = compression_studies.tails(n=2**14, block=1024)
    assert set(found) == {"normal", "Student's t, 3 degrees of freedom,"}
    assert found["normal"]["ALQ"] < found["normal"]["AMQ"]
    tailed = found["Student's t, 3 degrees of freedom,"]
    assert tailed["ALQ"] / tailed["AMQ"] > 1.5 * found["normal"]["ALQ"] / found["normal"]["AMQ"]
