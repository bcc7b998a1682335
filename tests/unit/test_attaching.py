"""A kernel attaches, or begins another run, after some engines have died."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.cluster.api import launch
from workbench.cluster.engines import cluster as cluster_module
from workbench.cluster.engines.cluster import Cluster
from workbench.cluster.processes.lab_place import ClusterError, LabPlace, this_process
from workbench.cluster.transport.rpc_client import NoAnswer


class Engines:
    """Stands in for a cluster. answers: by rank the experiment, an error that it raises, or None if it died.

    generation: of the run that each engine has
    """

    run_id = "g"

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked, self.rpc = answers, list[int](), self
        self.engines = [SimpleNamespace(rank=rank) for rank in range(len(answers))]

    def describe_death(self, rank: int) -> str | None:
        return None if self.answers[rank] is not None else "ended"

    def ask_rank(self, rank: int, what: str, timeout: float) -> tuple[Any, bytes]:
        self.asked.append(rank)
        if isinstance(answer := self.answers[rank], Exception):
            raise answer
        return {"of": rank, "run_id": self.run_id}, answer


@pytest.mark.parametrize(
    ("answers", "found", "asked"),
    [
        ((None, b"run"), 1, [1, 1]),
        ((NoAnswer("no answer"), b"run"), 1, [0, 1, 1]),
        ((ClusterError("rank 0: AttributeError"), b"run"), 1, [0, 1, 1]),
        ((b"", b"run"), 1, [0, 1, 1]),
    ],
    ids=["dead", "silent", "an error", "idle"],
)
def test_a_kernel_attaches_to_the_first_engine_that_has_the_run(
    answers: tuple[Any, ...], found: int, asked: list[int]
) -> None:
    engines: Any = Engines(*answers)
    job = {"of": found, "run_id": "g"}
    assert launch._fetch_session_arguments(engines, "g") == (job, b"run") and engines.asked == asked


def test_a_kernel_attaches_to_no_engine_that_still_has_the_run_before() -> None:
    engines: Any = Engines(b"run", b"run")
    assert launch._fetch_session_arguments(engines, "another") == ({}, b"")


def test_engines_without_a_run_are_told_from_engines_that_do_not_answer() -> None:
    idle: Any = Engines(None, b"")
    assert launch._fetch_session_arguments(idle, "g") == ({}, b"")
    silent: Any = Engines(None, NoAnswer("rank 1 does not answer"))
    with pytest.raises(NoAnswer, match="rank 1 does not answer"):
        launch._fetch_session_arguments(silent, "g")
    dead: Any = Engines(None, None)
    with pytest.raises(ClusterError, match="all engines of the run have ended"):
        launch._fetch_session_arguments(dead, "g")


def test_a_new_cluster_keeps_what_was_set_for_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.Cluster, "start_or_connect", lambda self: self)
    old = launch.Cluster("lab", 2, spare=1)
    old.error = RuntimeError("it never came up")
    old.renewal.starts_ahead, old.spares.list_used_ranks = False, lambda: {1}
    monkeypatch.setattr(old, "close", lambda: None)
    new = launch.renew_cluster(old)
    assert (
        new is not old
        and not new.renewal.starts_ahead
        and new.spares.list_used_ranks() == {1}
        and new.spares.count == 1
    )


class Client:
    """Stands in for ipyparallel's client. `closed`: whether its owner closed it."""

    closed = False

    def close(self, linger: int) -> None:
        self.closed = True


def detached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: list[float] | None = None) -> LabPlace:
    """Returns the place of a lab without engines. A cluster that attaches to it connects to nothing."""
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path / "runtime"))
    place = LabPlace.make_place("left")
    place.write_state(owner=owner, ranks=1, device="cpu", devices=["cpu"], kind="gloo", engines=[], keys=["a", "b"],
                      here=True, connection="none")  # fmt: skip
    monkeypatch.setattr(cluster_module, "start_guard", lambda place: None)
    for method in ("_open_sockets", "_send_owner", "_activate_magic"):
        monkeypatch.setattr(Cluster, method, lambda self, *rest: None)
    return place


