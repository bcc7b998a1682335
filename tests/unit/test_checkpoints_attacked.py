"""Tests malicious checkpoints: pickles in every file, and manifests of all kinds.

The result must be one sentence, or a run that goes on. Nothing from the checkpoint may execute.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kept import lived, losses, simulated
from tests.ranks import ended, experiment, live
from workbench.compressors import TopK
from workbench.record.checkpoints import FOLDER, MANIFEST, Checkpoint, CheckpointFiles, list_checkpoints, seal_manifest
from workbench.record.store import RunError
from workbench.settings import KnobError
from workbench.sim.run.resuming import plan_resume, settings_of
from workbench.strategies import KFAC

pytestmark = pytest.mark.ranks


class Canary:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Makes a checkpoint of 2 ranks."""
    lived(experiment(2, 10, save_every=10, compressor=TopK.usual(), strategy=KFAC()), tmp_path / "run")
    return list_checkpoints(tmp_path / "run" / FOLDER)[0]


def signed(folder: Path) -> None:
    """Writes correct hashes into the manifest, as an attacker can."""
    about = manifest(folder)
    for file in about["files"]:
        raw = (folder / file).read_bytes()
        about["files"][file] = {"sha256": hashlib.sha256(raw).hexdigest(), "nbytes": len(raw)}
    (folder / MANIFEST).write_bytes(seal_manifest(about))


def manifest(folder: Path) -> dict[str, Any]:
    """Returns a checkpoint's manifest without its seal."""
    said: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return {key: value for key, value in said.items() if key != "sha256"}


def goes_on(folder: Path) -> str:
    """Resumes from the checkpoint. Returns "" if that works, else the error."""
    try:
        kept = Checkpoint.open(folder)
        sessions = live(experiment(2, 12, compressor=TopK.usual(), strategy=KFAC()), resume=str(kept.path))
    except (RunError, KnobError) as error:
        return str(error)
    ended(sessions)
    failed = [s.error for s in sessions if s.error is not None and not s.error["consequence"]]
    assert all(one["type"] in ("RunError", "KnobError") for one in failed), failed
    return str(failed[0]["text"]) if failed else ""


def sentence(text: str) -> bool:
    return bool(text) and "\n" not in text and len(text) < 700


FILES = (MANIFEST, ".metadata", "__0_0.distcp", "__1_0.distcp")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("hashed", [False, True], ids=["", "and its hash is right"])
def test_a_pickle_in_place_of_a_file_is_never_opened(file: str, hashed: bool, made: Path, tmp_path: Path) -> None:
    canary = tmp_path / "it ran".replace(" ", "-")
    size = (made / file).stat().st_size
    (made / file).write_bytes(pickle.dumps(Canary(canary)).ljust(size, b"\0"))
    if hashed and file != MANIFEST:
        signed(made)
    said = goes_on(made)
    assert not canary.exists()
    if file == ".metadata":
        assert said == ""  # no code reads it
    elif file == MANIFEST or not hashed:
        assert sentence(said)
    pickle.loads((made / file).read_bytes())
    assert canary.exists(), "the pickle itself would have done it"


def test_a_pickle_inside_a_torch_file_is_never_opened(made: Path, tmp_path: Path) -> None:
    """The values keep their bytes. The attacker replaces everything around them."""
    canary = tmp_path / "ran"
    evil = pickle.dumps(Canary(canary))
    about = manifest(made)
    for file in [name for name in about["files"] if name.endswith(".distcp")]:
        raw = bytearray((made / file).read_bytes())
        places = sorted((at, at + nbytes) for f, at, nbytes, _, _ in about["blobs"] if f == file)
        for (_, end), (begin, _) in zip([(0, 0), *places], [*places, (len(raw), 0)], strict=True):
            if begin - end >= len(evil):
                raw[end:begin] = evil.ljust(begin - end, b"\0")
        (made / file).write_bytes(raw)
        assert not zipfile.is_zipfile(made / file)
    signed(made)
    assert goes_on(made) == "" and not canary.exists()


