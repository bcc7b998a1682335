"""Three studies for docs/project/compression.md: Accordion and its two ratios, levels at equal bits, Zen's schemes.

Losses of Accordion and of the levels are cells of the compressors' campaign. Rounding errors are measured on gradients
of a real training in one process. Zen's schemes run on real ranks, table by table, next to their formulas.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.ranks import exchange, placed
from tests.sparse_sums import by_formula
from workbench import simulate
from workbench.compressors import Compressor, Zen
from workbench.compressors._schemes import SCHEMES, Sparsity, expected
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.lab import Lab
from workbench.rank import Memory
from workbench.settings import from_plain
from workbench.sim import Costs
from workbench.tasks import ClickThrough, TaskBase


def under_feedback(of: Any) -> dict[str, Any]:
    return {"ErrorFeedback": {"of": of}}


# -- Accordion --

PAIRS: dict[str, tuple[Any, Any]] = {
    "PowerSGD": ({"PowerSGD": {"rank": 4}}, {"PowerSGD": {"rank": 1}}),
    "TopK": ({"TopK": {"density": 0.1}}, {"TopK": {"density": 0.001}}),
}  # gentle, harsh
CHECKS = 20  # steps between two of Accordion's checks


def accordions() -> dict[str, Any]:
    """Returns each pair's two fixed ratios and Accordion between them, by label."""
    found: dict[str, Any] = {}
    for of, (gentle, harsh) in PAIRS.items():
        both = {"Accordion": {"gentle": gentle, "harsh": harsh, "every": CHECKS}}
        for word, codec in (("gentle", gentle), ("Accordion", both), ("harsh", harsh)):
            found[f"{of}: {word}"] = under_feedback(codec)
    return found


# -- levels --

BITS, BLOCKS = 3, (64, 1024, 16384)
FITS = {"fit_first": 20, "fit_second": 100}  # a run has few steps
ROUNDERS: dict[str, dict[str, Any]] = {
    "QSGD": {"norm": "l2"}, "QSGD, norm=max": {"norm": "max"}, "NUQSGD": {"norm": "l2"}, "AMQ": FITS, "ALQ": FITS,
}  # fmt: skip


def rounders() -> dict[str, Any]:
    """Returns the codecs that round to levels, by label, at equal bits."""
    return {
        f"{label}, blocks of {block}": {label.partition(",")[0]: {"bits": BITS, "block": block, **more}}
        for block in BLOCKS for label, more in ROUNDERS.items()
    }  # fmt: skip


def gradients(task: TaskBase, steps: int = 300, every: int = 10) -> list[Tensor]:
    """Returns (n,) gradients of every tenth step of a training in one process."""
    learner = task.build()
    torch.manual_seed(0)
    model = learner.model()
    optimizer = learner.optimizer(model.parameters(), task.lr)
    data, found = iter(learner.data(0, 1, 8, 0)), []
    for step in range(steps):
        optimizer.zero_grad()
        learner.loss(model, next(data)).backward()
        if step % every == 0:
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        optimizer.step()
    return found


def variances(grads: list[Tensor], last: int = 10) -> dict[str, list[float]]:
    """Returns ||C(x) - x||^2 / ||x||^2 of each of the last gradients by label; earlier gradients fit the levels."""
    found: dict[str, list[float]] = {}
    for label, plain in rounders().items():
        codec = from_plain(quick(plain), Compressor)
        memory, parts = Memory(0), placed((len(grads[0]),))
        lost = [float((exchange(codec, x[None], parts, [memory]) - x).square().sum() / x.square().sum()) for x in grads]
        found[label] = lost[-last:]
    return found


def tails(n: int = 2**17, bits: int = BITS, block: int = 8192) -> dict[str, dict[str, float]]:
    """Returns ||C(x) - x||^2 / ||x||^2 of fitted codecs on normal and on long-tailed numbers."""
    rng = torch.Generator().manual_seed(0)
    normal = torch.randn(n, generator=rng)
    chi = torch.randn(3, n, generator=rng).square().mean(0)
    found: dict[str, dict[str, float]] = {}
    for kind, x in (("normal", normal), ("Student's t, 3 degrees of freedom,", normal / chi.sqrt())):
        for label in ("ALQ", "AMQ"):
            codec, memory = from_plain({label: {"bits": bits, "block": block}}, Compressor), Memory(0)
            for _ in range(2):
                out = exchange(codec, x[None], placed((n,)), [memory])
            found.setdefault(kind, {})[label] = float((out - x).square().sum() / x.square().sum())
    return found


