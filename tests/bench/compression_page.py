# ruff: noqa: E501
"""Writes docs/project/compression.md from the cells in docs/data/compression, without any number typed by hand."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench import compression_tuned, studies_page
from tests.bench.cells import Results, kept, reached
from tests.bench.page import table
from tests.bench.words import spread

QUESTION = "Which compressor reaches a loss sooner than dense fp32, and on which link?"
REPRODUCE = """## Reproduction

`make bench-compression` measures the raw samples in `docs/data/` and writes this page from them.
`python -m tests.bench.compression --page-only` only writes the page.
"""
DENSE, BF16, AGAIN = "Dense", "Cast(to=bf16)", "Dense again"
CLEARLY = 1.05  # times as fast: a smaller ratio is no difference


class Row(NamedTuple):
    """One compressor on one link.

    steps: to the target loss, median of the seeds (0: most did not reach it); each: of every seed
    step:  seconds of one step; nbytes: sent per rank in it; codec: seconds of its own work in it
    time:  steps times step
    """

    label: str
    steps: float
    each: list[float]
    step: float
    nbytes: float
    codec: float

    @property
    def time(self) -> float:
        return self.steps * self.step


def results(data: Path) -> Results:
    return Results.of(data)


def target(found: Results) -> float:
    """Returns the target loss: dense's at half of its run, as mean of the seeds; 0 without any."""
    curves = [f["curve"] for f in found.seeds("loss", DENSE, "any link").values()]
    ends = [loss for c in curves for s, _, loss in c if s >= c[-1][0] / 2]
    heads = [next(loss for s, _, loss in c if s >= c[-1][0] / 2) for c in curves]
    return round(statistics.fmean(heads), 3) if ends else 0.0


def steps_to(found: Results, label: str) -> list[float]:
    """Returns the steps to the target by seed; 0 if a seed did not reach it."""
    goal = target(found)
    each = found.seeds("loss", label, "any link").values()
    return [reached([(s, float(s), loss) for s, _, loss in f["curve"]], goal) or 0.0 for f in each]


def _middle(each: list[float]) -> float:
    """Returns the median steps to the loss. Seeds that never reach it count as slowest; such a median gives 0."""
    middle = statistics.median_high(s or math.inf for s in each) if not all(each) else statistics.median(each)
    return middle if math.isfinite(middle) else 0.0


def ranking(found: Results, link: str) -> list[Row]:
    """Returns all measured compressors of a link: fastest first, those that missed the target last."""
    rows = []
    for f in found.files:
        if f["part"] != "step" or f["where"] != link or "step_s" not in f["found"]:
            continue
        each, one = steps_to(found, f["row"]), f["found"]
        if each:
            rows.append(Row(f["row"], _middle(each), each, one["step_s"], one["bytes"], one["codec_s"]))
    return sorted(rows, key=lambda r: (not r.steps, r.time or r.step))


def text(data: Path, shared: Path) -> str:
    """Returns the whole page from the campaign's cells in `data` and the other samples in `shared`."""
    found = results(data)
    links = list(dict.fromkeys(f["where"] for f in found.files if f["part"] == "step"))
    parts = [
        _head(found),
        _codecs(shared / "codecs.json"),
        _how(found),
        _losses(found, data),
        compression_tuned.text(found),
    ]
    parts += [_times(found, data), *(_link(found, link) for link in sorted(links, key=_order))]
    parts += [_full(found), _where(found), studies_page.text(found, data / "studies", _old(found, data, "levels"))]
    return "\n".join([part for part in parts if part] + [REPRODUCE])


def _head(found: Results) -> str:
    """Returns the title, the question, the fastest compressor on each link, and the machine."""
    tuned, slow, said = _head_start(found), [], []
    for link in sorted({f["where"] for f in found.files if f["part"] == "step"}, key=_order):
        if (speeds := _speeds(ranking(found, link))) is None:
            continue
        wins, _ = _sides(speeds)
        if not wins:
            slow.append(link)
            continue
        best = max(speeds.values())
        also = f", {best * tuned:.2f} times that of dense at its own best learning rate" if tuned else ""
        said.append(f"At {link}, {wins[0]} is the fastest to the loss: {best:.2f} times the speed of dense fp32{also}.")
    if slow:
        said.insert(
            0, f"On these links no compressor is clearly faster to the loss than dense fp32: {', '.join(slow)}."
        )
    dates = sorted({f["date"] for f in found.files if f.get("date")}) or ["an unknown date"]
    when = f"on {dates[0]}" if dates[0] == dates[-1] else f"from {dates[0]} to {dates[-1]}"
    machine = f"Machine: 2 cores; the samples do not name the CPU. No GPU was used. Measured {when}."
    return "# Compression, measured\n\n" + "\n".join([QUESTION, *said, machine]) + "\n"


