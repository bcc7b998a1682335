"""Compares predicted with measured steps of a Llama on four real ranks, under every strategy and compressor.

    python -m tests.bench.llama --out docs/data/llama.json [--only WORD ...] [--list] [--predict] [--calibrate NAME ...]

The model is a small, untrained one of transformers. Calibration runs: DDP on a Link that no setting has, the same with
messages too short for that Link, each compressor on it, and once each partition or strategy with its own arithmetic.

Every setting is a separate run. The benchmark resumes: measurements and calibrations in the file are not repeated,
except those named with --calibrate. A setting that fails is reported, and the next start tries it again. With --predict
no setting is measured: the file's settings are predicted again from its calibrations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from tests.bench import beside
from tests.bench.cells import costs_as_plain, costs_from_plain
from tests.bench.methods import method
from tests.bench.words import Goal
from workbench import Experiment, Lab, simulate
from workbench.compressors import Cast, Compressor, TopK, Zen
from workbench.fabric import Fabric, Link
from workbench.partitions import Pipeline, Tensor
from workbench.record.store import write_atomically
from workbench.run import Run
from workbench.settings import Change, KnobError, members
from workbench.sim import Costs
from workbench.strategies import KFAC, Strategy
from workbench.tasks import Colwise, Rowwise, Task

RANKS, SETTLE, COUNTED = 4, 5, 24  # steps before counting; whole rounds of every strategy after it
PACE = 200.0  # ms of a step's compute on a whole model, which four ranks on two cores can keep
WORDS, CONTEXT, BATCH = 256, 32, 4
ASKED, WORST = 0.03, 0.10
LONGEST = 300.0  # seconds; Newton's runs, the longest, take less than three minutes
WRAPPERS = {"ErrorFeedback", "WarmUp", "Layers", "Dense"}  # their results depend on the wrapped compressor
LINKS = (Link(bandwidth=100, latency=0.5), Link(bandwidth=1000, latency=2.0))


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
    ))  # fmt: skip


def _data(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randint(0, WORDS, (BATCH, CONTEXT + 1), generator=rng) for _ in range(16)]


def _loss(model: Any, text: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(text[:, :-1]).logits.flatten(0, 1), text[:, 1:].flatten())


def _split(model: Any) -> dict[str, Colwise | Rowwise]:
    """Returns the parts that AsyncDrop's sub-models can leave out: features between a block's matrices."""
    return {
        "model.layers.*.mlp.gate_proj": Colwise(), "model.layers.*.mlp.up_proj": Colwise(),
        "model.layers.*.mlp.down_proj": Rowwise(),
    }  # fmt: skip


def _lookups(text: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the rows that ShadowSync's trainers request from its servers."""
    return {"model.embed_tokens.weight": text[:, :-1]}


def _optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


KNOWN = Experiment(
    task=Task(model=_model, data=_data, loss=_loss, optimizer=_optimizer, pure=True), ranks=RANKS, pace=PACE,
    steps=SETTLE + COUNTED, eval_every=0, bucket_mb=0.5, fabric=Fabric(link=Link(bandwidth=300, latency=0.2)),
)  # fmt: skip
BF16 = Cast(to="bf16")
SPREAD = {
    "1F1B, 2 stages, bf16 between": Pipeline(stages=2, micros=4, activations=BF16, gradients=BF16),
    "1F1B, 4 stages, top-k 10 % between": Pipeline(stages=4, micros=BATCH, activations=TopK(density=0.1)),
    "slices, 2 ways, bf16 inside": Tensor(ways=2, activations=BF16, gradients=BF16),
}


HALVES = {"TopK": ("bucket_mb", 0.25)}  # set in mid-calibration: a codec's fit needs two sizes
WARM = 4  # warm-up steps if the usual number exceeds the measured steps
SHORTER: dict[str, dict[str, Any]] = {name: {"warmup": WARM} for name in ("OneBitAdam", "PostLocalSGD", "QAdam")}
SHORTER["Newton"] = {"iterations": 3}  # each takes as long as another method's pass
LOOKS_UP = replace(KNOWN.task, lookups=_lookups)
TASKS = {"AsyncDrop": replace(KNOWN.task, split=_split)}
TASKS |= dict.fromkeys(("ShadowSync", "ShadowSyncBMUF", "ShadowSyncMA"), LOOKS_UP)


def compressors() -> dict[str, Compressor]:
    """Returns each shipped compressor by its bare name, except wrappers."""
    found = {name: cls for name, cls in members(Compressor).items() if cls.__module__.startswith("workbench.")}
    return {name: cls.usual() for name, cls in found.items() if name not in WRAPPERS}


