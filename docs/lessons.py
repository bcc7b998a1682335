"""Makes the site's pages of lessons: the text of each notebook, and a run to inspect without a kernel.

A new lesson needs a line in RUNS. The build of the site makes its run, and repeats it only if the code has changed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from html import escape
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from sphinx.errors import ConfigError

import workbench
from widgets.charts.board import PAGE_CSS, plotly_js
from widgets.export.report import REPLAY_JS, pack_run

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGES = [f"notebooks/{path.stem}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]

# The code for each page's run, as a user would type it after `from workbench import *`. It simulates a run, or opens a
# recorded one with `Run.open("docs/data/runs/...")`. The page shows this code. With real tensors 100 steps of four
# ranks take half a minute on one core. With sizes only they take a second, and show no losses.
RUNS = {
    "01_first_run": """simulate(recipe("first_run").set("steps", 125), real=True, changes=[
    Change(25, "fabric.link.bandwidth", 100), Change(50, "strategy", LocalSGD(every=4)),
    Change(75, "strategy", DDP()), Change(75, "compressor", ErrorFeedback(of=TopK())),
    Change(100, "compressor", Dense()), Change(100, "fabric.faults", [Slow(rank=2)])])""",
    "02_reading_a_timeline": """simulate(recipe("slow_link").set("steps", 100), real=True, changes=[
    Change(26, "strategy", LocalSGD()), Change(74, "strategy", DDP()),
    Change(74, "compressor", ErrorFeedback(of=TopK()))])""",
    "04_roofline": """simulate(Experiment(task=ByteGPT(), batch=2, pace=11, eval_every=0, steps=75,
    fabric=Fabric(link=Link(bandwidth=1000, latency=0))), changes=[Change(25, {"batch": 8, "pace": 43}),
    Change(50, {"batch": 32, "pace": 171})])""",
    "11_one_strategy_two_clocks": """simulate(recipe("first_run").set("ranks", 16).set("steps", 75), changes=[
    Change(25, "bucket_mb", 10), Change(50, "strategy", LocalSGD())])""",
    "03_collectives": """simulate(Experiment(task=ByteGPT(layers=2, width=64, heads=4, context=32), pace=100,
    eval_every=0, steps=80, bucket_mb=64, fabric=Fabric(link=Link(bandwidth=100, latency=10), algorithm=Ring())),
    changes=[Change(20, "fabric.link.bandwidth", 1000), Change(40, "fabric.link.latency", 1),
    Change(60, "bucket_mb", 0.05)])""",
    "05_buckets": """simulate(Experiment(task=ByteGPT(layers=4), batch=2, pace=300, eval_every=0, steps=88,
    bucket_mb=0.25, fabric=Fabric(link=Link(bandwidth=300, latency=0.2))), changes=[Change(22, "bucket_mb", 8),
    Change(44, "fabric.link", Link(bandwidth=1000, latency=6)), Change(66, "bucket_mb", 0.25)])""",
    "12_the_slow_one": """simulate(Experiment(task=ByteGPT(layers=1, width=32, heads=4, context=32), pace=100,
    eval_every=0, steps=125, fabric=Fabric(link=Link(bandwidth=1000, latency=0.1))), changes=[
    Change(25, "fabric.faults", [TransientStraggler(probability=0.1, factor=5)]),
    Change(50, "strategy", BackupWorkers(backup=1)), Change(75, "strategy", DDP()),
    Change(75, "fabric.faults", [Slow(rank=1, factor=3)]), Change(100, "strategy", BackupWorkers(backup=1))])""",
    "13_talk_less_often": """simulate(Experiment(task=ByteGPT(layers=1, width=32, heads=4, context=32), pace=100,
    steps=112, eval_every=16, lr=0.012, fabric=Fabric(link=Link(bandwidth=100, latency=5))), real=True, changes=[
    Change(32, "strategy", LocalSGD(every=8)), Change(72, "strategy", DiLoCo(every=8))])""",
    "14_never_wait": """simulate(Experiment(task=ByteGPT(layers=1, width=32, heads=4, context=32), pace=100,
    eval_every=0, steps=100, strategy=LocalSGD(every=5), fabric=Fabric(link=Link(bandwidth=14.5))), changes=[
    Change(25, "fabric.link.bandwidth", 1.45), Change(50, "strategy", ShadowMA()),
    Change(75, "fabric.link.bandwidth", 14.5)])""",
    "15_neighbours_only": """simulate(Experiment(task=ByteGPT(layers=1, width=32, heads=4, context=32), pace=100,
    steps=100, eval_every=5, lr=0.012, fabric=Fabric(link=Link(bandwidth=100, latency=5))), real=True, changes=[
    Change(25, "strategy", Gossip()), Change(50, "strategy", Gossip(graph="exponential")),
    Change(75, "strategy", LowPrecisionDecentralized())])""",
    "16_send_the_largest": """simulate(recipe("slow_link").set("measure_every", 4).set("steps", 75), real=True,
    changes=[Change(25, "compressor", TopK()), Change(50, "compressor", ErrorFeedback(of=TopK()))])""",
    "17_send_it_coarsely": """simulate(recipe("slow_link").set("measure_every", 4).set("steps", 75), real=True,
    changes=[Change(25, "compressor", QSGD(bits=4)), Change(50, "compressor", ErrorFeedback(of=EFSignSGD()))])""",
    "18_send_its_shape": """simulate(recipe("slow_link").set("measure_every", 4).set("steps", 75), real=True,
    changes=[Change(25, "compressor", PowerSGD()), Change(50, "fabric.link.bandwidth", 1000)])""",
    "19_rings_trees_sites": """simulate(Experiment(task=ByteGPT(layers=1, width=32, heads=4, context=32), pace=100,
    eval_every=0, steps=110, fabric=Fabric(link=Link(bandwidth=100, latency=5), algorithm=Ring())), changes=[
    Change(22, "fabric.algorithm", HalvingDoubling()), Change(44, "fabric.algorithm", ParameterServer()),
    Change(66, "fabric.algorithm", DoubleTree()),
    Change(88, {"fabric.site": 2, "fabric.between_latency": 20, "fabric.algorithm": Hierarchical()})])""",
    "06_it_does_not_fit": """simulate(Experiment(task=ByteGPT(layers=4), batch=2, pace=300, eval_every=0, steps=88,
    fabric=Fabric(link=Link(bandwidth=400, latency=0.5))), changes=[
    Change(22, "strategy", ZeRO1()), Change(44, "strategy", ZeRO2()), Change(66, "strategy", ZeRO3())])""",
    "20_off_the_device": """simulate(Experiment(task=ByteGPT(layers=4), batch=8, pace=300, eval_every=0, steps=40,
    strategy=ZeRO3(), fabric=Fabric(link=Link(bandwidth=400, latency=0.5), host=0.2, disk=0.1)), changes=[
    Change(10, "strategy", ZeROOffload()), Change(20, "strategy", ZeROInfinity()),
    Change(30, {"strategy": ZeRO3(), "partition.checkpoint": "units"})])""",
    "07_in_stages": """simulate(Experiment(task=ByteGPT(layers=8, width=96, heads=4, context=32), batch=32, pace=1600,
    eval_every=0, steps=66, partition=Pipeline(stages=4, micros=4, schedule=GPipe())), changes=[
    Change(22, "partition.schedule", OneFOneB()), Change(44, "partition.micros", 8)])""",
    "08_one_layer_on_two_ranks": """simulate(Experiment(task=ByteGPT(layers=1), ranks=4, batch=8, pace=200,
    eval_every=0, steps=30, fabric=Fabric(link=Link(bandwidth=1000, latency=0.1))), changes=[
    Change(10, "partition", Tensor(ways=2)), Change(20, "partition.sequence", True)])""",
    "09_meshes": """simulate(Experiment(task=ByteGPT(layers=2, width=128, heads=8), ranks=8, batch=8, pace=400,
    eval_every=0, steps=15, partition=Pipeline(stages=2, micros=4, of=Tensor(ways=2)),
    fabric=Fabric(link=Link(bandwidth=2000, latency=0.05), site=4, between_bandwidth=200, between_latency=2)), changes=[
    Change(5, "partition", Tensor(ways=4)), Change(10, "partition", Tensor(ways=8))])""",
    "23_ranks_you_do_not_own": """simulate(Experiment(task=Digits(width=8, hidden=64, shards="dirichlet", alpha=0.1),
    lr=0.016, pace=50, eval_every=8, steps=96, strategy=LocalSGD(every=8),
    fabric=Fabric(link=Link(bandwidth=100, latency=5))), real=True, changes=[
    Change(48, {"strategy": BoundedStaleness(bound=3), "lr": 0.002})])""",
    "10_when_one_dies": """simulate(Experiment(task=ByteGPT(layers=1, width=32, heads=4, context=32), pace=20,
    eval_every=0, steps=90, on_death="go on"), changes=[
    Change(30, "fabric.faults", [Crash(rank=2)]), Change(60, "strategy", ZeRO3())])""",
    "21_large_batches": """simulate(Experiment(task=Digits(width=8, hidden=64), batch=2, optimizer=SGD(), lr=0.025,
    lr_scaled=True, lr_base=8, pace=100, eval_every=5, steps=120), real=True, changes=[Change(30, "batch", 4),
    Change(60, {"batch": 16, "clip": 1.0}), Change(90, "strategy", KFAC(damping=0.1, inverses_every=5))])""",
    "22_who_decides_when": """simulate(Experiment(task=ByteGPT(layers=1, width=32, heads=4, context=32), pace=100,
    eval_every=0, steps=150, fabric=Fabric(link=Link(bandwidth=1000, latency=0.1)),
    policy=SyncSwitch(fraction=1.0, straggler="elastic", windows=1, look_every=10)), changes=[
    Change(40, "fabric.faults", [Slow(rank=1, factor=3)]), Change(80, "fabric.faults", [])])""",
    "24_your_own": """simulate(recipe("digits").set("pace", 20).set("steps", 75), real=True, changes=[
    Change(25, "strategy", LocalSGD(every=2)), Change(50, "strategy", LocalSGD(every=8))])""",
}
STEPS = 150  # in a run of at most so many steps, a reader can hold each step still
MOST = 200_000  # maximum bytes of a run, so that its page stays below 3 MB

HEAD = """
*This page shows a notebook. [Download it](<path:{file}>), or open it with `make lab`. [Its run](#the-run) at the end of
this page needs no kernel.*
"""
WITHOUT = "*Without a kernel you can play [the run at the end of this page](#the-run).*"
RUN = """
## The run

{said} Play it, move its time, or hold a step still. To see what a box of the timeline is, point at it, tap it, or move
from box to box with the arrow keys.

```python
from workbench import *

run = {code}
```

<div class="wb-replay" data-run="{up}{run}" data-plotly="{up}plotly.js">
The charts need scripts, which this browser does not allow.
</div>
<script defer src="{up}player.js"></script>
"""
RESULT = '<div class="lesson-result">{shown}</div>'
FOLDED = '<details class="lesson-result"><summary>Show the result</summary>{shown}</details>'  # it answers a question
STATIC = "_static/lessons"


def markdown(name: str, file: str, said: str) -> str:
    """Returns the notebook `name` as Markdown: its number in the title, its run and the text `said` at the end."""
    short, parts = Path(name).name, []
    up, asked = "../" * name.count("/") + f"{STATIC}/", False
    for cell in json.loads((ROOT / f"{name}.ipynb").read_text("utf8"))["cells"]:
        source = "".join(cell["source"])
        asks = cell["cell_type"] == "code" and "Prediction(" in source
        parts.append(source if cell["cell_type"] == "markdown" else _fenced(source))
        if shown := "".join(_show(short, up, output) for output in cell.get("outputs", ())):
            parts.append((FOLDED if asked and not asks else RESULT).format(shown=shown))
        asked = asked or asks
        if cell["cell_type"] == "code" and source.splitlines()[-1:] == ["lab"] and WITHOUT not in parts:
            parts.append(WITHOUT)  # here the notebook shows the dashboard
    title, _, rest = parts[0].partition("\n")
    number = short.partition("_")[0]
    head = title.replace("# ", f"# {number} ", 1) + "\n" + HEAD.format(file=f"{short}.ipynb")
    run = RUN.format(said=said, code=RUNS[short], up=up, run=file)
    return "\n\n".join([head, rest, *parts[1:], run])


def _show(short: str, up: str, output: dict[str, Any]) -> str:
    """Returns a stored output as HTML in one line, which Markdown leaves as it is."""
    data = output.get("data", {"text/plain": output.get("text", ())})
    text = "".join(data.get("text/plain", ()))
    if "image/png" in data:
        return f'<img loading="lazy" src="{up}{picture_file(short, data["image/png"])}" alt="{_one_line(text)}">'
    if "text/html" in data:
        return "".join(data["text/html"]).replace("\n", " ")
    return f"<pre>{_one_line(text)}</pre>" if text else ""


def _one_line(text: str) -> str:
    return escape(text).replace("\n", "&#10;")


def picture_file(short: str, data: str) -> str:
    """Returns the name of the file of a lesson's picture. It changes with the picture."""
    return f"{short}.{hashlib.sha256(data.encode()).hexdigest()[:12]}.png"


def write_pictures(folder: Path) -> None:
    """Writes the pictures of all lessons' stored outputs, and removes older ones."""
    wanted = {}
    for name in PAGES:
        for cell in json.loads((ROOT / f"{name}.ipynb").read_text("utf8"))["cells"]:
            found = [output.get("data", {}).get("image/png") for output in cell.get("outputs", ())]
            wanted |= {picture_file(Path(name).name, data): data for data in found if data}
    for old in folder.glob("*.*.png"):
        if old.name not in wanted:
            old.unlink()
    for file, data in wanted.items():
        (folder / file).write_bytes(base64.b64decode(data))


def _fenced(source: str) -> str:
    fence = max(re.findall("`{3,}", source), key=len, default="``") + "`"
    return f"{fence}python\n{source}\n{fence}"


def told(run: Any) -> str:
    """Returns a sentence or two about the origin of a run."""
    of, about = f"{run.summary()['steps']} steps of {run.settings['ranks']} ranks", run.environment
    if about.get("host") != "simulated":
        where = f"real ranks, each a process, on a machine with {about['cpus']} cores and torch {about['torch']}"
        return f"**Recorded** on {run.started[:10]}: {of}, {where}."
    real = "real ranks would have these losses"
    what = real if about["tensors"] == "real" else "it followed sizes only, so there are no losses"
    return f"**Simulated** during the build of this site: {of}. The clock is the simulator's; {what}."


@cache
def page_file(short: str) -> str:
    """Returns the name of the file of a lesson's run. It changes with the code that makes the run."""
    code = [path.read_bytes() for room in ("workbench", "widgets") for path in sorted((ROOT / room).rglob("*.py"))]
    return f"{short}.{hashlib.sha256(b''.join([RUNS[short].encode(), *code])).hexdigest()[:12]}.js"


def make(short: str, path: Path) -> None:
    """Makes the run of a lesson and writes it as a script. A comment in the first line describes the run."""
    os.chdir(ROOT)
    names = {name: getattr(workbench, name) for name in workbench.__all__}
    run = eval(RUNS[short], names)  # noqa: S307  (it is ours, from above)
    windows = min(int(run.summary()["steps"]), STEPS)
    texts = (pack_run(run, windows, steps) for steps in (2, 1))  # two steps at a time, if that is small enough
    if (text := next((text for text in texts if len(text) < MOST), None)) is None:
        raise ValueError(f"RUNS of docs/lessons.py, {short}: the run takes more than {MOST} bytes; give it fewer steps")
    path.write_text(f"// {told(run)}\n(window.wbRuns ??= {{}})[{path.name!r}] = {text!r};\n", "utf8")


def packed(data: bytes) -> str:
    """Returns bytes as text for a script, with 7 bits per character. An eighth bit marks characters that need escapes.

    This takes 20 % more than the bytes, and base64 33 %. So a page with plotly.js stays below 3 MB.
    """
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    groups = np.pad(bits, (0, -len(bits) % 7)).reshape(-1, 7) @ (1 << np.arange(6, -1, -1))
    return (groups | np.where(np.isin(groups, [0, *b'\n\r"\\']), 128, 0)).astype(np.uint8).tobytes().decode("latin-1")


def build(app: Any) -> None:
    """Makes the missing files that the pages load."""
    if app.builder.format != "html":
        return
    if missing := [name for name in PAGES if Path(name).name not in RUNS]:
        raise ConfigError(f"docs/lessons.py: RUNS has no line for {', '.join(missing)}")
    folder = Path(app.outdir) / STATIC
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plotly.js").write_text(f'window.wbPlotly = "{packed(plotly_js())}";\n', "utf8")
    glue, css = (HERE / "lessons.js").read_text("utf8"), json.dumps(PAGE_CSS)
    (folder / "player.js").write_text(f"(() => {{\nconst CSS = {css};\n{REPLAY_JS}\n{glue}}})();\n", "utf8")
    write_pictures(folder)
    wanted = {page_file(Path(name).name): Path(name).name for name in PAGES}
    for old in folder.glob("*.*.js"):
        if old.name not in wanted:
            old.unlink()
    todo = [(short, folder / file) for file, short in wanted.items() if not (folder / file).exists()]
    if todo:
        with ProcessPoolExecutor(min(len(todo), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
            list(pool.map(make, *zip(*todo, strict=True)))
    app.lessons_made = {short for short, _ in todo}


def outdated(app: Any, env: Any, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Returns the pages with a new run."""
    return [name for name in PAGES if Path(name).name in getattr(app, "lessons_made", ())]


def read(app: Any, page: str, text: list[str]) -> None:
    """Gives Sphinx a notebook as Markdown."""
    if page in PAGES and app.builder.format == "html":
        for path in (Path(__file__), HERE / "reference" / "glossary.md"):  # the page depends on these
            app.env.note_dependency(str(path))
        file = page_file(Path(page).name)
        said = (Path(app.outdir) / STATIC / file).read_text("utf8").partition("\n")[0].removeprefix("// ")
        text[0] = markdown(page, file, said)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", build)
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", read, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