def _order(link: str) -> float:
    """Sort key of links, fast ones first."""
    number = link.split()[0]
    return -(float(number) * (1000 if "Gbit" in link else 1)) if number[0].isdigit() else float("-inf")


def _how(found: Results) -> str:
    from tests.bench.compression import BUCKET, COUNTED, EVERY, PACE, SETTLE, STEPS, TASK

    return (
        "## Time to a loss, by link\n\n"
        "Whether a compressor pays depends on the link, so each link has a table. The tables compare with dense fp32. They also compare with bf16, because half of the bytes "
        f"are nearly free. The task is ByteGPT(layers={TASK.layers}, width={TASK.width}, context={TASK.context}) on 4 ranks under DDP, with buckets of {BUCKET:g} MB. A compressor takes its "
        f"density, norm or scale within one bucket. All rows use the task's optimizer (AdamW) and its learning rate, {TASK.lr:g}. Tuned rates and other optimizers follow below.\n\n"
        f"- Loss by step: the simulator with real tensors, {STEPS} steps, evaluated every {EVERY}, three seeds. Under a lockstep strategy the loss does not depend on the link.\n"
        f"- Time of a step: {COUNTED} steps on real ranks, after {SETTLE} steps that do not count. Each step has {PACE:g} ms of paced compute. Codecs that run during backward share "
        "two cores with four ranks.\n"
        f"- Time to the loss {target(found):g}: the steps to the loss times the time of a step. Dense has this loss at half of its run.{compression_tuned.sooner(found, target(found))}\n"
    )


def _times(found: Results, data: Path) -> str:
    """Returns a note about step times that were measured with older code."""
    from tests.bench.compression import COSTS, steps

    cells = {(c.row, c.where): c for c in steps()}
    timed = [f for f in found.files if f["part"] == "step" and (f["row"], f["where"]) in cells]
    old = {f["row"]: f.get("commit") or "?" for f in timed if kept(cells[f["row"], f["where"]], COSTS, data) is None}
    head = "### Step times\n\nThe tables below multiply the steps to the loss by the time of a step. "
    if not old:
        return head + "All steps were timed with the present code.\n"
    at = ", ".join(sorted(set(old.values())))
    return (
        f"{head}These rows were timed before their code or shared code changed, and were not timed again:\n\n"
        f"{table(['rows timed with older code', 'commit'], [[', '.join(sorted(old)), at]])}\n"
        "ALQ's and AMQ's steps after the first step still do what they did then, and first steps do not count. In fp32 this also holds for every other compressor that rounds to levels.\n"
    )


def _old(found: Results, data: Path, part: str) -> list[str]:
    """Returns the rows with seeds that ran with older code."""
    from tests.bench.compression import COSTS, losses

    there = {(f["row"], f["seed"]) for f in found.files if f["part"] == part}
    return sorted({c.row for c in losses(part) if (c.row, c.seed) in there and kept(c, COSTS, data) is None})


