"""Lab: the notebook's front door. It owns a cluster and the run on it; everything else is behind it.

It draws nothing and imports no torch: `workbench.display` entry points give it a face in a notebook.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from workbench.cluster.cluster import Cluster
from workbench.cluster.errors import RankError as RankError
from workbench.cluster.launch import find, fitted, launch, new_generation, open_run, rejoin, within
from workbench.cluster.live import Live
from workbench.cluster.place import ClusterError as ClusterError
from workbench.cluster.turns import Turn as Turn
from workbench.cluster.turns import Turns, planned
from workbench.display import face
from workbench.experiment import Experiment
from workbench.knobs import Change, KnobError
from workbench.run import Run

MAX_RANKS = 64
_labs: dict[str, Lab] = {}


class Lab:
    """`ranks` real ranks on engines of their own, and the run that they train.

    The engines start in the background. Making the same lab again gives the same lab; with other ranks the old
    one is closed first, unless it is training.

    name:     labs of different names live side by side
    cluster:  the client connection file of an existing ipyparallel cluster; None starts one here
    profile:  the ipyparallel profile of an existing cluster
    device:   "auto", "cpu", "cuda", or how many GPUs to use
    """

    _asked: tuple[Any, ...]
    _begun = False

    def __new__(cls, ranks: int = 4, *, name: str = "lab", **rest: Any) -> Self:
        old = _labs.get(name)
        asked = (_checked(ranks), {"cluster": None, "profile": None, "device": "auto", **rest})
        if old is not None and old._asked == asked and old._usable:
            return old  # type: ignore[return-value]
        if old is not None:
            if old.live and old._asked != asked:
                raise ClusterError(
                    f"{old!r}: a run is live there; stop it first with lab.stop(), "
                    f"or give the new lab a name of its own: Lab(ranks={ranks}, name='second')"
                )
            old.close()
        lab = super().__new__(cls)
        lab._asked = asked
        return lab

    def __init__(
        self,
        ranks: int = 4,
        *,
        name: str = "lab",
        cluster: Path | str | None = None,
        profile: str | None = None,
        device: str | int = "auto",
    ) -> None:
        if self._begun:
            return
        if cluster is not None and profile is not None:
            raise KnobError(f"cluster={str(cluster)!r}, profile={profile!r}: give one of them")
        connection = f"profile:{profile}" if profile is not None else cluster
        self._take_over(name, ranks, Cluster(name, ranks, device, connection).start())

    def _take_over(self, name: str, ranks: int, cluster: Cluster) -> None:
        self.name, self.ranks, self.cluster = name, ranks, cluster
        self.turns: list[Turn] = []
        self._experiment = Experiment(ranks=ranks).checked()
        self._live: Live | None = None
        self._begun = True
        _labs[name] = self

    @classmethod
    def attach(cls, name: str | None = None) -> Lab:
        """The live lab that an earlier kernel detached, with its run from the first row on."""
        for known in _labs.values():
            if known._usable and name in (None, known.name):
                return known
        cluster = Cluster.again(find(name))
        lab = object.__new__(cls)
        lab._asked = (cluster.ranks, {"cluster": None, "profile": None, "device": cluster.device})
        lab._take_over(cluster.name, cluster.ranks, cluster)
        lab._live = rejoin(cluster, lab.turns)
        if lab._live:
            lab._experiment = lab._live.turns.experiment
        return lab

    @property
    def _usable(self) -> bool:
        return self._begun and self.cluster.usable

    @property
    def live(self) -> bool:
        """Whether a run is under way."""
        return self._live is not None and not self._live.over.is_set()

    @property
    def run_now(self) -> Run | None:
        """The run under way, or the last one; None before the first."""
        return self._live.run if self._live else None

    @property
    def experiment(self) -> Experiment:
        """What would run, or runs now, or ran last, with every change that was applied."""
        last = self._live
        followed = last and (self.live or self._experiment is last.began_with)
        return last.turns.experiment if last and followed else self._experiment

    @property
    def state(self) -> str:
        """starting, idle, running, paused, stopping or failed; "closed" after close or detach."""
        if self.live and self._live:
            return self._live.state
        if self.cluster.closed and not self.cluster.error:
            return "closed"
        if self.cluster.error or (self._live and self._live.state == "failed"):
            return "failed"
        return "idle" if self.cluster.ready else "starting"

    @property
    def progress(self) -> str:
        """How far the engines are in coming up: "loading torch", "2 of 4 engines up", "ready"."""
        return self.cluster.progress

    @property
    def notes(self) -> list[str]:
        """What went wrong or wants attention, in sentences, newest last."""
        own = [str(self.cluster.error)] if self.cluster.error else []
        return own + (list(self._live.notes) if self._live else [])

    @property
    def status(self) -> list[dict[str, Any]]:
        """Each rank: engine, host, pid, device, state, step, and what it is busy with."""
        return self.cluster.table(self._live.status if self._live else {})

    @property
    def view(self) -> Any:
        """Ipyparallel's view of the ranks in order, for `%%px` and `apply`; also while they train."""
        return self.wait().cluster.view

    def wait(self, timeout: float | None = None) -> Lab:
        """Waits until the engines are up; raises ClusterError with the reason if they will not be."""
        self.cluster.wait(timeout)
        return self

    # -- running

    def run(
        self, experiment: Experiment | None = None, changes: Sequence[Change] = (), out: Path | str | None = None
    ) -> Run:
        """Starts a run and returns it at once; the one under way if it is of this very experiment.

        changes: knobs to turn at given steps. out: the run directory; else one is made in your data directory.
        """
        wanted = self.experiment if experiment is None else fitted(experiment, self.ranks)
        if self.live and self._live:
            if experiment is None or wanted in (self.experiment, self._live.began_with):
                return self._live.run
            raise ClusterError(f"{self!r}: a run is live; turn its knobs with lab.turn(...), or lab.stop() it first")
        to_come = planned(wanted, changes)
        self._renew()
        run = open_run(wanted, out)
        self._experiment = wanted
        self._live = Live(run, self.cluster, Turns(wanted, self.turns), new_generation())
        threading.Thread(target=launch, args=(self._live, to_come), name="run start", daemon=True).start()
        return run

    def _renew(self) -> None:
        """Starts the engines again if one was lost, or if they never came up."""
        if self.cluster.closed and not self.cluster.error:
            raise ClusterError(f"lab {self.name!r} is closed; make it again with Lab(ranks={self.ranks})")
        if not self.cluster.error and (not self.cluster.ready or self.cluster.healthy):
            return
        old = self.cluster
        old.close()
        self.cluster = Cluster(old.name, old.ranks, old.device, old.connection).start()

    def turn(self, path: str, value: Any) -> Turn:
        """Turns one knob; raises KnobError at once if it cannot be. During a run all ranks apply it at one step."""
        if self.live and self._live:
            return self._live.turn(path, value)
        self._experiment = within(self.experiment.turn(path, value), self.ranks)
        done = Turn("before the run", path, value, applied_at=0)
        self.turns.append(done)
        return done

    def pause(self) -> None:
        """Pauses all ranks at the next step boundary."""
        self._request("pause")

    def resume(self) -> None:
        self._request("resume")

    def step(self, n: int = 1) -> None:
        """Trains `n` steps, then pauses."""
        if not isinstance(n, int) or n < 1:
            raise KnobError(f"n={n!r}: must be an integer in [1, 1000000] steps")
        self._request("step", n=n)

    def stop(self) -> None:
        """Stops the run at the next step boundary, also ranks that are blocked; returns at once."""
        if self.live and self._live:
            self._live.stop()

    def abort(self) -> None:
        """Ends the run at once, in the middle of a step."""
        if self.live and self._live:
            self._live.abort()

    def _request(self, kind: str, **rest: Any) -> None:
        if not self.live or not self._live:
            raise ClusterError(f"{self!r}: there is no run to {kind}; start one with lab.run()")
        self._live.order("request", request={"id": f"{kind} {time.time_ns():x}", "kind": kind, **rest})

    # -- the end

    def close(self) -> None:
        """Ends the run, and every process that this lab started."""
        if self.live and self._live:
            self._live.stop()
            if not self._live.over.wait(3.0):
                self._live.abort()
                self._live.over.wait(2.0)
        self._leave("the lab was closed")
        self.cluster.close()

    def detach(self) -> None:
        """Leaves engines and run going when this kernel ends; `Lab.attach()` in another one finds them."""
        self.wait().cluster.detach()
        self._leave("the lab was detached")

    def _leave(self, why: str) -> None:
        if self._live:
            self._live.leave(why)
        if _labs.get(self.name) is self:
            del _labs[self.name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()

    # -- how it shows itself

    def __repr__(self) -> str:
        what = f"Lab {self.name!r}: {self.ranks} rank{'s' * (self.ranks != 1)}"
        if not self.cluster.ready:
            return f"{what}, {self.progress}"
        gpus = self.cluster.devices[0] != "cpu"
        engines = f"{len(self.cluster.engines)} {'GPU' if gpus else 'CPU'} engine{'s' * (self.ranks != 1)}"
        what += f" on {engines}, {self.state}"
        if self._live:
            what += f" {self.experiment.strategy} at step {self._live.step}"
        return what

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return face("Lab", self, include, exclude)


def _checked(ranks: Any) -> int:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MAX_RANKS:
        raise KnobError(f"ranks={ranks!r}: must be an integer in [1, {MAX_RANKS}]")
    return ranks


def _close_all() -> None:
    for lab in list(_labs.values()):
        lab.close()


atexit.register(_close_all)