def strategies() -> dict[str, Strategy]:
    """Returns each shipped strategy that can be simulated, with its measured knobs."""
    found = {name: cls for name, cls in members(Strategy).items() if cls.__module__.startswith("workbench.")}
    knobs = {name: {**method(name).knobs[0], **SHORTER.get(name, {})} for name in found}
    return {name: method(name).strategy(knobs[name]) for name, cls in found.items() if not cls.opaque}


def settings() -> Iterator[tuple[str, Experiment]]:
    """Yields the experiments to predict, by name; none is a calibration run."""
    slow, fast = (replace(KNOWN, fabric=Fabric(link=link), bucket_mb=1.0) for link in LINKS)
    for name, strategy in strategies().items():
        codec = method(name).codec()
        task = TASKS.get(name, KNOWN.task)
        yield f"{name}, {_wire(slow)}", replace(slow, strategy=strategy, compressor=codec, task=task)
    for name, compressor in compressors().items():
        yield f"DDP, {name}, {_wire(fast)}", replace(fast, compressor=compressor)
    for name, partition in SPREAD.items():
        yield f"{name}, {_wire(slow)}", replace(slow, partition=partition, pace=RANKS * PACE)
    for e in (slow, fast):
        yield f"DDP, TopK, buckets of 0.25 MB, {_wire(e)}", replace(e, bucket_mb=0.25, compressor=TopK.usual())


def calibrations() -> dict[str, Experiment]:
    """Returns the runs that measure costs, by name: each adds the costs of one setting."""
    short = replace(KNOWN, compressor=TopK.usual(), bucket_mb=0.25)  # on this Link they should be shorter than they are
    found = {"DDP": KNOWN, "short messages": short}
    found |= {name: replace(KNOWN, compressor=compressor) for name, compressor in compressors().items()}
    ways = {"KFAC": KFAC(), "Newton": strategies()["Newton"]}
    return found | {name: replace(KNOWN, strategy=way) for name, way in ways.items()}


def _wire(e: Experiment) -> str:
    return f"{e.fabric.link.bandwidth:g} Mbit/s, {e.fabric.link.latency:g} ms"


def _real(e: Experiment) -> bool:
    """Whether it reads values. Zen chooses per bucket by its share of nonzeros, so one common share misleads."""
    return method(type(e.strategy).__name__).real or isinstance(e.compressor, Zen)


class Campaign:
    """The measurements so far, and the lab that makes the missing ones."""

    def __init__(self, out: Path | None, ran: Callable[..., Run]) -> None:
        self._out, self._ran = out, ran
        self.failed: list[str] = []
        self.found: dict[str, Any] = {"costs": {}, "rows": []}
        if out and out.exists():
            self.found = json.loads(out.read_text())

    def costs(self, needed: Iterable[str] = ()) -> Costs:
        """Returns the costs of DDP, and of all calibrations or the needed ones."""
        wanted = calibrations()
        known = self.found["costs"]
        for name in dict.fromkeys(("DDP", "short messages", *(needed or wanted))):
            if name not in known:
                known[name] = costs_as_plain(Costs.measured(_longer(self._ran, wanted[name], HALVES.get(name))))
                self._keep()
                print(f"calibrated: {name}", flush=True)
        every = {name: costs_from_plain(plain) for name, plain in known.items()}
        costs = every["DDP"]
        for name in dict.fromkeys(("short messages", *every)):  # first, so that each codec has its own prices
            costs = costs | every[name]
        return costs

    def predict(self) -> None:
        """Predicts the measured settings again."""
        costs, every = self.costs(), dict(settings())
        for row in self.found["rows"]:
            if "measured" in row:
                e = every[row["setting"]]
                row["predicted"] = beside.seconds(simulate(e, costs=costs, real=_real(e)))
                print(f"{row['setting']}: {row['predicted'] / row['measured'] - 1:+.1%}", flush=True)
                self._keep()

    def measure(self, name: str, e: Experiment, costs: Costs, real: bool = False) -> None:
        """Measures one setting, unless the file has it."""
        if any(row["setting"] == name for row in self.found["rows"]):
            return
        try:
            expected = beside.seconds(simulate(e, costs=costs, real=real))
            row = {"setting": name, "predicted": expected, "measured": beside.seconds(_done(self._ran(e)))}
        except KnobError as error:
            row = {"setting": name, "refused": str(error)}
        except Exception as error:  # a setting that fails must not stop the next ones
            self.failed.append(name)
            return print(f"{name}: failed with {type(error).__name__}: {error}", flush=True)
        self.found["rows"].append(row)
        self._keep()
        off = f"{row['predicted'] / row['measured'] - 1:+.1%}" if "measured" in row else row["refused"]
        print(f"{name}: {off}", flush=True)

    def _keep(self) -> None:
        if self._out:
            write_atomically(self._out, json.dumps(self.found, indent=1))  # complete whenever this process is killed


