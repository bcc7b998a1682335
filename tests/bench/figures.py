"""Draws each strategy's timeline on four simulated ranks under DDP's, as one self-contained SVG per strategy.

    python -m tests.bench figures

Both panels have the same task, link, faults, axis and number of earlier steps, so only the strategy differs.
tests/bench/methods.py has the text, and the knobs that show it best. Bars come from the simulated record alone. The
file's bytes depend on the code only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import torch

from tests.bench.methods import Method, found, methods
from tests.bench.svg import TEXT, fitting, line, rect, text, ticks, width, wrapped
from tests.sim.virtual import Stack
from widgets.charts import theme
from widgets.charts.boxes import BROWN, KINDS
from workbench import simulate
from workbench.compressors import Dense
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.record.timeline import Rows
from workbench.run import Run
from workbench.strategies import DDP, Strategy
from workbench.tasks import Task

FOLDER = Path(__file__).parents[2] / "docs" / "project" / "strategies"
RANKS, LAYERS, SIDE = 4, 4, 250  # four buckets of 0.25 MB
PACE, MBIT = 30.0, 400.0  # ms of compute per step; all buckets take as long on the wire
FIRST, STEPS = 24, 72  # the first step shown; how many are simulated
WIDTH, LEFT, RIGHT = 880, 126, 20  # px
EPS = 1e-9  # seconds
COMPUTE, NETWORK, BETWEEN, PITCH = 20, 18, 2, 52  # px: the two lanes of a rank, the gap between them, rank to rank

_FILL = {kind.key: kind.fill for kind in KINDS}
LOOKS = {  # kind of bar: (legend, colour, colour of its text)
    "forward": ("F forward", _FILL["forward"], "#000000"),
    "backward": ("B backward", _FILL["backward"], "#ffffff"),
    "update": ("update", _FILL["update"], "#000000"),
    "exposed": ("the step stands still", _FILL["exposed"], ""),
    "transfer": ("sending (number of the bucket; → rank it goes to)", _FILL["transfer"], "#000000"),
    "waiting": ("in a collective, waiting for other ranks", "", ""),
}


class Bar(NamedTuple):
    """An activity of a rank. `t0` and `t1` are seconds from the left edge, clipped to the panel."""

    rank: int
    kind: str
    names: tuple[str, ...]  # from long to short
    t0: float
    t1: float


class Panel(NamedTuple):
    """One strategy's stretch of time."""

    title: str
    said: str  # its speed and its traffic
    bars: list[Bar]
    steps: list[tuple[int, float, int]]  # (rank, when, number) of each step that starts in it
    serving: list[int]  # ranks that do not train


def task() -> Task:
    """Returns a task with equal layers, so buckets are equal. Values only matter to strategies that read them."""
    return Task(
        model=lambda: Stack(LAYERS, SIDE), data=_data, loss=lambda model, x: (model(x) - 1).square().mean(),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-4),
    )  # fmt: skip


def _data(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed + rank)
    return [torch.randn(8, SIDE, generator=rng) for _ in range(16)]


def experiment(strategy: Strategy, method: Method) -> Experiment:
    """Returns the simulated experiment for a figure of `method`, with the strategy or DDP under the same conditions."""
    link = Link(bandwidth=method.mbit or MBIT, latency=method.latency)
    return Experiment(
        task=task(), strategy=strategy, ranks=RANKS, steps=STEPS, pace=PACE, eval_every=0, bucket_mb=4e-6 * SIDE**2,
        compressor=Dense() if type(strategy) is DDP else method.codec(),
        fabric=Fabric(link=link, faults=method.faults),
    )  # fmt: skip


def simulated(strategy: Strategy, method: Method) -> Run:
    return simulate(experiment(strategy, method), real=method.real)


