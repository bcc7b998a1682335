"""Chooses a pipeline on the page while ranks train: its knobs appear, impossible choices are grey with a reason."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest

from tests.browser.conftest import Sheet

pytestmark = pytest.mark.browser
RUN = """from workbench import ByteGPT, Experiment, Lab
lab = Lab(ranks=2)
task = ByteGPT(layers=2, width=32, heads=4, context=32)
run = lab.run(Experiment(task=task, ranks=2, steps=0, pace=60, eval_every=0))
lab"""


def options(sheet: Sheet, path: str) -> dict[str, tuple[bool, str]]:
    """Returns the choices of a control by label: (whether greyed, its tooltip)."""
    found: list[Any] = (
        sheet.control(path)
        .locator("select")
        .first.evaluate(
            "(e) => [...e.options].map((o) => [o.textContent, o.classList.contains('twb-refused'), o.title])"
        )
    )
    return {text: (grey, title) for text, grey, title in found}


def test_a_pipeline_is_chosen_on_the_page_and_impossible_choices_are_grey(sheet: Sheet) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(RUN)], metadata=kernel)
    nbformat.write(book, sheet.jupyter.folder / "stages.ipynb")
    sheet.page.set_viewport_size({"width": 1440, "height": 900})
    sheet.open("stages.ipynb")
    sheet.run("lab = Lab(ranks=2)")
    sheet.past(3)
    before = options(sheet, "partition")
    assert {"Whole", "Pipeline", "Tensor"} <= before.keys() and not any(grey for grey, _ in before.values())
    assert not options(sheet, "strategy")["LocalSGD"][0]
    sheet.control("partition").locator("select").first.select_option(label="Pipeline")
    sheet.page.locator("[data-view=mesh]").wait_for(state="visible")
    sheet.control("partition.schedule").wait_for()
    schedules = {name.partition(" ")[0] for name in options(sheet, "partition.schedule")}
    assert {"OneFOneB", "GPipe", "ZeroBubble"} <= schedules
    grey = {name.partition(" ")[0]: title for name, (is_grey, title) in options(sheet, "strategy").items() if is_grey}
    assert "ShadowSync" in grey and not {"LocalSGD", "Hogwild"} & grey.keys(), "Hogwild comes with a whole model"
    assert "ranks also exchange in the background; take partition=Whole() with it" in grey["ShadowSync"]
    sheet.past(sheet.step() + 3)
    sheet.shot("partition-controls")
