"""Makes consecutive steps of a run a run of their own."""

from __future__ import annotations

import numpy as np

from workbench.record.timeline import Rows, Table, Timeline

STANDING = ("examples", "lr", "memory ")  # begin the names of samples recorded only when they change


def cut_segment(tl: Timeline, first: int, stop: int) -> Timeline:
    """Returns steps `[first, stop)`, all earlier marks and earlier samples that still hold."""
    cut = Timeline()
    for kind in ("spans", "samples", "marks"):
        rows = tl.table(kind).rows()
        within = rows.step >= first
        if kind == "samples" and len(rows):
            coded = rows.coded("name")
            within |= np.array([word.startswith(STANDING) for word in coded.words.texts], bool)[coded.codes]
        _extend_table(cut.table(kind), rows[(rows.step < stop) & (within | (kind == "marks"))])
    return cut


def _extend_table(table: Table, rows: Rows) -> None:
    if len(rows):
        table.extend({k: rows.coded(k) if k in table.words else getattr(rows, k) for k in table.types})
