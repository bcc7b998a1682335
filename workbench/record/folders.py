"""Private folders: created with mode 0700, never shared, removed without following links."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

ALLOW = "WORKBENCH_ALLOW_SHARED_FOLDERS"  # set to 1 by a user who trusts all users that can write there


def make_private_folder(path: Path) -> None:
    """Creates a folder and missing parents with mode 0700.

    Raises OSError; FileNotFoundError for a link without a target.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        if folder.is_symlink() and not folder.exists():
            raise FileNotFoundError(errno.ENOENT, f"{folder} is a link to {os.readlink(folder)}, which does not exist")
        folder.mkdir(mode=0o700, exist_ok=True)


def remove_folder(path: Path) -> None:
    """Removes a folder, or only the link if `path` is one. Raises OSError."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def is_allowed() -> bool:
    """Whether the user allows other users' folders."""
    return os.environ.get(ALLOW, "") == "1"


def others_can_write(about: os.stat_result) -> bool:
    """Whether other users can write, because everyone or the group can.

    A group with the owner's name and no other member is private.
    """
    if about.st_mode & stat.S_IWOTH:
        return True
    return bool(about.st_mode & stat.S_IWGRP) and not _is_private_group(about)


def reason_to_refuse(path: Path) -> str:
    """Returns why `path` cannot be private (another owner or other writers), or "".

    A missing folder is good: its creator will own it.
    """
    if is_allowed() or not hasattr(os, "getuid"):
        return ""
    try:
        about = path.stat()
    except OSError:
        return ""
    if about.st_uid != os.getuid():
        return f"the folder belongs to {_user(about.st_uid)}, who can read and change its files"
    if others_can_write(about):
        who = "everybody" if about.st_mode & stat.S_IWOTH else f"the group {_group(about.st_gid)}"
        return f"{who} can write to the folder and change its files"
    return ""


def _is_private_group(about: os.stat_result) -> bool:
    with contextlib.suppress(ImportError, KeyError):  # no such group or user, or another system
        import grp
        import pwd

        group, owner = grp.getgrgid(about.st_gid), pwd.getpwuid(about.st_uid)
        return group.gr_name == owner.pw_name and not set(group.gr_mem) - {owner.pw_name}
    return False


def _user(number: int) -> str:
    with contextlib.suppress(ImportError, KeyError):
        import pwd

        return pwd.getpwuid(number).pw_name
    return f"user {number}"


def _group(number: int) -> str:
    with contextlib.suppress(ImportError, KeyError):
        import grp

        return grp.getgrgid(number).gr_name
    return str(number)
