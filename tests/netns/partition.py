"""Cuts off a lab's third engine, on another machine, and reconnects it. Runs in the first namespace.

    python -m tests.netns.partition NAMESPACE SWITCH FOLDER SECONDS

The cut ends SECONDS after the other ranks have noticed it or gone on. The script prints the results as JSON, and
test_partition.py reads them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.labs import endless, rows
from tests.network import Network
from tests.waiting import until
from workbench.cluster.processes.lab_place import host_name
from workbench.lab import Lab
from workbench.strategies import DDP

BOUND = 90.0  # seconds, enough for a busy machine
ELSEWHERE = "elsewhere"  # the other machine's host name


@contextlib.contextmanager
def engines(namespace: str, folder: Path) -> Iterator[Path]:
    """Starts a controller and two engines here, one engine elsewhere; yields the connection file for kernels."""
    profile, started = folder / "profile", list[subprocess.Popen[bytes]]()
    security = profile / "security"

    def start(name: str, *command: str) -> None:
        log = (folder / f"{name}.log").open("wb")
        started.append(subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True))

    def engine(*before: str) -> None:
        start(f"engine {len(started)}", *before, sys.executable, "-m", "ipyparallel.engine",
              f"--file={security / 'ipcontroller-engine.json'}", f"--profile-dir={profile}")  # fmt: skip

    try:
        start("controller", sys.executable, "-m", "ipyparallel.controller", f"--ip={Network.address(0)}",
              "--IPController.enable_curve=True", "--HeartMonitor.max_heartmonitor_misses=1200",
              f"--profile-dir={profile}")  # fmt: skip
        assert until(lambda: (security / "ipcontroller-client.json").exists(), BOUND), "no controller"
        for _ in range(2):
            engine()
        import ipyparallel

        file = security / "ipcontroller-client.json"
        with contextlib.closing(ipyparallel.Client(str(file), timeout=BOUND)) as client:
            assert until(lambda: len(client.ids) == 2, BOUND), "two engines here"
            engine("ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c",
                   f'hostname {ELSEWHERE}; exec "$@"', "sh")  # fmt: skip
            assert until(lambda: len(client.ids) == 3, BOUND), "one over there"
        yield file
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)  # a controller has child processes
            process.wait()


def at(lab: Lab, step: int) -> None:
    assert until(lambda: lab._live is not None and lab._live.step >= step, BOUND), lab.notes


def all_wait(lab: Lab, cable: Callable[[str], None], seconds: float) -> dict[str, object]:
    """Checks that all ranks wait while the other machine is cut off, and go on afterwards."""
    run = lab.run(endless(strategy=DDP(), ranks=3, on_hang="wait", hang_after=3.0, pace=20.0))
    at(lab, 20)
    cable("down")
    assert until(lambda: run.details("hang"), BOUND), lab.notes
    stood = lab._live.step if lab._live else 0
    said = run.details("hang")[0][-1]
    time.sleep(seconds)
    still = lab._live is not None and lab._live.step <= stood + 1
    cable("up")
    healed = time.monotonic()
    at(lab, stood + 20)
    came = time.monotonic() - healed
    members = lab.members
    lab.stop()
    return {"text": said["text"], "ranks": said["ranks"], "still": still, "came": came, "members": members,
            "state": run.wait(BOUND).state, "missing": run.missing}  # fmt: skip


def others_go_on(lab: Lab, cable: Callable[[str], None], seconds: float) -> dict[str, object]:
    """Checks that the run goes on without the other machine and gets it back."""
    run = lab.run(endless(strategy=DDP(), ranks=3, on_hang="evict", hang_after=3.0, pace=20.0))
    at(lab, 20)
    hosts = [row["host"] for row in lab.status]
    cable("down")
    cut = time.monotonic()
    assert until(lambda: lab.members == (0, 1), BOUND), lab.notes
    (said,) = [detail for *_, detail in run.details("members")]
    went_on = time.monotonic() - cut
    at(lab, said["step"] + 20)
    time.sleep(seconds)
    cable("up")
    healed = time.monotonic()

    def back() -> bool:
        with contextlib.suppress(Exception):  # refused until its engine has found that the run went on
            lab.resize(3).wait(BOUND)
        return lab.members == (0, 1, 3)

    assert until(back, BOUND), lab.notes
    came = time.monotonic() - healed
    assert until(lambda: rows(run, 3) > 20, BOUND), "it trains"
    lab.stop()
    ended = run.wait(BOUND)
    return {
        "hosts": [h == host_name() for h in hosts],
        "text": said["text"],
        "went_on": went_on,
        "came": came,
        "state": ended.state,
        "missing": run.missing,
        "ranks": sorted(map(int, set(run.spans["rank"]))),
    }


def main() -> None:
    namespace, switch, folder, seconds = sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])

    def cable(state: str) -> None:
        subprocess.run(["ip", "-n", switch, "link", "set", "port1", state], check=True)

    with engines(namespace, folder) as file, Lab(ranks=3, cluster=str(file)) as lab:
        lab.wait(BOUND)
        print(json.dumps([all_wait(lab, cable, seconds), others_go_on(lab, cable, seconds)]), flush=True)
    os._exit(0)  # client threads that wait for an ended controller must not delay the exit


if __name__ == "__main__":
    main()
