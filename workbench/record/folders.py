"""Folders of a run on disk: only this user may read them, and a deletion never follows a symbolic link."""

from __future__ import annotations

import shutil
from pathlib import Path


def make_private_folder(path: Path) -> None:
    """Makes a folder, and every parent that is missing, with mode 0700. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def remove_folder(path: Path) -> None:
    """Removes a folder with its content; of a symbolic link, the link alone. Raises OSError."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
