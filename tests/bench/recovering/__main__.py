"""Kills one of four workers while they train: ours, torchrun, torchft and Ray Train, in the same test.

    python -m tests.bench.recovering [NAME ...] --python PYTHON --out docs/data/recovering.json [--busy] [--kills 10]

PYTHON is an environment with the other systems: `pip install torch torchft opentelemetry-api
opentelemetry-exporter-otlp-proto-http 'ray[train]'`. Each system trains the same small network with steps of slightly
over 50 ms. Each kill is a SIGKILL one to three seconds after all four train. The output has the seconds until a process
noticed, until a new group made a step, and until four workers did, and the number of repeated steps. With `--busy` two
processes compute at the same time. Results in the file stay, so the benchmark resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.recovering import by_ray, by_torchft, by_torchrun, killing, ours
from tests.bench.recovering.starting import running

Kill = Callable[[random.Random], dict[str, Any]]


@contextmanager
def apart(group: Callable[..., Any], python: str) -> Iterator[Kill]:
    """Runs a group of processes in its own folder."""
    with tempfile.TemporaryDirectory() as folder, group(Path(folder), python):
        yield partial(killing.kill, Path(folder))


@contextmanager
def here(spare: int, python: str) -> Iterator[Kill]:
    with ours.lab(spare) as lab:
        yield partial(ours.kill, lab)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Runs processes that compute all the time, each with its own share of the processors."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for _ in range(processes):
            stack.enter_context(running([sys.executable, "-c", "while True: pass"], Path(folder)))
        yield


WAYS: dict[str, Callable[[str], Any]] = {
    "workbench, cold": partial(here, 0),
    "workbench, a spare engine": partial(here, 1),
    "torchrun": partial(apart, by_torchrun.group),
    "torchft": partial(apart, by_torchft.group),
    "torchft, limits of 1 s": partial(apart, partial(by_torchft.group, limit=1)),
    "torchft, its DDP": partial(apart, partial(by_torchft.group, by="DDP")),
    "Ray Train": partial(apart, by_ray.group),
}
PACKAGES = ("torch", "torchft", "ray")


def versions(python: str) -> dict[str, str]:
    """Returns the versions of the other systems in that Python."""
    ask = "import importlib.metadata as m, sys; print(*(m.version(name) for name in sys.argv[1:]))"
    said = subprocess.run([python, "-c", ask, *PACKAGES], capture_output=True, text=True, check=True).stdout
    return dict(zip(PACKAGES, said.split(), strict=True))


def kills(name: str, python: str, numbers: range, seed: int) -> Iterator[dict[str, Any]]:
    """Makes kills of one kind in one group, and starts a new group after a kill that was not survived."""
    left = list(numbers)
    while left:
        with WAYS[name](python) as kill:
            while left:
                found = kill(random.Random(f"{seed} {left.pop(0)}"))
                print(name, found, flush=True)
                yield found
                if found.get("full") is None:
                    break


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("names", nargs="*", metavar="NAME", help="; ".join(WAYS))
    ask.add_argument("--kills", type=int, default=10, help="of each")
    ask.add_argument("--busy", action="store_true", help="next to two busy processes")
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--python", required=True, help="a Python with the other libraries")
    ask.add_argument("--out", type=Path, required=True)
    said = ask.parse_args()
    if unknown := set(said.names) - set(WAYS):
        ask.error(f"{', '.join(unknown)}: must be among {', '.join(WAYS)}")
    found = json.loads(said.out.read_text()) if said.out.exists() else []
    for name in said.names or WAYS:
        key = {"who": name, "busy": said.busy, "seed": said.seed}
        mine = next((one for one in found if key.items() <= one.items()), None)
        if mine is None:
            found.append(mine := {**key, "cores": os.cpu_count(), "versions": versions(said.python), "each": []})
        with busy(2 * said.busy):
            for one in kills(name, said.python, range(len(mine["each"]), said.kills), said.seed):
                mine["each"].append(one)
                said.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
