"""Runs the install steps of the online environment for the first notebook in a fresh venv."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.every
def test_post_build_gives_an_environment_that_can_run_the_first_notebook(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    path = f"{tmp_path / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    rest: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    built = subprocess.run([ROOT / "binder" / "postBuild"], cwd=ROOT, env={**os.environ, "PATH": path}, **rest)
    assert built.returncode == 0, built.stderr[-2000:]
    assert "torch:" in built.stdout, "it says which build of torch it takes"
    code = "import jupyterlab, widgets.page.display, workbench.lab; "
    code += "print(workbench.recipe('first_run').checked().ranks)"
    python = tmp_path / "env" / "bin" / "python"
    ran = subprocess.run([python, "-W", "ignore", "-c", code], cwd=tmp_path, **rest)
    assert ran.stdout.strip() == "4", ran.stderr[-2000:]
    code = "from widgets.page.side import has_sidecar; print(has_sidecar())"
    docks = subprocess.run([python, "-c", code], cwd=tmp_path, **rest)
    assert docks.stdout.strip() == "True", "the button Dock, which lessons name, needs sidecar"


def test_post_build_asks_setup_for_the_dock_extras(tmp_path: Path) -> None:
    """A stub of setup.sh prints its arguments."""
    (tmp_path / "binder").mkdir()
    for path, text in {"binder/postBuild": (ROOT / "binder" / "postBuild").read_text(),
                       "setup.sh": '#!/bin/sh\necho "$@"\n'}.items():  # fmt: skip
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    command = [tmp_path / "binder" / "postBuild"]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    built = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert built.stdout.split() == [sys.executable, "dock"]


def test_post_build_is_executable_and_asks_for_a_supported_python() -> None:
    assert os.access(ROOT / "binder" / "postBuild", os.X_OK)
    major, minor = (ROOT / "binder" / "runtime.txt").read_text().strip().removeprefix("python-").split(".")
    assert (int(major), int(minor)) >= (3, 11)
