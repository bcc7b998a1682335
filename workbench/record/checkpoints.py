"""Reads checkpoints on disk, checks their manifests and decides which to keep.

    step-00000010/        gets this name when it is complete; until then it is `.step-00000010.part`
        manifest.json     step, settings, the place of every tensor's bytes, each rank's own values, SHA-256 of files;
                          begins with the SHA-256 of its own content
        __3_0.distcp      written by rank 3, in the tensor layout of torch.distributed.checkpoint
        .metadata         a pickle for torch.distributed.checkpoint alone; the workbench never opens it

Readers use only the manifest's JSON and the raw bytes of tensors. Nothing is unpickled, so no content becomes code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

from workbench.record.check_run_json import MAX_RANKS, SETTINGS, count, number
from workbench.record.folders import remove_folder
from workbench.record.store import RunError
from workbench.settings import short

SCHEMA = 2  # schema 1 is still readable: it has no boxes and no SHA-256 of the manifest
FOLDER, MANIFEST, METADATA = "checkpoints", "manifest.json", ".metadata"  # of a run; of a checkpoint
REPLACED = ".replaced"  # ends a checkpoint's name during its replacement
_NAMED = re.compile(r"step-(\d{8,10})")
_FILES = re.compile(r"__\d{1,4}_0\.distcp|\.metadata")
_SEAL = re.compile(rb'\{"sha256": "([0-9a-f]{64})", ')
MAX_MANIFEST_BYTES = 2**28
MAX_DIMENSION = 2**48
CHUNK_BYTES = 2**22  # to hash at a time
WIDTHS = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip  # bytes of an element, by dtype


class Blob(NamedTuple):
    """A dense tensor: `nbytes` raw bytes of `file`, from byte `at`."""

    file: str
    at: int
    nbytes: int
    dtype: str
    sizes: tuple[int, ...]


def name(step: int) -> str:
    """Returns the folder name of the checkpoint before `step`."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Returns the step in such a name."""
    return int(path.name[5:])


class _KeepFacts(NamedTuple):
    """The facts that decide whether to keep a checkpoint."""

    path: Path
    held_out: float | None
    asked: bool


class Checkpoint:
    """A checkpoint by its manifest. Opening reads no tensors; `CheckpointFiles` does.

    step:  the step that follows it
    ranks: number of ranks that trained
    kind:  "ranks": each rank had its own state; "whole": all had the same state. "model": the model alone
    each:  each rank's state, for `host/checkpoint/`
    """

    def __init__(self, path: Path, said: Mapping[str, Any]) -> None:
        self.path, self.said = path, said
        self.step, self.ranks, self.kind = int(said["step"]), int(said["ranks"]), str(said["kind"])
        self.settings: dict[str, Any] = dict(said["experiment"])
        self.held_out: float | None = said.get("held_out")
        self.asked = bool(said.get("asked"))
        self.run = str(said.get("run") or "")
        self.planned: list[dict[str, Any]] = list(said.get("planned") or ())
        # changes before `step`; old files have them in `each`
        self.made: list[dict[str, Any]] = list(said.get("made") or ())
        self.each: list[dict[str, Any]] = list(said["each"])
        self.blobs = [Blob(file, at, nbytes, dtype, tuple(sizes)) for file, at, nbytes, dtype, sizes in said["blobs"]]

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Opens a checkpoint's folder, or a run directory's newest one.

        path:  the folder of the checkpoint, or of the run

        Raises RunError if there is no complete checkpoint, or if its manifest is damaged.
        """
        if not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path):
            raise RunError(f"resume={short(path)}: must be a checkpoint's folder or a run's directory, such as "
                           f"'runs/first/checkpoints/step-00000100'")  # fmt: skip
        path = Path(path)
        with suppress(OSError):  # the folder may be read-only
            restore_replaced(path.parent)
        there = [path] if (path / MANIFEST).exists() else [*list_checkpoints(path), *list_checkpoints(path / FOLDER)]
        if not there:
            raise RunError(f"{path}: holds no complete checkpoint; give a checkpoint's folder or the directory of a "
                           f"run that had save_every above 0")  # fmt: skip
        try:
            return cls(there[-1].resolve(), _read_manifest(there[-1]))
        except RunError as error:
            raise RunError(f"{error}; {_older(there[-1])}") from None

    def __repr__(self) -> str:
        return f"Checkpoint before step {self.step} of {self.ranks} ranks in {self.path}"


class CheckpointFiles:
    """A checkpoint's open files. One descriptor hashes and reads a file."""

    damage = RunError  # if a file is missing or changed

    def __init__(self, of: Checkpoint) -> None:
        self._of = of
        self._open: dict[str, int] = {}

    def read(self, blob: Blob) -> bytearray:
        """Returns a tensor's bytes. Raises RunError if its file is missing or changed."""
        if blob.file not in self._open:
            self._open[blob.file] = self._checked(blob.file)
        data, fd = bytearray(blob.nbytes), self._open[blob.file]
        view, done = memoryview(data), 0
        while done < blob.nbytes:
            if not (n := os.preadv(fd, [view[done:]], blob.at + done)):
                raise self._damaged(blob.file, "ends too early")
            done += n
        return data

    def _checked(self, file: str) -> int:
        path, said = self._of.path / file, self._of.said["files"][file]
        try:
            fd = _opened(path)
        except OSError as error:
            raise self._damaged(file, f"cannot be read ({error.strerror})") from None
        digest = hashlib.sha256()
        for at in range(0, os.fstat(fd).st_size, CHUNK_BYTES):
            digest.update(os.pread(fd, CHUNK_BYTES, at))
        if digest.hexdigest() != said["sha256"]:
            os.close(fd)
            raise self._damaged(file, "was changed after it was written: its SHA-256 differs")
        return fd

    def _damaged(self, file: str, why: str) -> RunError:
        return RunError(f"{self._of.path}: {file} {why}; {_older(self._of.path)}")

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


