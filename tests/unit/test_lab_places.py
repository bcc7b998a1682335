"""Tests the private directories of labs, their owners, and the devices of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.cluster.api.launch import find_place, fit_experiment, open_run
from workbench.cluster.engines import engine_probe as engines_module
from workbench.cluster.engines.engine_probe import Engine, check_versions, choose_devices, list_versions
from workbench.cluster.processes import duration_history
from workbench.cluster.processes import lab_place as place_module
from workbench.cluster.processes.lab_place import (
    ClusterError,
    LabPlace,
    alive,
    host_name,
    is_over,
    list_places,
    runs_dir,
    runtime_root,
    this_process,
)
from workbench.cluster.processes.lab_processes import end_processes, wait_for
from workbench.engine.record.row_spool import RowSpool
from workbench.experiment import Experiment
from workbench.record import folders, store
from workbench.run import Run, RunError
from workbench.settings import KnobError


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    yield


def engine(rank: int = 0, gpus: int = 0, where: str = "", **versions: str) -> Engine:
    said = {"host": where or host_name(), "pid": os.getpid(), "created": this_process()[1], "reach": "127.0.0.1"}
    return Engine(rank=rank, id=rank, gpus=gpus, versions={**list_versions(), **versions}, **said)


def test_a_place_is_private_and_unique() -> None:
    one, two = LabPlace.make_place("lab"), LabPlace.make_place("lab")
    assert one.path != two.path and {p.path for p in list_places()} == {one.path, two.path}
    for path in (runtime_root(), one.path, one.file):
        assert path.stat().st_mode & 0o077 == 0
    one.write_state(more=1)
    assert LabPlace(one.path).read_state()["more"] == 1 and LabPlace(one.path).read_state()["owner"] == this_process()


def test_an_owner_and_a_guest_keep_what_the_other_wrote() -> None:
    owner = LabPlace.make_place("shared")
    guest = LabPlace(owner.path)
    guest.write_state(run={"run_id": 1})
    owner.add_process([7, 1.0], "engine 0")
    guest.write_state(run={"run_id": 2})
    owner.add_process([8, 1.0], "engine 1")
    owner.drop_process(7)
    for place in (owner, guest, LabPlace(owner.path)):
        assert place.state["run"] == {"run_id": 2} and place.state["processes"] == [[8, 1.0, "engine 1"]]


def test_no_write_is_lost_when_kernels_write_at_the_same_time() -> None:
    place = LabPlace.make_place("busy")
    code = "import sys; from pathlib import Path; from workbench.cluster.processes.lab_place import LabPlace\n" \
           "p = LabPlace(Path(sys.argv[1]))\nfor i in range(20): p.add_process([i, 0.0], sys.argv[2])"  # fmt: skip
    others = [subprocess.Popen([sys.executable, "-c", code, str(place.path), name]) for name in ("a", "b")]
    for i in range(20):
        place.add_process([i, 0.0], "here")
    assert [other.wait(60) for other in others] == [0, 0]
    assert len(place.state["processes"]) == 60


HOLDER = """import fcntl, os, signal, sys; from pathlib import Path
from workbench.cluster.processes.lab_place import LabPlace
with LabPlace(Path(sys.argv[1]))._locked():
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_stopped_kernel_that_holds_the_lock_is_named_and_blocks_nobody_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = LabPlace.make_place("shared")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(place.path)])
    try:
        os.waitpid(holder.pid, os.WUNTRACED)
        monkeypatch.setattr(place_module, "LOCK_TIMEOUT", 0.3)
        words = f"{place.path / 'lab.lock'}: the lab's state cannot be changed.*held by process {holder.pid}, which"
        with pytest.raises(ClusterError, match=words):
            place.write_state(run={"run_id": 1})
        end_processes(place)  # raises nothing
        os.kill(holder.pid, signal.SIGCONT)
        assert holder.wait(60) == 0
        place.write_state(run={"run_id": 2})
        assert place.read_state()["run"] == {"run_id": 2}
    finally:
        holder.kill()
        holder.wait()


