"""Tests the report of a rank that the system killed for lack of memory, from the system's counters."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.cluster.processes import boot
from workbench.cluster.processes.exit_causes import MACHINE_COUNTS, ResourceShortage
from workbench.engine.collectives.mapped_file import map_file

KILLED = -signal.SIGKILL
V1, V2 = "4:memory:/lab\n0::/\n", "0::/lab.slice\n"
FILES = {
    V1: ("/sys/fs/cgroup/memory/lab/memory.oom_control", "/sys/fs/cgroup/memory/lab/memory.limit_in_bytes"),
    V2: ("/sys/fs/cgroup/lab.slice/memory.events", "/sys/fs/cgroup/lab.slice/memory.max"),
}


class System(dict[str, str]):
    """A stub of the system's files by path."""

    def read(self, path: str) -> str:
        if path not in self:
            raise FileNotFoundError(path)
        return self[path]

    def ended(self, path: str) -> None:
        """Counts one more killed process in the file at `path`."""
        before, after = self[path].split("oom_kill ")
        self[path] = f"{before}oom_kill {int(after.split()[0]) + 1}\n"


def system(cgroups: str = "", **more: str) -> System:
    files = {"/proc/7/cgroup": cgroups, MACHINE_COUNTS: "nr_free_pages 5\noom_kill 3\n", **more}
    if cgroups in FILES:
        count, limit = FILES[cgroups]
        files |= {count: "low 0\noom 2\noom_kill 1\n", limit: "200000000"}
    return System(files)


def looked(files: System) -> ResourceShortage:
    made = ResourceShortage(files.read)
    made.read_counts([7])
    return made


@pytest.mark.parametrize("cgroups", [V1, V2])
def test_a_memory_cgroup_of_either_version_reports_the_kill(cgroups: str) -> None:
    files = system(cgroups)
    it = looked(files)
    assert it.words(7, KILLED) == ""
    files.ended(FILES[cgroups][0])
    files.ended(MACHINE_COUNTS)
    assert it.words(7, KILLED).startswith("the system ended it for lack of memory (its cgroup may have 200 MB); take ")
    assert it.words(7) != "", "of an engine that another kernel started nobody knows the exit code"
    assert it.words(7, 1) == it.words(7, -signal.SIGTERM) == it.words(8, KILLED) == ""


def test_with_the_machines_counter_only_the_report_is_most_likely() -> None:
    files = system()
    it = looked(files)
    files.ended(MACHINE_COUNTS)
    assert "most likely this one; take a smaller batch" in it.words(7, KILLED)
    it.read_counts([7])
    assert it.words(7, KILLED) == "", "what was counted before this run is no reason"


ODD = System({"/proc/7/cgroup": "nonsense\n4:memory", MACHINE_COUNTS: "oom_kill many\n"})


@pytest.mark.parametrize("files", [System(), ODD])
def test_without_counters_nothing_is_reported(files: System) -> None:
    assert looked(files).words(7, KILLED) == ""


def test_an_unlimited_cgroup_reports_no_number() -> None:
    files = system(V2)
    it = looked(files)
    files.ended(FILES[V2][0])
    for limit in ("max", str(9223372036854771712)):
        files[FILES[V2][1]] = limit
        assert it.words(7, KILLED).startswith("the system ended it for lack of memory; ")


def test_a_sigbus_is_reported_with_the_room_of_dev_shm() -> None:
    found = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=0)
    it = ResourceShortage(System().read, lambda path: found)  # type: ignore[arg-type, return-value]
    assert "no room (/dev/shm has 67.1 MB, 0.0 free); enlarge it" in it.words(7, -signal.SIGBUS)

    def none(path: str) -> Any:
        raise FileNotFoundError(path)

    assert ResourceShortage(System().read, none).words(7, -signal.SIGBUS).endswith("for which there was no room")


CGROUP = Path("/sys/fs/cgroup/memory")
EATS = """
import sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(__import__("os").getpid()))
print("in", flush=True)
sys.stdin.readline()
kept = []
while True:
    kept.append(bytearray(10**7))
"""


@pytest.fixture
def small() -> Any:
    """Makes a memory cgroup of 60 MB."""
    made = CGROUP / f"workbench-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text("60000000")
    except OSError:
        pytest.skip("no memory cgroup of version 1 can be made here")
    yield made
    made.rmdir()


def test_a_process_out_of_memory_is_distinguished_from_a_killed_one(small: Path) -> None:
    for eats in (True, False):
        command = [sys.executable, "-c", EATS, str(small)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdin and child.stdout and child.stdout.readline() == b"in\n"
        it = ResourceShortage()
        it.read_counts([child.pid])
        if eats:
            child.stdin.write(b"go\n")
            child.stdin.flush()
        else:
            child.kill()
        assert child.wait(60) == KILLED
        said = it.words(child.pid, KILLED)
        assert ("its cgroup may have 60 MB" in said) == eats and (said == "") != eats
        child.stdin.close()
        child.stdout.close()


# -- shared memory and descriptors --


def test_shared_memory_is_allocated_when_it_is_mapped(tmp_path: Path) -> None:
    one, two = map_file(tmp_path / "x", 4096), map_file(tmp_path / "x", 4096)
    one[:2] = b"hi"
    assert two[:2] == b"hi" and (tmp_path / "x").stat().st_blocks * 512 >= 4096
    with pytest.raises(OSError, match="8 bytes of memory that ranks share; free space there, or set TMPDIR"):
        raise_full(tmp_path)


def raise_full(path: Path) -> None:
    import errno

    with pytest.MonkeyPatch.context() as patch:

        def full(fd: int, at: int, nbytes: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "posix_fallocate", full)
        map_file(path / "y", 8)


FULL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from workbench.engine.collectives.mapped_file import map_file
try:
    block = map_file(Path(sys.argv[2]) / "arrivals", 1 << 20)
except OSError as error:
    print(error)
else:
    block[:] = bytes(1 << 20)
"""


def test_on_a_full_disk_a_rank_gets_an_error_instead_of_a_signal(tmp_path: Path) -> None:
    script = f"mount -t tmpfs -o size=64k none {tmp_path} && exec {sys.executable} -c '{FULL}' {Path.cwd()} {tmp_path}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    if (done.returncode in (1, 32) and "unshare" in done.stderr + done.stdout) or "mount:" in done.stderr:
        pytest.skip("no file system can be mounted here")
    assert (done.returncode, done.stderr) == (0, "")
    assert "No space left on device: 1048576 bytes of memory that ranks share; free space there" in done.stdout


LIMITS = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from workbench.cluster.processes import boot
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
boot.raise_descriptor_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize("hard", [2000, 256])
def test_an_engine_raises_its_descriptor_limit_to_the_hard_limit(hard: int) -> None:
    script = LIMITS.format(hard=hard)
    done = subprocess.run([sys.executable, "-c", script, str(Path.cwd())], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{min(hard, boot.DESCRIPTORS)}\n", done.stderr


def test_an_unlisted_descriptor_limit_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac behaves so: 256 at first, no hard limit, and values above kern.maxfilesperproc are refused."""
    limits = [256, resource.RLIM_INFINITY]

    def refusing(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")
        limits[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", refusing)
    boot.raise_descriptor_limit()
    assert limits == [10_240, resource.RLIM_INFINITY]
