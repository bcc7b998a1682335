"""`make test-gpu`: runs the GPU tests, prints the outcome and writes docs/project/gpu.md.

Without a GPU it only reports that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "project" / "gpu.md"
LIMIT = 1800  # seconds
FIRST, LAST = "<!-- written by make test-gpu -->", "<!-- end -->"  # markers around the written part


def main() -> int:
    """Returns exit code 0 if all tests that could run passed."""
    if not torch.cuda.is_available():
        name = PAGE.relative_to(ROOT)
        print(f"no NVIDIA GPU was found (torch {torch.__version__}), so nothing was run and {name} stays as it is")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        report, notes = Path(folder, "report.xml"), Path(folder, "notes")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests", f"--session-timeout={LIMIT}",
                   f"--junitxml={report}", "-o", "junit_family=xunit1", "-p", "no:cacheprovider"]  # fmt: skip
        env = {**os.environ, "WORKBENCH_GPU_NOTES": str(notes)}
        code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
        outcomes = read(report)
        numbers = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    PAGE.write_text(renewed(PAGE.read_text("utf8"), seen(outcomes, numbers)))
    passed = [name for name, outcome in outcomes if outcome == "passed"]
    print(f"{len(passed)} of {len(outcomes)} passed; {PAGE.relative_to(ROOT)} says which, on what machine")
    return code


def read(report: Path) -> list[tuple[str, str]]:
    """Returns (test, "passed", "failed" or the reason for skipping) in the order of running."""
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
        kinds = {child.tag: child for child in case}
        outcome = "failed" if kinds.keys() & {"failure", "error"} else "passed"
        if "skipped" in kinds:
            outcome = kinds["skipped"].get("message", "skipped")
        found.append((case.get("name", "").replace("_", " ").removeprefix("test "), outcome))
    return found


def renewed(text: str, seen: str) -> str:
    """Returns the page with a new generated part. The handwritten rest stays."""
    before, _, rest = text.partition(FIRST)
    return f"{before}{FIRST}\n\n{seen}\n{LAST}{rest.partition(LAST)[2]}"


def seen(outcomes: list[tuple[str, str]], numbers: list[dict[str, object]]) -> str:
    """Describes the machine, each test's outcome, and the measurements."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    lines = [f"{len(gpus)} GPU: {', '.join(gpus)}; torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}; "
             f"{time.strftime('%Y-%m-%d')}.", ""]  # fmt: skip
    lines += ["| test | outcome |", "| --- | --- |", *(f"| {name} | {outcome} |" for name, outcome in outcomes), ""]
    lines += ["| measured | |", "| --- | --- |", *(f"| {n['what']} | {n['value']:.3g} |" for n in numbers), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
