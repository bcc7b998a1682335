"""The present savings and costs of compression, as a sentence and a small table."""

from __future__ import annotations

import math
import time
from html import escape
from typing import Any, ClassVar

from widgets.views._base import Patch, View, ranks_of
from workbench.analysis import BreakEven, Compression, break_even, last_steps, list_stretches, measure_compression
from workbench.analysis.steps.words import format_seconds

LAST_STEPS = 200  # last steps with measurements, at most
OFF = "Compression is off: every element crosses the wire. Choose a compressor to see its savings and costs here."
EARLY = "The savings and costs of {name} appear here after a few steps."
UNMEASURED = "not measured: set measure_every to 20"
SOON = "measured every {every} steps if all ranks keep step"
OVER = "The run has too few steps with {name} to measure its savings and costs."
ALONE = "A single rank sends nothing, so compression saves nothing here."
MARK = {"costs": " wb-found"}


class CompressionBenefit(View):
    """Effective ratio, error, unsent residual and whether compression pays."""

    name: ClassVar[str] = "pays"
    title: ClassVar[str] = "Does compression pay?"
    about: ClassVar[str] = (
        "Whether compression pays on this link, as a sentence and a table: bytes saved, error added, the unsent "
        "residual, and the time of encoding against the saved waiting."
    )
    order: ClassVar[int] = 52

    def __init__(self) -> None:
        super().__init__()
        self._at = 0.0
        self._said = ""

    def update(self, run: Any) -> Patch:
        now, rows = time.monotonic(), len(run.timeline.spans) + len(run.timeline.marks)
        if self._said and (rows == self.cursor or (run.live and now - self._at < 2.0)):
            return Patch()
        self.cursor, self._at = rows, now
        html = _make_page(run)
        if html == self._said:
            return Patch()
        self._said = html
        return Patch(html=html)


def _make_page(run: Any) -> str:
    present = list_stretches(run)[-1]
    if not present.compressor:
        return f'<p class="wb-empty">{OFF}</p>'
    if ranks_of(run) < 2:
        return f'<p class="wb-empty">{ALONE}</p>'
    found, stop = break_even(run), last_steps(run.timeline)[1]
    if found is None or stop <= present.first:
        said = EARLY if run.live else OVER
        return f'<p class="wb-empty">{escape(said.format(name=present.compressor))}</p>'
    what = measure_compression(run.timeline, max(present.first, stop - LAST_STEPS), stop)
    every = int(present.settings.get("measure_every") or 0)
    lines = _make_rows(what, found, every)
    rows = "".join(f'<tr><th scope="row">{a}</th><td>{b}</td><td>{c}</td></tr>' for a, b, c in lines)
    said = f'<p class="wb-verdict{MARK.get(found.verdict, "")}">{escape(found.text)}</p>'
    caption = f"{escape(found.name)} <small>steps {found.steps[0]}-{found.steps[1] - 1}</small>"
    return f'{said}<table class="wb-card wb-saved"><caption>{caption}</caption><tbody>{rows}</tbody></table>'


def _make_rows(what: Compression, found: BreakEven, every: int) -> list[tuple[str, str, str]]:
    sizes = f"{_format_size(what.sent)} sent instead of {_format_size(what.dense)} (fp32), per exchange and rank"
    ratio = ("effective ratio", f"{what.ratio:.3g} &times;", sizes) if what.ratio == what.ratio else None
    beside = f"{format_seconds(found.beside)} of it behind compute" if found.beside > 1e-4 else ""
    dense = f"with Dense {format_seconds(found.dense)} ({found.known})" if found.known else "with Dense: unknown"
    return [
        *([ratio] if ratio else []),
        *_error_rows(what, every),
        ("encode and decode", format_seconds(found.codec), beside),
        ("stalled besides", format_seconds(found.exposed), dense),
    ]


def _error_rows(what: Compression, every: int) -> list[tuple[str, str, str]]:
    if not what.measured:
        return [("error added", "&ndash;", SOON.format(every=every) if every else UNMEASURED)]
    many = f"median of {what.measured} measurement{'s' * (what.measured != 1)}"
    lines = [
        ("relative error of the sum", what.error, many),
        ("cosine to the dense sum", what.cosine, "1: the same direction"),
        ("left unsent", what.residual, "mean residual over the mean of the dense sum"),
    ]
    return [(name, f"{value:.3g}", remark) for name, value, remark in lines if not math.isnan(value)]


def _format_size(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.3g} kB"
