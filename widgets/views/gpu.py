"""Each rank's GPU: use, power and link traffic. Hidden without a GPU."""

from __future__ import annotations

from typing import Any, ClassVar

from widgets.views._base import Patch, View
from workbench.analysis import format_bytes, measure_gpus
from workbench.analysis.resources.gpus import RankGpu


class Gpu(View):
    """A table with a row per rank."""

    name: ClassVar[str] = "gpu"
    title: ClassVar[str] = "GPUs"
    about: ClassVar[str] = (
        "A row per rank, as nvidia-ml-py reads it: the share of the last 10 seconds in which its GPU worked, its power "
        "in watts, and bytes per second out and in over its links. Links are NVLink, or PCIe without NVLink."
    )
    order: ClassVar[int] = 16
    quiet: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._said: str | None = None

    def update(self, run: Any) -> Patch:
        read = self.fresh(run.timeline.samples).equal("name", "gpu use").any()
        if self._said is not None and not read:
            return Patch()
        said = make_table(measure_gpus(run.timeline)) if read else ""
        if said == self._said:
            return Patch()
        self._said = said
        return Patch(html=said)


def make_table(found: list[RankGpu]) -> str:
    """Returns the table; "" without a GPU.

    >>> make_table([])
    ''
    """
    if not found:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("rank", "use", "power", "sent", "received"))
    cells = (
        (
            str(g.rank),
            _format_value(g.use, "{:.0%}"),
            _format_value(g.power, "{:.0f} W"),
            _format_rate(g.sent),
            _format_rate(g.received),
        )
        for g in found
    )
    rows = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in cells)
    return f'<div class="wb-table"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _format_value(value: float, form: str) -> str:
    return form.format(value).replace("%", " % of the time") if value == value else ""


def _format_rate(value: float) -> str:
    return f"{format_bytes(round(value))}/s" if value == value else ""
