"""Converts spans to boxes on the timeline.

All boxes of a kind form one outline with gaps, a single plotly trace. So 1,000 boxes cost little more than one. A
collective becomes 2 boxes: the wait for the last rank, then the transfer.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from widgets.charts import theme
from widgets.views._base import Columns
from workbench.analysis import PathPiece
from workbench.analysis.steps.collectives import moving_since, send_rates
from workbench.record.timeline import Rows

BROWN = "#8A5A00"


class BoxKind(NamedTuple):
    """A kind of box: its place in a rank's row (rows are 1 apart, downwards) and its look."""

    key: str
    legend: str
    top: float
    bottom: float
    fill: str
    pattern: str = ""
    text: str = ""  # colour of names inside boxes; empty: no names
    listed: bool = True
    edge: str = theme.PAPER  # of a solid box; darker than a light fill, to be visible on white

    def make_trace(self) -> go.Scatter:
        """Returns an empty trace. The page outlines its boxes (`meta.lane`)."""
        pattern = {"shape": self.pattern, "fgcolor": self.fill, "bgcolor": "rgba(0,0,0,0)", "size": 6, "solidity": 0.45}
        return go.Scatter(
            x=[], y=[], mode="lines", fill="toself", fillcolor=self.fill, fillpattern=pattern if self.pattern else None,
            line={"width": 1, "color": self.fill if self.pattern else self.edge}, hoverinfo="skip",
            name=self.legend, showlegend=self.listed, meta={"lane": [self.top, self.bottom], "text": self.text},
        )  # fmt: skip


KINDS = (
    BoxKind("exposed", "exposed: the step is stalled", -0.42, -0.10, theme.VERMILLION, "/"),
    BoxKind("bubble", "bubble: waiting for another stage", -0.42, -0.10, BROWN, "\\"),
    BoxKind("forward", "forward", -0.46, -0.06, theme.SKY, text="#000000", edge=theme.BLUE),
    BoxKind("backward", "backward", -0.46, -0.06, theme.BLUE, text="#ffffff"),
    BoxKind("update", "update", -0.38, -0.06, theme.GREEN, text="#000000"),
    BoxKind("eval", "evaluation", -0.46, -0.06, theme.GREY, "x"),
    BoxKind("switch", "state transfer", -0.46, 0.30, theme.PURPLE, "-"),
    BoxKind("waiting", "waiting for others", 0.10, 0.20, theme.GREY, "|"),
    BoxKind("transfer", "transferring", 0.0, 0.30, theme.ORANGE, text="#000000", edge=BROWN),
    BoxKind("odd", "transferring, odd bucket", 0.0, 0.30, "#F6D48A", text="#000000", listed=False, edge=BROWN),
    BoxKind("codec", "compressing", 0.0, 0.30, theme.GREEN, "."),
    BoxKind("preparing", "adding and copying before an exchange", 0.0, 0.30, theme.GREEN, "-"),
    BoxKind("measuring", "sent to evaluate or to measure compression", 0.0, 0.30, BROWN, "x"),
    BoxKind("port", "port busy", 0.34, 0.42, theme.PURPLE),
    BoxKind("offload", "to or from host or disk", 0.42, 0.50, BROWN, "/"),
    BoxKind("stepped", "update on the host", 0.42, 0.50, theme.GREEN),
    BoxKind("path", "critical path", -0.06, 0.0, theme.INK, edge=theme.INK),
)
STAGES = " in stage "  # part of messages' names between pipeline stages
SENDING = ("transfer", "odd", "measuring", "port", "offload")  # kinds with bytes
_NUMBER = {kind.key: i for i, kind in enumerate(KINDS)}
_LANES = {"wait": "exposed", "eval": "eval", "switch": "switch", "codec": "codec", "port": "port",
          "measuring": "measuring", "offload": "offload"}  # fmt: skip


class Boxes(NamedTuple):
    """Columns per trace, and the names that `code` refers to.

    Each trace has x0, x1, rank, row, code, step and asked. Kinds that send also have nbytes and mbit (Mbit/s; 0: no
    data).
    """

    traces: dict[int, Columns]
    names: list[str]


