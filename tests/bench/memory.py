"""Measures the memory of notebook 00 with 2 ranks as Binder counts it: server, kernel, controller, engines.

    python -m tests.bench.memory --out docs/data/memory.json

Proportional set size (shared pages count once in all), summed over the processes and sampled while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import nbformat
import psutil
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_first_run.ipynb"


class Watch:
    """Sums the memory of this process's descendants twice a second."""

    def __init__(self) -> None:
        self.samples: list[dict[str, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        began = time.monotonic()
        while not self._over.wait(0.5):
            sums: dict[str, float] = {}
            for p in psutil.Process().children(recursive=True):
                try:
                    name = kind(p.cmdline())
                    sums[name] = sums.get(name, 0.0) + p.memory_full_info().pss / 1e6
                except psutil.Error:
                    continue
            self.samples.append({**sums, "t": round(time.monotonic() - began, 1)})

    def end(self) -> list[dict[str, float]]:
        self._over.set()
        self._thread.join()
        return self.samples


def kind(command: list[str]) -> str:
    """Returns the kind of a process, from its command line."""
    line = " ".join(command)
    for name, sign in (("server", "jupyter"), ("kernel", "ipykernel_launcher"), ("engines", "boot.py engine"),
                       ("controller", "boot.py controller")):  # fmt: skip
        if sign in line:
            return name
    return "others"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    a = ask.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(XDG_DATA_HOME=f"{folder}/data", WORKBENCH_RUNTIME_DIR=f"{folder}/labs")
        watch = Watch()
        command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--port=0"]
        server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(5)
        book = nbformat.read(NOTEBOOK, as_version=4)
        for cell in book.cells:
            cell.source = cell.source.replace("Lab(ranks=4)", "Lab(ranks=2)")
        at = next(i for i, c in enumerate(book.cells) if "lab.stop()" in c.source)
        book.cells.insert(at, nbformat.v4.new_code_cell("import time; time.sleep(20)"))
        NotebookClient(book, timeout=150, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
        server.terminate()
        server.wait(20)
        samples = watch.end()
    peak: dict[str, Any] = max(samples, key=total)
    print(f"peak {total(peak):.0f} MB: { {k: round(v) for k, v in peak.items() if k != 't'} }")
    if a.out:
        a.out.write_text(json.dumps(samples))


def total(sample: dict[str, float]) -> float:
    """Returns the MB of all processes together."""
    return sum(v for k, v in sample.items() if k != "t")


if __name__ == "__main__":
    main()