def test_exactly_one_of_two_kernels_that_attach_at_the_same_time_owns_the_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, both, clients = detached(tmp_path, monkeypatch), threading.Barrier(2), list[Client]()

    def connect(self: Cluster, connection: str) -> Client:
        both.wait(20)  # now both kernels have read that the lab has no owner
        clients.append(Client())
        return clients[-1]

    def attach(_: int) -> Cluster | ClusterError:
        try:
            return Cluster.attach_to(LabPlace(place.path))
        except ClusterError as error:
            return error

    monkeypatch.setattr(Cluster, "_connect_client", connect)
    with ThreadPoolExecutor(2) as kernels:
        came = list(kernels.map(attach, range(2)))
    owners = [c for c in came if isinstance(c, Cluster)]
    errors = [str(c) for c in came if isinstance(c, ClusterError)]
    assert len(owners) == len(errors) == 1 and place.read_state()["owner"] == this_process()
    assert errors[0].startswith(f"lab 'left': process {this_process()[0]:.0f} attached to it at the same moment")
    assert sorted(client.closed for client in clients) == [False, True], "the kernel without the lab holds no sockets"


def test_a_kernel_takes_a_lab_over_from_a_dead_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = detached(tmp_path, monkeypatch, owner=[2**22 + 1, 1.0])
    monkeypatch.setattr(Cluster, "_connect_client", lambda self, connection: Client())
    assert not Cluster.attach_to(place).is_guest and place.read_state()["owner"] == this_process()


@pytest.mark.parametrize("gone", ["the folder", "the file"])
def test_a_lab_that_ends_while_a_kernel_attaches_is_named(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = detached(tmp_path, monkeypatch)

    def connect(self: Cluster, connection: str) -> Client:
        place.remove_folder() if gone == "the folder" else place.file.unlink()
        return Client()

    monkeypatch.setattr(Cluster, "_connect_client", connect)
    with pytest.raises(ClusterError, match=f"the lab in {place.path} has ended"):
        Cluster.attach_to(LabPlace(place.path))


@pytest.mark.parametrize("when", ["before its state is read", "before its connection file is read"])
def test_a_lab_that_vanishes_between_listing_and_attaching_is_named(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = detached(tmp_path, monkeypatch)

    def connect(self: Cluster, connection: str) -> Client:
        place.remove_folder()
        raise FileNotFoundError(f"{connection} is no file")

    monkeypatch.setattr(Cluster, "_connect_client", connect)
    if when == "before its state is read":
        place.remove_folder()
    with pytest.raises(ClusterError, match=f"the lab in {place.path} has ended; start one"):
        Cluster.attach_to(LabPlace(place.path))


def test_a_living_lab_without_its_controller_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(self: Cluster, connection: str) -> Client:
        raise TimeoutError("Hub connection request timed out")

    place = detached(tmp_path, monkeypatch)
    monkeypatch.setattr(Cluster, "_connect_client", connect)
    with pytest.raises(ClusterError, match="none: no controller answers there"):
        Cluster.attach_to(place)


@pytest.mark.parametrize("full", [False, True], ids=["written", "the disk is full"])
def test_engines_hear_of_a_detach_before_another_kernel_can_own_them(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that dies in between owns the lab, so its guard ends it."""
    events: list[tuple[str, Any]] = []
    lab = Cluster("left", 1)
    lab.place = detached(tmp_path, monkeypatch, owner=this_process())

    def write(self: LabPlace, **fields: Any) -> None:
        events.append(("file", fields["owner"]))
        if full:
            raise OSError("No space left on device")

    monkeypatch.setattr(LabPlace, "write_state", write)
    monkeypatch.setattr(Cluster, "_send_owner", lambda self, owner: events.append(("engines", owner)))
    if full:
        with pytest.raises(OSError, match="No space left"):
            lab.detach()
    else:
        lab.detach()
    assert events == [("engines", None), ("file", None)] + [("engines", this_process())] * full