def test_one_bit_of_a_tensor_is_noticed(made: Path) -> None:
    raw = bytearray((made / "__1_0.distcp").read_bytes())
    raw[len(raw) // 2] ^= 1
    (made / "__1_0.distcp").write_bytes(raw)
    assert "__1_0.distcp was changed after it was written: its SHA-256 differs" in goes_on(made)


@pytest.mark.parametrize("file", FILES[2:])
def test_links_pipes_and_missing_files_are_errors(file: str, made: Path, tmp_path: Path) -> None:
    raw = (made / file).read_bytes()
    (made / file).unlink()
    assert sentence(goes_on(made))
    os.mkfifo(made / file)
    assert sentence(goes_on(made))
    (made / file).unlink()
    (tmp_path / "elsewhere").write_bytes(raw)
    (made / file).symlink_to(tmp_path / "elsewhere")
    assert sentence(goes_on(made))


ODD: list[Any] = [
    None, -1, 2**70, 1.5, "x", "../../etc/passwd", [], {}, [[]], {"a": 1}, True, float("nan"), "__0_0.distcp",
]  # fmt: skip


def places(of: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields every place in a manifest, outer ones first."""
    yield path
    for key, value in of.items() if isinstance(of, dict) else enumerate(of) if isinstance(of, list) else ():
        yield from places(value, (*path, key))


def test_manifests_of_all_kinds_give_one_sentence(tmp_path: Path) -> None:
    """Each manifest differs in one place from a good one. Uses the simulator, which reads the same files."""
    rest = {"compressor": TopK.usual(), "strategy": KFAC()}
    simulated(2, 4, tmp_path / "a", 2, **rest)
    folder = list_checkpoints(tmp_path / "a")[0]
    good = manifest(folder)
    every, draw = [p for p in places(good) if p], random.Random(11)
    shallow = [p for p in every if len(p) <= 2 or p[0] not in ("blobs", "each", "experiment")]
    refused = went_on = 0
    for where in [*shallow, *draw.sample(every, 150)]:
        changed = json.loads(json.dumps(good))
        at = changed
        for key in where[:-1]:
            at = at[key]
        at[where[-1]] = draw.choice(ODD)
        (folder / MANIFEST).write_bytes(seal_manifest(changed))
        try:
            kept = Checkpoint.open(folder)
            with_settings = plan_resume(kept, settings_of(kept, experiment().task)) if where[0] != "each" else None
            assert with_settings is None or with_settings.checkpoint is kept
            run, _ = simulated(2, 4, tmp_path / "b", 0, resume=kept, **rest)
            assert len(losses(run, 2)) == 2
            went_on += 1
        except (RunError, KnobError) as error:
            assert sentence(str(error)), str(error)
            refused += 1
        except Exception as error:  # a valid value without sense ends the run by an error of the training code
            assert where[0] == "each" and not isinstance(error, (MemoryError, OSError)), (where, error)
            refused += 1
    assert refused > 100 and went_on > 10


def test_opening_something_else_is_an_error(tmp_path: Path) -> None:
    for path in ("", "\0", 3, tmp_path, tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").write_text("x")
        with pytest.raises(RunError) as error:
            Checkpoint.open(path)  # type: ignore[arg-type]
        assert sentence(str(error.value))
    (tmp_path / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(RunError, match="truncated or not one that workbench wrote"):
        Checkpoint.open(tmp_path)
    (tmp_path / MANIFEST).unlink()
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(RunError, match="cannot be read"):
        Checkpoint.open(tmp_path)


def test_bytes_come_from_the_file_that_was_hashed(made: Path) -> None:
    """A file that is swapped after it was hashed has no effect."""
    kept = Checkpoint.open(made)
    files, blob = CheckpointFiles(kept), next(b for b in kept.blobs if b.nbytes > 100)
    before = files.read(blob)
    (made / "other").write_bytes(b"\xff" * (made / blob.file).stat().st_size)
    os.replace(made / "other", made / blob.file)
    assert files.read(blob) == before
    files.close()
