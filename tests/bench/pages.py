# ruff: noqa: E501
"""Groups the measurements into pages. Each page begins with a question, what was measured, and the machine.

The numbers of a summary come from the raw samples, as those of the tables do.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench import (
    across,
    activations,
    algorithms,
    llama,
    named,
    prediction,
    published_wire_page,
    scale,
    second_order_page,
    tuned,
)
from tests.bench import page as tables
from tests.bench.ddp import ratios
from tests.bench.netns import ratio
from tests.bench.words import listed

Found = dict[str, Any]  # the raw samples by the measurement's name; measurements that were not made are absent


class Page(NamedTuple):
    """A page. headings: a searchable noun for each measurement; summarise: the results in plain sentences."""

    title: str
    question: str
    headings: dict[str, str]
    summarise: Callable[[Found], list[str]]


def summarise_engine(found: Found) -> list[str]:
    """Summarises the engine's speed against torch's, and live changes."""
    said = []
    for name, ours, theirs in (("ddp", "DDP", "torch's DDP"), ("fsdp", "ZeRO-3", "torch's FSDP2 over gloo")):
        if name in found:
            cells = found[name]
            mean = statistics.geometric_mean(statistics.median(ratios(c["rows"])["ours"]) for c in cells)
            said.append(
                f"Our {ours} makes {mean:.3f} times the steps per second of {theirs} (geometric mean of {len(cells)} cells)."
            )
    if "live" in found:
        late = statistics.median(found["live"]["DDP"]["late"])
        first = statistics.median(found["live"]["first_loss"])
        said.append(
            f"A live change takes effect after {1e3 * late:.0f} ms under DDP. The first loss comes after {first:.1f} s."
        )
    return said


def summarise_pipelines(found: Found) -> list[str]:
    """Summarises idle stages, the throughput against torch's schedules, and the loss with compressed activations."""
    said = []
    if "pipeline" in found:
        off = max(abs(tables.measure_bubble(c) - tables.predict_bubble(c)) for c in found["pipeline"])
        said.append(f"The measured bubble, the share of idle time, differs from its formula by at most {off:.3f}.")
    if "schedules" in found:
        pace = [statistics.median(ratios([row[:4] for row in c["rows"]])["ours"]) for c in found["schedules"]]
        said.append(f"Our schedules make {min(pace):.3f} to {max(pace):.3f} times the steps per second of torch's.")
    if "activations" in found:
        costly, most = activations.find_costly_codecs(found["activations"])
        said.append(
            f"Of the codecs for activations, only {' and '.join(costly)} can raise the training loss by more than seeds differ: by up to {most:.2f}."
            if costly else "No codec for activations raises the training loss by more than seeds differ."
        )  # fmt: skip
    return said


def summarise_memory(found: Found) -> list[str]:
    """Summarises the least device memory, and its price."""
    if "offload" not in found:
        return []
    first, *others = found["offload"]
    least = min(others, key=lambda c: c["blocks"][-1]["peak"])
    steps = [b["step"] / a["step"] for a, b in zip(first["blocks"], least["blocks"], strict=True)]
    return [
        f"The least device memory is {least['blocks'][-1]['peak'] / 1e6:.1f} MB, under {least['name']}. {first['name']} needs "
        f"{first['blocks'][-1]['peak'] / 1e6:.1f} MB. With the least memory a step takes {statistics.median(steps):.2f} times as long."
    ]


