"""Memory that the ranks of one host share."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path


def map_file(path: Path, nbytes: int) -> mmap.mmap:
    """Maps the file at `path` into memory, and creates it if it is missing. No descriptor stays open.

    It allocates the disk space now, and raises OSError if there is none: on a full disk, a write into a sparse file
    would end the process (SIGBUS).
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _allocate_space(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    except OSError as error:
        why = (
            f"{error.strerror}: {nbytes} bytes of memory that ranks share; free space there, or set TMPDIR to "
            f"another folder"
        )
        raise OSError(error.errno, why, str(path.parent)) from None
    finally:
        os.close(fd)


def _allocate_space(fd: int, nbytes: int) -> None:
    try:
        return os.posix_fallocate(fd, 0, nbytes)
    except AttributeError:  # not on a Mac
        pass
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    os.ftruncate(fd, nbytes)
