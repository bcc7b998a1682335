"""Damages files of a checkpoint or a record at random, and checks what reading them gives.

    python -m tests.damage                          both, 3,000 seeds each, into docs/data/damage.json
    python -m tests.damage --only record --count 50 --out some.json

A campaign continues at the end of its file. Nothing trains: files are read as ranks, notebooks and pages read them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "data" / "damage.json"
COUNT = 3000  # changes of each kind
DIGITS = 1000  # of these, changes of a digit in a manifest
HANGS = 60  # seconds after which reading counts as hung
SAVED_EVERY = 100  # seeds

GOOD = ("refused", "warned", "same", "shorter")  # outcomes without silent loss
Change = Callable[[bytearray, random.Random], None]


class Subject(Protocol):
    """Files to damage. make: writes them into a folder; read: returns the outcome and a sentence."""

    def make(self, folder: Path) -> None: ...
    def files(self, folder: Path) -> list[Path]: ...
    def read(self, folder: Path, file: Path, way: str, seed: int) -> tuple[str, str]: ...


# -- changes of one file's bytes


def digit(data: bytearray, rng: random.Random) -> None:
    """Replaces one digit by another."""
    at = rng.choice([i for i, byte in enumerate(data) if 48 <= byte <= 57])
    data[at] = rng.choice([d for d in range(48, 58) if d != data[at]])


def flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def set_byte(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] = rng.choice((0, 255, 127, rng.randrange(256)))


def clear(data: bytearray, rng: random.Random) -> None:
    """Zeroes a stretch, as if a block of a disk was never written."""
    at, n = rng.randrange(len(data)), rng.choice((8, 64, 512, 4096))
    data[at : at + n] = bytes(len(data[at : at + n]))


def repeat(data: bytearray, rng: random.Random) -> None:
    """Overwrites a stretch with another stretch of the file."""
    n = min(rng.choice((8, 64, 512)), len(data))
    source, to = rng.randrange(len(data) - n + 1), rng.randrange(len(data) - n + 1)
    data[to : to + n] = data[source : source + n]


def insert(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 8, 100)))


def leave_out(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 8, 100))]


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def append(data: bytearray, rng: random.Random) -> None:
    data += rng.choice((rng.randbytes(50), bytes(data)))


CHANGES: tuple[Change, ...] = (flip, flip, set_byte, clear, repeat, insert, leave_out, cut, append, digit)


# changes of whole files


def swap(file: Path, files: list[Path], rng: random.Random) -> None:
    """Swaps two files."""
    other = rng.choice([each for each in files if each != file])
    mine, others = file.read_bytes(), other.read_bytes()
    file.write_bytes(others)
    other.write_bytes(mine)


def remove(file: Path, files: list[Path], rng: random.Random) -> None:
    file.unlink()


def replace(file: Path, files: list[Path], rng: random.Random) -> None:
    """Replaces the file by a link, a pipe or a folder."""
    file.unlink()
    match rng.randrange(3):
        case 0:
            file.symlink_to("/etc/passwd")
        case 1:
            os.mkfifo(file)
        case 2:
            file.mkdir()


WHOLE = (swap, remove, replace)


def harm(subject: Subject, folder: Path, seed: int, only: str = "") -> tuple[Path, str]:
    """Makes the change of this seed. Returns the file and the kind of change. only: this file, digits alone"""
    rng, files = random.Random(seed), subject.files(folder)
    if only:
        file, way = folder / only, digit
        return file, _changed(file, way, rng)
    file = rng.choice(files)
    if seed % 8 == 7:
        whole = rng.choice(WHOLE)
        # a record may lack a file, because a rank may have written none
        if not (whole is remove and file.suffix == ".arrow"):
            whole(file, files, rng)
            return file, whole.__name__
    return file, _changed(file, rng.choice(CHANGES), rng)


def _changed(file: Path, way: Change, rng: random.Random) -> str:
    data = bytearray(file.read_bytes())
    before = bytes(data)
    way(data, rng)
    if bytes(data) == before:
        flip(data, rng)
    file.write_bytes(data)
    return way.__name__


class Hung(BaseException):
    """Reading took too long."""


def _ring(*_: Any) -> None:
    raise Hung


def play(subject: Subject, good: Path, folder: Path, seed: int, only: str = "") -> dict[str, Any]:
    """Plays one seed. Returns the change and its outcome."""
    shutil.copytree(good, folder)
    file, way = harm(subject, folder, seed, only)
    signal.signal(signal.SIGALRM, _ring)
    signal.alarm(HANGS)
    try:
        outcome, text = subject.read(folder, file, way, seed)
    except Hung:
        outcome, text = "hung", f"no end within {HANGS} s"
    except Exception as error:
        outcome, text = "raised", "".join(traceback.format_exception(error))[-600:]
    finally:
        signal.alarm(0)
        shutil.rmtree(folder)
    return {"seed": seed, "file": file.name, "way": way, "outcome": outcome, "text": text}


def campaign(subject: Subject, count: int, done: dict[str, Any], save: Callable[[], None], first: str) -> None:
    """Plays the seeds from `done["next"]` on. first: a file; the first DIGITS seeds change a digit in it

    done: counts of seeds by way and outcome, and each wrong one
    """
    ways, wrong = done.setdefault("ways", {}), done.setdefault("wrong", [])
    top = Path(tempfile.mkdtemp(prefix="damage-"))
    try:
        subject.make(top / "good")
        for seed in range(done.get("next", 0), count):
            one = play(subject, top / "good", top / "case", seed, first if seed < DIGITS else "")
            outcomes = ways.setdefault("digit of the manifest" if first and seed < DIGITS else one["way"], {})
            outcomes[one["outcome"]] = outcomes.get(one["outcome"], 0) + 1
            if one["outcome"] not in GOOD:
                wrong.append(one)
                print(one, flush=True)
            done["next"] = seed + 1
            if seed % SAVED_EVERY == SAVED_EVERY - 1:
                save()
    finally:
        shutil.rmtree(top)
        save()


def main() -> int:
    from tests.damaged_checkpoint import DamagedCheckpoint
    from tests.damaged_record import DamagedRecord

    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--only", choices=("checkpoint", "record"))
    ask.add_argument("--count", type=int, default=COUNT)
    ask.add_argument("--out", type=Path, default=OUT)
    args = ask.parse_args()
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}

    def save() -> None:
        args.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")

    began, wrong = time.monotonic(), 0
    for name, subject, first in (("checkpoint", DamagedCheckpoint(), DamagedCheckpoint.manifest),
                                 ("record", DamagedRecord(), "")):  # fmt: skip
        if args.only in (None, name):
            campaign(subject, args.count, found.setdefault(name, {}), save, first)
            wrong += len(found[name]["wrong"])
    print(f"{wrong} wrong, {time.monotonic() - began:.0f} s")
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