def _losses(found: Results, data: Path) -> str:
    labels = list(dict.fromkeys(f["row"] for f in found.files if f["part"] == "loss" and "curve" in f["found"]))
    if not labels:
        return "### Loss by step\n\nNot measured yet: `make bench-compression`.\n"
    base = found.seeds("loss", DENSE, "any link")
    dense_bytes = statistics.fmean(f["bytes"] for f in base.values()) if base else 0.0
    dense_end = statistics.fmean(f["curve"][-1][2] for f in base.values()) if base else 0.0
    lines = []
    for label in labels:
        each = list(found.seeds("loss", label, "any link").values())
        ends = [f["curve"][-1][2] for f in each]
        to = steps_to(found, label)
        never = sum(not s for s in to)
        reach = (
            f"{_middle(to):.0f}{f' (never: {never} of {len(to)} seeds)' if never else ''}"
            if _middle(to)
            else f"never: {never} of {len(to)} seeds"
        )
        sent = statistics.fmean(f["bytes"] for f in each)
        gap = f"{statistics.fmean(ends) / dense_end - 1:+.1%}" if dense_end else ""
        factor = f"{dense_bytes / sent:.1f}" if sent and dense_bytes else ""
        lines.append((statistics.fmean(ends), [label, factor, reach, spread(ends), gap]))
    lines.sort(key=lambda line: line[0])
    head = [
        "compressor",
        "times fewer bytes than dense fp32",
        "steps to the loss",
        "final held-out loss",
        "loss against dense",
    ]
    refused = "".join(f"\n{row}: {why}.\n" for (part, row), why in found.refused.items() if part == "loss")
    old = _old(found, data, "loss")
    since = (
        f"\nSome or all seeds of these rows ran before their code or shared code changed:\n\n{table(['rows with older code'], [[', '.join(old)]])}"
        if old
        else ""
    )
    return f"### Loss by step\n\n{table(head, [line for _, line in lines])}{since}{refused}"


def _link(found: Results, link: str) -> str:
    rows = ranking(found, link)
    base = {r.label: r for r in rows}
    dense, half = base.get(DENSE), base.get(BF16)
    lines = []
    for r in rows:
        over = [
            "" if b is None else f"{b.time / r.time:.2f}" if b.time and r.time else "not reached" for b in (dense, half)
        ]
        pace = f"{dense.step / r.step:.2f}" if dense else ""
        lines.append(
            [r.label, f"{r.step * 1e3:.0f} ms", pace, f"{r.nbytes / 1e3:.1f} kB", f"{r.codec * 1e3:.1f} ms", *over]
        )
    head = [
        "compressor",
        "time of a step",
        "times dense fp32's steps/s",
        "sent per rank and step",
        "codec per step",
        "times dense fp32's speed to the loss",
        "times bf16's speed to the loss",
    ]
    return f"### Link: {link}\n\n{table(head, lines)}{_control(found, link)}"


def _control(found: Results, link: str) -> str:
    """Returns the A/A result: dense before and after all other rows."""
    first, again = found.seeds("step", DENSE, link), found.seeds("step", AGAIN, link)
    if not first or not again:
        return ""
    ratio = again[0]["step_s"] / first[0]["step_s"]
    return f"\nDense, timed again after every other row: {again[0]['step_s'] * 1e3:.0f} ms, {ratio:.2f} times as long as before (A/A).\n"


def _full(found: Results) -> str:
    cells = [f for f in found.files if f["part"] == "full"]
    if not cells:
        return ""
    lines = []
    for f in sorted(cells, key=lambda f: (_order(f["where"]), f["row"])):
        one = f["found"]
        took = f"{one['time_s']:.1f} s" if one["time_s"] else "not reached"
        ratio = f"{one['time_s'] / one['product_s']:.2f}" if one["time_s"] else ""
        now = next((r.time for r in ranking(found, f["where"]) if r.label == f["row"]), 0.0)
        since = (
            f" (now {now:.1f} s: predicted before the code changed)" if abs(now / one["product_s"] - 1) > 1e-3 else ""
        )
        lines.append([f["where"], f["row"], f"{one['product_s']:.1f} s{since}", took, ratio])
    head = ["link", "compressor", "predicted time to the loss", "measured time to the loss", "measured / predicted"]
    about = (
        "A prediction multiplies the steps to the loss by the time of a step. On each link, dense and the compressor that was then the fastest trained on real ranks "
        "until the loss. There is one seed, so the steps to the loss vary, too."
    )
    return f"### Predicted and measured time to the loss\n\n{about}\n\n{table(head, lines)}"


