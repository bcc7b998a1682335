"""A cell: one simulated run and its few numbers, which are kept as a small JSON file.

The file's name describes the run. Its key is a hash of all inputs: the experiment, the costs of compute, the strategy's
code without prose and imports. A cell with an unchanged key is not run again. This module knows neither the campaign of
the cell nor the page that shows it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.methods import FAST, LINK, SLOW, SLOW_RANK, STUMBLE, method
from tests.bench.source import code
from workbench import analysis, simulate
from workbench.compressors import Compressor, inside
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link, Slow, TransientStraggler
from workbench.optimizers import Optimizer
from workbench.policies import ByHand, PolicyBase
from workbench.run import Run
from workbench.settings import Change, KnobError, from_plain, knobs, to_plain
from workbench.sim import AlphaBeta, Costs, Duration, Line
from workbench.strategies import DDP
from workbench.tasks import ByteGPT, TaskBase

DATA = Path(__file__).parents[2] / "docs" / "data" / "strategies"
MEANING = 1  # increased when a number that is read from a run changes its meaning
RANKS, SEEDS = 4, (0, 1, 2)
TASK = ByteGPT(layers=2, width=64, heads=4, context=32)
STEPS, EVERY = 300, 20  # steps of a cell; steps between two evaluations
KEPT = ("forward", "backward", "update", "codec", "wire", "late", "between", "evaluate", "parts", "density")  # costs
LITTLE = 0.01  # of the model's bytes: a step that sends less has not synchronised


def fabric(where: str, seed: int) -> Fabric:
    """Returns the network and the faults of a table, by name."""
    link = Link(bandwidth=100.0, latency=5.0) if where == LINK else Link(bandwidth=10_000.0, latency=0.05)
    often = TransientStraggler(probability=0.1, factor=5.0, seed=seed)
    faults = {SLOW: (Slow(rank=SLOW_RANK, factor=2.0),), STUMBLE: (often,)}
    return Fabric(link=link, faults=faults.get(where, ()))


FABRICS = (FAST, LINK, SLOW, STUMBLE)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One simulated run: a strategy by name, its row in the tables, and its other inputs.

    after: steps of plain DDP before the strategy takes over, with its learning rate
    rate:  the learning rate as a multiple of the task's
    real:  real tensors, or sizes only
    codec: the compressor as plain data if it is not the method's, such as {"TopK": {"density": 0.01}}
    bucket_mb: the size of a bucket
    optimizer: as plain data, if it is not the task's own
    policy: the policy that changes knobs, as plain data, if there is one; batch: per rank, 0 is the task's own
    """

    part: str
    row: str
    where: str
    seed: int
    method: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    task: TaskBase = TASK
    fabric: Fabric = Fabric()
    ranks: int = RANKS
    steps: int = STEPS
    every: int = EVERY
    rate: float = 1.0
    after: int = 0
    real: bool = True
    codec: Mapping[str, Any] | str = ""
    bucket_mb: float = 1.0
    optimizer: Mapping[str, Any] | str = "TaskOwn"
    policy: Mapping[str, Any] | str = "ByHand"
    batch: int = 0

    @property
    def path(self) -> Path:
        """The cell's file in the data folder."""
        words = f"{self.part} {self.row} {self.where} {self.seed}"
        return Path(re.sub(r"[^\w.]+", "-", words).strip("-") + ".json")

    @property
    def work(self) -> int:
        """Steps of all ranks times layers, roughly proportional to the cell's cost."""
        steps = self.ranks * self.steps * getattr(self.task, "layers", 1)
        return steps if self.real else steps // 20

    def asked(self) -> tuple[Experiment, list[Change]]:
        """Returns the experiment and its changes. Raises KnobError."""
        strategy = method(self.method).strategy(self.knobs)
        codec = from_plain(self.codec, Compressor, "compressor") if self.codec else method(self.method).codec()
        lr = self.rate * self.task.lr
        optimizer = from_plain(self.optimizer, Optimizer, "optimizer")
        e = Experiment(
            task=self.task, strategy=strategy, fabric=self.fabric, ranks=self.ranks, steps=self.steps, seed=self.seed,
            eval_every=self.every, lr=lr, compressor=codec, bucket_mb=self.bucket_mb,
            optimizer=optimizer, policy=from_plain(self.policy, PolicyBase, "policy"), batch=self.batch,
        )  # fmt: skip
        if not self.after:
            return e.checked(), []
        changes = [
            Change(self.after, "lr", lr),
            *([Change(self.after, "strategy", strategy)] if strategy != DDP() else []),
        ]
        return Experiment.read({**e.plain(), "strategy": "DDP", "lr": self.task.lr}).checked(), changes