def quick(plain: dict[str, Any]) -> dict[str, Any]:
    """Scales the fitting steps down by 10, because only every tenth gradient is seen."""
    ((name, knobs),) = plain.items()
    return {name: {k: max(1, v // 10) if k.startswith("fit_") else v for k, v in knobs.items()}}


# -- Zen --

RANKS, LATENCY = 4, 0.2
IDS = {200.0: (30, 100, 400, 2000, 8000), 20.0: (30, 100, 400, 2000)}  # by Mbit/s, rows of each of eight tables
SETTLE, COUNTED = 2, 4


class Seen(NamedTuple):
    """One scheme on one model. density: of a rank's gradient; wire: median seconds of a step's exchange."""

    mbit: float
    ids: int
    scheme: str
    density: float
    wire: float
    nbytes: float
    model: int


def clicks(ids: int, scheme: str, link: Link) -> Experiment:
    """Returns a run with tables in one bucket; each rank touches 64 random rows of each table per step."""
    task = ClickThrough(fields=8, ids=ids, width=64, hidden=8, skew=0.0)
    return Experiment(
        task=task, ranks=RANKS, batch=64, compressor=Zen(scheme=scheme), bucket_mb=1000.0, pace=30.0,
        fabric=Fabric(link=link), steps=SETTLE + COUNTED, eval_every=0,
    )  # fmt: skip


def looked(run: Any, mbit: float, ids: int, scheme: str) -> Seen:
    """Returns the measurements of a run's exchanges."""
    spans, samples = run.spans, run.samples
    comm = spans[(spans.lane == "comm") & (spans.step >= SETTLE)]
    each = [float((one.t1 - one.t0).sum()) for _, one in comm.groupby(["rank", "step"])]
    sent = float(comm.nbytes.sum()) / RANKS / COUNTED
    dense = samples[samples.name == "density"].value
    return Seen(mbit, ids, scheme, float(dense.mean()) if len(dense) else 0.0, statistics.median(each), sent,
                int(run.details("start", 0)[0][2]["nbytes"]))  # fmt: skip


def schemes() -> Iterator[Seen]:
    """Runs every scheme on every model on real ranks."""
    with Lab(ranks=RANKS, name="zen") as lab:
        for mbit, ids, scheme in [(m, n, s) for m, each in IDS.items() for n in each for s in ("auto", *SCHEMES)]:
            run = lab.run(clicks(ids, scheme, Link(bandwidth=mbit, latency=LATENCY)))
            run.wait(120)
            if run.state != "done":
                raise RuntimeError(f"{scheme} with {ids} ids ended as {run.state}")
            yield looked(run, mbit, ids, scheme)


def said(density: float, model: int, scheme: str, p: int = RANKS) -> int:
    """Returns the expected bytes that a rank sends, by the formula for equally likely rows."""
    n, width = model // 4, 64
    units = n / width
    return expected(scheme, Sparsity(density * units, density * n, round(units), n, 4, units), p)


def crossing(low: str, high: str, p: int, took: Callable[[str, int, float], float]) -> float:
    """Returns the density at which `high` begins to take less than `low`, by bisection."""
    a, b = 1e-4, 1.0
    for _ in range(12):
        middle = (a * b) ** 0.5
        a, b = (middle, b) if took(low, p, middle) < took(high, p, middle) else (a, middle)
    return (a * b) ** 0.5


CROSSINGS = (("gather", "owners"), ("tree", "owners"), ("gather", "dense"), ("owners", "dense"))
COUNTS = (4, 16)  # ranks


def in_virtual_time(scheme: str, p: int, density: float) -> float:
    """Returns the simulated seconds of an exchange with sizes only on a link without latency."""
    e = clicks(8000, scheme, Link(bandwidth=200.0))
    e = replace(e, ranks=p, steps=2, compressor=Zen(scheme=scheme, rows="elements"))
    spans = simulate(e, costs=Costs(density=density), real=False).spans
    mine = spans[(spans["rank"] == 0) & (spans.lane == "comm") & (spans.step == 1)]
    return float((mine.t1 - mine.t0).sum())


def crossings() -> list[dict[str, Any]]:
    """Returns the densities at which schemes cross, by formula and in virtual time."""
    return [
        {"below": a, "above": b, "ranks": p, "formula": crossing(a, b, p, by_formula),
         "simulated": crossing(a, b, p, in_virtual_time)}
        for p in COUNTS for a, b in CROSSINGS
    ]  # fmt: skip


def measure(folder: Path, task: TaskBase, now: dict[str, Any]) -> None:
    """Runs the measurements that are not cells into `folder`; existing results stay."""
    folder.mkdir(parents=True, exist_ok=True)
    todo: dict[str, Callable[[], Any]] = {
        "variance.json": lambda: variances(gradients(task)),
        "tails.json": tails,
        "crossings.json": crossings,
        "schemes.json": lambda: [seen._asdict() for seen in schemes()],
    }
    for name, run in todo.items():
        if not (folder / name).exists():
            print(f"measuring {name}", flush=True)
            (folder / name).write_text(json.dumps({**now, "bits": BITS, "rows": run()}))
