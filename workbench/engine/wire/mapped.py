"""A small file that the ranks of one host have in common, in the memory of each."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path


def mapped(path: Path, nbytes: int) -> mmap.mmap:
    """The file at `path`, made if it is not there, as memory; no descriptor of it stays open.

    Its room is taken now. A file that is only said to be long takes it at the first write, and where there is none left
    by then the system ends the process (SIGBUS). Raises OSError where there is none now.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _take(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    except OSError as error:
        why = f"{error.strerror}: {nbytes} bytes that ranks share; make room there, or set TMPDIR to another place"
        raise OSError(error.errno, why, str(path.parent)) from None
    finally:
        os.close(fd)


def _take(fd: int, nbytes: int) -> None:
    try:
        return os.posix_fallocate(fd, 0, nbytes)
    except AttributeError:  # not on a Mac
        pass
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    os.ftruncate(fd, nbytes)
