"""Lab: the notebook's entry point. It owns a cluster and the run on it.

It draws nothing and imports no torch. `workbench.display` entry points draw it in a notebook.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from workbench.cluster.api import launch
from workbench.cluster.api.run_controls import RunControls
from workbench.cluster.engines.cluster import Cluster
from workbench.cluster.processes.lab_place import ClusterError as ClusterError
from workbench.cluster.processes.uninterruptible import without_interrupts
from workbench.cluster.run.rank_errors import RankError as RankError
from workbench.cluster.run.run_changes import BEFORE_RUN, Changes
from workbench.cluster.run.run_changes import PendingChange as PendingChange
from workbench.cluster.run.run_controller import RunController
from workbench.cluster.run.run_waiting import wait_for_stop
from workbench.experiment import Experiment, user_input
from workbench.record.display import dashboard, face, show
from workbench.record.run import hearers
from workbench.run import Run, require_memory, resumed, tuning
from workbench.settings import AND, Change, KnobError, each

if TYPE_CHECKING:
    from workbench.sim.tune.live_search import Tuning

_labs: dict[str, Lab] = {}


class Lab(RunControls):
    """`ranks` real ranks on engines of their own and the run that they train.

    The engines start in the background. Making the same lab again returns the same lab. With other arguments it first
    closes the old lab. Raises ClusterError if the old lab is training.

    ranks:    number of ranks, each on an engine of its own
    name:     labs of different names can coexist
    cluster:  the client connection file of an existing ipyparallel cluster. None starts one here
    profile:  the ipyparallel profile of an existing cluster
    device:   "auto", "cpu", "cuda" or a number of GPUs
    spare:    further engines for `resize` and `on_death="replace"`. They are warm. The lab replaces each used one
    """

    _asked: tuple[Any, ...]
    _begun = False

    def __new__(cls, ranks: int = 4, *, name: str = "lab", **rest: Any) -> Self:
        old = _labs.get(user_input.text(name, "name", "lab"))
        asked = (user_input.ranks(ranks), {"cluster": None, "profile": None, "device": "auto", "spare": 0, **rest})
        if old is not None and old._asked == asked and old._usable:
            return old  # type: ignore[return-value]
        if old is not None:
            if old.live and old._asked != asked:
                raise ClusterError(
                    f"{old!r}: a run is live there; stop it first with lab.stop() "
                    f"or give the new lab its own name: Lab(ranks={ranks}, name='second')"
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
        spare: int = 0,
    ) -> None:
        if self._begun:
            return
        user_input.system()
        if cluster is not None and profile is not None:
            raise KnobError(f"cluster={str(cluster)!r}, profile={profile!r}: give only one")
        cluster = (
            user_input.path(cluster, "cluster", "security/ipcontroller-client.json") if cluster is not None else None
        )
        connection = f"profile:{user_input.text(profile, 'profile', 'default')}" if profile is not None else cluster
        if user_input.spare(spare) and connection is not None:
            raise KnobError(f"spare={spare}: this lab starts no engines; start more where its cluster is and take "
                            f"fewer ranks in experiments")  # fmt: skip
        on = user_input.device(device)
        with without_interrupts():
            self._take_over(name, ranks, Cluster(name, ranks, on, connection, spare).start_or_connect())

    def _take_over(self, name: str, ranks: int, cluster: Cluster) -> None:
        self.name, self.ranks, self.cluster = name, ranks, cluster
        self.changes: list[PendingChange] = []
        self._experiment = Experiment(ranks=ranks).checked()
        self._live: RunController | None = None
        self.tuning: Tuning | None = None
        self.watchers: list[Callable[[], bool]] = []  # each returns whether a user sees this lab through it
        self._begun = True
        cluster.spares.list_used_ranks = lambda: self._live.used_ranks if self.live and self._live else range(ranks)
        _labs[name] = self

    @classmethod
    def attach(cls, name: str | None = None) -> Lab:
        """Returns the live lab that an earlier kernel detached, with its complete run.

        name:  the lab's name. None: any that is live

        Raises ClusterError if there is none.
        """
        for known in _labs.values():
            if known._usable and name in (None, known.name):
                return known
        with without_interrupts():
            cluster = Cluster.attach_to(launch.find_place(name))
            lab = object.__new__(cls)
            lab._asked = (cluster.ranks, {"cluster": None, "profile": None, "device": cluster.device, "spare": 0})
            lab._take_over(cluster.name, cluster.ranks, cluster)
            lab._live = launch.rejoin_run(cluster, lab.changes, Run)
            lab._experiment = lab._live.changes.experiment if lab._live else lab._experiment
        return lab

    @property
    def _usable(self) -> bool:
        return self._begun and self.cluster.is_usable

    @property
    def run_now(self) -> Run | None:
        """The run under way or the last one. None before the first."""
        return cast(Run, self._live.run) if self._live else None

    @property
    def experiment(self) -> Experiment:
        """The experiment of the next, present or last run with every applied change."""
        last = self._live
        followed = last and (self.live or self._experiment is last.initial_experiment)
        return last.changes.experiment if last and followed else self._experiment

    @property
    def state(self) -> str:
        """`starting`, `idle`, `running`, `paused`, `stopping`, `failed`, or `closed` after close or detach."""
        if self.live and self._live:
            return self._live.state
        if self.cluster.closed and not self.cluster.error:
            return "closed"
        if self.cluster.error or (self._live and self._live.state == "failed"):
            return "failed"
        return "idle" if self.cluster.is_ready else "starting"

    @property
    def progress(self) -> str:
        """The progress of the engines' start, for example "2 of 4 engines up" or "ready"."""
        return self.cluster.progress

    @property
    def notes(self) -> list[str]:
        """Errors and warnings as sentences. The newest is last."""
        own = [str(self.cluster.error)] if self.cluster.error else []
        cluster = self.cluster
        lacking = filter(None, [cluster.health.controller_trouble, cluster.spares.trouble, cluster.renewal.trouble])
        return [*own, *(self._live.notes if self._live else ()), *lacking]

    @property
    def status(self) -> list[dict[str, Any]]:
        """Each rank's place (engine, host, pid, device) and state (step, present activity)."""
        return self.cluster.list_ranks(self._live.status if self._live else {})

    @property
    def view(self) -> Any:
        """Ipyparallel's view of the ranks in order for `%%px` and `apply`. It works while they train, too."""
        return self.wait().cluster.view

    def wait(self, timeout: float | None = None) -> Lab:
        """Waits until the engines are up. Raises ClusterError with the reason if they cannot start.

        timeout:  seconds to wait. None: as long as the start takes
        """
        self.cluster.wait(timeout)
        return self

    def run(
        self, experiment: Experiment | None = None, changes: Sequence[Change] = (), out: Path | str | None = None,
        on_nan: str | None = None, secret: str = "", resume: Path | str | None = None,
    ) -> Run:  # fmt: skip
        """Starts a run and returns it at once. If the same experiment already runs, returns that run.

        Waits up to 60 s for a run that is stopping. Raises ClusterError if it does not end, or if another run is live.
        Raises KnobError if settings or changes are invalid.

        experiment:  the settings. None: the lab's `experiment`
        changes:     knobs to set before given steps
        out:         the run directory. None: one in your data directory
        on_nan:      the value of the experiment's knob of that name for this run. None leaves it as it is
        secret:      for riddles: text that dashboards show in place of verdicts and faults, until `run.secret` is ""
        resume:      a checkpoint's folder, or a run's directory for its newest checkpoint. Without an experiment the
                     run goes on unchanged, bit-identical in lockstep. With one, different settings change before the
                     first step
        """
        wanted = (
            self.experiment
            if experiment is None
            else launch.fit_experiment(user_input.experiment(experiment), self.ranks)
        )
        begun = None
        if resume is not None:
            begun = resumed(
                resume, None if experiment is None else wanted, user_input.changes(changes) or None, self.ranks
            )
            wanted, changes = launch.check_ranks(begun.experiment, self.ranks), begun.changes
        wanted = wanted if on_nan is None else wanted.set("on_nan", on_nan)
        if self._live and self._live.state == "stopping":
            wait_for_stop(self._live)
        if self.live and self._live:
            if begun is None and (experiment is None or wanted in (self.experiment, self._live.initial_experiment)):
                return cast(Run, self._live.run)
            raise ClusterError(f"{self!r}: a run is live; set its knobs with lab.set(...) or lab.stop() it first")
        to_come = user_input.planned(wanted, user_input.changes(changes))
        require_memory(wanted)
        with without_interrupts():
            self.cluster = launch.renew_cluster(self.cluster)
        run = launch.open_run(wanted, out, Run, begun and begun.parent)
        run.secret = secret  # before the run is visible
        for hear in tuple(hearers):
            hear(run)
        seen = partial(launch.is_watched, self.watchers)
        with without_interrupts():
            self._live = RunController(run, self.cluster, Changes(wanted, self.changes), launch.new_generation(), seen)
            self._experiment, rest = wanted, (self._live, to_come, begun and begun.prepare_checkpoint)
            threading.Thread(target=launch.start_sessions, args=rest, name="run start", daemon=True).start()
        return run

    def set(self, path: str | Mapping[str, Any], value: Any = None) -> PendingChange:
        """Sets a knob on all ranks before one step, or for the next run. Returns a handle for the ranks' answer.

        path:   the knob, such as "strategy.every". Or a dict of values by path: the lab checks them together and sets
                them before the same step. Strategy and partition may need this
        value:  the new value. Unused with a dict

        Raises KnobError at once if it is invalid. Raises ClusterError if the lab is closed.
        `lab.turn` and `lab.turns` are old names of `lab.set` and `lab.changes` for one release.
        """
        if self.live and self._live:
            require_memory(self.experiment, path, value)
            return self._live.request_change(path, value)
        launch.refuse_closed(self.cluster, AND.join(each(path, value)))
        self._experiment = launch.check_ranks(self.experiment.set(path, value), self.ranks)
        self.changes.append(PendingChange(Change(0, path, value, BEFORE_RUN), 0))
        return self.changes[-1]

    def tune(self, paths: Any = None, **how: Any) -> Tuning:
        """Searches live for settings with the shortest step on a thread of its own. `wait()` returns the result.

        The dashboard draws its trials. `lab.tuning` is the last search. For the method see
        `workbench.sim.tune.live_search`.

        paths:  the knobs to tune, as in `workbench.tune`. None: knobs that suit the strategy
        how:    the other arguments of `workbench.tune`, and those of `Tuning`

        Raises KnobError if a search is under way, no run is live, or an argument is invalid.
        """
        if self.tuning is not None and self.tuning.live:
            raise KnobError("tune: a search is under way; end it with lab.tuning.stop() or wait with lab.tuning.wait()")
        self.tuning = tuning(self, paths, **how)
        return self.tuning

    turn, turns = set, property(lambda self: self.changes)  # old names, for one release

    # -- the end

    def close(self) -> None:
        """Ends the run and every process that this lab started."""
        with without_interrupts():
            if self._live:
                self._live.close()
            self._leave("the lab was closed")
            self.cluster.close()

    def detach(self) -> None:
        """Keeps engines and run alive when this kernel ends. `Lab.attach()` in another kernel finds them."""
        cluster = self.wait().cluster
        with without_interrupts():
            cluster.detach()
            self._leave("the lab was detached")

    def _leave(self, why: str) -> None:
        if self._live:
            self._live.leave_run(why)
        if _labs.get(self.name) is self:
            del _labs[self.name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()

    # -- how it shows itself

    def __repr__(self) -> str:
        what = f"Lab {self.name!r}: {self.ranks} rank{'s' * (self.ranks != 1)}"
        if not self.cluster.is_ready:
            return f"{what}, {self.progress}"
        kind = "CPU" if self.cluster.devices[0] == "cpu" else "GPU"
        what += f" on {len(self.cluster.engines)} {kind} engine{'s' * (self.ranks != 1)}, {self.state}"
        if self._live:
            what += f" {self.experiment.strategy} at step {self._live.step}"
        return f"{what}; {self._live.run.holdup}" if self._live and self._live.run.holdup else what

    def dashboard(self, read_only: bool = False) -> Any:
        """Returns the dashboard as a widget.

        read_only:  return a separate one without controls

        Its `dock()` shows it in a panel next to the notebook. `state()` and `restore(state)` keep its open parts.
        """
        return dashboard("Lab", self, read_only)

    def _ipython_display_(self) -> None:
        show("Lab", self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return face("Lab", self, include, exclude)


@atexit.register
def _close_all() -> None:
    with ExitStack() as stack:  # closes every lab, then raises the error of one that failed
        for lab in reversed(list(_labs.values())):
            stack.callback(lab.close)
