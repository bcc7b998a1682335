"""Reads and checks untrusted traces of torch.profiler (Kineto's Chrome traces as .json or .json.gz).

It skips and counts events without a finite time or a name. It refuses files too large for memory.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from workbench.record.check_run_json import RunError, count, number
from workbench.settings import short

MAX_FILE_BYTES = 400 << 20  # of JSON in one file; Python's objects take about 8 times as much
MAX_NAME_LENGTH = 200
MAX_SECONDS = 1e10
MAX_RANKS = 32767
_RANK = re.compile(r"rank[-_ ]?([0-9]{1,5})")


class Event(NamedTuple):
    """An event, in seconds since 1970 (since another time without a base)."""

    t0: float
    t1: float
    name: str
    cat: str
    tid: str
    args: dict[str, Any]


class Trace(NamedTuple):
    """One file: a rank's events, ordered by begin. odd: number of skipped events"""

    path: Path
    rank: int | None  # from the file or its name
    device: str
    events: list[Event]
    odd: int


def read(path: Path | str) -> Trace:
    """Reads a file's events. Raises RunError if it is too large or not from torch.profiler."""
    if not isinstance(path, str | Path) or not str(path) or "\0" in str(path):
        raise RunError(f"trace={short(path)}: must be a file that torch.profiler wrote, such as 'rank-0.json.gz'")
    path = Path(path)
    data = _bytes(path)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise RunError(f"{path}: is truncated or not JSON; torch.profiler completes it when its block ends") from None
    del data
    about = found if isinstance(found, dict) else {}
    said = about.get("traceEvents") if about else found
    if not isinstance(said, list):
        raise RunError(f"{path}: has no traceEvents, so torch.profiler did not write it")
    base = about.get("baseTimeNanoseconds")
    base = base * 1e-9 if isinstance(base, int | float) and number(base) else 0.0
    lasted = [e for e in said if isinstance(e, dict) and e.get("ph") == "X"]
    events = [event for e in lasted if (event := _event(e, base))]
    if not events:
        raise RunError(f"{path}: has no event with a duration, so there is nothing to show")
    events.sort(key=lambda e: e.t0)
    return Trace(path, _rank(about, path), _device(about), events, len(lasted) - len(events))


def _bytes(path: Path) -> bytes:
    if path.is_dir():
        raise RunError(f"{path}: is a folder; name the trace files in it (one for each rank)")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise RunError(f"{path}: there is no such file") from None
    except (OSError, EOFError, ValueError) as error:
        raise RunError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(data) > MAX_FILE_BYTES:
        raise RunError(
            f"{path}: has more than {MAX_FILE_BYTES >> 20} MB of JSON; profile fewer steps with torch.profiler's "
            f"schedule(active=...)"
        )
    return data


def _event(e: dict[str, Any], base: float) -> Event | None:
    ts, dur, name, args = e.get("ts"), e.get("dur", 0), e.get("name"), e.get("args")
    if not isinstance(ts, int | float) or not isinstance(dur, int | float) or not isinstance(name, str):
        return None
    if not number(ts) or not number(dur):
        return None
    t0 = base + ts * 1e-6
    if not 0 <= dur * 1e-6 < MAX_SECONDS or not abs(t0) < MAX_SECONDS:
        return None
    tid, cat = str(e.get("tid"))[:MAX_NAME_LENGTH], str(e.get("cat"))[:MAX_NAME_LENGTH]
    return Event(t0, t0 + dur * 1e-6, name[:MAX_NAME_LENGTH], cat, tid, args if isinstance(args, dict) else {})


def _rank(about: dict[str, Any], path: Path) -> int | None:
    said = about.get("distributedInfo")
    rank = said.get("rank") if isinstance(said, dict) else None
    if isinstance(rank, int) and count(rank) and rank < MAX_RANKS:
        return rank
    found = _RANK.search(path.name.lower())
    return min(int(found[1]), MAX_RANKS - 1) if found else None


def _device(about: dict[str, Any]) -> str:
    said = about.get("deviceProperties")
    first = said[0] if isinstance(said, list) and said else None
    return str(first.get("name", ""))[:MAX_NAME_LENGTH] if isinstance(first, dict) else ""


def by_rank(traces: Iterable[Trace]) -> dict[int, Trace]:
    """Maps traces by rank; traces without a rank get free numbers. Raises RunError for duplicates."""
    found: dict[int, Trace] = {}
    silent = []
    for trace in traces:
        if trace.rank is None:
            silent.append(trace)
        elif trace.rank in found:
            other = found[trace.rank].path
            raise RunError(f"{trace.path}: is of rank {trace.rank}, and so is {other}; give one file for each rank")
        else:
            found[trace.rank] = trace
    free = (rank for rank in range(MAX_RANKS) if rank not in found)
    return dict(sorted({**found, **{next(free): trace for trace in silent}}.items()))
