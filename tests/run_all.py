"""Runs every test, one pytest per mark, and lists the skipped tests with their reasons.

Separate processes keep one group from taking another down. `python tests/run_all.py [MARK ...]` runs only those groups.
`long` means the groups that `make test` leaves out; `make test-long` and CI run them, too. Installs nothing, and names
no test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
TOTAL = 60 * 60  # seconds for all groups of one call together, on a busy machine
# Each group, and the seconds after which it certainly hangs: about 4 times its time on two quiet cores. A test belongs
# to the first group whose mark it carries, so the most special come first. They run in the opposite order.
GROUPS = {
    "gpu": 600, "every": 7200, "netns": 480, "long": 2700, "slow": 3600, "browser": 1200, "notebook": 600,
    "engine": 1800, "ranks": 1800, "quick": 900,
}  # fmt: skip
LONG = ("netns", "long", "slow")  # the groups behind `long`
ASKED = ("every",)  # groups that run only on request
WANTED = 15 * 60  # seconds that `make test` may take on two quiet cores
# Processes per group. Tests wait most of their time, above all where ranks are threads.
BESIDE = dict.fromkeys(("quick", "engine", "notebook", "browser"), 2)
BESIDE |= dict.fromkeys(("ranks", "slow", "long", "every"), 3)
# Groups without expensive fixtures per file: an idle worker takes tests of a busy worker's file, because some files
# take 10 % of all time.
SHARED_OUT = ("ranks", "long", "every")
NOTHING_FOUND = 5  # pytest's exit code


class Outcome(NamedTuple):
    """Outcome of one group: counts by kind, and (group, reason) of each skipped test."""

    code: int
    counts: Counter[str]
    skipped: Counter[tuple[str, str]]


def expression(group: str) -> str:
    """Returns the -m expression that selects a group's tests and no other group's."""
    marks = [g for g in GROUPS if g != "quick"]
    if group == "quick":
        return " and ".join(f"not {m}" for m in marks)
    return " and ".join([group, *(f"not {m}" for m in marks[: marks.index(group)])])


def says(text: str, mark: str) -> bool:
    """Returns whether a test file may hold tests of this mark. Cases of `ranks` tests carry `long` or `every`, too."""
    others = {"long": ["mark.ranks", "thinned("], "every": ["mark.ranks", "thinned("],
              "slow": ["mark.engine", "mark.browser", "mark.notebook"]}  # fmt: skip
    return any(word in text for word in [f"mark.{mark}", *others.get(mark, [])])


def where(group: str) -> list[str]:
    """Returns the files with a group's tests, because pytest takes a minute to read all files.

    Tests without a mark may be in any file. tests/conftest.py checks each test against this.
    """
    if group == "quick":
        return []
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if says(path.read_text("utf8"), group)]


def run(group: str, limit: float) -> Outcome:
    """Runs one group. A group over its time is stopped and counts as failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", expression(group), f"--session-timeout={limit:.0f}"]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", "-p", "no:cacheprovider", "--color=no"]
        command += ["--durations=40", "--durations-min=10"]
        command += where(group)
        if group in BESIDE and (os.cpu_count() or 1) > 1:
            command += ["-n", f"{BESIDE[group]}", "--dist", "worksteal" if group in SHARED_OUT else "loadfile"]
        # Compiled files are kept, because hundreds of engines and workers would each compile them again.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=limit + 60, check=False, env=env).returncode
        except subprocess.TimeoutExpired:
            print(f"{group}: stopped after {limit + 60:.0f} s", flush=True)
            code = 124
        if code == NOTHING_FOUND:
            return Outcome(0, Counter(), Counter())
        return read(group, code, report)


def read(group: str, code: int, report: Path) -> Outcome:
    """Reads the counts in pytest's report. A missing report means that pytest itself died."""
    counts: Counter[str] = Counter()
    skipped: Counter[tuple[str, str]] = Counter()
    if not report.exists():
        return Outcome(code or 1, Counter({"error": 1}), skipped)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag: child for child in case}
        if "failure" in kinds or "error" in kinds:
            counts["failed" if "failure" in kinds else "error"] += 1
        elif "skipped" in kinds:
            counts["skipped"] += 1
            skipped[group, kinds["skipped"].get("message", "").strip() or "no reason given"] += 1
        else:
            counts["passed"] += 1
    return Outcome(code, counts, skipped)


def chosen(asked: list[str]) -> list[str]:
    """Returns the groups to run, from quick to special: the requested ones, or the default ones."""
    wanted = set(asked) | (set(LONG) if "long" in asked else set()) or set(GROUPS) - {*LONG, *ASKED}
    if strange := wanted - set(GROUPS):
        raise SystemExit(f"no group {', '.join(sorted(strange))}: there are {', '.join(GROUPS)}")
    return [g for g in reversed(GROUPS) if g in wanted]


def main(groups: list[str]) -> int:
    """Runs the groups from quick to slow, and prints the skipped tests and one closing line."""
    began = time.monotonic()
    code, counts, skipped = 0, Counter[str](), Counter[tuple[str, str]]()
    for group in chosen(groups):
        left = TOTAL - (time.monotonic() - began) if group not in ASKED else GROUPS[group]
        print(f"\n== {group} ==", flush=True)
        if left < 1:
            print(f"{group}: no time left of {TOTAL} s")
            code, counts["error"] = 1, counts["error"] + 1
            continue
        outcome = run(group, min(GROUPS[group], left))
        code = code or outcome.code
        counts += outcome.counts
        skipped += outcome.skipped
    close(counts, skipped, time.monotonic() - began)
    if not groups and (took := time.monotonic() - began) > WANTED:
        print(f"this took {took / 60:.0f} minutes; on a quiet machine with two cores it is to take {WANTED // 60}")
    return code


def close(counts: Counter[str], skipped: Counter[tuple[str, str]], seconds: float) -> None:
    """Prints the skipped tests with reasons, and the closing line."""
    print("\nskipped:" if skipped else "\nskipped: nothing")
    for (group, reason), n in sorted(skipped.items()):
        print(f"  {group} ({n}): {reason}")
    if file := os.environ.get("WORKBENCH_SKIPPED"):
        Path(file).write_text("".join(f"{group}\t{n}\t{reason}\n" for (group, reason), n in sorted(skipped.items())))
    order = {"failed": "failed", "passed": "passed", "skipped": "skipped", "error": "errors"}
    words = ", ".join(f"{counts[kind]} {word}" for kind, word in order.items() if counts[kind]) or "no tests ran"
    print(f"===== {words} in {seconds:.2f}s ({time.strftime('%H:%M:%S', time.gmtime(seconds))}) =====", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