def write(folder: Path = FOLDER) -> list[Path]:
    """Writes all figures; reports and skips strategies that do not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for method in methods():
        if (cls := found(method.name)) is None:
            print(f"no figure of {method.name}: there is no such strategy yet")
        elif cls.opaque:
            print(f"no figure of {method.name}: only torch itself can run its exchange, on the wall clock")
        else:
            path = folder / f"{method.name}.svg"
            path.write_text(figure(method), encoding="utf-8")
            written.append(path)
    return written


def figure(method: Method) -> str:
    """Returns the whole SVG."""
    strategy = method.strategy(method.shown)
    panels = [
        panel("DDP", simulated(DDP(), method), method.window * 1e-3),
        panel(method.label(method.shown), simulated(strategy, method), method.window * 1e-3),
    ]
    return drawn(f"{method.label(method.shown)} compared with DDP", method.see, about(method), panels, method.window)


def about(method: Method) -> str:
    """Returns the common conditions of both panels in words."""
    parts = [
        f"4 ranks, {PACE:g} ms of compute per step, {4e-6 * SIDE**2 * LAYERS:g} MB of parameters in {LAYERS} buckets"
    ]
    late = f", {method.latency:g} ms latency" if method.latency else ""
    parts += [f"{method.mbit or MBIT:g} Mbit/s{late} at each rank's port", *([method.fault] if method.fault else [])]
    return "; ".join(parts) + "."


# -- reading the record --


def panel(title: str, run: Run, seconds: float) -> Panel:
    """Returns the stretch from the start of rank 0's step FIRST."""
    spans = run.timeline.spans.rows()
    steps = spans[spans.equal("lane", "step")]
    trains = sorted({int(r) for r in steps.rank})
    begin = float(steps.t0[(steps.rank == trains[0]) & (steps.step == FIRST)][0])
    if (end := min(float(steps.t1[steps.rank == r].max()) for r in trains)) < begin + seconds:
        raise ValueError(f"{title}: a rank is done after {end - begin:.3f} s of the {seconds} s that are to be shown")
    kept = steps[(steps.t0 >= begin - 1e-9) & (steps.t0 < begin + seconds)]
    starts = [(int(r), float(t) - begin, int(k)) for r, t, k in zip(kept.rank, kept.t0, kept.step, strict=True)]
    serving = [r for r in range(RANKS) if r not in trains]
    return Panel(title, said(spans, trains), bars(spans, begin, begin + seconds), sorted(starts), serving)


def said(spans: Rows, trains: list[int]) -> str:
    """Returns batches per second of all ranks and megabytes sent per batch, over all counted steps."""
    counted = (spans.step >= FIRST) & (spans.step < STEPS)
    steps = spans[counted & spans.equal("lane", "step")]
    batches = spans[counted & spans.equal("lane", "compute") & spans.equal("name", "forward")]
    seconds = {r: float(steps.t1[steps.rank == r].max() - steps.t0[steps.rank == r].min()) for r in trains}
    rate = sum(int((batches.rank == r).sum()) / seconds[r] for r in trains)
    sent = float(spans.nbytes[counted & spans.equal("lane", "comm")].sum()) / len(batches)
    return f"{rate:.0f} batches/s, {sent * 1e-6:.2f} MB sent per batch"


def bars(spans: Rows, begin: float, end: float) -> list[Bar]:
    """Returns the ranks' activities between two times. A rank waits until its port moves a collective's data."""
    near = spans[(spans.t1 > begin) & (spans.t0 < end)]
    ports = spans[spans.equal("lane", "port") & (spans.t1 > near.t0.min()) & (spans.t0 < near.t1.max())]
    out = []
    for rank, lane, name, t0, t1 in zip(near.rank, near.lane, near.name, near.t0, near.t1, strict=True):
        mine = int(rank), float(t0), float(t1)
        if lane == "compute":
            out.append(_bar(mine, name, (name, name[0].upper()), begin, end))
        elif lane == "wait":
            out.append(_bar(mine, "exposed", (), begin, end))
        elif lane == "comm" and name.startswith("send"):
            out.append(_bar(mine, "transfer", _short(name), begin, end))
        elif lane == "comm":
            at = ports[(ports.rank == rank) & ports.equal("name", name) & (ports.t0 >= t0) & (ports.t1 <= t1 + 1e-12)]
            moves = float(at.t0[0])
            out.append(_bar((mine[0], mine[1], moves), "waiting", (), begin, end))
            out.append(_bar((mine[0], moves, float(at.t1[0])), "transfer", _short(name), begin, end))
    return _joined(sorted(bar for bar in out if bar.t1 > bar.t0 + EPS))