def test_a_lock_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    place = LabPlace.make_place("shared")
    with place._locked():
        later = threading.Timer(0.2, lambda: LabPlace(place.path).write_state(more=1))
        later.start()
        assert not wait_for(lambda: "more" in place.read_state(), 0.5)
    later.join()
    assert place.read_state()["more"] == 1


def test_a_kernel_that_dies_while_it_writes_leaves_no_draft_for_long() -> None:
    place = LabPlace.make_place("busy")
    code = "import json, os, sys; from pathlib import Path\n" \
           "from workbench.cluster.processes.lab_place import LabPlace\n" \
           "json.dump = lambda *rest: os._exit(9)\nLabPlace(Path(sys.argv[1])).write_state(more=1)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code, str(place.path)], timeout=60, check=False).returncode == 9
    with pytest.raises(TypeError, match="not JSON serializable"):
        place.write_state(more=object())
    place = LabPlace(place.path)
    place.write_state(more=2)
    assert sorted(p.name for p in place.path.glob("lab.*")) == ["lab.json", "lab.lock"]
    assert place.read_state()["more"] == 2 and place.read_state()["name"] == "busy"


def test_a_place_without_its_file_still_knows_its_processes() -> None:
    place = LabPlace.make_place("removed")
    place.add_process([7, 1.0], "engine 0")
    place.remove_folder()
    assert place.state["processes"] == [[7, 1.0, "engine 0"]]


def test_a_runtime_directory_that_is_not_ours_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").symlink_to(tmp_path)
    assert runtime_root() == tmp_path / "data" / "training-workbench" / "runtime"
    (tmp_path / "runtime").unlink()
    tmp_path.chmod(0o777)
    assert runtime_root() == tmp_path / "data" / "training-workbench" / "runtime"
    monkeypatch.setattr(place_module.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ClusterError, match="belongs to another user"):
        runtime_root()


def test_a_runtime_directory_whose_parent_a_group_can_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_is_private_group", lambda about: False)
    tmp_path.chmod(0o770)
    assert runtime_root() == tmp_path / "data" / "training-workbench" / "runtime"
    tmp_path.chmod(0o1770)
    assert runtime_root() == tmp_path / "runtime", "in a sticky folder nobody renames what others own"
    tmp_path.chmod(0o770)
    monkeypatch.setenv(folders.ALLOW, "1")
    assert runtime_root() == tmp_path / "runtime"
    monkeypatch.delenv(folders.ALLOW)
    (tmp_path / "data" / "training-workbench").chmod(0o770)
    with pytest.raises(ClusterError, match=f"other users can write to its parent folder.*set {folders.ALLOW}=1"):
        runtime_root()


def test_a_private_group_contains_only_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = SimpleNamespace(pw_name="ada")
    monkeypatch.setattr("pwd.getpwuid", lambda number: user)
    tmp_path.chmod(0o770)
    cases = [("ada", [], False), ("ada", ["ada"], False), ("ada", ["bob"], True), ("lab", [], True)]
    for group, members, is_other in cases:
        found = SimpleNamespace(gr_name=group, gr_mem=members)
        monkeypatch.setattr("grp.getgrgid", lambda number, found=found: found)
        assert folders.others_can_write(tmp_path.stat()) is is_other, (group, members)
    tmp_path.chmod(0o757)
    assert folders.others_can_write(tmp_path.stat())


def test_a_folder_of_another_user_or_that_others_can_write_to_takes_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_is_private_group", lambda about: False)
    e, out = Experiment(ranks=1), tmp_path / "run"
    out.mkdir()
    for mode, who in [(0o777, "everybody"), (0o770, r"the group \w+")]:
        out.chmod(mode)
        words = f"{who} can write to the folder.*choose another folder or set {folders.ALLOW}=1"
        with pytest.raises(RunError, match=words):
            open_run(e, out, Run)
        with pytest.raises(RunError, match="can write to the folder"):
            Run(e).save(out)
    out.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "getuid", lambda: os.geteuid() + 1)
        with pytest.raises(RunError, match=f"{out}: the folder belongs to .*who can read and change"):
            open_run(e, out, Run)
        (tmp_path / "link").symlink_to(out)
        with pytest.raises(RunError, match="the folder belongs to"):
            open_run(e, tmp_path / "link", Run)
    assert not list(out.iterdir()), "nothing was written"
    out.chmod(0o777)
    monkeypatch.setenv(folders.ALLOW, "1")
    assert open_run(e, out, Run).path == out.resolve()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_was_given_to_another_user_takes_no_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    os.chown(out, 65534, 65534)
    with pytest.raises(RunError, match=r"the folder belongs to (nobody|user 65534)"):
        open_run(Experiment(ranks=1), out, Run)