def summarise_network(found: Found) -> list[str]:
    """Summarises the emulated link against a real network, all-reduce algorithms and published bandwidths."""
    said = []
    if "netns" in found:
        near = sum(abs(ratio(f) - 1) <= 0.1 for f in found["netns"])
        said.append(
            f"A step on the emulated link lasts as long as on a real network, within 10 %, in {near} of "
            f"{len(found['netns'])} cells."
        )
    if "algorithms" in found:
        cells = [cell for one in found["algorithms"] for cell in algorithms.cells(one)]
        names = Counter(cell["first"] for cell in cells)
        right = sum(cell["over"] <= algorithms.CLOSE for cell in cells)
        said.append(
            f"In {len(cells)} cells the fastest all-reduce is: {', '.join(f'{name} in {n}' for name, n in names.most_common())}. "
            f"In {right} cells the cost models' choice is within {algorithms.CLOSE - 1:.0%} of it."
        )
    if "between" in found:
        first = sum(min(c["took"], key=lambda w, c=c: statistics.median(c["took"][w])) == "compressed between sites"
                    for c in found["between"])  # fmt: skip
        said.append(
            f"With two sites, compression only between them is the fastest sum in {first} of {len(found['between'])} cells."
        )
    if "published_wire" in found:
        near, of = published_wire_page.count_near(found["published_wire"]["bandwidth"])
        said[-1:] = [
            f"{' '.join(said[-1:])} The simulator is within a factor of {1 + published_wire_page.NEAR:g} of {near} of {of} published bandwidths.".strip()
        ]
    return said


def summarise_methods(found: Found) -> list[str]:
    """Summarises methods that train with the same result as another one, or in other steps."""
    said = []
    if "shadow" in found:
        slow = {
            way: statistics.median(b[0] for b in found["shadow"]["cells"][-1]["blocks"][way])
            for way in ("ShadowMA", "averaging (LocalSGD)")
        }
        said.append(
            f"On the slowest link, shadow synchronisation processes {slow['ShadowMA'] / slow['averaging (LocalSGD)']:.1f} times the "
            f"examples per second of foreground averaging every 5 steps."
        )
    if "second_order" in found:
        d, each = found["second_order"], []
        for goal in ("Digits", "ByteGPT"):
            ours, sgd = (statistics.median(second_order_page.steps_of(d, goal, method)) for method in ("KFAC", "SGD"))
            longer = statistics.median(second_order_page.slower(d, goal, "KFAC"))
            each.append(
                f"On {goal}, K-FAC reaches the loss in {ours / sgd:.2f} of SGD's steps and {longer * ours / sgd:.2f} times its seconds."
            )
        said.append(" ".join(each))
    if "priorities" in found:
        by = next(c for c in found["priorities"]["cells"] if c["wire"] == 1)["blocks"]
        paired = zip(by["DDP"], by["ByteScheduler"], strict=True)
        said.append(
            f"If communication takes as long as compute, ByteScheduler makes {statistics.median(a / b for a, b in paired):.2f} times DDP's steps per second."
        )
    return said


def summarise_simulator(found: Found) -> list[str]:
    """Summarises how long simulations and plans of many ranks take."""
    said = []
    if "scale" in found:
        rows = {n: r for n, r in found["scale"]["rows"].items() if "refused" not in r["each"]}
        quick = sum(min(scale.count_seconds(one) for one in row.values()) <= scale.ASKED for row in rows.values())
        said.append(
            f"In the simulator, {found['scale']['steps']} steps of {found['scale']['ranks']:,} ranks take at most {scale.ASKED:g} s "
            f"under {quick} of {len(rows)} strategies. DDP takes {scale.count_seconds(rows['DDP']['alike']):.1f} s if one replica stands for all."
        )
    if "planning" in found:
        fresh = statistics.median(row["seconds"] for row in found["planning"] if not row["loaded"])
        said.append(f"A plan for 4,096 ranks takes {fresh:.1f} s in a fresh process.")
    return said


def summarise_diagnosis(found: Found) -> list[str]:
    """Summarises how often the analyses name the right rank, and how good the search's setting is."""
    said = []
    if "named" in found:
        trials = [t for name, cell in found["named"].items() if "apart" not in name for t in cell["trials"]]
        alarms = sum(len(cell["free"]) for cell in found["named"].values())
        looks = sum(cell["free_looks"] for cell in found["named"].values())
        said.append(
            f"If a rank is 10 % slower, the analysis names it and its phase in {sum(map(named.right, trials))} of {len(trials)} trials. "
            f"It raises a false alarm at {alarms} of {looks:,} looks."
        )
    if "tuned" in found:
        each = [tuned.ratio(cell) for name, cell in found["tuned"].items() if name in tuned.LINKS]
        said.append(
            f"On {len(each)} links, `lab.tune` finds a setting with {min(each):.2f} to {max(each):.2f} times the best setting's step time. "
            f"The model learns nothing in this test, because of a tiny learning rate."
        )
    return said