def key(cell: Cell, costs: Costs) -> str:
    """Returns the hash of a cell's inputs as 16 hex digits. Raises KnobError if the cell cannot run."""
    experiment, changes = cell.asked()
    policies = () if experiment.policy == ByHand() else (experiment.policy,)
    what = {
        "experiment": told(experiment), "changes": [[c.at_step, c.path, told(c.value)] for c in changes],
        "costs": costs_as_plain(costs), "real": cell.real, "after": cell.after, "meaning": MEANING,
        "code": [code(type(x)) for x in (experiment.strategy, *inside(experiment.compressor), *policies)],
    }  # fmt: skip
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def told(value: Any) -> Any:
    """Returns a setting as plain data without default values, so that new knobs and new names change nothing.

    >>> told(Experiment(ranks=3, fabric=Fabric(link=Link(latency=5.0))))
    {'Experiment': {'fabric': {'Fabric': {'link': {'Link': {'latency': 5.0}}}}, 'ranks': 3}}
    """
    if not is_dataclass(value) or isinstance(value, type):
        return [told(v) for v in value] if isinstance(value, (list, tuple)) else to_plain(value)
    usual = {k.name: k.default for k in knobs(type(value))}
    mine = {f.name: getattr(value, f.name) for f in fields(value)}
    name = next(iter(getattr(type(value), "formerly_called", ())), type(value).__name__)
    return {name: {k: told(v) for k, v in mine.items() if k not in usual or v != usual[k]}}


# -- running and keeping --


def measured(cell: Cell, costs: Costs) -> dict[str, Any]:
    """Runs a cell and returns its numbers, or the reason why it cannot run."""
    try:
        experiment, changes = cell.asked()
        run = simulate(experiment, changes=changes, costs=costs, real=cell.real)
    except KnobError as reason:
        return {"refused": str(reason)}
    return read(run, cell.after)


def read(run: Run, after: int = 0) -> dict[str, Any]:
    """Returns the numbers to keep of a run. Bytes and synchronisations count from step `after` on.

    samples_per_s: of all ranks together, until the first rank has made all its steps
    bytes:         sent by one rank in one step, mean over ranks and steps; busiest: by the rank that sends most
    compute:       mean seconds of a forward, a backward and an update
    largest:       the most bytes that one rank sent in any one step
    synced:        share of steps in which rank 0 sent more than 1 % of the model
    curve:         (step, seconds, held-out loss) of every evaluation; accuracy: the last one's, if any
    """
    e, tl = run.experiment, run.timeline
    spans = tl.spans.rows()
    steps = spans[spans.equal("lane", "step")]
    done = min(float(steps.t1[steps.rank == r].max()) for r in np.unique(steps.rank))
    made = int((steps.t1 <= done + 1e-12).sum())
    sent = analysis.bytes_per_step(tl, after, e.steps + 1)
    model = int(run.details("start", 0)[0][2]["nbytes"])
    rows = tl.samples.rows()
    held, right = rows[rows.equal("name", "held_out")], rows[rows.equal("name", "held_out:accuracy")]
    work = spans[spans.equal("lane", "compute")]
    phases = [work[work.equal("name", phase)] for phase in ("forward", "backward", "update")]
    found: dict[str, Any] = {
        "compute": [rounded(float((p.t1 - p.t0).sum()) / max(1, len(steps))) for p in phases],
        "samples_per_s": rounded(e.batch * made / done),
        "bytes": rounded(float(sent.sum()) / e.ranks / (e.steps - after)),
        "busiest": rounded(float(sent.sum(axis=0).max()) / (e.steps - after)),
        "largest": int(sent.max(initial=0)),
        "synced": rounded(float((sent[: e.steps - after, 0] > LITTLE * model).mean())),
        "model": model,
        "curve": [[int(s), rounded(t), rounded(v)] for s, t, v in zip(held.step, held.t, held.value, strict=True)],
    }
    return {**found, **({"accuracy": rounded(float(right.value[-1]))} if len(right) else {})}


