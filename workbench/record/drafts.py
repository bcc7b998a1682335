"""Writes a checkpoint into a hidden folder and renames it when complete. Each rank writes one file."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.record.checkpoints import MANIFEST, REPLACED, name, restore_replaced, seal_manifest
from workbench.record.folders import make_private_folder, remove_folder
from workbench.record.store import private

SHOWN_AGAIN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # a reader restored the old checkpoint


class Draft:
    """A checkpoint under construction. Rank 0 begins and ends it."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path, self._to = folder / f".{name(step)}.part", folder / name(step)
        self._replaced = folder / f".{name(step)}{REPLACED}"

    def begin(self) -> None:
        """Creates the folder, and removes or restores those of killed runs. Raises OSError."""
        make_private_folder(self.path.parent)
        _clear_replaced(self.path.parent)
        for old in self.path.parent.glob(".step-*.part"):
            remove_folder(old)
        self.path.mkdir(mode=0o700)

    def file(self, called: str) -> Written:
        return Written(self.path / called)

    def commit(self, manifest: Mapping[str, Any]) -> Path:
        """Seals and renames the checkpoint, safe against a power cut. Raises OSError.

        Hides one of the same step until then. Readers restore it after a crash.
        """
        with Written(self.path / MANIFEST) as file:
            file.write(seal_manifest(manifest))
        _synced(self.path)
        self._take_place()
        _synced(self._to.parent)
        if os.path.lexists(self._replaced):
            with contextlib.suppress(OSError):  # a reader may hold its files; `begin` tries again
                remove_folder(self._replaced)
        return self._to

    def _take_place(self) -> None:
        """First hides a checkpoint of the same step, and again if a reader restores it."""
        if os.path.lexists(self._to):
            os.rename(self._to, self._replaced)
        try:
            os.rename(self.path, self._to)
        except OSError as error:
            if error.errno not in SHOWN_AGAIN:
                raise
            os.rename(self._to, self._replaced)
            os.rename(self.path, self._to)

    def give_up(self) -> None:
        """Removes the draft and shows the old checkpoint. Raises nothing."""
        with contextlib.suppress(OSError):
            _clear_replaced(self.path.parent)
        shutil.rmtree(self.path, ignore_errors=True)


class Written:
    """A new file that counts and hashes its content."""

    def __init__(self, path: Path) -> None:
        self.nbytes, self._hash = 0, hashlib.sha256()
        self._file = open(path, "xb", buffering=0, opener=private)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += self._file.write(view[done:])
        self._hash.update(view)
        self.nbytes += done
        return done

    def close(self) -> dict[str, Any]:
        """Syncs the file. Returns its entry for the manifest."""
        os.fsync(self._file.fileno())
        self._file.close()
        return {"sha256": self._hash.hexdigest(), "nbytes": self.nbytes}

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._file.closed:
            self.close()


def _clear_replaced(folder: Path) -> None:
    """Restores replaced checkpoints without a new one, and removes the rest.

    Raises OSError if one stays hidden.
    """
    restore_replaced(folder)
    for old in folder.glob(f".step-*{REPLACED}"):
        with contextlib.suppress(OSError):  # harmless: the new checkpoint is complete
            remove_folder(old)


def _synced(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