def summarise_record(found: Found) -> list[str]:
    """Summarises the record's size, and what the dashboard costs."""
    said = []
    if "record" in found:
        said.append(f"A span takes {found['record']['bytes_per_span']:.0f} bytes on disk.")
    if "record_hour" in found:
        hour = found["record_hour"]
        said.append(
            f"A record of an hour ({hour['spans'] / 1e6:.1f} million spans) opens in {statistics.median(hour['load_s']):.1f} s."
        )
    boards = {"8 ranks": "dashboard", "64 ranks": "dashboard_64", "4 real ranks": "dashboard_real"}
    budgets = [
        (setup, key, tables.keeps(found[name]["results"][key], sign, limit))
        for setup, name in boards.items()
        if name in found
        for key, (sign, limit) in found[name]["budgets"].items()
    ]
    if budgets:
        over: dict[str, list[str]] = {}
        for setup, key, is_kept in budgets:
            if not is_kept:
                over.setdefault(setup, []).append(key)
        said.append(
            f"The dashboard keeps {sum(is_kept for *_, is_kept in budgets)} of its {len(budgets)} budgets."
            + "".join(f" With {setup} it misses: {'; '.join(keys)}." for setup, keys in over.items())
        )
    return said


def summarise_prediction(found: Found) -> list[str]:
    """Summarises the errors of predicted steps."""
    parts = [(what, part, found[name]) for name, (what, part) in PREDICTED.items() if name in found]
    if not parts:
        return []
    off = [(what, part.step_errors(d)) for what, part, d in parts]
    medians = listed([f"{100 * statistics.median(each):.1f} % for {what} ({len(each)} settings)" for what, each in off])
    worst = listed([f"{100 * max(each):.1f} %" for _, each in off])
    kept = [goal.kept for _, part, d in parts for goal in part.goals(d)]
    return [
        f"The median error is {medians}.",
        f"The worst errors are {worst}, in the same order. {sum(kept)} of {len(kept)} goals are kept.",
    ]


PREDICTED: dict[str, tuple[str, Any]] = {  # raw samples -> what was predicted, and the module of the section
    "prediction": ("DDP and LocalSGD", prediction), "across": ("models across ranks", across),
    "llama": ("a Llama", llama),
}  # fmt: skip
PREDICTION = Page(
    "Predicted against measured step time",
    "How far is the simulator's step time from the measured one?",
    {"prediction": "DDP and LocalSGD on three links", "across": "Pipelines, tensor parallelism and ZeRO",
     "llama": "Strategies and compressors on a Llama"},
    summarise_prediction,
)  # fmt: skip
SECTIONS = {**tables.SECTIONS, **{name: part.section for name, (_, part) in PREDICTED.items()}}
PAGES = {
    "engine": Page(
        "Engine speed against torch",
        "How fast is the engine compared with torch's DDP and FSDP2? How soon does a live change take effect?",
        {"ddp": "DDP against torch's DDP", "fsdp": "ZeRO-3 against torch's FSDP2", "beyond": "Limits of ZeRO-3's speed",
         "bound": "Step time against its lower bound", "live": "Latency of live changes, cost of recording, start-up",
         "slow_link": "Time to a loss on a slow link", "memory": "Memory of the first notebook"},
        summarise_engine,
    ),
    "pipelines": Page(
        "Pipelines",
        "How long are a pipeline's stages idle? What does compressing activations cost?",
        {"pipeline": "Pipeline bubble", "schedules": "Pipeline schedules against torch's", "activations": "Compressed activations",
         "activations_tuned": "Compressed activations at tuned rates"},
        summarise_pipelines,
    ),
    "memory": Page(
        "Memory: sharding and offloading",
        "How little device memory does a model need? How much longer does a step take then?",
        {"offload": "ZeRO-Offload and ZeRO-Infinity"},
        summarise_memory,
    ),
    "network": Page(
        "Networks and all-reduce",
        "Does the emulated link agree with a real network? Which all-reduce is the fastest? Does the simulator predict published numbers?",
        {"netns": "Emulated link against a real network", "algorithms": "All-reduce algorithms",
         "between": "Compression between sites", "published": "Published scaling: interleaved pipelines and ZeRO",
         "published_wire": "Published bandwidths: DiLoCo and DDP"},
        summarise_network,
    ),
    "methods": Page(
        "Training methods",
        "What do background synchronisation, second-order methods and priorities gain?",
        {"priorities": "ByteScheduler and P3", "shadow": "Throughput of shadow synchronisation",
         "shadow_quality": "Loss of shadow synchronisation", "shadow_tables_quality": "Loss of ShadowSync with embedding tables",
         "second_order": "K-FAC and Newton against SGD with momentum"},
        summarise_methods,
    ),
    "simulator": Page(
        "Simulator at scale",
        "How long does a simulation or a plan of many ranks take?",
        {"scale": "Simulation of 1,024 ranks", "planning": "Plan for 4,096 ranks"},
        summarise_simulator,
    ),
    "diagnosis": Page(
        "Stragglers and tuning",
        "Do the analyses name the right rank and phase? Does `lab.tune` find the best setting?",
        {"named": "Straggler and its phase", "tuned": "Tuning search against a full sweep"},
        summarise_diagnosis,
    ),
    "record": Page(
        "Record and dashboard",
        "How large is the record? How long does it take to open? What does the dashboard cost?",
        {"record": "Size of the record", "record_hour": "Opening a record of an hour", "checksums": "Checksums of the record",
         "dashboard": "Dashboard with 8 ranks", "dashboard_64": "Dashboard with 64 ranks",
         "dashboard_real": "Dashboard with 4 real ranks on the same cores"},
        summarise_record,
    ),
}  # fmt: skip