def rounded(x: float) -> float:
    """Rounds to six digits, to keep files short."""
    return float(f"{x:.6g}")


def reached(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """Returns the interpolated seconds until the held-out loss is `target`; None if it never is.

    >>> reached([[0, 0.0, 3.0], [20, 1.0, 2.0]], 2.5)
    0.5
    """
    for (_, t0, high), (_, t1, low) in pairwise(curve):
        if low <= target:
            share = min(1.0, max(0.0, (high - target) / (high - low))) if high > low else 1.0
            return float(t0 + (t1 - t0) * share)
    return None


class Results:
    """Measured cells by part, row and place; refused cells separately."""

    def __init__(self, files: Iterable[Mapping[str, Any]]) -> None:
        self.files = [dict(f) for f in files]
        self._found: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
        self.refused: dict[tuple[str, str], str] = {}
        for f in self.files:
            if "refused" in f["found"]:
                self.refused[f["part"], f["row"]] = f["found"]["refused"]
            else:
                self._found.setdefault((f["part"], f["row"], f["where"]), {})[f["seed"]] = f["found"]

    @classmethod
    def of(cls, folder: Path = DATA) -> Results:
        """Reads all cells in a folder."""
        read = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
        return cls(f for f in read if "found" in f)

    def seeds(self, part: str, row: str, where: str) -> dict[int, dict[str, Any]]:
        """Returns the results by seed; empty without any measurement."""
        return dict(sorted(self._found.get((part, row, where), {}).items()))

    def pairs(self, part: str, row: str, base: str, where: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Returns (result in `row`, result in `base`) of every seed that both have."""
        mine, others = self.seeds(part, row, where), self.seeds(part, base, where)
        return [(mine[s], others[s]) for s in mine if s in others]


def kept(cell: Cell, costs: Costs, folder: Path = DATA) -> dict[str, Any] | None:
    """Returns the earlier result of a cell if its inputs are unchanged."""
    path = folder / cell.path
    if not path.exists():
        return None
    held = json.loads(path.read_text())
    try:
        return dict(held) if held["key"] == key(cell, costs) else None
    except KnobError as reason:
        return dict(held) if held["found"].get("refused") == str(reason) else None


def keep(cell: Cell, costs: Costs, found: Mapping[str, Any], folder: Path = DATA, **more: Any) -> None:
    """Writes a cell's file."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"part": cell.part, "row": cell.row, "where": cell.where, "seed": cell.seed, "method": cell.method}
    try:
        about["key"] = key(cell, costs)
    except KnobError:
        about["key"] = ""
    path = folder / cell.path
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({**about, **more, "found": found}))
    fresh.replace(path)


def costs_as_plain(costs: Costs) -> dict[str, Any]:
    """Returns costs as JSON without unmeasured values, so that a new kind of cost changes no kept file."""
    usual = asdict(Costs())
    plain = {k: v for k, v in asdict(costs).items() if k in KEPT or v != usual[k]}
    return json.loads(json.dumps({**plain, "codec": dict(costs.codec)}))


def costs_from_plain(plain: Mapping[str, Any]) -> Costs:
    phases = {k: tuple(Duration(*d) for d in plain[k]) for k in ("forward", "backward", "update")}
    tuples = {name: {k: tuple(Line(*p) if isinstance(p, list) else p for p in v)
                     for k, v in plain.get(name, {}).items()} for name in ("codec", "beside", "coder")}  # fmt: skip
    wires = {name: AlphaBeta(*plain[name]) for name in ("wire", "linked", "post") if name in plain}
    return Costs(**{**plain, **phases, **tuples, **wires})
