"""Converts other jobs' torch.profiler traces to our timeline: a row per rank, with overlap.

    step      the profiler's steps (`ProfilerStep#3`), or the whole trace. On a GPU a step ends with the last kernel
              that was launched in it
    compute   on a GPU kernels except communication and copies, on a CPU operators. `backward`: called by autograd;
              `update`: called by an optimizer; `forward`: all other compute
    comm      kernels of NCCL or RCCL; on a CPU the events of gloo or MPI
    wait      communication without compute: exposed
    offload   copies between host and device

Events less than `GAP` apart become one span. So a timeline has hundreds of boxes, not a million. Overlap is accurate to
that gap. Bytes are those of a collective's input tensor, if the trace has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.cover import Cover
from workbench.record.kineto import Event, Trace
from workbench.record.timeline import Mark, Span, Timeline

GAP = {True: 5e-6, False: 50e-6}  # seconds, on a GPU and on a CPU (with Python between operators)
MAX_CLOCK_DIFFERENCE = 60.0  # seconds between the begins of 2 ranks above which their clocks are not trusted
KERNELS, COPIES = "kernel", ("gpu_memcpy", "gpu_memset")
_STEP = re.compile(r"ProfilerStep#([0-9]{1,9})")
_GPU_COMM = re.compile(r"^(nccl|rccl|mscclpp?|oneccl)", re.I)
_CPU_COMM = re.compile(r"^(gloo|mpi|ucc|nccl):(\w+)")
_BACKWARD, _UPDATE = "autograd::engine::evaluate_function", "Optimizer.step#"
_ITEM = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "long": 8, "byte": 1, "char": 1, "bool": 1}
_OPS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
        "alltoall": "all_to_all", "broadcast": "broadcast", "sendrecv": "send",
        "reduce": "reduce", "barrier": "barrier"}  # fmt: skip


class TracePiece(NamedTuple):
    """A rank's work: lane, name and step."""

    step: int
    lane: str
    name: str
    asked: float
    t0: float
    t1: float
    nbytes: int = 0


def convert_traces(traces: dict[int, Trace]) -> tuple[Timeline, list[str]]:
    """Merges all ranks' traces into one timeline from 0. Also returns notes."""
    timeline, notes = Timeline(), []
    begins = {rank: trace.events[0].t0 for rank, trace in traces.items()}
    zero = dict.fromkeys(begins, min(begins.values()))
    if max(begins.values()) - min(begins.values()) > MAX_CLOCK_DIFFERENCE:
        zero = begins
        notes.append("the ranks' clocks are far apart, so each rank begins at 0; waits between ranks are unknown")
    if odd := sum(trace.odd for trace in traces.values()):
        notes.append(f"{odd} events without a finite time or a name were omitted")
    rows: list[Span] = []
    for rank, trace in traces.items():
        for p in convert_events(trace.events):
            asked, t0, t1 = (t - zero[rank] for t in (min(p.asked, p.t0), p.t0, p.t1))
            rows.append(Span(rank, p.step, p.lane, p.name, asked, t0, t1, p.nbytes))
    rows.sort(key=lambda span: span.t1)
    timeline.spans.add(rows)
    timeline.marks.add([Mark(rows[-1].rank, rows[-1].step, "state", rows[-1].t1, '{"state": "done"}')])
    return timeline, notes


def convert_events(events: Sequence[Event]) -> list[TracePiece]:
    """Converts one rank's events, in order."""
    host = [e for e in events if e.cat not in (KERNELS, *COPIES)]
    kernels = [e for e in events if e.cat == KERNELS]
    copies = [e for e in events if e.cat in COPIES]
    steps = _find_steps(host, events)
    launched = {e.args["correlation"]: e.t0 for e in host
                if e.cat in ("cuda_runtime", "cuda_driver") and isinstance(e.args.get("correlation"), int)}  # fmt: skip
    device, mine = (
        bool(kernels),
        [*(kernels or (e for e in host if _is_compute(e) or _CPU_COMM.match(e.name))), *copies],
    )
    calls = [e.args.get("correlation") for e in mine]
    asked = np.array([launched.get(c, e.t0) if isinstance(c, int) else e.t0 for c, e in zip(calls, mine, strict=True)])
    at = np.searchsorted(steps[:, 0], asked, side="right") - 1
    fit = (at >= 0) & (device | (asked < steps[at.clip(0), 1]))
    found: list[list[TracePiece]] = [[] for _ in steps]
    for e, by, step, phase, good in zip(mine, asked.tolist(), at.tolist(), _find_phases(host, asked), fit, strict=True):
        if not good:
            continue
        if e.cat in COPIES:
            found[step].append(TracePiece(step, "offload", e.name, e.t0, e.t0, e.t1, _read_nbytes(e)))
        elif op := _name_collective(e, device):
            found[step].append(TracePiece(step, "comm", op, by, e.t0, e.t1, _read_nbytes(e)))
        else:
            found[step].append(TracePiece(step, "compute", phase, e.t0, e.t0, e.t1))
    ends = _find_ends(steps, found) if device else steps.tolist()
    return [piece for step, (t0, t1) in enumerate(ends) for piece in _of_step(step, t0, t1, found[step], GAP[device])]


