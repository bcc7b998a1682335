"""Installs the built wheel into empty environments and runs the README's quickstart there.

    python -m tests.packages [--torch 2.11.0 --torch newest] [--python python3.11 --python python3.13]

The command tries each version of torch under each Python. `newest` takes the newest torch that pip finds. Only the
torch that `constraints.txt` pins comes with the other pins of that file. The command skips a Python that the machine
lacks, and prints its name. Exit status: the number of environments in which something failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = "training-workbench"
LIMIT = 1200.0  # seconds for one command


def run_command(*command: str | Path, cwd: Path | None = None) -> str:
    """Returns what a command prints; RuntimeError with the end of its output if it fails."""
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # which may name the clone
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=outside, text=True, timeout=LIMIT, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Builds the project's wheel in a folder."""
    run_command(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def find_pinned_torch() -> str:
    """Returns the version of torch in `constraints.txt`."""
    found = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found
    return found[1]


def find_lowest_torch() -> str:
    """Returns the lowest version of torch that the metadata allow."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (line,) = [need for need in needs if need.startswith("torch>=")]
    return f"{line.removeprefix('torch>=')}.0"


def make_environment(folder: Path, wheel: Path, torch: str, python: str = sys.executable) -> Path:
    """Makes an empty environment, installs the wheel with this torch, and returns its interpreter."""
    run_command(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    pins = ["--constraint", ROOT / "constraints.txt"] if torch == find_pinned_torch() else []
    asked = "torch" if torch == "newest" else f"torch=={torch}"
    run_command(inside, "-m", "pip", "install", "--quiet", *pins, asked, wheel)
    return inside


def read_quickstart() -> str:
    """Returns the Python block of the README's quickstart."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (block,) = [text for text in blocks if "with Lab(" in text]
    return str(block)


def try_quickstart(python: Path, folder: Path) -> str:
    """Runs the quickstart in a folder that lies outside of the clone; returns what it prints."""
    script = folder / "quickstart.py"
    script.write_text(read_quickstart())
    return run_command(python, script, cwd=folder)


def list_notebooks(python: Path, folder: Path) -> list[str]:
    """Returns the names of the notebooks that an installed workbench opens, copied into a folder."""
    code = "from workbench.entrypoints.jupyter import find_notebooks; print(find_notebooks())"
    found = Path(run_command(python, "-c", code, cwd=folder).splitlines()[-1])
    return [path.name for path in found.glob("*.ipynb")]


def try_environment(folder: Path, wheel: Path, torch: str, python: str = sys.executable) -> str:
    """Tries one environment; returns the versions that it has. AssertionError or RuntimeError if anything is wrong."""
    inside = make_environment(folder / "venv", wheel, torch, python)
    code = "import sys, torch, workbench; print(workbench.__file__, sys.version.split()[0], torch.__version__)"
    where, *versions = run_command(inside, "-c", code, cwd=folder).split()
    assert Path(where).is_relative_to(folder / "venv"), where
    printed = try_quickstart(inside, folder)
    assert "strategy" in printed and "compressor" in printed, printed
    assert sorted(list_notebooks(inside, folder)) == sorted(p.name for p in (ROOT / "notebooks").glob("*.ipynb"))
    return " ".join(versions)


def main() -> int:
    """Tries every environment that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="append", help="a version of torch, or newest")
    parser.add_argument("--python", action="append", help="an interpreter, by name or path")
    asked = parser.parse_args()
    failed = 0
    for python in asked.python or [sys.executable, "python3.12", "python3.13", "python3.14"]:
        if shutil.which(python) is None:
            print(f"{python}: not on this machine", flush=True)
            continue
        for torch in asked.torch or [find_lowest_torch(), "newest"]:
            with tempfile.TemporaryDirectory() as name:
                try:
                    versions = try_environment(Path(name), build_wheel(Path(name)), torch, python)
                    print(f"{NAME} with Python and torch {versions}: the quickstart runs", flush=True)
                except (AssertionError, RuntimeError) as error:
                    failed += 1
                    print(f"{python} with torch {torch}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
