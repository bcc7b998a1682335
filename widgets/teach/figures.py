"""Figures of lessons: messages, schedules, meshes, graphs, rooflines, memory and curves.

    draw_collective(Ring(), ranks=4)        # the messages of an all-reduce, by round
    draw_schedule(OneFOneB(), stages=4)     # the passes of a pipeline

Each function draws the workbench's own objects and returns a plotly figure. Its `layout.meta["alt"]` describes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import plotly.graph_objects as go

from widgets.charts import theme
from widgets.teach.frame import (
    GRID,
    INK,
    MUTED,
    PAPER,
    curve_line,
    fill_bar,
    log_axis,
    make_figure,
    rank_axis,
    title_figure,
)
from widgets.teach.passes import TimedPass, time_passes
from widgets.views.memory import OTHER, PARTS
from workbench.analysis import format_bytes, measure_memory
from workbench.experiment.mesh_rules import make_mesh
from workbench.fabric import Fabric
from workbench.fabric.algorithms import Algorithm
from workbench.fabric.messages import list_rounds
from workbench.settings import KnobError, in_words, short, to_plain

WIDE = 900  # px of a figure's plot on a page of 1024 px
DIGIT = 11  # px that a character needs
LABELLED_RANKS = 8  # messages of more ranks have no numbers
MARKED_POINTS = 40  # points of a longer curve have no markers
MAX_RANKS = 64  # a figure of more ranks would be illegible
MESSAGES = {  # (receiver adds, message leaves a site): name, colour, dash
    (True, False): ("added by its receiver", theme.BLUE, "solid"),
    (False, False): ("copied by its receiver", theme.GREEN, "dot"),
    (True, True): ("added, to another site", theme.VERMILLION, "solid"),
    (False, True): ("copied, to another site", theme.PURPLE, "dot"),
}
PASSES = {  # name, colour, colour of the text
    "F": ("forward", theme.SKY, "#000000"),
    "B": ("backward", theme.BLUE, "#ffffff"),
    "I": ("gradient of the input", theme.BLUE, "#ffffff"),
    "W": ("gradient of the parameters", theme.YELLOW, "#000000"),
}


def draw_collective(
    algorithm: Algorithm, ranks: int = 4, fabric: Fabric | None = None, nbytes: int = 1 << 20
) -> go.Figure:
    """Draws the messages of an all-reduce of `nbytes` bytes: an arrow for each, from round to round.

    A thicker arrow carries more bytes. The number at an arrow is that of its part of the tensor. Sites are those of
    `algorithm` or `fabric`.
    """
    _require_ranks(ranks)
    rounds = list_rounds(algorithm, ranks, fabric, nbytes)
    site = getattr(algorithm, "site", 0) or (fabric.site if fabric else 0) or ranks
    sizes = sorted({round(m.share, 9) for every in rounds for m in every}, reverse=True)
    thick = 4.5 if ranks <= LABELLED_RANKS else 2.0
    labelled = ranks <= LABELLED_RANKS and len(sizes) == 1 and sizes[0] < 1
    figure = make_figure(
        90 + 56 * ranks if ranks <= LABELLED_RANKS else 90 + 30 * ranks, "round", "",
        xaxis={"tickvals": [k + 0.5 for k in range(len(rounds))], "ticktext": [*range(1, len(rounds) + 1)],
               "range": [0, len(rounds)], "showgrid": False},
        yaxis=rank_axis(ranks),
    )  # fmt: skip
    for k in range(1, len(rounds)):
        figure.add_vline(x=k, line={"color": GRID, "width": 1})
    for rank in range(site, ranks, site):
        figure.add_hline(y=rank - 0.5, line={"color": MUTED, "width": 1.5, "dash": "dash"})
    for (adds, away), (name, colour, dash) in MESSAGES.items():
        for number, size in enumerate(sizes):
            chosen = [(k, m) for k, every in enumerate(rounds) for m in every if m.adds == adds
                      and (m.source // site != m.to // site) == away and round(m.share, 9) == size]  # fmt: skip
            if chosen:
                listed = not any(trace.name == name for trace in figure.data)
                figure.add_trace(_draw_arrows(chosen, name, colour, dash, max(1.5, thick - 1.5 * number), listed))
    if labelled:
        told = [(k + 0.12, m.source, round(m.start / m.share)) for k, every in enumerate(rounds) for m in every]
        x, y, text = zip(*told, strict=True)
        figure.add_trace(go.Scatter(
            x=x, y=y, text=text, mode="markers+text", showlegend=False, hoverinfo="skip", marker=_circle(19, 1, MUTED),
            textfont={"size": theme.TEXT_SIZE, "color": INK},
        ))  # fmt: skip
        figure.update_xaxes(title_text=f"round (numbers: the part of the tensor, of {round(1 / sizes[0])})")
    most = max(sum(m.share for every in rounds for m in every if m.source == rank) for rank in range(ranks))
    title = f"{_name(algorithm)} on {ranks} ranks: {len(rounds)} rounds"
    counts = [len(every) for every in rounds]
    alt = (f"{title}. Messages in each round: {', '.join(map(str, counts))}. A rank sends at most {most:.3g} times the "
           f"bytes of the tensor. Sites: {-(-ranks // site)}.")  # fmt: skip
    return title_figure(figure, title, f"a rank sends at most {most:.3g} times the tensor", alt)


def _draw_arrows(chosen: list[Any], name: str, colour: str, dash: str, width: float, listed: bool) -> go.Scatter:
    x, y, told = [], [], []
    for k, m in chosen:
        x += [k + 0.06, k + 0.94, None]
        y += [m.source, m.to, None]
        words = f"round {k + 1}: rank {m.source} sends {m.share:.3g} of the tensor to rank {m.to}, which "
        told += [words + ("adds it" if m.adds else "copies it")] * 3
    return go.Scatter(
        x=x, y=y, mode="lines+markers", name=name, showlegend=listed, text=told, hoverinfo="text", legendgroup=name,
        line={"color": colour, "width": width, "dash": dash},
        marker={"symbol": "arrow", "angleref": "previous", "size": [0, 8 + 2 * width, 0] * len(chosen),
                "color": colour, "opacity": 1},
    )  # fmt: skip


def draw_schedule(schedule: Any, stages: int = 4, micros: int = 8, steps: int = 1, backward: float = 2.0) -> go.Figure:
    """Draws when each stage computes which micro-batch, if messages take no time.

    backward: how long a backward takes; a forward through a whole stage takes 1
    """
    passes = time_passes(schedule, stages, micros, steps, backward)
    end = max(p.end for p in passes)
    idle = 1 - sum(p.end - p.begin for p in passes) / (stages * end)
    figure = make_figure(
        120 + 52 * stages, "time (forwards of a stage)", "", barmode="overlay", bargap=0.12, xaxis={"range": [0, end]},
        yaxis={**rank_axis(stages, "stage"), "showgrid": False},
    )  # fmt: skip
    cut = int(any(len(str(p.action)) > _room(p, end) for p in passes))  # whether labels lack the kind of the pass
    for what, (name, colour, ink) in PASSES.items():
        if not (mine := [p for p in passes if p.action.what == what]):
            continue
        label = [str(p.action)[cut:] for p in mine]
        fits = all(len(text) <= _room(p, end) for p, text in zip(mine, label, strict=True))
        figure.add_trace(go.Bar(
            x=[p.end - p.begin for p in mine], base=[p.begin for p in mine], y=[p.stage for p in mine], name=name,
            orientation="h", text=label if fits else None, textposition="inside", insidetextanchor="middle",
            textangle=0, constraintext="none", cliponaxis=False, insidetextfont={"size": theme.TEXT_SIZE, "color": ink},
            marker=fill_bar(colour, ""), hoverinfo="text",
            hovertext=[f"stage {p.stage}: {name} of micro-batch {p.action.micro}, from {p.begin:g} to {p.end:g}"
                       for p in mine],
        ))  # fmt: skip
    ahead = f", {steps} steps" if steps > 1 else ""
    title = f"{_name(schedule)} on {stages} stages, {micros} micro-batch{'es' * (micros > 1)}{ahead}"
    orders = [f"stage {s}: " + " ".join(str(p.action) for p in passes if p.stage == s) for s in range(stages)]
    alt = f"{title}. Stages are idle for {idle:.0%} of the time. Order of the passes: {'; '.join(orders)}."
    return title_figure(figure, title, f"idle: {idle:.0%} of the stages' time".replace("%", " %"), alt)


def _room(one: TimedPass, end: float) -> float:
    """Returns how many characters fit into a pass."""
    return (one.end - one.begin) / end * WIDE / DIGIT


def draw_mesh(mesh: Any, along: str = "") -> go.Figure:
    """Draws ranks at their coordinates. Ranks with the same letter and colour are a group along dimension `along`.

    mesh:  an Experiment, or the sizes of the dimensions by name, such as {"data": 2, "pipeline": 2, "tensor": 2}
    along: a dimension; by default the last, which has neighbouring ranks
    """
    dims, ranks = _dims_of(mesh)
    _require_ranks(len(ranks))
    names, sizes = [name for name, _ in dims], [size for _, size in dims]
    if (along := along or names[-1]) not in names:
        raise KnobError(f"along={short(along)}: must be a dimension of this mesh: {', '.join(map(repr, names))}")
    wide, high = sizes[-1], sizes[-2] if len(sizes) > 1 else 1
    blocks = list(product(*(range(size) for size in sizes[:-2])))
    found: dict[tuple[int, ...], int] = {}
    x, y, text, told, groups = [], [], [], [], []
    for rank, where in zip(ranks, product(*(range(size) for size in sizes)), strict=True):
        key = tuple(place for name, place in zip(names, where, strict=True) if name != along)
        group = found.setdefault(key, len(found))
        x.append(blocks.index(where[:-2]) * (wide + 0.7) + where[-1])
        y.append(where[-2] if len(where) > 1 else 0)
        text.append(f"<b>{rank}</b><br>{_letter(group)}")
        told.append(f"rank {rank}: " + ", ".join(f"{n} {i}" for n, i in zip(names, where, strict=True)))
        groups.append(group)
    figure = make_figure(
        130 + 74 * high, names[-1], "",
        xaxis={"tickvals": x[:wide] if len(blocks) == 1 else sorted(set(x)), "showgrid": False, "showline": False,
               "ticktext": [*range(wide)] * len(blocks), "range": [-0.7, max(x) + 0.7]},
        yaxis={"tickvals": [*range(high)], "ticktext": [f"{names[-2]} {i} " for i in range(high)] if len(names) > 1
               else [""], "range": [high - 0.4, -0.8], "showgrid": False, "showline": False, "ticks": ""},
    )  # fmt: skip
    colours = [curve_line(group, 1)["color"] for group in groups]
    figure.add_trace(go.Scatter(
        x=x, y=y, text=text, hovertext=told, hoverinfo="text", mode="markers+text", showlegend=False,
        textfont={"size": theme.TEXT_SIZE, "color": INK},
        marker={"symbol": "square", "size": 48, "color": PAPER, "line": {"width": 4, "color": colours}},
    ))  # fmt: skip
    for number, block in enumerate(blocks if len(names) > 2 else []):
        words = ", ".join(f"{name} {place}" for name, place in zip(names, block, strict=False))
        middle = number * (wide + 0.7) + (wide - 1) / 2
        figure.add_annotation(x=middle, y=-0.68, text=words, showarrow=False, font={"size": theme.TEXT_SIZE})
    title = "Mesh: " + " × ".join(f"{name} {size}" for name, size in dims)
    every = [[rank for rank, mine in zip(ranks, groups, strict=True) if mine == g] for g in range(len(found))]
    listed = "; ".join(f"{_letter(g)}: ranks {', '.join(map(str, one))}" for g, one in enumerate(every))
    alt = f"{title}. Groups along {along}: {listed}."
    return title_figure(figure, title, f"the same letter: a group along {along}", alt)


def draw_graph(strategy: Any, ranks: int = 8, number: int = 0) -> go.Figure:
    """Draws a graph of neighbours: a line between ranks that exchange, an arrow if only one sends.

    strategy: one with neighbours, such as Gossip(graph="ring"), or each rank's receivers, such as {0: [1], 1: [0]}
    number:   the round, for graphs that differ from round to round
    """
    if isinstance(strategy, Mapping):
        edges, name = {(rank, to) for rank, every in strategy.items() for to in every}, "Neighbours"
        ranks = 1 + max((max(edge) for edge in edges), default=len(strategy) - 1)
    elif hasattr(strategy, "receivers"):
        if reason := strategy.refuses_size(ranks):
            raise KnobError(reason)
        name = _name(strategy, "graph", "edges")
        edges = {(rank, to) for rank in range(ranks) for to in strategy.receivers(ranks, rank, number)}
    else:
        raise KnobError(f"strategy={_name(strategy)}: its ranks have no graph of neighbours; take Gossip()")
    _require_ranks(ranks)
    at = [(math.sin(2 * math.pi * r / ranks), math.cos(2 * math.pi * r / ranks)) for r in range(ranks)]
    hidden = {"visible": False, "range": [-1.25, 1.25]}
    figure = make_figure(460, "", "", xaxis=hidden, yaxis={**hidden, "scaleanchor": "x"})
    for rank, to in sorted(edges):
        both = (to, rank) in edges
        if both and rank > to:
            continue
        (x0, y0), (x1, y1) = at[rank], at[to]
        figure.add_annotation(
            x=x1, y=y1, ax=x0, ay=y0, xref="x", yref="y", axref="x", ayref="y", text="", showarrow=True, standoff=20,
            startstandoff=20, arrowhead=0 if both else 2, arrowsize=1.2, arrowwidth=2.5, arrowcolor=theme.BLUE,
        )  # fmt: skip
    figure.add_trace(go.Scatter(
        x=[x for x, _ in at], y=[y for _, y in at], text=[f"<b>{r}</b>" for r in range(ranks)], mode="markers+text",
        showlegend=False, hoverinfo="text", textfont={"size": 16, "color": INK},
        hovertext=[f"rank {r} sends to {sorted(to for who, to in edges if who == r)}" for r in range(ranks)],
        marker=_circle(36, 3, theme.BLUE),
    ))  # fmt: skip
    title = f"{name} on {ranks} ranks, round {number + 1}"
    sends = [sum(who == r for who, _ in edges) for r in range(ranks)]
    listed = "; ".join(f"{r} to {', '.join(str(to) for who, to in sorted(edges) if who == r)}" for r in range(ranks))
    told = f"a rank sends to {min(sends)}" + (f" to {max(sends)}" if max(sends) > min(sends) else "")
    return title_figure(figure, title, f"{told} other{'s' * (max(sends) > 1)}", f"{title}. Who sends: {listed}.")


def draw_roofline(
    points: Mapping[str, tuple[float, float]], peak: float, bandwidths: Mapping[str, float], title: str = "Roofline"
) -> go.Figure:
    """Draws rooflines and measured points. A point under the slope waits for bytes, under the flat part for compute.

    points:     name -> (arithmetic intensity in FLOP per byte, FLOP/s)
    peak:       FLOP/s of the processor
    bandwidths: name -> bytes/s, such as {"memory": 2e10, "network": 1e8}
    """
    if not bandwidths or peak <= 0 or min(bandwidths.values()) <= 0:
        raise KnobError("peak, bandwidths: must be above 0, with at least one bandwidth")
    ridges = {name: peak / rate for name, rate in bandwidths.items()}
    every = [*ridges.values(), *(x for x, _ in points.values())]
    least, most = min(every) / 10, max(every) * 10
    figure = make_figure(
        430, "arithmetic intensity (FLOP per byte)", "FLOP/s", xaxis=log_axis([least, most]),
        yaxis=log_axis([peak, *(least * rate for rate in bandwidths.values()), *(y for _, y in points.values())]),
    )  # fmt: skip
    for number, (name, rate) in enumerate(bandwidths.items()):
        x, name = [least, ridges[name], most], f"{name}: {format_bytes(rate)}/s, ridge at {_round(ridges[name])} FLOP/B"
        figure.add_trace(
            go.Scatter(x=x, y=[least * rate, peak, peak], mode="lines", name=name, line=curve_line(number, 3))
        )
    for number, (name, (at, rate)) in enumerate(points.items()):
        figure.add_trace(go.Scatter(
            x=[at], y=[rate], mode="markers+text", text=[name], name=name, showlegend=False,
            textposition="bottom center", textfont={"size": theme.TEXT_SIZE, "color": INK},
            hovertemplate=f"{name}: %{{x:.3~g}} FLOP/B, %{{y:.3~s}}FLOP/s<extra></extra>",
            marker={"symbol": theme.rank_symbol(number), "size": 13, "color": INK},
        ))  # fmt: skip
    told = [f"{name} at {x:.3g} FLOP per byte and {_flops(y)}" for name, (x, y) in points.items()]
    roofs = [f"{name} meets the peak at {_round(x)} FLOP per byte" for name, x in ridges.items()]
    alt = f"{title}. Peak: {_flops(peak)}. Roofs: {'; '.join(roofs)}. Points: {'; '.join(told)}."
    return title_figure(figure, title, f"peak: {_flops(peak)}", alt)


def draw_memory(bars: Mapping[str, Any], limit_mb: float = 0.0, title: str = "Memory of a rank") -> go.Figure:
    """Draws a stacked bar of bytes by category for each name.

    bars:     name -> bytes by category, or a run: its rank with the largest peak
    limit_mb: the budget, as a line (MB); 0: none
    """
    found = {name: _bytes_of(name, bar) for name, bar in bars.items()}
    known = {name: (colour, shape) for name, colour, shape in PARTS}
    figure = make_figure(
        150 + 44 * len(found), "memory (bytes)", "", barmode="stack", bargap=0.3,
        xaxis={"tickformat": "~s", "ticksuffix": "B", "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "ticks": "", "showgrid": False, "automargin": True, "type": "category"},
    )  # fmt: skip
    for category in dict.fromkeys(name for bar in found.values() for name in bar):
        colour, shape = known.get(category, OTHER[1:])
        figure.add_trace(go.Bar(
            x=[bar.get(category, 0) for bar in found.values()], y=[*found], orientation="h", name=category,
            marker=fill_bar(colour, shape), hovertemplate=f"%{{y}}, {category}: %{{x:.4~s}}B<extra></extra>",
        ))  # fmt: skip
    if limit_mb:
        figure.add_vline(x=limit_mb * 1e6, line={"color": INK, "width": 2, "dash": "dash"},
                         annotation={"text": f"budget: {limit_mb:g} MB", "font": {"size": theme.TEXT_SIZE},
                                     "yanchor": "bottom"})  # fmt: skip
    told = [f"{name}: {', '.join(f'{c} {format_bytes(n)}' for c, n in bar.items())}" for name, bar in found.items()]
    budget = f" Budget: {limit_mb:g} MB." if limit_mb else ""
    return title_figure(figure, title, "", f"{title}. {'; '.join(told)}.{budget}")


def draw_lines(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str, title: str, log: str = ""
) -> go.Figure:
    """Draws curves with a dash and a marker of their own.

    lines: name -> (x values, y values)
    x, y:  the axes' titles, with units
    log:   the logarithmic axes: "x", "y" or "xy"
    """
    if set(log) - set("xy"):
        raise KnobError(f"log={short(log)}: must be 'x', 'y', 'xy' or ''")
    kinds = [log_axis([v for line in lines.values() for v in line[k]]) if name in log else {}
             for k, name in enumerate("xy")]  # fmt: skip
    figure = make_figure(420, x, y, xaxis=kinds[0], yaxis=kinds[1])
    for number, (name, (at, value)) in enumerate(lines.items()):
        figure.add_trace(go.Scatter(
            x=list(at), y=list(value), name=name, mode="lines+markers" if len(at) <= MARKED_POINTS else "lines",
            line=curve_line(number, 2.5), marker={"symbol": theme.rank_symbol(number), "size": 9},
        ))  # fmt: skip
    told = [f"{name}: from {v[0]:.3g} at {a[0]:.3g} to {v[-1]:.3g} at {a[-1]:.3g}"
            for name, a, v in ((name, list(a), list(v)) for name, (a, v) in lines.items()) if a]  # fmt: skip
    return title_figure(figure, title, "", f"{title}. {y} over {x}. {'; '.join(told)}.")


def _dims_of(mesh: Any) -> tuple[tuple[tuple[str, int], ...], tuple[int, ...]]:
    """Returns the dimensions of a mesh and its ranks in order."""
    if isinstance(mesh, Mapping) and mesh and all(isinstance(n, int) and n > 0 for n in mesh.values()):
        return tuple(mesh.items()), tuple(range(math.prod(mesh.values())))
    if hasattr(mesh, "strategy"):
        mesh = make_mesh(mesh.strategy, mesh.ranks, partition=mesh.partition)
        return mesh.dims, mesh.ranks
    raise KnobError(f"mesh={short(mesh)}: must be an Experiment, or sizes by name, such as {{'data': 2, 'tensor': 2}}")


def _bytes_of(name: str, bar: Any) -> dict[str, float]:
    if isinstance(bar, Mapping):
        return dict(bar)
    if hasattr(bar, "timeline") and (found := measure_memory(bar.timeline)):
        return dict(max(found, key=lambda one: one.peak).most)
    raise KnobError(f"bars[{name!r}]={short(bar)}: must be bytes by category, or a run that records memory")


def _name(member: Any, *kept: str) -> str:
    """Writes a member with the settings that differ from its defaults, and those in `kept` that are not empty."""
    plain = to_plain(member)
    if not isinstance(plain, dict) or len(plain) != 1:
        return in_words(plain)
    ((name, knobs),) = plain.items()
    usual = to_plain(type(member)())[name]
    said = {key: value for key, value in knobs.items() if value != usual.get(key) or (key in kept and value)}
    return in_words({name: said}) if said else name


def _circle(size: int, width: int, colour: str) -> dict[str, Any]:
    return {"size": size, "color": PAPER, "line": {"width": width, "color": colour}}


def _round(x: float) -> str:
    """Returns a number with three digits, without an exponent: 7,810."""
    return f"{float(f'{x:.3g}'):,.0f}" if x >= 100 else f"{x:.3g}"


def _flops(rate: float) -> str:
    return format_bytes(rate).removesuffix("B") + "FLOP/s"


def _letter(number: int) -> str:
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _require_ranks(ranks: int) -> None:
    if not 1 <= ranks <= MAX_RANKS:
        raise KnobError(f"ranks={ranks}: a figure shows 1 to {MAX_RANKS} ranks")