def _joined(out: list[Bar]) -> list[Bar]:
    """Joins adjacent bars of one kind: waiting, or messages to the same rank."""
    joined: list[Bar] = []
    for bar in sorted(out, key=lambda b: (b.rank, b.kind, b.t0)):
        last = joined[-1] if joined else None
        goes_on = last is not None and last[:2] == bar[:2] and abs(last.t1 - bar.t0) < EPS
        if last is not None and goes_on and (bar.kind == "exposed" or _to(bar) == _to(last) != ""):
            joined[-1] = last._replace(t1=bar.t1, names=last.names if last.names == bar.names else (_to(bar),))
        else:
            joined.append(bar)
    return joined


def _to(bar: Bar) -> str:
    """Returns the arrow to a message's receiver; "" for other bars."""
    return next((name for name in reversed(bar.names) if name.startswith("→")), "")


def _bar(mine: tuple[int, float, float], kind: str, names: tuple[str, ...], begin: float, end: float) -> Bar:
    rank, t0, t1 = mine
    return Bar(rank, kind, names, max(t0, begin) - begin, min(t1, end) - begin)


def _short(name: str) -> tuple[str, ...]:
    """Returns a transfer's names: the bucket's number and, for a message, its receiver."""
    bucket, to = re.search(r"(?:bucket|fragment) (\d+)", name), re.search(r" to (\d+)$", name)
    number, arrow = bucket[1] if bucket else "", f"→{to[1]}" if to else ""
    return tuple(dict.fromkeys(x for x in (f"{number} {arrow}".strip(), arrow or number) if x))


# -- drawing --


def drawn(title: str, see: str, common: str, panels: list[Panel], window: float) -> str:
    """Returns the picture of some panels over one axis of `window` ms."""
    body, y = [text(20, 32, title, "title")], 32.0
    for words, look in ((see, "see"), (common, "soft")):
        y += 2
        for part in wrapped(words, WIDTH - 40, TEXT + 1 if look == "see" else TEXT):
            y += 21
            body.append(text(20, y, part, look))
    scale = (WIDTH - LEFT - RIGHT) / (window * 1e-3)
    y += 16
    for one in panels:
        body += [f'<g data-window="{window:g}">', *_panel(one, y, scale), "</g>"]
        y += 44 + PITCH * RANKS
    body += _axis(y, window, scale)
    shown = {bar.kind for one in panels for bar in one.bars}
    legend, y = _legend(y + 64, [kind for kind in LOOKS if kind in shown])
    return _page(title, see, body + legend, y + 18)


def _panel(one: Panel, top: float, scale: float) -> list[str]:
    """Draws the heading, the step numbers of rank 0 and a row per rank."""
    out = [text(20, top + 18, one.title, "name"), text(WIDTH - RIGHT, top + 18, one.said, "soft", text_anchor="end")]
    rows = top + 44
    free = 0.0
    first = min((rank for rank, _, _ in one.steps), default=0)
    for rank, t, number in one.steps:
        x = LEFT + t * scale
        y = rows + rank * PITCH
        out.append(line(x, y - 5, x, y + COMPUTE + BETWEEN + NETWORK + 3, "boundary"))
        words = f"step {number}" if t == 0 else str(number)
        if rank == first and x > free and x + width(words) < WIDTH:
            out.append(text(x, rows - 8, words, "soft"))
            free = x + width(words) + 6
    for rank in range(RANKS):
        y = rows + rank * PITCH
        out.append(text(20, y + 15, f"rank {rank}", "rank"))
        out.append(text(LEFT - 10, y + 15 + COMPUTE + BETWEEN, "network", "soft", text_anchor="end"))
        out.append(
            line(LEFT, y + COMPUTE + BETWEEN + NETWORK / 2, WIDTH - RIGHT, y + COMPUTE + BETWEEN + NETWORK / 2, "rail")
        )
        if rank in one.serving:
            out.append(text(LEFT + 6, y + 15, "only serves: it computes no gradients", "soft"))
    for bar in sorted(one.bars, key=lambda b: b.kind != "waiting"):
        out += _drawn(bar, rows + bar.rank * PITCH, scale)
    return out


