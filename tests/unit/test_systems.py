"""Tests messages on other systems, on which ranks cannot run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.testing

from workbench.cli import app
from workbench.experiment import user_input
from workbench.lab import Lab
from workbench.settings import KnobError


@pytest.mark.parametrize("command", [["lab"], ["demo"], ["run", "digits", "--out", "here"]])
def test_windows_is_refused_with_a_hint_at_wsl(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(user_input, "sys", SimpleNamespace(platform="win32"))
    with pytest.raises(KnobError, match=r"must be Linux or macOS.*install WSL \(`wsl --install`"):
        Lab(ranks=2)
    said = typer.testing.CliRunner().invoke(app, command)
    assert said.exit_code == 2 and "platform=win32: " in said.output and "WSL" in said.output
    assert not list(tmp_path.iterdir())
