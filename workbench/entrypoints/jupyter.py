"""Opens JupyterLab on the first notebook."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import sysconfig
import webbrowser
from pathlib import Path
from typing import NoReturn

import workbench
from workbench.experiment import user_input
from workbench.record.run import RunError

FIRST = "01_first_run.ipynb"


def open_lab(port: int, browser: bool) -> NoReturn:
    """Replaces this process by JupyterLab, so that Ctrl-C and signals reach only JupyterLab."""
    user_input.system()
    folder = find_notebooks()
    free = find_free_port(port)
    if free != port:
        print(f"port {port} is in use: taking {free}", flush=True)
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(24)
    opens = browser and can_open_browser()
    address = f"http://localhost:{free}/lab/tree/{folder.name}/{FIRST}?token={token}"
    print("opening" if opens else "open this address in a browser:", address, flush=True)
    # The token is in the environment, which other users of the machine cannot read.
    os.execve(sys.executable, make_command(folder, free, opens), {**os.environ, "JUPYTER_TOKEN": token})  # noqa: S606


def make_command(folder: Path, port: int, opens: bool) -> list[str]:
    """Returns JupyterLab's command line."""
    words = [sys.executable, "-m", "jupyterlab", str(folder / FIRST), f"--ServerApp.root_dir={folder.parent}"]
    words += [f"--port={port}", "--ServerApp.port_retries=50", "--log-level=WARN"]
    words += ["--LabApp.news_url=None"]  # else its question covers a corner of the page
    words += [] if opens else ["--no-browser"]
    return words + (["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else [])


def find_notebooks() -> Path:
    """Returns the lessons' folder: the clone's, or a copy of the installed files in the current folder."""
    found = locate_notebooks()
    if found != find_installed():
        return found
    here = Path.cwd() / "notebooks"
    print(f"copying the notebooks to {here}", flush=True)
    return Path(shutil.copytree(found, here, dirs_exist_ok=True))


def locate_notebooks() -> Path:
    """Returns the lessons' folder: the clone's, that in the current folder, or the installed one."""
    cloned, here = Path(workbench.__file__).parents[1] / "notebooks", Path.cwd() / "notebooks"
    for folder in (cloned, here, installed := find_installed()):
        if (folder / FIRST).exists():
            return folder
    where = f"neither in {cloned}, nor in {here}, nor in {installed}"
    raise RunError(f"{FIRST}: found {where}; install the workbench again, or work in a clone")


def find_installed() -> Path:
    """Returns the folder in which pip puts the lessons."""
    return Path(sysconfig.get_path("data"), "share", "training-workbench", "notebooks")


def find_free_port(port: int) -> int:
    """Returns `port`, or the next free one."""
    for candidate in range(port, min(port + 50, 65536)):
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            return candidate
    raise RunError(f"port={port}: in use, and so are the 49 after it; give --port")


def can_open_browser() -> bool:
    """Whether a screen and a browser exist."""
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True
