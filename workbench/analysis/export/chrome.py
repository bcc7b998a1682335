"""Writes a run as torch.profiler does: a Chrome trace per rank, for tools like HTA.

Holistic Trace Analysis (HTA) 0.5 reads a folder with a file per rank. It needs a space after the colon in
`"distributedInfo": {"rank": 0, ...}`. Kernels (`cat` "kernel") have a stream and the `correlation` of their launch.
Collectives are kernels like `nccl...Kernel`. Steps have names like `ProfilerStep#3`. Evaluations, hand-overs and
measurements are annotations outside of steps. So HTA's `get_comm_comp_overlap` agrees with `analysis.overlap`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.analysis.steps.window import Window, last_steps
from workbench.record.store import RunError, replace_file

if TYPE_CHECKING:
    from workbench.record.run import Run

STREAMS = {"compute": 7, "comm": 20}
HOST = 100_000  # rank 0's host process; its device process is 0
PREFIX = "ncclDevKernel_"
_COLLECTIVES = {"all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter",
                "broadcast": "Broadcast", "all_to_all": "AllToAll"}  # fmt: skip


def to_chrome(run: Run, folder: Path | str) -> Path:
    """Writes `rank-0.json.gz`, ... into `folder`. Raises RunError on failure."""
    folder, (first, stop) = Path(folder), last_steps(run.timeline)
    w = Window(run.timeline, first, stop)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank in w.ranks.tolist():
            path = folder / f"rank-{rank}.json.gz"
            with replace_file(path) as draft, gzip.open(draft, "wt", compresslevel=5) as out:
                out.write(json.dumps(_make_header(run, rank, len(w.ranks)))[:-1] + ', "traceEvents": [\n')
                for i, event in enumerate(_list_events(w, rank)):
                    out.write((",\n" if i else "") + json.dumps(event, separators=(",", ":")))
                out.write("\n]}\n")
    except OSError as error:
        raise RunError(f"{folder}: no traces can be written there ({error.strerror}); choose another folder") from error
    return folder


def _make_header(run: Run, rank: int, ranks: int) -> dict[str, Any]:
    return {
        "schemaVersion": 1, "deviceProperties": [{"id": rank, "name": "a rank of training-workbench"}],
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": ranks}, "traceName": run.name,
        "displayTimeUnit": "ms", "baseTimeNanoseconds": int(run.epoch * 1e9),
    }  # fmt: skip


def _list_events(w: Window, rank: int) -> Iterator[dict[str, Any]]:
    rows = w.rows[w.rows.rank == rank]
    outside = w.is_outside(rows)
    begun = float(rows.asked.min()) if len(rows) else 0.0
    yield {"ph": "M", "name": "process_name", "pid": HOST + rank, "tid": 0, "ts": 0, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "ts": 0, "args": {"name": f"rank {rank}, device"}}
    columns = (rows.step, rows.lane, rows.name, rows.asked, rows.t0, rows.t1, rows.nbytes, outside)
    plain = zip(*(c.tolist() for c in columns), strict=True)
    for number, (step, lane, name, asked, t0, t1, nbytes, out) in enumerate(plain, start=1):
        ts, dur = _to_microseconds(t0), _to_microseconds(t1 - t0)
        if lane == "step":
            yield {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": HOST + rank, "tid": 1,
                   "ts": ts, "dur": dur, "args": {"strategy": name}}  # fmt: skip
        elif lane in STREAMS and not (out and lane == "comm"):
            call = {"External id": number, "correlation": number}
            yield {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": HOST + rank, "tid": 2,
                   "ts": _to_microseconds(max(begun, min(asked, t0))), "dur": 1, "args": call}  # fmt: skip
            said = {**call, "device": rank, "stream": STREAMS[lane], "step": step}
            if lane == "comm":
                kind = next((v for k, v in _COLLECTIVES.items() if name.startswith(k)), "SendRecv")
                said |= {"Collective name": name, "In msg nelems": nbytes, "dtype": "Byte"}
                name = f"{PREFIX}{kind} Kernel {name}"
            yield {"ph": "X", "cat": "kernel", "name": name, "pid": rank, "tid": STREAMS[lane], "ts": ts, "dur": dur,
                   "args": said}  # fmt: skip
        else:
            yield {"ph": "X", "cat": "user_annotation", "name": f"{lane}: {name}", "pid": HOST + rank, "tid": f"{lane}",
                   "ts": ts, "dur": dur, "args": {"step": step, "nbytes": nbytes}}  # fmt: skip


def _to_microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
