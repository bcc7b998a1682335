"""Runs a script on several processes, like torchrun, and returns its result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from tests.waiting import until

HERE = Path(__file__).parent / "scripts_ddp"


def started_by_torchrun(name: str, out: Path, words: tuple[str, ...], size: int = 2) -> Any:
    """Returns what tests/scripts_ddp/`name`.py with these arguments saves in `out`, without the workbench.

    size: how many processes run it
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }
    asked = [sys.executable, str(HERE / f"{name}.py"), *words]
    ranks = [subprocess.Popen(asked, env={**told, "RANK": r, "LOCAL_RANK": r}) for r in map(str, range(size))]
    try:
        assert until(lambda: _read(out) is not None, 200)
    finally:
        for p in ranks:  # torch's own end may take a minute without a name service
            p.kill()
            p.wait()
    return _read(out)


def _read(file: Path) -> Any:
    try:
        return torch.load(file)
    except (OSError, RuntimeError, EOFError, UnpicklingError):  # missing or incomplete
        return None
