"""Mistakes planted in a copy of the package, one at a time: does a test notice?

    python -m tests.mutants [--list] [--only WORDS ...] [--at-a-time 2]

Which mistakes says tests/mutations.py, each with the tests that are to notice it. Before the first of them these tests
have to pass on the copy as it is, and how long that takes says when one hangs. A mutant is

    killed       a test fails, or does not end: that is how it should be
    survived     no test notices: write one, or say why none can
    equivalent   no test notices, and mutations.py says why none can
    wrong        its text is not there any more, it is said to be equivalent and is noticed, or its tests do not run

Only copies are changed, in a temporary folder. Ends with 1 where one has survived or is wrong.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.mutations import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
COPIED = ("workbench", "widgets", "tests", "pyproject.toml")
HANGS = 4.0  # times what its tests take on the package as it is
PATIENCE = 60.0  # seconds, at least
PASSED, FAILED = 0, 1  # of pytest's exit codes; any other is that the tests did not run
KILLED, SURVIVED, EQUIVALENT, WRONG = "killed", "survived", "equivalent", "wrong"


class Tried(NamedTuple):
    """What pytest came to: code is None where it was stopped because it did not end."""

    code: int | None
    said: str
    seconds: float


class Found(NamedTuple):
    """What became of a mutant, and by what."""

    what: str
    by: str
    seconds: float = 0.0


def planted(text: str, mutant: Mutant) -> str:
    """A file's text with the mistake in it. Raises ValueError where that has no place, or more than one."""
    if (count := text.count(mutant.was)) != 1:
        raise ValueError(f"its text is {count} times in {mutant.file}, and has to be once: {mutant.was.strip()!r}")
    return text.replace(mutant.was, mutant.now)


class Copy:
    """The package and its tests in a folder of their own."""

    def __init__(self, folder: Path, of: Path = ROOT, parts: Sequence[str] = COPIED) -> None:
        self.folder = folder
        for part in parts:
            if (of / part).is_dir():
                shutil.copytree(of / part, folder / part)
            else:
                shutil.copy2(of / part, folder / part)

    @contextmanager
    def mistaken(self, mutant: Mutant) -> Iterator[None]:
        """Inside, the mistake is there. Its file has an age of its own, so nothing compiled stands for it."""
        path = self.folder / "workbench" / mutant.file
        text, was = path.read_text(), path.stat()
        path.write_text(planted(text, mutant))
        os.utime(path, (was.st_atime, was.st_mtime + 60))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, (was.st_atime, was.st_mtime))

    def run(self, tests: Sequence[str], limit: float, keeps: bool = False) -> Tried:
        """These tests, until one fails. keeps: may what Python compiles be kept? Not what has a mistake in it."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--color=no", "--tb=line",
                   "-o", "timeout=600", "-m", "ranks or not ranks", *tests]  # fmt: skip
        own = {"PYTHONPATH": str(self.folder)} | ({} if keeps else {"PYTHONDONTWRITEBYTECODE": "1"})
        began = time.monotonic()
        with subprocess.Popen(command, cwd=self.folder, env=os.environ | own, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, start_new_session=True) as process:  # fmt: skip
            code: int | None
            try:
                said, _ = process.communicate(timeout=limit)
                code = process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said, code = process.communicate()[0], None
        return Tried(code, said, time.monotonic() - began)


def judged(mutant: Mutant, tried: Tried) -> Found:
    """What that says of the mutant."""
    failed = re.search(r"^FAILED \S*?(\w+)\.py::(\S+)", tried.said, re.MULTILINE)
    by = f"{failed[1]}::{failed[2]}" if failed else "it did not end"
    if tried.code not in (None, PASSED, FAILED):
        return Found(WRONG, f"pytest ended with {tried.code}: {tried.said.strip()[-400:]}", tried.seconds)
    if tried.code == PASSED:
        return Found(EQUIVALENT if mutant.equivalent else SURVIVED, mutant.equivalent or mutant.why, tried.seconds)
    if mutant.equivalent:
        return Found(WRONG, f"is said to be equivalent, and was noticed by {by}", tried.seconds)
    return Found(KILLED, by, tried.seconds)


class Trials:
    """Tries mutants on so many copies at a time."""

    def __init__(self, copies: Iterable[Copy]) -> None:
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            self._free.put(copy)
        self._lasts: dict[tuple[str, ...], float] = {}

    @contextmanager
    def _copy(self) -> Iterator[Copy]:
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)

    def unharmed(self, tests: tuple[str, ...]) -> float:
        """How long tests take without a mistake; raises SystemExit where they do not pass."""
        with self._copy() as copy:
            tried = copy.run(tests, 600.0, keeps=True)
        if tried.code != PASSED:
            raise SystemExit(f"{' '.join(tests)}: does not pass on the package as it is:\n{tried.said[-3000:]}")
        self._lasts[tests] = tried.seconds
        print(f"pass in {tried.seconds:.0f} s: {' '.join(tests)}", flush=True)
        return tried.seconds

    def tried(self, mutant: Mutant) -> Found:
        with self._copy() as copy:
            try:
                with copy.mistaken(mutant):
                    limit = max(PATIENCE, HANGS * self._lasts[mutant.tests])
                    found = judged(mutant, copy.run(mutant.tests, limit))
            except ValueError as error:
                found = Found(WRONG, str(error))
        print(f"{found.what:10} {mutant.name}  [{found.seconds:.0f} s; {found.by}]", flush=True)
        return found


def chosen(words: Sequence[str]) -> list[Mutant]:
    """Those whose name has one of these words in it; all where there are none."""
    return [m for m in MUTANTS if not words or any(word.lower() in m.name.lower() for word in words)]


def play(mutants: Sequence[Mutant], at_a_time: int) -> dict[str, Found]:
    """What became of each."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(at_a_time) as pool:
        trials = Trials(Copy(Path(folder, str(number))) for number in range(at_a_time))
        sets = list(dict.fromkeys(m.tests for m in mutants))
        print(f"all tests pass, in {sum(pool.map(trials.unharmed, sets)):.0f} s", flush=True)
        return dict(zip((m.name for m in mutants), pool.map(trials.tried, mutants), strict=True))


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--list", action="store_true", help="say which there are, and plant none")
    ask.add_argument("--only", nargs="+", default=[], metavar="WORDS", help="those with one of these in their name")
    ask.add_argument("--at-a-time", type=int, default=2, help="how many copies are tried at a time")
    a = ask.parse_args()
    mutants, began = chosen(a.only), time.monotonic()
    if not mutants:
        ask.error(f"--only {' '.join(a.only)}: no mutant has that in its name; --list says which there are")
    if a.list:
        print("\n".join(f"{m.name} ({m.file}): {m.why}" for m in mutants))
        return 0
    found = play(mutants, max(1, a.at_a_time))
    counts = Counter(each.what for each in found.values())
    words = ", ".join(f"{counts[what]} {what}" for what in (KILLED, EQUIVALENT, SURVIVED, WRONG) if counts[what])
    print(f"{len(found)} mutants in {(time.monotonic() - began) / 60:.0f} minutes: {words}")
    return 1 if counts[SURVIVED] or counts[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