def _opened(path: Path) -> int:
    """Opens a regular file, never a link or a pipe. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "it is not a regular file")
    return fd


def seal_manifest(said: Mapping[str, Any]) -> bytes:
    """Returns a manifest's bytes, which begin with the SHA-256 of its other fields."""
    body = json.dumps({"schema": SCHEMA, **said}).encode()
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'", ' + body[1:]


def _read_manifest(path: Path) -> dict[str, Any]:
    """Raises RunError if the manifest is damaged or invalid."""
    try:
        with os.fdopen(_opened(path / MANIFEST), "rb") as file:
            text = file.read(MAX_MANIFEST_BYTES + 1)
        seal = _SEAL.match(text)
        if seal and hashlib.sha256(b"{" + text[seal.end() :]).hexdigest().encode() != seal[1]:
            raise RunError(f"{path}: its {MANIFEST} was changed after it was written: its SHA-256 differs")
        said = json.loads(text if len(text) <= MAX_MANIFEST_BYTES else b"")
    except RunError:
        raise
    except OSError as error:
        raise RunError(f"{path}: its {MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise RunError(f"{path}: its {MANIFEST} is truncated or not one that workbench wrote") from None
    reason = find_fault(said) or ("it has no SHA-256 of itself" if said["schema"] > 1 and not seal else None)
    if reason:
        raise RunError(f"{path}: its {MANIFEST} is not one that workbench wrote: {reason}")
    said.pop("sha256", None)
    return dict(said)


def _older(path: Path) -> str:
    """Suggests an older checkpoint."""
    for other in reversed(list_checkpoints(path.parent)):
        if _NAMED.fullmatch(path.name) and step_of(other) < step_of(path):
            with suppress(RunError):
                _read_manifest(other)
                return f"resume from the previous checkpoint, {other}"
    return "resume from another checkpoint"


# -- find and prune checkpoints --


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns a folder's complete checkpoints, newest last. Includes some that a killed writer left hidden."""
    with suppress(OSError):
        restore_replaced(folder)
    with suppress(OSError):
        named = [p for p in folder.iterdir() if _NAMED.fullmatch(p.name) and (p / MANIFEST).exists()]
        return sorted(named, key=step_of)
    return []


def restore_replaced(folder: Path) -> None:
    """Shows replaced checkpoints again if their writer died before the new one was in place.

    Raises OSError if one stays hidden.
    """
    for hidden in folder.glob(f".step-*{REPLACED}"):
        shown = hidden.with_name(hidden.name[1:].removesuffix(REPLACED))
        if _NAMED.fullmatch(shown.name) and not shown.exists():
            os.rename(hidden, shown)


def prune(folder: Path, keep: int) -> list[Path]:
    """Removes all but the `keep` newest, the best (held-out loss) and the requested checkpoints. Returns their paths.

    Keeps unreadable ones, which the workbench did not write. Keeps those behind a symbolic link, which may be another
    run's. Raises OSError.
    """
    every: list[_KeepFacts] = []
    for path in [] if folder.is_symlink() else list_checkpoints(folder):
        if path.is_symlink():
            continue
        with suppress(RunError):
            one = Checkpoint.open(path)
            every.append(_KeepFacts(path, one.held_out, one.asked))  # one manifest at a time
    rated = [c for c in every if c.held_out is not None]
    stay = {c.path for c in every[-keep:]} | {c.path for c in every if c.asked}
    stay |= {min(rated, key=lambda c: float(c.held_out or 0.0)).path} if rated else set()
    gone = [c.path for c in every if c.path not in stay]
    for path in gone:
        remove_folder(path)
    return gone


# -- check a manifest --


def find_fault(said: Any) -> str | None:
    """Returns a manifest's first fault with field and value, or None."""
    return next(_wrongs(said), None)


def _wrongs(said: Any) -> Iterator[str]:
    if not isinstance(said, dict):
        yield f"it holds {short(said)}, which must be an object"
        return
    rules: dict[str, tuple[bool, str]] = {
        "schema": (said.get("schema") in (1, SCHEMA), f"1 or {SCHEMA}, which this version reads"),
        "kind": (said.get("kind") in ("ranks", "whole", "model"), "ranks, whole or model"),
        "step": (count(said.get("step")) and said["step"] < 10**10, "a whole number, 0 or more"),
        "ranks": (count(said.get("ranks")) and 1 <= said["ranks"] <= MAX_RANKS, f"from 1 to {MAX_RANKS}"),
        "experiment": (bool(SETTINGS.good(said.get("experiment"))), SETTINGS.words),
        "held_out": (said.get("held_out") is None or number(said["held_out"]), "a number, or null"),
        "planned": (_list_of(said.get("planned", []), dict), "a list of changes"),
        "made": (_list_of(said.get("made", []), dict), "a list of changes"),
        "files": (isinstance(said.get("files"), dict), "an object of files by name"),
        "blobs": (_list_of(said.get("blobs"), list), "a list of tensors"),
        "each": (_list_of(said.get("each"), dict), "a list of each rank's state"),
    }
    for field, (good, words) in rules.items():
        if not good:
            yield f"{field} is {short(said.get(field))}, which must be {words}"
            return
    for file, about in said["files"].items():
        fine = _FILES.fullmatch(file) and isinstance(about, dict) and count(about.get("nbytes"))
        if not fine or not re.fullmatch("[0-9a-f]{64}", str(about.get("sha256"))):
            yield f"files.{short(file)} is {short(about)}, which must be nbytes and sha256 of a file of a checkpoint"
    for at, blob in enumerate(said["blobs"]):
        if not _good_blob(blob, said["files"]):
            yield f"blobs[{at}] is {short(blob)}, which must be a place in a file, a dtype and sizes"
    wanted = 1 if said["kind"] == "whole" else said["ranks"]
    if len(said["each"]) != wanted:
        yield f"each has {len(said['each'])} entries, and must have {wanted}"
    for rank, one in enumerate(said["each"]):
        items = one.get("items")
        if not isinstance(one.get("said"), dict):
            yield f"each[{rank}].said is {short(one.get('said'))}, which must be an object with the rank's state"
        if not _list_of(items, list) or not all(_good_item(item, len(said["blobs"])) for item in items):
            yield f"each[{rank}].items is {short(items)}, which must be a list of tensors by name"


def _list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _good_blob(blob: list[Any], files: Mapping[str, Any]) -> bool:
    if len(blob) != 5 or not isinstance(blob[0], str) or blob[0] not in files or blob[0] == METADATA:
        return False
    file, at, nbytes, dtype, sizes = blob
    if not (count(at) and count(nbytes) and isinstance(dtype, str) and dtype in WIDTHS and _good_sizes(sizes)):
        return False
    return bool(prod(sizes) * WIDTHS[dtype] == nbytes and at + nbytes <= files[file]["nbytes"])


def _good_sizes(sizes: Any) -> bool:
    return _list_of(sizes, int) and len(sizes) <= 64 and all(count(n) and n <= MAX_DIMENSION for n in sizes)


def _good_item(item: list[Any], blobs: int) -> bool:
    """Checks `[name, its blobs in order, its shape, the box that each blob fills]`. Schema 1 has no boxes."""
    if len(item) not in (3, 4) or not isinstance(item[0], str) or not _list_of(item[1], int):
        return False
    if not _good_sizes(item[2]) or not all(count(n) and n < blobs for n in item[1]):
        return False
    return len(item) == 3 or (_list_of(item[3], list) and len(item[3]) == len(item[1]) and all(map(_good_box, item[3])))


def _good_box(box: list[Any]) -> bool:
    """Checks [offsets, sizes]."""
    return len(box) == 2 and all(map(_good_sizes, box)) and len(box[0]) == len(box[1])
