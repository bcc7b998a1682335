"""Where engines run, with which versions, and whether they can train together."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from dataclasses import asdict, dataclass
from typing import Any

from workbench.cluster.processes.lab_place import ClusterError, host_name
from workbench.settings import KnobError

PROBE_PREFIX = "workbench-probe "


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine and its rank, which differs from ipyparallel's id.

    An engine that a run left behind may return as another rank: then two instances describe one process.
    """

    rank: int
    id: int
    host: str
    pid: int
    created: float
    reach: str
    gpus: int
    versions: dict[str, str]
    rows_address: str = ""
    rpc_address: str = ""

    def __str__(self) -> str:
        return f"engine {self.id} on {self.host} (pid {self.pid})"

    @property
    def process_key(self) -> tuple[str, int, float]:
        """Identifies the process: host, pid, create time."""
        return self.host, self.pid, self.created

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _make_probe() -> str:
    """Returns source text that only prints one line about the engine."""
    return f"""
def _workbench_probe(controller):
    import importlib.metadata, json, os, platform, socket
    import psutil
    def version(name):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "missing"
    try:
        import torch
        gpus = torch.cuda.device_count()
    except ImportError:
        gpus = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((controller, 9))
        reach = s.getsockname()[0]
    me = psutil.Process()
    own = dict(torch=version("torch"), workbench=version("training-workbench"))
    about = dict(host=socket.gethostname(), pid=me.pid, created=me.create_time(), reach=reach, gpus=gpus)
    print({PROBE_PREFIX!r} + json.dumps(dict(about, versions=dict(own, Python=platform.python_version()))))
_workbench_probe({{controller!r}})
del _workbench_probe
"""


def probe_engines(client: Any, ids: list[int], controller: str, timeout: float = 60.0) -> list[Engine]:
    """Describes each engine; rank r is on the r-th of `ids`. Raises ClusterError if one does not answer."""
    question, until = _make_probe().replace("{controller!r}", repr(controller)), time.monotonic() + timeout
    outputs = dict.fromkeys(ids, "")
    while missing := [i for i, s in outputs.items() if not s]:
        asked = client.direct_view(missing).execute(question, silent=False, block=False)
        try:
            asked.get(max(until - time.monotonic(), 0.0))
        except TimeoutError:
            late = [i for i in missing if i not in {m["engine_id"] for m in asked.metadata if m["completed"]}]
            text = f"engines {late or missing} did not answer within {timeout:g} s (is a cell running there?)"
            raise ClusterError(text) from None
        asked.wait_for_output(10)  # output may arrive later
        lines = [next((x for x in out.splitlines() if x.startswith(PROBE_PREFIX)), "") for out in asked.stdout]
        outputs |= dict(zip(missing, lines, strict=True))
    return [Engine(rank=r, id=i, **json.loads(s[len(PROBE_PREFIX) :])) for r, (i, s) in enumerate(outputs.items())]


def list_versions() -> dict[str, str]:
    """Returns this kernel's versions, without importing torch."""

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "missing"

    own = {"torch": version("torch"), "workbench": version("training-workbench")}
    return {"Python": platform.python_version(), **own}


def check_versions(engines: list[Engine]) -> None:
    """Raises ClusterError with every engine whose Python (minor version), torch or workbench differs."""
    own, wrong = list_versions(), []
    for engine in engines:
        for what, version in engine.versions.items():
            if _shorten_version(what, version) != _shorten_version(what, own[what]):
                wrong.append(f"{engine} has {what} {version}, this kernel has {own[what]}")
    if wrong:
        raise ClusterError(f"versions differ, so nothing was started: {'; '.join(wrong)}. Install the same on both")


def _shorten_version(what: str, version: str) -> str:
    return version.rsplit(".", 1)[0] if what == "Python" else version.split("+")[0]


def choose_devices(engines: list[Engine], asked: str | int) -> tuple[list[str], str]:
    """Returns (each rank's device, "nccl" or "gloo"). NCCL needs one GPU per rank.

    Each host uses its own GPUs. "auto" takes CPUs if a host has none. Raises KnobError if `asked` is invalid or a host
    has too few GPUs.
    """
    gpus: dict[str, int] = {}  # by host
    for engine in engines:
        gpus[engine.host] = min(engine.gpus, gpus.get(engine.host, engine.gpus))
    scarce = min(gpus, key=lambda name: gpus[name], default="")
    fewest = gpus.get(scarce, 0)
    if asked == "cpu" or (asked == "auto" and not fewest):
        return ["cpu"] * len(engines), "gloo"
    if asked not in ("auto", "cuda") and not isinstance(asked, int):
        raise KnobError(f"device={asked!r}: must be auto, cpu, cuda, or a number of GPUs")
    if not fewest or (isinstance(asked, int) and not 1 <= asked <= fewest):
        where = f" on {scarce}" if len(gpus) > 1 else ""
        few = f"must be an integer in [1, {fewest}] GPUs, or auto, cpu, cuda" if fewest else "there is no GPU; use cpu"
        raise KnobError(f"device={asked!r}{where}: {few}")
    use = {name: count if isinstance(asked, str) else asked for name, count in gpus.items()}
    places: dict[str, dict[tuple[str, int, float], int]] = {}  # by host, each process's index
    chosen = []
    for engine in engines:
        there = places.setdefault(engine.host, {})
        chosen.append(f"cuda:{there.setdefault(engine.process_key, len(there)) % use[engine.host]}")
    alone = all(len(there) <= use[name] for name, there in places.items())
    return chosen, "nccl" if alone else "gloo"


def spans_hosts(engines: list[Engine]) -> bool:
    """Whether an engine runs on another machine."""
    return any(e.host != host_name() for e in engines)
