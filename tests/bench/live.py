"""Measures how quickly a change acts, the cost of recording, and the time to the first loss.

python -m tests.bench.live --out docs/data/live.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from workbench import Experiment, Lab
from workbench.engine.record.recorder import Recorder
from workbench.run import Run
from workbench.tasks import ByteGPT

PATHS: list[tuple[str, Any]] = [("bucket_mb", (0.3, 3.0)), ("lr", (1e-3, 4e-3)), ("link.latency", (0.0, 0.2))]


def first_loss() -> tuple[float, list[str]]:
    """Returns seconds from `Lab(ranks=4)` to the first training loss, and the texts shown until then."""
    began = time.monotonic()
    lab = Lab(ranks=4, name="first")
    run = lab.run(Experiment(task=ByteGPT()))
    shown: list[str] = []
    while not (run.timeline.samples.rows().name == "loss").any():
        if not shown or shown[-1] != repr(lab):
            shown.append(repr(lab))
        time.sleep(0.02)
    took = time.monotonic() - began
    lab.stop()
    lab.close()
    return took, shown


def latencies(lab: Lab, strategy: Any, count: int, out: Path) -> dict[str, Any]:
    """Measures the time from `lab.set` to the step of effect by the record's clock, and the lengths of steps."""
    began = relayed(lab)
    run = lab.run(Experiment(task=ByteGPT(), strategy=strategy), out=out)
    _until(lambda: (run.timeline.samples.rows().name == "loss").sum() > 40)
    rng = random.Random(1)
    turns = []
    for _ in range(count):
        path, (low, high) = rng.choice(PATHS)
        change = lab.set(path, rng.uniform(low, high))
        if not change.wait(30):
            raise RuntimeError(f"not answered: {change}")
        turns.append(change.id)
        time.sleep(rng.uniform(0.0, 0.15))
    lab.stop()
    run.wait(30)
    rows = run.marks[run.marks.name == "change"]
    epoch = json.loads((run.path / "run.json").read_text())["epoch"]
    asked = [json.loads(row.detail)["requested_at"] - epoch for row in rows.itertuples()]
    late = [t - asking for t, asking in zip(rows.t, asked, strict=True)]
    s = run.spans
    looks = s[(s.lane == "eval") & (s["rank"] == 0)]
    held_up = [bool(((looks.t0 < t) & (looks.t1 > asking)).any()) for t, asking in zip(rows.t, asked, strict=True)]
    steps = s[(s.lane == "step") & (s["rank"] == 0)]
    lasted = list(steps.t1 - steps.t0)
    return {"recording": recording(run, relayed(lab) - began), "late": late, "held_up": held_up, "steps": lasted,
            "every": getattr(strategy, "every", 1)}  # fmt: skip


def relayed(lab: Lab) -> float:
    """Returns the CPU seconds of a lab's relay so far, over all its runs."""
    return lab.cluster.row_subscriber.seconds if lab.cluster.row_subscriber else 0.0


def recording(run: Run, relaying: float) -> dict[str, float]:
    """Returns CPU seconds of recording and spooling (all ranks), of relaying and of the run's processes."""
    v = run.timeline.samples.rows()
    total = {n: float(v.value[v.name == n].sum()) for n in ("cpu_recording", "cpu_process")}
    rows = len(run.timeline.spans) + len(run.timeline.samples)
    return {**total, "cpu_appending": rows * append_cost(), "cpu_relaying": relaying, "rows": rows}


def append_cost() -> float:
    """Returns the CPU seconds of the writing thread per row."""
    recorder = Recorder(0)
    began = time.thread_time()
    for step in range(100_000):
        recorder.span(step, "comm", "all_reduce bucket 3", 0.0, 0.0, 0.0, 0)
    took = (time.thread_time() - began) / 100_000
    recorder.close()
    return took


def _until(ask: Any, within: float = 60.0) -> None:
    end = time.monotonic() + within
    while not ask():
        if time.monotonic() > end:
            raise TimeoutError("waited in vain")
        time.sleep(0.02)


def main() -> None:
    from workbench.strategies import DDP, LocalSGD

    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--runs", type=Path, default=Path("runs"))
    ask.add_argument("--count", type=int, default=100)
    a = ask.parse_args()
    stamp = f"{time.time():.0f}"
    starts = [first_loss() for _ in range(3)]
    found: dict[str, Any] = {"first_loss": [s for s, _ in starts], "shown": starts[-1][1]}
    print(f"Lab(ranks=4) to first loss: {', '.join(f'{s:.1f} s' for s, _ in starts)}", flush=True)
    with Lab(ranks=4, name="live") as lab:
        for strategy in (DDP(), LocalSGD(every=8)):
            name = type(strategy).__name__
            found[name] = latencies(lab, strategy, a.count, a.runs / f"live-{stamp}-{name}")
            late = sorted(found[name]["late"])
            print(
                f"{name}: change acts after {statistics.median(late) * 1e3:.0f} ms (median), "
                f"{late[int(0.99 * (len(late) - 1))] * 1e3:.0f} ms (p99); "
                f"step {statistics.median(found[name]['steps']) * 1e3:.0f} ms",
                flush=True,
            )
            cost = found[name]["recording"]
            share = (cost["cpu_recording"] + cost["cpu_appending"] + cost["cpu_relaying"]) / cost["cpu_process"]
            print(f"{name}: recording, spooling and relaying cost {share:.2%} of the run's CPU time", flush=True)
    if a.out:
        a.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