def boxes_of(
    rows: Rows, index: np.ndarray, last_arrival: np.ndarray, limit: int, dense: np.ndarray | None = None
) -> Boxes:
    """Returns the boxes of `rows`, at most `limit` per kind.

    index: (n,) each row's number in the table of spans
    last_arrival: `(n,)` when the last rank arrived at the row's collective. NaN for other rows
    dense: `(n,)` mask of steps without compression. Their lane "codec" shows preparation
    """
    kinds, names = _find_kinds(rows), _NameTable(rows)
    if dense is not None:
        kinds[(kinds == _NUMBER["codec"]) & dense] = _NUMBER["preparing"]
    begun, mbit = moving_since(rows, last_arrival), np.nan_to_num(send_rates(rows, last_arrival))
    found: dict[int, Columns] = {}
    for number, kind in enumerate(KINDS):
        at = np.flatnonzero(kinds == number)[:limit]
        x0 = begun[at] if kind.key in ("transfer", "odd") else rows.t0[at]
        found[number] = _make_columns(rows, index, at, x0, rows.t1[at], names.number_names(at))
        if kind.key in SENDING:
            found[number] |= {"nbytes": rows.nbytes[at], "mbit": mbit[at]}
    at = np.flatnonzero(rows.equal("lane", "comm") & (last_arrival > rows.t0 + 1e-5))[:limit]
    end = np.fmin(last_arrival[at], rows.t1[at])
    found[_NUMBER["waiting"]] = _make_columns(
        rows, index, at, rows.t0[at], end, names.number_names(at, "waiting for others: ")
    )
    return Boxes(found, names.all_names)


def add_path(found: Boxes, path: list[PathPiece], rank: np.ndarray, row: int) -> None:
    """Adds the critical path. rank: each piece's row; row: any drawn span

    >>> boxes = Boxes({}, ["forward"])
    >>> add_path(boxes, [PathPiece(3, -1, "network", 1.0, 2.0)], np.array([1]), 7)
    >>> boxes.names, boxes.traces[len(KINDS) - 1]["rank"].tolist()
    (['forward', 'critical path: network'], [1])
    """
    texts = [f"critical path: {p.cause}" for p in path]
    found.names.extend(dict.fromkeys(texts))
    code = np.array([found.names.index(t) for t in texts], np.int64)
    step, begin, end = (np.array([p[i] for p in path]) for i in (0, 3, 4))
    found.traces[_NUMBER["path"]] = {"x0": begin, "x1": end, "row": np.full(len(path), row), "code": code,
                                     "rank": rank, "step": step, "asked": begin}  # fmt: skip


def _make_columns(rows: Rows, index: np.ndarray, at: np.ndarray, x0: np.ndarray, x1: np.ndarray, code: Any) -> Columns:
    rest: dict[str, np.ndarray] = {"rank": rows.rank[at], "step": rows.step[at], "asked": rows.asked[at]}
    return {"x0": x0, "x1": x1, "row": index[at], "code": code, **rest}


def _find_kinds(rows: Rows) -> np.ndarray:
    """Returns the number of each row's kind; -1: not drawn."""
    out = np.full(len(rows), -1)
    for lane, key in _LANES.items():
        out[rows.equal("lane", lane)] = _NUMBER[key]
    out[(out == _NUMBER["exposed"]) & _between_stages(rows)] = _NUMBER["bubble"]
    compute, comm = rows.equal("lane", "compute"), rows.equal("lane", "comm")
    out[compute] = _NUMBER["forward"]
    for name in ("backward", "update"):
        out[compute & rows.phase(name)] = _NUMBER[name]
    out[(out == _NUMBER["offload"]) & rows.phase("update")] = _NUMBER["stepped"]
    names = rows.coded("name")
    odd = np.array([_is_odd(text) for text in names.words.texts], bool)
    out[comm] = np.where(odd[names.codes[comm]], _NUMBER["odd"], _NUMBER["transfer"])
    return out


def _between_stages(rows: Rows) -> np.ndarray:
    names = rows.coded("name")
    found = np.array([STAGES in text for text in names.words.texts], bool)
    return found[names.codes]


def _is_odd(name: str) -> bool:
    number = re.search(r"(\d+)\D*$", name)
    return bool(number and int(number[1]) % 2)


class _NameTable:
    def __init__(self, rows: Rows) -> None:
        self._coded = rows.coded("name")
        self._number: dict[str, int] = {}

    def number_names(self, at: np.ndarray, prefix: str = "") -> np.ndarray:
        words, back = np.unique(self._coded.codes[at], return_inverse=True)
        texts = [prefix + str(self._coded.words.texts[w]) for w in words]
        mine = np.array([self._number.setdefault(t, len(self._number)) for t in texts], "i8")
        return mine[back]

    @property
    def all_names(self) -> list[str]:
        return list(self._number)
