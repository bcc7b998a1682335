"""Every test, one pytest per mark so that one group cannot take another down; ends with what was skipped and why.

`python tests/run_all.py [MARK ...]` runs only those groups; `long` stands for those that `make test` leaves out, which
`make test-long` and CI run too. Installs nothing. Knows no test by name.
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
TOTAL = 80 * 60  # seconds for all groups together, on a machine that is busy with other things; but where all is asked
# Each group and the seconds after which it hangs for certain: about four times what it takes on two quiet cores, since
# people's machines are busy. The most special first: a test belongs to the first group whose mark it carries. They run
# in the opposite order, from quick to special.
GROUPS = {
    "gpu": 600, "netns": 480, "every": 7200, "long": 2700, "slow": 3600, "browser": 1200, "notebook": 600,
    "engine": 1800, "ranks": 1800, "quick": 900,
}  # fmt: skip
LONG = ("netns", "long", "slow")  # the groups behind `long`: `make test` is to take at most WANTED
ASKED = ("every",)  # and what is run where it is asked for only
WANTED = 20 * 60  # seconds that `make test` may take on two quiet cores
# Several at a time, for much of their time they wait: most where ranks are threads.
BESIDE = {"quick": 2, "ranks": 3, "slow": 2, "long": 3, "every": 3, "engine": 2, "browser": 2}
# Where no file's tests share what takes long to make, an idle worker takes over tests of a busy one's file: some files
# of these groups take a tenth of all.
SHARED_OUT = ("ranks", "long", "every")
NOTHING_FOUND = 5  # pytest's exit code


class Outcome(NamedTuple):
    """What one group came to: counts by kind, and (group, reason) of each skipped test."""

    code: int
    counts: Counter[str]
    skipped: Counter[tuple[str, str]]


def expression(group: str) -> str:
    """The -m expression that selects a group's tests and no other group's."""
    marks = [g for g in GROUPS if g != "quick"]
    if group == "quick":
        return " and ".join(f"not {m}" for m in marks)
    return " and ".join([group, *(f"not {m}" for m in marks[: marks.index(group)])])


def says(text: str, mark: str) -> bool:
    """Does a test file say that tests of this mark lie in it? Some are given to cases of what carries `ranks`, too."""
    others = {"long": ["mark.ranks", "thinned("], "every": ["mark.ranks", "thinned("],
              "slow": ["mark.engine", "mark.browser", "mark.notebook"]}  # fmt: skip
    return any(word in text for word in [f"mark.{mark}", *others.get(mark, [])])


def where(group: str) -> list[str]:
    """Where a group's tests lie, for pytest: each group would wait a minute for it to read all files.

    Those without a mark may lie anywhere. tests/conftest.py holds each test to this.
    """
    if group == "quick":
        return []
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if says(path.read_text("utf8"), group)]


def run(group: str, limit: float) -> Outcome:
    """Runs one group; a group over its time is stopped and counts as failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", expression(group), f"--session-timeout={limit:.0f}"]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", "-p", "no:cacheprovider", "--color=no"]
        command += ["--durations=10", "--durations-min=10"]
        command += where(group)
        if group in BESIDE and (os.cpu_count() or 1) > 1:
            command += ["-n", f"{BESIDE[group]}", "--dist", "worksteal" if group in SHARED_OUT else "loadfile"]
        # What is compiled is kept: hundreds of engines and workers would each compile all of it anew.
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
    """The counts in pytest's report; a report that is missing means that pytest itself died."""
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
    """The groups to run, from quick to special: those asked for, or all that people wait for."""
    wanted = set(asked) | (set(LONG) if "long" in asked else set()) or set(GROUPS) - {*LONG, *ASKED}
    if strange := wanted - set(GROUPS):
        raise SystemExit(f"no group {', '.join(sorted(strange))}: there are {', '.join(GROUPS)}")
    return [g for g in reversed(GROUPS) if g in wanted]


def main(groups: list[str]) -> int:
    """Runs the groups from quick to slow and prints the list of skipped tests and one closing line."""
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
    """Prints what was skipped, why, and the closing line."""
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
