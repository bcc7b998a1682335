"""Shows runs with stages, slices and shards on the page, in two sizes, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import nbformat
import pytest

from tests.browser.conftest import Sheet, opened, served
from tests.browser.legible import cut_off, hard_to_read, touching
from tests.browser.test_looks import TEXTS, sized
from workbench import simulate
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.settings import Change
from workbench.strategies import ZeRO3
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.browser
TASK = ByteGPT(layers=4)
RUNS = {  # the layout at the end of each run, which the dashboard shows; each run changes once
    "pipeline": (Whole(), Change(4, "partition", Pipeline(stages=2))),
    "tensor": (Pipeline(stages=2), Change(4, "partition", Tensor(ways=2))),
    "zero": (Whole(), Change(4, "strategy", ZeRO3())),
}
CELL = "from widgets import Dashboard\nfrom workbench import Run\nshown = iter(['pipeline', 'tensor', 'zero'])"
LEGEND = "[...document.querySelectorAll('[data-view=timeline] .wb-legend li')].filter((e) => e.checkVisibility())"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Sheet]:
    """A notebook whose second cell shows the next of the runs each time it runs."""
    with served(tmp_path_factory.mktemp("across")) as jupyter, opened(jupyter, request) as sheet:
        for name, (way, change) in RUNS.items():
            link = Fabric(link=Link(bandwidth=300.0))
            e = Experiment(task=TASK, ranks=4, batch=16, steps=10, pace=40.0, partition=way, fabric=link, eval_every=0)
            simulate(e, changes=[change]).save(jupyter.folder / name)
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        cells = [nbformat.v4.new_code_cell(c) for c in (CELL, "Dashboard(Run.open(next(shown)))")]
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), jupyter.folder / "across.ipynb")
        sheet.open("across.ipynb")
        sheet.run("shown = iter")
        yield sheet


def seen(sheet: Sheet) -> dict[str, Any]:
    """Returns what the page shows: the views from top to bottom, the timeline's legend, the texts."""
    sheet.page.wait_for_function("document.querySelector('[data-view=timeline]')?.dataset.draws > 0")
    sheet.page.wait_for_timeout(1500)
    return dict(
        sheet.page.evaluate(f"""() => ({{
      views: [...document.querySelectorAll('.wb-panel')].filter((e) => e.checkVisibility()).map((e) => e.dataset.view),
      legend: {LEGEND}.map((e) => e.textContent.trim()),
      said: document.querySelector('[data-view=pipeline]')?.textContent ?? '',
      drawn: document.querySelector('[data-view=mesh]')?.textContent ?? '',
    }})""")
    )


@pytest.mark.parametrize("name", RUNS)
def test_the_layout_of_a_model_is_shown_and_nothing_is_cut_off(page: Sheet, name: str) -> None:
    page.page.set_viewport_size({"width": 1440, "height": 900})
    page.run("next(shown)", keys="Control+Enter")
    found = seen(page)
    views = found["views"]
    assert views.index("memory") == views.index("timeline") + 1, views
    assert ("bubble: waiting for another stage" in found["legend"]) == (name == "pipeline"), found["legend"]
    assert ("Stages are idle for" in found["said"]) == (name == "pipeline")
    assert ("mesh" in views) == (name != "zero"), views
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        page.page.set_viewport_size({"width": 1440, "height": 900})
        page.theme(theme)
        for size in ("large", "small"):
            sized(page, size)
            page.shot(f"across-{name}-{size}-{theme.rpartition(' ')[2].lower()}")
            assert cut_off(page.page, ".twb-dashboard") == []
            assert [pair for texts in TEXTS for pair in touching(page.page, texts)] == []
            assert hard_to_read(page.page) == []
    view = page.page.locator("[data-view=memory]").first
    view.scroll_into_view_if_needed()
    page.shot(f"across-{name}-memory")
