"""Runs a script on a thread as torchrun does: `__main__`, arguments, folder, and the rank's environment."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from workbench.engine.collectives.wire import LOOPBACK
from workbench.engine.p2p.listener import find_own_address
from workbench.engine.script.script_view import ScriptView
from workbench.tasks import TaskError


def open_script_store(run: ScriptView) -> dist.TCPStore | None:
    """Returns, on rank 0, the store in which the script's process group meets.

    torchrun's agent opens it too: otherwise another process might take the port.
    """
    return dist.TCPStore(_find_address(run), 0, is_master=True, wait_for_workers=False) if run.rank.id == 0 else None


def _find_address(run: ScriptView) -> str:
    return LOOPBACK if run.peers.local else find_own_address(run.session.store_address)


def make_environment(run: ScriptView, store: dist.TCPStore | None) -> dict[str, str]:
    """Returns torchrun's environment variables for this rank. All ranks call it together."""
    rank, size, session, here = run.rank.id, run.rank.size, run.session, _find_address(run)
    where, port = run.broadcast_text_now(f"{here} {store.port if store is not None else 0}").split()
    hosts = [run.broadcast_text_now(here, r) for r in range(size)]
    names = list(dict.fromkeys(hosts))
    local, on, number = hosts[:rank].count(here), hosts.count(here), names.index(here)
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(on),
        "GROUP_RANK": str(number), "GROUP_WORLD_SIZE": str(len(names)), "ROLE_RANK": str(rank), "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(size), "MASTER_ADDR": where, "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": session.generation, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip


@contextmanager
def prepare_main(run: ScriptView, script: Any, store: dist.TCPStore | None) -> Iterator[Callable[[], Any]]:
    """Yields a function that runs the script, in a process prepared as torchrun does.

    Raises TaskError if there is no such script, or if a process group is open already.
    """
    file: Path = script.path
    if not file.is_file():
        raise TaskError(f"file={script.file!r}: there is no such file at {file} on this machine")
    if dist.is_initialized():
        raise TaskError(f"file={script.file!r}: a process group is open in this engine already, as from a %%px cell; "
                        f"close it with torch.distributed.destroy_process_group()")  # fmt: skip
    where, words, paths, known = Path.cwd(), sys.argv, list(sys.path), set(sys.modules)
    told = make_environment(run, store)
    before = {name: os.environ.get(name) for name in told}
    prompt = sys.__dict__.pop("ps1", None)  # an engine has it, and libraries would assume a notebook
    try:
        os.environ.update(told)
        os.chdir(script.folder)
        sys.argv = [str(script.file), *script.args]
        sys.path.insert(0, str(file.parent))
        yield partial(runpy.run_path, str(file), run_name="__main__")
    finally:
        if dist.is_initialized():
            with suppress(Exception):  # peers may have gone before
                dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})
        sys.argv, sys.path[:] = words, paths
        if prompt is not None:
            sys.ps1 = prompt
        with suppress(OSError):
            os.chdir(where)
        _unload_modules(file.parent, known)


def _unload_modules(folder: Path, known: set[str]) -> None:
    """Lets the next run import edited modules of the script's folder."""
    for name in set(sys.modules) - known:
        found = getattr(sys.modules[name], "__file__", None)
        if found and Path(found).is_relative_to(folder) and "site-packages" not in found:
            del sys.modules[name]
