"""Cuts off a machine while ranks train, then reconnects it. Needs root and about a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.network import Network, why_not

pytestmark = pytest.mark.netns


@pytest.mark.parametrize("seconds", [pytest.param(2, marks=pytest.mark.every), 45], ids="{} s".format)
def test_a_run_waits_for_a_cut_off_machine_or_goes_on_and_takes_it_back_without_a_restart(
    seconds: int, tmp_path: Path
) -> None:
    """45 s is longer than common timeouts."""
    if reason := why_not():
        pytest.skip(reason)
    env = {**os.environ, "WORKBENCH_RUNTIME_DIR": str(tmp_path / "runtime"), "XDG_DATA_HOME": str(tmp_path / "data")}
    with Network(2) as network:
        command = [sys.executable, "-m", "tests.netns.partition", network.names[1], network.switch, str(tmp_path),
                   str(seconds)]  # fmt: skip
        done = subprocess.run(network.command(0, command), env=env, capture_output=True, text=True, timeout=400)
    logs = "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in tmp_path.glob("*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}\n{logs}"
    waited, told = json.loads(done.stdout.splitlines()[-1])
    assert waited["ranks"] == [2] and waited["still"], "the one that is out of reach is named, and nobody goes on"
    assert waited["state"] == "stopped" and waited["members"] == [0, 1, 2] and not waited["missing"]
    assert told["hosts"] == [True, True, False], "the third is another machine"
    assert "rank 2 is lost; ranks 0, 1 went on" in told["text"]
    assert told["state"] == "stopped" and told["ranks"] == [0, 1, 2, 3] and not told["missing"]
    print(f"waiting: on {waited['came']:.1f} s after the cable was back; else {told['went_on']:.1f} s after the cut, "
          f"and whole {told['came']:.1f} s after the cable was back")  # fmt: skip