def test_a_run_directory_is_private_however_it_is_made(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for out in (tmp_path / "runs" / "first", None):
            run = open_run(Experiment(ranks=1), out, Run)
            assert run.path is not None and run.path.is_dir()
        Run(Experiment(ranks=1), name="saved").save(tmp_path / "saves" / "saved")
        spool = RowSpool(tmp_path / "gone" / "again", 0, 100)  # the folder is gone, and a rank makes it again
        spool.queue_rows("samples", 0, {"rank": [0], "step": [0], "name": ["loss"], "t": [0.0], "value": [1.0]})
        assert spool.close(20.0) and list((tmp_path / "gone" / "again").iterdir())
        duration_history.note_duration("a start", 1.0)
        made = [path for path in tmp_path.rglob("*") if path.is_dir()]
        assert len(made) > 6 and {path.stat().st_mode & 0o777 for path in made} == {0o700}
    finally:
        os.umask(before)


def test_a_place_is_swept_when_its_owner_and_its_processes_are_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    gone = [child.pid, 1.0]
    left = LabPlace.make_place("left")
    left.write_state(owner=gone, processes=[[*gone, "engine 0"]])
    assert not alive(gone) and is_over(left.read_state())
    LabPlace.make_place("new")
    assert [p.read_state()["name"] for p in list_places()] == ["new"]


@pytest.mark.parametrize("reads", [1, 2])
def test_a_place_that_another_kernel_removes_during_a_look_raises_nothing(
    reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, done = LabPlace.read_state, []

    def until_removed(self: LabPlace) -> dict[str, Any]:
        found = read(self)
        if found.get("name") == "other":
            done.append(self)
            if len(done) == reads:
                self.remove_folder()
        return found

    for look in (lambda: LabPlace.make_place("new"), lambda: find_place("other")):
        LabPlace.make_place("other").write_state(engines=[])
        done.clear()
        with monkeypatch.context() as patch:
            patch.setattr(LabPlace, "read_state", until_removed)
            try:
                look()
            except ClusterError as error:
                assert "there is no live lab called 'other'" in str(error)
        assert len(done) >= reads


def test_a_detached_place_stays_while_an_engine_lives() -> None:
    place = LabPlace.make_place("kept")
    place.write_state(owner=None, engines=[engine().as_dict()])
    assert not is_over(place.read_state()) and find_place("kept").path == place.path
    place.write_state(engines=[{**engine().as_dict(), "pid": 2**22 + 1}])
    assert is_over(place.read_state())
    with pytest.raises(ClusterError, match="no live lab called 'kept'"):
        find_place("kept")


def test_other_versions_are_named_with_engine_and_host() -> None:
    check_versions([engine(Python=list_versions()["Python"].rsplit(".", 1)[0] + ".99")])
    with pytest.raises(ClusterError, match=r"engine 1 on far \(pid \d+\) has torch 1.0, this kernel has .*workbench 9"):
        check_versions([engine(), engine(1, where="far", torch="1.0"), engine(2, workbench="9")])


@pytest.mark.parametrize(
    ("gpus", "ranks", "asked", "answer"),
    [
        (0, 2, "auto", (["cpu", "cpu"], "gloo")),
        (2, 2, "auto", (["cuda:0", "cuda:1"], "nccl")),
        (1, 2, "auto", (["cuda:0", "cuda:0"], "gloo")),
        (4, 2, "cpu", (["cpu", "cpu"], "gloo")),
        (4, 3, 2, (["cuda:0", "cuda:1", "cuda:0"], "gloo")),
    ],
)
def test_each_rank_gets_a_device(gpus: int, ranks: int, asked: Any, answer: Any) -> None:
    assert choose_devices([replace(engine(r, gpus), pid=r) for r in range(ranks)], asked) == answer


def test_a_restarted_engine_keeps_its_device() -> None:
    first, second = (replace(engine(r, 2), pid=r) for r in range(2))
    assert choose_devices([first, second, replace(second, rank=2)], "auto") == (["cuda:0", "cuda:1", "cuda:1"], "nccl")


@pytest.mark.parametrize(
    ("there", "asked", "answer"),
    [
        ("4 1 1", "auto", (["cuda:0", "cuda:0", "cuda:0"], "gloo")),
        ("1 4 4", "auto", (["cuda:0", "cuda:0", "cuda:1"], "nccl")),
        ("1 4 4", 1, (["cuda:0", "cuda:0", "cuda:0"], "gloo")),
        ("4 0 0", "auto", (["cpu", "cpu", "cpu"], "gloo")),
    ],
)
def test_each_host_uses_its_own_gpus(there: str, asked: Any, answer: Any) -> None:
    hosts = zip(("a", "b", "b"), map(int, there.split()), strict=True)
    assert (
        choose_devices([replace(engine(r, gpus, where), pid=r) for r, (where, gpus) in enumerate(hosts)], asked)
        == answer
    )


@pytest.mark.parametrize(
    ("gpus", "asked", "text"), [(1, 2, r"device=2 on b: .*\[1, 1\] GPUs"), (0, "cuda", "on b: there is no GPU")]
)
def test_a_host_with_too_few_gpus_is_refused_by_name(gpus: int, asked: Any, text: str) -> None:
    with pytest.raises(KnobError, match=text):
        choose_devices([engine(0, 4, "a"), engine(1, gpus, "b")], asked)


@pytest.mark.parametrize(
    ("gpus", "asked", "text"),
    [(0, "cuda", "there is no GPU"), (2, 3, r"device=3: must be an integer in \[1, 2\] GPUs"), (1, "tpu", "auto, cpu")],
)
def test_missing_devices_are_refused(gpus: int, asked: Any, text: str) -> None:
    with pytest.raises(KnobError, match=text):
        choose_devices([engine(0, gpus)], asked)


def test_an_experiment_takes_the_ranks_of_its_lab_by_default() -> None:
    assert fit_experiment(Experiment(), 2).ranks == 2 and fit_experiment(Experiment(ranks=1), 2).ranks == 1
    with pytest.raises(KnobError, match=r"ranks=8: must be an integer in \[1, 2\]"):
        fit_experiment(Experiment(ranks=8), 2)


def test_a_run_gets_a_separate_directory_outside_the_working_directory(tmp_path: Path) -> None:
    before = set(Path.cwd().iterdir())
    one, two = open_run(Experiment(), None, Run), open_run(Experiment(), None, Run)
    assert one.path != two.path and one.path.parent == two.path.parent == runs_dir()
    assert (one.path / "run.json").exists() and open_run(Experiment(), tmp_path / "x", Run).path == tmp_path / "x"
    assert set(Path.cwd().iterdir()) == before


def test_a_run_under_a_link_to_nowhere_is_refused_by_the_name_of_the_link(tmp_path: Path) -> None:
    runs_dir().parent.mkdir(parents=True)
    runs_dir().symlink_to(tmp_path / "unmounted")
    words = f"{runs_dir()} is a link to {tmp_path / 'unmounted'}, which does not exist"
    with pytest.raises(ClusterError, match=f"nothing can be recorded in .*: {words}; .*name another place"):
        open_run(Experiment(), None, Run)
    with pytest.raises(RunError, match=f"a run cannot be written there .{words}.; choose another directory"):
        store.create(runs_dir() / "saved", {})
    (tmp_path / "unmounted").mkdir()
    assert open_run(Experiment(), None, Run).path.parent == tmp_path / "unmounted"


def test_kernels_that_start_in_the_same_second_get_separate_directories() -> None:
    with ThreadPoolExecutor(16) as kernels:
        opened = list(kernels.map(lambda _: open_run(Experiment(), None, Run), range(16)))
    assert len({run.path for run in opened}) == 16


def test_the_question_to_engines_is_plain_source() -> None:
    compile(engines_module._make_probe().replace("{controller!r}", "'x'"), "probe", "exec")
    assert "controller" in engines_module._make_probe()
