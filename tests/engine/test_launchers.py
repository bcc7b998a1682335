"""Starts engines with the Slurm and SSH profiles of docs/howto/slurm.md and ssh.md, with stand-ins for the commands."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.labs import BOUND, apart, endless, reached
from tests.waiting import until
from workbench.cluster.processes.lab_place import ClusterError
from workbench.cluster.run.run_changes import PendingChange
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.run import Run
from workbench.tasks import Digits

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
PAGES = "".join((ROOT / "docs" / "howto" / f"{name}.md").read_text("utf8") for name in ("slurm", "ssh"))
COMMANDS = {
    # A job is a process group that runs the script. Its number is the group's.
    "sbatch": """
import os, re, subprocess, sys
script = open(sys.argv[-1]).read()
tasks = re.search(r"^#SBATCH --ntasks=(\\d+)$", script, re.MULTILINE)[1]
job = subprocess.Popen(["sh", sys.argv[-1]], env={**os.environ, "SLURM_NTASKS": tasks}, start_new_session=True,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("Submitted batch job", job.pid)
""",
    "srun": """
import os, signal, subprocess, sys
tasks = [subprocess.Popen(sys.argv[1:]) for _ in range(int(os.environ["SLURM_NTASKS"]))]
signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])  # as srun passes it on
for task in tasks:
    task.wait()
""",
    # Like Slurm's own, it accepts a job that has ended: engines without a controller end by themselves.
    "scancel": """
import contextlib, os, signal, sys
with contextlib.suppress(ProcessLookupError):
    os.killpg(int(sys.argv[-1]), signal.SIGTERM)
""",
    "ssh": """
import subprocess, sys
given = [x for x in sys.argv[1:] if x != "-tt"]
assert given[0] == "one", given
sys.exit(subprocess.run(["sh", "-c", " ".join(given[1:])]).returncode)
""",
    "scp": """
import os, shutil, sys
source, to = (x.partition(":")[2] if x.startswith("one:") else x for x in sys.argv[-2:])
to = os.path.expanduser(to)
os.path.realpath(source) == os.path.realpath(to) or shutil.copy(source, to)
""",
}


@pytest.fixture
def site(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home directory with the profiles of the page; the site's commands come first in PATH."""
    with apart(tmp_path_factory) as patch:
        commands = tmp_path / "commands"
        commands.mkdir()
        for name, text in COMMANDS.items():
            (commands / name).write_text(f"#!{sys.executable}\n{text}")
            (commands / name).chmod(0o700 | stat.S_IXUSR)
        patch.setenv("PATH", os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]))
        patch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        for name, text in re.findall(r'```python\n# ipcluster_config.py of the profile "(\w+)"\n(.*?)```', PAGES, re.S):
            profile = tmp_path / "ipython" / f"profile_{name}"
            profile.mkdir(parents=True)
            (profile / "ipcluster_config.py").write_text(text)
        yield tmp_path


@contextmanager
def started(site: Path, name: str, engines: int = 2) -> Iterator[None]:
    """Runs the engines of a profile while the block runs, then stops their launcher."""
    with (site / "ipcluster.log").open("w") as log:
        command = ["ipcluster", "start", f"--profile={name}", "-n", str(engines)]
        cluster = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=site)
    file = site / "ipython" / f"profile_{name}" / "security" / "ipcontroller-client.json"
    try:
        assert until(lambda: file.exists() or cluster.poll() is not None, BOUND)
        assert cluster.poll() is None, (site / "ipcluster.log").read_text()
        yield
    finally:
        try:
            subprocess.run(["ipcluster", "stop", f"--profile={name}"], timeout=60, check=False, cwd=site)
            cluster.wait(60)
        finally:  # a process that remains would be a warning in this worker's next test
            cluster.kill()
            cluster.wait(60)


def found(profile: str, engines: int = 2) -> Lab:
    """Returns the lab of a profile once its engines have started."""
    end = time.monotonic() + BOUND
    while True:
        lab = Lab(ranks=engines, name=profile, profile=profile)
        try:
            return lab.wait(BOUND)
        except ClusterError:
            lab.close()
            assert time.monotonic() < end
            time.sleep(0.5)


def test_engines_that_slurm_starts_train_and_leave_when_it_takes_the_job_away(site: Path) -> None:
    with started(site, "slurm"), found("slurm") as lab:
        assert lab.run(Experiment(ranks=2, steps=5)).wait(BOUND).state == "done"
        run = lab.run(endless(ranks=2))
        reached(lab, 5)
        (job,) = re.findall(r"Submitted batch job (\d+)|submitted with job id: '?(\d+)",
                            (site / "ipcluster.log").read_text())[:1]  # fmt: skip
        subprocess.run(["scancel", next(filter(None, job))], check=True)
        assert until(lambda: lab.state == "idle" or not lab.live, BOUND), lab.notes
        assert any("preempted" in note for note in lab.notes), lab.notes
        assert run.state == "preempted" == Run.open(str(run.path)).state, lab.notes
        kept = sorted((Path(str(run.path)) / "checkpoints").glob("step-*"))
        assert kept, "nobody is left, so a checkpoint is kept"


def test_engines_that_ssh_starts_train(site: Path) -> None:
    config = site / "ipython" / "profile_ssh" / "ipcluster_config.py"
    text = config.read_text().replace('{"one": 1, "two": 1}', '{"one": 2}')
    config.write_text(text.replace('remote_python = "python"', f"remote_python = {sys.executable!r}"))
    with started(site, "ssh"), found("ssh") as lab:
        assert lab.run(Experiment(ranks=2, steps=5)).wait(BOUND).state == "done"


@pytest.mark.long
def test_an_old_rank_that_dies_while_launched_ranks_join_leaves_the_others_with_their_state(site: Path) -> None:
    with started(site, "slurm", 4), found("slurm", 4) as lab:
        run = lab.run(Experiment(ranks=2, steps=0, task=Digits(hidden=64), on_death="go on", pace=20.0))
        reached(lab, 60)
        asked, live = lab.resize(4), lab._live
        assert live is not None
        os.kill(live.cluster.engines[1].process_key[1], signal.SIGKILL)
        assert until(lambda: _settled(lab, asked, 1), BOUND), lab.notes
        assert lab.live and 0 in lab.members, lab.notes
        reached(lab, (lab.status[0]["step"] or 0) + 10)
        lab.stop()
        assert run.wait(BOUND).state == "stopped"
        losses = run.samples[run.samples.name == "loss"].sort_values("t").value
        assert losses.tail(6).mean() < losses.iloc[0] / 3, "the survivors train from trained values"


def _settled(lab: Lab, asked: PendingChange, victim: int) -> bool:
    """Whether a request for ranks is answered and the victim is no member."""
    return not lab.live or ((asked.applied_at or asked.refused) is not None and victim not in lab.members)