INDEX = """# Benchmarks

Each page begins with its question and its result. Each section says when it was measured, on which machine, by which
commit, and at which load. No section used a GPU; see [the page about a GPU](gpu.md). Ratios against torch come from
alternating blocks of one run. A section states a shortfall where its table shows it.

| page | question | result |
| --- | --- | --- |
{rows}

`make bench` measures everything and writes these pages from the raw samples in `docs/data/`.
`python -m tests.bench --page-only` only writes the pages.
"""


def write_pages(data: Path) -> dict[str, str]:
    """Returns the text of each page by file name, from the raw samples in `data`. The index is `benchmarks.md`."""
    found = {name: json.loads(path.read_text()) for name in SECTIONS if (path := data / f"{name}.json").exists()}
    about = json.loads((data / "machines.json").read_text()) if (data / "machines.json").exists() else {}
    rows = "\n".join(
        f"| [{page.title}](benchmarks/{key}.md) | {page.question} | {' '.join(page.summarise(found))} |"
        for key, page in PAGES.items()
    )
    texts = {f"benchmarks/{key}.md": write_page(page, found, about) for key, page in PAGES.items()}
    return {"benchmarks.md": INDEX.format(rows=rows), "prediction.md": write_page(PREDICTION, found, about), **texts}


def write_page(page: Page, found: Found, about: dict[str, Any]) -> str:
    """Returns one page: its question, the results, the machine, and the sections with their tables."""
    machines = sorted({about[name]["cpu"] for name in page.headings if name in about})
    lines = [page.question, *page.summarise(found), f"Machine: {' or '.join(machines)}. No GPU was used."]
    parts = [f"# {page.title}\n\n" + "\n".join(lines) + "\n"]
    for name, heading in page.headings.items():
        if name not in found:
            parts.append(f"## {heading}\n\nNot measured yet: `python -m tests.bench {name}`.\n")
            continue
        m = about.get(name, {})
        parts.append(f"## {heading} ({m.get('date', 'date unknown').partition(';')[0]})\n")
        parts.append(SECTIONS[name](found[name]))
        parts.append(f"*{describe_machine(m)}*\n" if m else "*The machine was not recorded.*\n")
    return "\n".join(parts)


def describe_machine(m: dict[str, Any]) -> str:
    """Returns where, when and by which command a section was measured."""
    where = f"{m['cpu']}; {m['system']}; Python {m['python']}, torch {m['torch']}; commit {m['commit']}"
    return f"{m['date']}; {where}; `{m['command']}`; {tables.load(m)}."
