"""Clicks from the user's own file in Criteo's format."""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from workbench.settings import knob
from workbench.tasks._base import Learner, TaskBase, TaskError, shuffled
from workbench.tasks._clicks import Batch, ClickNet, auc, log_loss, lookups, of_rate

INTEGERS, CATEGORIES = 13, 26
COLUMNS = ["label", *(f"I{i}" for i in range(1, INTEGERS + 1)), *(f"C{i}" for i in range(1, CATEGORIES + 1))]
EVERY = 10  # one line in this many is held out, at the end
MISSING = float("nan")


@dataclass(frozen=True, kw_only=True)
class CriteoTSV(TaskBase):
    """The network of ClickThrough on a file of your own in the format of Criteo's click logs; nothing is downloaded.

    Each line has 40 fields separated by tabs: 1 for a click or 0, 13 integers, 26 categories as text. A missing value
    is an empty field. The file is plain or gzip. Integers x become sign(x) log(1 + |x|), each with a flag for a missing
    value. A hash (CRC-32) of each category's text gives one of rows 1 to ids - 1 of its column's table. So some texts
    share a row. Row 0 stands for missing texts. Lines are in order of time, so the last 10 % of the lines read are held
    out. A format error names its line and column. The file must exist on every machine with ranks.

    When to use it: to check a result from planted clicks on real ones.

    Reference: Criteo, "Display Advertising Challenge", 2014, https://www.kaggle.com/c/criteo-display-ad-challenge;
    hashing: Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009,
        https://arxiv.org/abs/0902.2206
    """

    path: str = knob("", live=False, doc="the file, plain or gzip")
    lines: int = knob(200_000, 100, 10**9, log=True, live=False, doc="largest number of lines to read, from the first")
    ids: int = knob(5000, 2, 10_000_000, log=True, live=False, doc="rows of each category's table")
    width: int = knob(16, 1, 512, live=False, doc="features of an embedding")
    hidden: int = knob(64, 1, 4096, live=False, doc="features of each hidden layer")

    lr: ClassVar[float] = 1e-3
    batch: ClassVar[int] = 128
    looks_up: ClassVar[bool] = True

    def build(self) -> Learner:
        return Learner(
            model=lambda: ClickNet(CATEGORIES, self.ids, 2 * INTEGERS, self.width, self.hidden),
            data=self._batches,
            loss=log_loss,
            optimizer=lambda params, lr: torch.optim.Adam(params, lr),
            evaluate=self._evaluated,
            lookups=lookups,
            indexed=True,
            pure=True,
        )

    def refuses(self, batch: int) -> str | None:
        if not self.path:
            return "path='': must name a file in Criteo's format; for clicks without a file take task=ClickThrough"
        return None

    def _table(self) -> Table:
        path = Path(self.path).expanduser()
        if not path.is_file():
            raise TaskError(f"path={self.path!r}: no such file here; put it on every machine with ranks")
        return read(path, path.stat().st_mtime_ns, self.lines, self.ids)

    def _batches(self, rank: int, ranks: int, batch: int, seed: int, used: int = 0) -> Iterator[Batch]:
        table = self._table().part(held_out=False)
        order = shuffled(len(table.clicked), rank, ranks, batch, seed, used)
        return ((table.ids[index].long(), table.numbers[index], table.clicked[index]) for index in order)

    @torch.no_grad()
    def _evaluated(self, model: nn.Module) -> dict[str, float]:
        where = next(model.parameters()).device
        ids, numbers, clicked = (x.to(where) for x in self._table().part(held_out=True))
        scores, losses = [], 0.0
        for some in torch.arange(len(clicked), device=where).split(8192):
            batch = ids[some].long(), numbers[some], clicked[some]
            losses += float(log_loss(model, batch)) * len(some)
            scores.append(model(batch[0], batch[1]))
        loss, rate = losses / len(clicked), float(clicked.double().mean())
        return {"loss": loss, "auc": auc(torch.cat(scores), clicked), "normalised entropy": loss / of_rate(rate)}


class Table(NamedTuple):
    """Lines as numbers: rows of tables `(n, 26)` int32, integers and flags `(n, 26)` float32, clicks `(n,)` float32."""

    ids: Tensor
    numbers: Tensor
    clicked: Tensor

    def part(self, held_out: bool) -> Table:
        """Returns the last 10 % of the lines, or the rest."""
        cut = len(self.clicked) - len(self.clicked) // EVERY
        return Table(*(x[cut:] if held_out else x[:cut] for x in self))


@cache
def read(path: Path, changed: int, lines: int, ids: int) -> Table:
    """Reads the file as a Table. changed: its modification time (for the cache)"""
    labels, integers, categories = array("f"), array("d"), array("i")
    known: list[dict[str, int]] = [{"": 0} for _ in range(CATEGORIES)]
    for number, line in enumerate(_lines(path), 1):
        if len(labels) == lines:
            break
        values = line.rstrip("\r\n").split("\t")
        if values == [""]:
            continue
        if len(values) != len(COLUMNS):
            raise TaskError(
                f"{path}, line {number}: has {len(values)} fields; must have {len(COLUMNS)} with a tab between: a "
                f"label, {INTEGERS} integers and {CATEGORIES} categories (empty if missing)"
            )
        if values[0] not in ("0", "1"):
            raise TaskError(_said(path, number, 0, values, "must be 0 or 1"))
        labels.append(values[0] == "1")
        try:
            integers.extend([int(v) if v else MISSING for v in values[1 : INTEGERS + 1]])
        except (ValueError, OverflowError):
            wrong = next(c for c in range(1, INTEGERS + 1) if values[c] and not _is_integer(values[c]))
            raise TaskError(_said(path, number, wrong, values, "must be an integer, or empty")) from None
        for seen, text in zip(known, values[INTEGERS + 1 :], strict=True):
            row = seen.get(text)
            if row is None:
                row = seen[text] = 1 + zlib.crc32(text.encode()) % (ids - 1)
            categories.append(row)
    if len(labels) < EVERY:
        raise TaskError(f"{path}: has {len(labels)} lines; must have at least {EVERY} to hold out the last 10 %")
    x = torch.tensor(integers, dtype=torch.float64).view(-1, INTEGERS)
    logs = (x.sign() * x.abs().log1p()).nan_to_num(0.0)
    numbers = torch.cat([logs, x.isnan()], 1).float()
    rows = torch.tensor(categories, dtype=torch.int32).view(-1, CATEGORIES)
    return Table(rows, numbers, torch.tensor(labels))


def _lines(path: Path) -> Iterator[str]:
    """Yields the file's lines, decompressed if it begins as gzip does."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as text:
            for line in text:
                number += 1
                yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TaskError(f"{path}, after line {number}: is truncated or damaged gzip ({error})") from None
    except UnicodeDecodeError:
        raise TaskError(f"{path}, after line {number}: is not text; must be plain or gzip") from None


def _is_integer(text: str) -> bool:
    try:
        return abs(int(text)) < 2**63
    except ValueError:
        return False


def _said(path: Path, number: int, column: int, values: list[str], wanted: str) -> str:
    return f"{path}, line {number}, column {column + 1} ({COLUMNS[column]}) = {values[column]!r}: {wanted}"