def _where(found: Results) -> str:
    """Returns the table of compressors that are faster and slower than dense, link by link."""
    tuned = _head_start(found)
    links = sorted({f["where"] for f in found.files if f["part"] == "step"}, key=_order)
    lines = [_winners(link, speeds, tuned) for link in links if (speeds := _speeds(ranking(found, link))) is not None]
    if not lines:
        return ""
    head = ["link", "fastest", "times dense fp32's speed", "faster than dense fp32", "slower than dense fp32"]
    best = " Tuned dense is dense fp32 at its own best learning rate." if tuned else ""
    more = ["times tuned dense's speed", "faster than tuned dense", "slower than tuned dense"] if tuned else []
    about = (
        f"Faster means: more than {CLEARLY:g} times the speed to the loss. Slower means: less than 1 / {CLEARLY:g} times. "
        f"A compressor that never reaches the loss is slower.{best}"
    )
    return f"### Faster and slower compressors, by link\n\n{about}\n\n{table(head + more, lines)}"


def _head_start(found: Results) -> float:
    """Returns Dense's steps at its own best learning rate over those at the task's; 0: not known."""
    known = compression_tuned.head_start(found, target(found))
    return known[1] / known[2] if known else 0.0


def _speeds(rows: list[Row]) -> dict[str, float] | None:
    """Returns each compressor's speed to the loss relative to dense (0: never reached); None without dense's."""
    base = next((r for r in rows if r.label == DENSE), None)
    if base is None or not base.time:
        return None
    return {r.label: base.time / r.time if r.time else 0.0 for r in rows if r.label != DENSE}


def _winners(link: str, speeds: dict[str, float], tuned: float) -> list[str]:
    """Returns one link's row. tuned: see _head_start."""
    wins, loses = _sides(speeds)
    best = max(speeds.values(), default=0.0)
    line = [link, wins[0] if wins else "none", f"{best:.2f}" if wins else "", *_counted((wins, loses), len(speeds))]
    if not tuned:
        return line
    sides = _sides({label: speed * tuned for label, speed in speeds.items()})
    return [*line, f"{best * tuned:.2f}" if wins else "", *_counted(sides, len(speeds))]


def _counted(sides: tuple[list[str], list[str]], count: int) -> list[str]:
    return [f"{len(labels)} of {count}{': ' if labels else ''}{', '.join(labels)}" for labels in sides]


def _sides(times: dict[str, float]) -> tuple[list[str], list[str]]:
    """Returns the labels that are clearly faster and those clearly slower, from relative speeds (0: target never
    reached).
    """
    return [label for label, x in times.items() if x > CLEARLY], [
        label for label, x in times.items() if x < 1 / CLEARLY
    ]


def _codecs(path: Path) -> str:
    if not path.exists():
        return "## Codec cost\n\nNot measured yet: `python -m tests.bench.codecs --out docs/data/codecs.json`.\n"
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    lines = []
    for r in rows:
        if r["part"] != "every":
            continue
        each = sorted(a / b for a, b in zip(r["codec"], r["copy"], strict=True))
        again = sorted(a / b for a, b in zip(r["copy again"], r["copy"], strict=True))
        ms = statistics.median(r["codec"]) * 1e3
        lines.append(
            (ms, [r["name"], f"{ms:.0f} ms", f"{statistics.median(each):.1f}", f"{statistics.median(again):.2f}"])
        )
    lines.sort(key=lambda line: line[0])
    head = ["compressor, by its bare name", "encode and decode", "times a copy of the memory", "copy / copy (A/A)"]
    about = (
        "One rank alone encodes and decodes 8 M float32 elements, one square matrix, with one thread. Rounds alternate with a copy of the same memory. Numbers are medians. "
        "A compressor has the settings that its bare name stands for."
    )
    asked = [
        (
            r["name"],
            r["input"],
            r["asked"],
            statistics.median(sorted(b / a for a, b in zip(r["ours"], r["plain"], strict=True))),
            r,
        )
        for r in rows
        if r["part"] == "kernel"
    ]
    more = ""
    if asked:
        kernel = [
            [n, i, f"{x:.2f}", f"{want:g}{'' if x >= want else ': NOT reached'}", r.get("quality", "")]
            for n, i, want, x, r in asked
        ]
        more = "\n" + table(
            ["kernel", "input", "times as fast as the plain torch expression", "goal", "quality"], kernel
        )
    return f"## Codec cost\n\n{about}\n\n{table(head, [line for _, line in lines])}{more}"