def _find_steps(host: Sequence[Event], events: Sequence[Event]) -> np.ndarray:
    """`(n, 2)` begin and end of profiler steps on the host, or of the whole trace."""
    said = {e.name: (e.t0, e.t1) for e in host if _STEP.fullmatch(e.name) and e.cat == "user_annotation"}
    whole = [(events[0].t0, max([e.t1 for e in events]))]
    return np.array(sorted(said.values()) or whole)


def _find_ends(steps: np.ndarray, found: list[list[TracePiece]]) -> list[tuple[float, float]]:
    """Returns begin and end of steps on a device: a step ends with its last kernel."""
    out: list[tuple[float, float]] = []
    for (begun, ended), mine in zip(steps.tolist(), found, strict=True):
        begin = out[-1][1] if out else min([p.t0 for p in mine], default=begun)
        out.append((begin, max([begin, *(p.t1 for p in mine)] if mine else [begin, ended])))
    return out


def _of_step(step: int, t0: float, t1: float, mine: list[TracePiece], gap: float) -> list[TracePiece]:
    out: list[TracePiece] = []
    computed = _cover_pieces((p for p in mine if p.lane == "compute"), gap)
    free = computed
    for name in ("update", "backward", "forward"):  # overlapping operators count once, in this order
        cover = _cover_pieces((p for p in mine if p.lane == "compute" and p.name == name), gap)
        out += [TracePiece(step, "compute", name, a, a, b) for a, b in _intersect_covers(cover, free)]
        free = Cover(*_to_arrays(_subtract_cover(free, cover)))
    comm = sorted((p for p in mine if p.lane == "comm"), key=lambda p: p.t0)
    out += [p._replace(name=f"{p.name} {number}") for number, p in enumerate(comm)]
    talked = _cover_pieces(comm, 0.0)
    out += [TracePiece(step, "wait", "communication", max(a, t0), max(a, t0), min(b, t1))
            for a, b in _subtract_cover(talked, computed) if min(b, t1) > max(a, t0)]  # fmt: skip
    out += [p for p in mine if p.lane == "offload"]
    return [*out, TracePiece(step, "step", "step", t0, t0, t1)]


def _cover_pieces(found: Iterable[TracePiece], gap: float) -> Cover:
    """Returns the union of pieces, with gaps up to `gap` closed."""
    every = list(found)
    wide = Cover(np.array([p.t0 for p in every]), np.array([p.t1 for p in every]) + gap)
    return Cover(wide.begin, wide.end - gap)


def _subtract_cover(cover: Cover, other: Cover) -> list[tuple[float, float]]:
    cuts = np.unique(np.concatenate([cover.begin, cover.end, other.begin, other.end]))
    middle = (cuts[1:] + cuts[:-1]) / 2
    keep = _is_inside(cover, middle) & ~_is_inside(other, middle)
    parts = Cover(cuts[:-1][keep], cuts[1:][keep])
    return list(zip(parts.begin.tolist(), parts.end.tolist(), strict=True))


def _intersect_covers(cover: Cover, other: Cover) -> list[tuple[float, float]]:
    return _subtract_cover(cover, Cover(*_to_arrays(_subtract_cover(cover, other))))


def _is_inside(cover: Cover, t: np.ndarray) -> np.ndarray:
    at = np.searchsorted(cover.begin, t, side="right") - 1
    return (at >= 0) & (t < cover.end[at.clip(0)]) if len(cover.begin) else np.zeros(len(t), bool)


def _to_arrays(parts: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([a for a, _ in parts], float), np.array([b for _, b in parts], float)


def _find_phases(host: Sequence[Event], t: np.ndarray) -> list[str]:
    out = np.full(len(t), "forward", "O")
    for name, begins in (("backward", _BACKWARD), ("update", _UPDATE)):
        some = [e for e in host if e.name.startswith(begins)]
        out[_is_inside(Cover(np.array([e.t0 for e in some]), np.array([e.t1 for e in some])), t)] = name
    return list(out)


def _is_compute(e: Event) -> bool:
    return (e.cat == "cpu_op" and not e.name.startswith("c10d::")) or e.name.startswith(_UPDATE)


def _name_collective(e: Event, gpu: bool) -> str:
    if gpu:
        if not _GPU_COMM.match(e.name):
            return ""
        said = e.args.get("Collective name")
        text = said if isinstance(said, str) and said else _GPU_COMM.sub("", e.name)
        plain = re.sub(r"[^a-z]", "", text.lower())
        return next((name for word, name in _OPS.items() if word in plain), "collective")
    found = _CPU_COMM.match(e.name)
    return found[2] if found else ""


def _read_nbytes(e: Event) -> int:
    count, item = e.args.get("In msg nelems"), _ITEM.get(str(e.args.get("dtype")).lower(), 0)
    said = e.args.get("bytes") if count is None else count
    if isinstance(said, bool) or not isinstance(said, int) or not 0 <= said < 2**48:
        return 0
    return said if count is None else said * item
