"""Plants mistakes in a copy of the package, one at a time, and checks that a test notices.

    python -m tests.mutants [--list] [--only WORDS ...] [--at-a-time 2]

tests/mutations.py lists the mistakes, each with its tests. The tests must first pass on the unchanged copy; their time
gives the limit for hangs. A mutant is

    killed       a test fails, or does not end: the wanted outcome
    survived     no test notices: write one, or state why none can
    equivalent   no test notices, and mutations.py states why none can
    wrong        its text is missing, a test notices an "equivalent" one, or its tests do not run

Only copies in a temporary folder change. Exits with 1 if a mutant has survived or is wrong.
"""

from __future__ import annotations

import argparse
import ast
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
HANGS = 4.0  # times the duration of its tests on the unchanged package
PATIENCE = 60.0  # seconds, at least
PASSED, FAILED = 0, 1  # pytest's exit codes; any other means that the tests did not run
OPERATORS = {"and", "or", "not"}  # of -k
KILLED, SURVIVED, EQUIVALENT, WRONG = "killed", "survived", "equivalent", "wrong"


class Tried(NamedTuple):
    """pytest's outcome. code: None if it was stopped because it did not end."""

    code: int | None
    said: str
    seconds: float


class Found(NamedTuple):
    """A mutant's outcome, and the test that noticed it."""

    what: str
    by: str
    seconds: float = 0.0


def planted(text: str, mutant: Mutant) -> str:
    """Returns a file's text with the mistake. Raises ValueError if its place is not there exactly once."""
    if (count := text.count(mutant.was)) != 1:
        raise ValueError(f"its text is {count} times in {mutant.file}, and has to be once: {mutant.was.strip()!r}")
    return text.replace(mutant.was, mutant.now)


class Copy:
    """The package and its tests in a separate folder."""

    def __init__(self, folder: Path, of: Path = ROOT, parts: Sequence[str] = COPIED) -> None:
        self.folder = folder
        for part in parts:
            if (of / part).is_dir():
                shutil.copytree(of / part, folder / part)
            else:
                shutil.copy2(of / part, folder / part)

    @contextmanager
    def mistaken(self, mutant: Mutant) -> Iterator[None]:
        """Plants the mistake for the duration of the block. A new mtime makes Python compile the file again."""
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
        """Runs these tests until one fails. keeps: whether to keep compiled files, which must not contain a mistake."""
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
    """Returns the mutant's outcome from pytest's."""
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
    """Tries mutants on several copies at a time."""

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
        """Returns the time of tests without a mistake. Raises SystemExit if they do not pass."""
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


def find_idle_words(tests: Sequence[str], root: Path = ROOT) -> list[str]:
    """Returns the words after -k that select nothing: no test's name or decorators have them."""
    files = [ast.parse((root / test.partition("::")[0]).read_text()) for test in tests if ".py" in test]
    functions = [node for file in files for node in ast.walk(file) if isinstance(node, ast.FunctionDef)]
    found = [" ".join([f.name, *map(ast.unparse, f.decorator_list)]) for f in functions if f.name.startswith("test_")]
    asked = re.findall(r"\w+", tests[tests.index("-k") + 1]) if "-k" in tests else []
    return [word for word in asked if word not in OPERATORS and word.lower() not in " ".join(found).lower()]


def chosen(words: Sequence[str]) -> list[Mutant]:
    """Returns mutants with one of these words in their names; all without words."""
    return [m for m in MUTANTS if not words or any(word.lower() in m.name.lower() for word in words)]


def play(mutants: Sequence[Mutant], at_a_time: int) -> dict[str, Found]:
    """Returns the outcome of each mutant."""
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
    if idle := {word: " ".join(m.tests) for m in mutants for word in find_idle_words(m.tests)}:
        ask.error("; ".join(f"-k {word} selects no test: {tests}" for word, tests in idle.items()))
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