def _longer(ran: Callable[..., Run], e: Experiment, then: tuple[str, Any] | None = None) -> Run:
    """Runs twice as many steps, with a knob set in the second half."""
    changes = [Change(e.steps, *then)] if then else []
    return _done(ran(replace(e, steps=2 * e.steps), changes))


def _done(run: Run) -> Run:
    if run.state != "done":
        raise RuntimeError(f"{run.experiment.strategy}, {run.experiment.compressor} ended as {run.state}")
    return run


def step_errors(found: dict[str, Any]) -> list[float]:
    """Returns the size of each relative error of a step."""
    return [abs(r["predicted"] / r["measured"] - 1) for r in found["rows"] if "measured" in r]


def goals(found: dict[str, Any]) -> list[Goal]:
    off = step_errors(found)
    return [Goal("median error", statistics.median(off), ASKED), Goal("worst error", max(off), WORST)]


def section(found: dict[str, Any]) -> str:
    """Returns the section of docs/project/prediction.md about a model other than ours."""
    rows = [{**r, "off": r["predicted"] / r["measured"] - 1} for r in found["rows"] if "measured" in r]
    refused = "".join(f"\n- {r['setting']}: {r['refused']}" for r in found["rows"] if "refused" in r)
    lines = ["| setting | measured (ms) | predicted (ms) | error |", "| --- | --- | --- | --- |"]
    for r in sorted(rows, key=lambda r: -abs(r["off"])):
        lines.append(f"| {r['setting']} | {r['measured'] * 1e3:.0f} | {r['predicted'] * 1e3:.0f} | {r['off']:+.1%} |")
    about = f"{found['about']}\n\n" if "about" in found else ""
    return (
        f"{RANKS} real ranks train a Llama of transformers with four layers of width 128. Each setting has its own "
        f"run. A step has {PACE:g} ms of paced compute, or four times as much if a replica is several ranks. Buckets "
        f"have 1 MB. The measured step is the mean of {SETTLE + COUNTED - beside.SETTLE} steps. The simulation has no "
        "tensor values, except for Zen and for methods that read them.\n\n"
        f"These runs calibrate the simulator on {_wire(KNOWN)}: DDP with buckets of 0.5 MB, each compressor, KFAC and "
        "Newton. One more run has messages that are too short for this link: TopK in buckets of 0.25 MB.\n\n"
        f"{about}{len(rows)} settings: {'; '.join(map(str, goals(found)))}. The largest error comes first. The raw "
        "numbers are in `docs/data/llama.json`.\n\n"
        + "\n".join(lines)
        + "\n"
        + (f"\nNot run:\n{refused}\n" if refused else "")
    )


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--runs", type=Path, default=Path("runs"))
    ask.add_argument("--only", nargs="*", default=[], metavar="WORD", help="settings whose names hold one of these")
    ask.add_argument("--list", action="store_true", help="say what would be measured")
    ask.add_argument("--predict", action="store_true", help="measure no setting, predict anew what was measured")
    ask.add_argument("--calibrate", nargs="*", default=[], metavar="NAME", help="calibrations to be measured again")
    a = ask.parse_args()
    wanted = [(n, e) for n, e in settings() if not a.only or any(word in n for word in a.only)]
    if a.list:
        return print("\n".join(name for name, _ in wanted), f"\n{len(wanted)} settings", flush=True)
    with Lab(ranks=RANKS, name="llama") as lab:

        def ran(e: Experiment, changes: Sequence[Change] = ()) -> Run:
            try:
                return lab.run(e, changes, out=a.runs / f"llama-{time.time():.2f}").wait(LONGEST)
            except TimeoutError:
                lab.abort()
                raise

        campaign = Campaign(a.out, ran)
        for name in a.calibrate:
            campaign.found["costs"].pop(name, None)
        if a.predict:
            return campaign.predict()
        names = {name for name in calibrations() if any(name in n.replace(",", "").split() for n, _ in wanted)}
        costs = campaign.costs(sorted(names) if a.only else ())
        for name, e in wanted:
            campaign.measure(name, e, costs, _real(e))
    if errors := step_errors(campaign.found):
        print(f"{len(errors)} settings: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    if campaign.failed:
        print(f"failed, to be tried again by the next start: {'; '.join(campaign.failed)}")


if __name__ == "__main__":
    main()
