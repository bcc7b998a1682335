"""Labs of tests: none meets another's files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def apart(folders: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """Labs that begin inside keep what they write, and are found, in folders of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNTIME_DIR", str(folders.mktemp("runtime")))
        patch.setenv("XDG_DATA_HOME", str(folders.mktemp("data")))
        yield patch
