"""Makes the recorded runs of this folder: `python -m tests.recorded.make FOLDER`.

Version 0.1.0 made them once, with every member of every family that it shipped. They show that its records still open,
draw and replay after later changes. Do not replace them. Put a record in a later format into a new folder next to them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from workbench import simulate
from workbench.compressors import DGC, Compressor, Dense, TopK
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Freeze, Link, Noisy, Slow, TransientStraggler
from workbench.lab import Lab
from workbench.optimizers import SGD, Optimizer
from workbench.run import Run
from workbench.settings import Change, members
from workbench.strategies import DDP, LocalSGD, Strategy
from workbench.tasks import ByteGPT, ClickThrough, CriteoTSV, Digits

HERE = Path(__file__).parent
EVERY = 4  # steps between two changes
CLICKS = HERE / "clicks.tsv"


class Plan(NamedTuple):
    """The first settings of a run, and its changes, one every `EVERY` steps."""

    experiment: Experiment
    turned: list[tuple[str, Any]]


def of(base: type, *names: str) -> list[Any]:
    """Returns members of a family with their usual knobs."""
    return [members(base)[name].usual() for name in names]


def turns(path: str, values: list[Any]) -> list[tuple[str, Any]]:
    return [(path, value) for value in values]


def plans() -> dict[str, Plan]:
    """Returns the nine runs on real ranks. The tenth is simulated."""
    digits, small = Digits(), {"ranks": 2, "eval_every": 10, "batch": 16}
    wire = Fabric(link=Link(bandwidth=400, latency=0.2))
    together = of(Strategy, "BackupWorkers", "BoundedStaleness", "LocalSGD", "SlowMo", "BMUF", "EASGD", "SelSync")
    outer = of(Strategy, "DiLoCo", "StreamingDiLoCo", "TorchDDP", "QAdam", "OneBitAdam")
    apart = of(Strategy, "Gossip", "StochasticGradientPush", "LowPrecisionDecentralized", "AsyncServer", "ShadowMA",
               "AsyncModelAverage", "Hogwild")  # fmt: skip
    quantised = of(Compressor, "Cast", "Float8", "ByteGrad", "OneBit", "QSGD", "NUQSGD", "ALQ", "AMQ", "SignSGD",
                   "EFSignSGD", "TernGrad")  # fmt: skip
    sparse = of(Compressor, "TopK", "SampledTopK", "Threshold", "RandomK", "SIDCo", "Wangni", "GTopK", "OkTopK",
                "ScaleCom")  # fmt: skip
    others = of(Compressor, "PowerSGD", "ACPSGD", "Accordion", "LGreCo", "Layers", "WarmUp", "ErrorFeedback", "Zen")
    faults = [(Slow(rank=1, factor=2.0),), (Noisy(spread=0.5),), (Freeze(rank=0, seconds=0.3),),
              (TransientStraggler(),), ()]  # fmt: skip
    learning = [("lr_scaled", True), ("lr_warmup", 10), ("clip", 1.0), ("batch", 8), ("clip", 0.0)]
    return {
        "averaging": Plan(Experiment(task=digits, **small), turns("strategy", together)),
        "outer": Plan(Experiment(task=digits, **small), turns("strategy", outer)),
        "apart": Plan(Experiment(task=digits, **small | {"ranks": 4}), turns("strategy", apart)),
        "quantised": Plan(Experiment(task=digits, measure_every=2, **small), turns("compressor", quantised)),
        "sparse": Plan(
            Experiment(task=digits, measure_every=2, **small),
            turns("compressor", [*sparse, DGC(), DGC(momentum=0.0)]),  # the first is refused under Adam
        ),
        "low-rank": Plan(Experiment(task=ByteGPT(), **small | {"ranks": 3}), turns("compressor", others)),
        "faults": Plan(
            Experiment(task=ByteGPT(), pace=20, fabric=wire, **small | {"ranks": 3}),
            [*turns("faults", faults), ("link.bandwidth", 100.0), ("link.latency", 2.0), ("bucket_mb", 0.1)],
        ),
        "optimizers": Plan(
            Experiment(task=ClickThrough(), optimizer=SGD(momentum=0.9), lr=0.01, **small),
            [*turns("optimizer", of(Optimizer, "Adam", "AdamW", "LAMB", "LARS", "TaskOwn")), *learning],
        ),
        "clicks": Plan(
            Experiment(task=CriteoTSV(path=str(CLICKS), lines=400, ids=50), strategy=LocalSGD(every=2), **small),
            [("strategy.every", 4), ("strategy", DDP()), ("compressor", TopK(density=0.1)), ("density", 0.5),
             ("compressor", Dense())],
        ),
    }  # fmt: skip


def simulated() -> Run:
    """Simulates 16 ranks, with replayable changes."""
    e = Experiment(task=ByteGPT(), ranks=16, steps=24, pace=50, fabric=Fabric(link=Link(bandwidth=200, latency=1.0)))
    turned = [("strategy", LocalSGD(every=4)), ("strategy", DDP()), ("compressor", TopK()), ("bucket_mb", 0.25)]
    return simulate(e, changes=[Change(step, *turn) for step, turn in zip((4, 12, 16, 20), turned, strict=True)])


def clicks(lines: int = 400) -> Iterator[str]:
    """Yields random lines in Criteo's format."""
    rng = random.Random(3)
    for _ in range(lines):
        numbers = [str(rng.randrange(100)) if rng.random() < 0.8 else "" for _ in range(13)]
        names = [f"{rng.randrange(40):08x}" if rng.random() < 0.9 else "" for _ in range(26)]
        yield "\t".join([str(int(rng.random() < 0.3)), *numbers, *names])


def recorded(name: str, plan: Plan, path: Path) -> Run:
    """Runs one plan on real ranks."""
    changes = [Change(EVERY * (n + 1), path, value) for n, (path, value) in enumerate(plan.turned)]
    steps = EVERY * (len(changes) + 2)
    e = plan.experiment.set("steps", steps)
    with Lab(ranks=e.ranks, name=f"recorded {name}") as lab:
        run = lab.run(e, changes=changes, out=path)
        run.wait(300)
    if run.state != "done":
        raise SystemExit(f"{name}: {run.state}: {lab.notes}")
    return run


def anonymous(path: Path) -> None:
    """Removes the machine's name and paths from run.json."""
    about = json.loads((path / "run.json").read_text().replace(str(CLICKS), f"tests/recorded/{CLICKS.name}"))
    about["run_dir"] = path.name
    if about["environment"].get("host") != "simulated":
        about["environment"].pop("host", None)
    (path / "run.json").write_text(json.dumps(about, indent=1))


def main(folder: Path, only: list[str]) -> None:
    if not CLICKS.exists():
        CLICKS.write_text("\n".join(clicks()) + "\n")
    for name, plan in plans().items():
        if not only or name in only:
            run = recorded(name, plan, folder / name)
            anonymous(folder / name)
            print(run, run.missing, run.warnings, [c.path for c in run.changes], flush=True)
    if not only or "simulated" in only:
        simulated().save(folder / "simulated")
        anonymous(folder / "simulated")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