def _drawn(bar: Bar, y: float, scale: float) -> list[str]:
    """Draws a bar and the longest of its names that fits into it."""
    x, wide = LEFT + bar.t0 * scale, (bar.t1 - bar.t0) * scale
    net = y + COMPUTE + BETWEEN
    top, high = {"waiting": (net + 5, NETWORK - 10), "transfer": (net, NETWORK)}.get(bar.kind, (y, COMPUTE))
    out = [rect(x, top, wide, high, bar.kind, data_rank=bar.rank)]
    if name := fitting(bar.names, wide) if LOOKS[bar.kind][2] else "":
        out.append(text(x + wide / 2, top + high / 2 + 5, name, f"in-{bar.kind}", text_anchor="middle"))
    return out


def _axis(y: float, window: float, scale: float) -> list[str]:
    out = [line(LEFT, y, WIDTH - RIGHT, y, "axis")]
    for ms in ticks(window):
        x = LEFT + ms * 1e-3 * scale
        out += [line(x, y, x, y + 6, "axis"), text(x, y + 22, f"{ms:g}", "soft", text_anchor="middle")]
    return [*out, text((LEFT + WIDTH - RIGHT) / 2, y + 42, "time (ms)", "soft", text_anchor="middle")]


def _legend(y: float, kinds: list[str]) -> tuple[list[str], float]:
    """Returns swatches with labels on as many lines as needed, and the position of the last line."""
    out, x = [], 20.0
    for kind in [*kinds, "boundary"]:
        words = LOOKS[kind][0] if kind in LOOKS else "a step begins"
        if x + 34 + width(words) > WIDTH - 20:
            x, y = 20.0, y + 26
        if kind == "boundary":
            out.append(line(x + 12, y - 4, x + 12, y + 18, "boundary"))
        else:
            out.append(rect(x, y + (4 if kind == "waiting" else 0), 26, 8 if kind == "waiting" else 16, f"{kind} key"))
        out.append(text(x + 34, y + 13, words, "ink"))
        x += 34 + width(words) + 26
    return out, y + 16


def _page(title: str, see: str, body: list[str], height: float) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title see" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="{TEXT}">'
    )
    names = f'<title id="title">{escape(title)}</title><desc id="see">{escape(see)}</desc>'
    paper = rect(0, 0, WIDTH, height, "paper")
    return "\n".join([head, names, f"<style>{STYLE}</style>", HATCHES, paper, *body, "</svg>", ""])


def _colours(paper: str, ink: str, soft: str, rail: str) -> str:
    """Returns the colours that follow the reader's theme."""
    return (
        f".paper{{fill:{paper}}} .title,.name,.rank,.ink,.see{{fill:{ink}}} .soft{{fill:{soft}}} "
        f".rail{{stroke:{rail}}} .axis,.boundary{{stroke:{ink}}} .waiting{{stroke:{soft}}} .tooth{{stroke:{soft}}}"
    )


LIGHT, DARK = ("#ffffff", "#1c1c1e", "#55555a", "#d9d9db"), ("#16181c", "#ececee", "#b8b8be", "#44464c")
_BARS = " ".join(f".{kind}{{fill:{fill}}} .in-{kind}{{fill:{ink}}}" for kind, (_, fill, ink) in LOOKS.items() if ink)
STYLE = (
    f".title{{font-size:20px;font-weight:700}} .name{{font-size:16px;font-weight:700}} .see{{font-size:{TEXT + 1}px}} "
    ".rank{font-weight:600} .boundary{stroke-width:2} .axis,.rail{stroke-width:1} "
    f"{_BARS} .forward{{stroke:{theme.BLUE}}} .backward,.update{{stroke:#00344f}} .transfer{{stroke:{BROWN}}} "
    f".exposed{{fill:url(#stripes);stroke:{theme.VERMILLION}}} .waiting{{fill:url(#teeth)}} "
    f".stripe{{stroke:{theme.VERMILLION}}} {_colours(*LIGHT)} @media (prefers-color-scheme: dark){{{_colours(*DARK)}}}"
)
HATCHES = (
    '<defs><pattern id="stripes" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="stripe" x1="1.5" y1="0" x2="1.5" y2="7" stroke-width="2.4"/></pattern>'
    '<pattern id="teeth" width="5" height="8" patternUnits="userSpaceOnUse">'
    '<line class="tooth" x1="1" y1="0" x2="1" y2="8" stroke-width="1.4"/></pattern></defs>'
)
