"""Controls: the knobs of a lab's experiment as inputs on the page.

What is drawn comes from `rows`; what a person asks for goes to `lab.set`, and a refusal is shown beside
the control that asked. No strategy, compressor or fault is known here by name.

[Note: When a model is asked] What a model refuses (a partition that cannot cut it) is told by its sizes, for which the
task's own function is called once. It may draw random numbers, which go on afterwards as if it had not; so it is called
on the kernel's main thread, when a page says something and at the end of a cell, where nobody else draws, and after the
first rows are there, for the simulator that asks takes a second to import.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast
from weakref import finalize, ref

import anywidget
import traitlets
from IPython import get_ipython

from widgets.controls.rows import Now, at_once, refused_anew, rows
from widgets.static import read_static
from workbench.run import outlined, refused_by_model
from workbench.settings import KnobError, each, fold, from_plain, resolve, with_value


class Controls(anywidget.AnyWidget):
    """The inputs for `lab.experiment`; `refresh()` brings them up to date and sends only what changed."""

    _esm = read_static("hearing.js", "controls.js")
    _css = read_static("look.css")
    rows = traitlets.List(traitlets.Dict()).tag(sync=True)
    opened = traitlets.List(traitlets.Unicode()).tag(sync=True)  # groups that a person has unfolded

    def __init__(self, lab: Any) -> None:
        super().__init__()
        self.lab = lab
        self.errors: dict[str, str] = {}
        self.drafts: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._seen: tuple[Any, ...] = ()
        self.on_msg(lambda _, message, __: self.asked(message))
        if (shell := get_ipython()) is not None:
            hook = cell_ended(ref(self))
            shell.events.register("post_run_cell", hook)
            finalize(self, shell.events.unregister, "post_run_cell", hook)
        self.refresh()

    def refresh(self) -> None:
        """Draws the experiment as it will be once every requested change is applied."""
        with self._lock:
            waiting = [t for t in self.lab.changes if t.applied_at is None and t.refused is None]
            experiment = told(self.lab)
            now = Now(
                live=self.lab.live,
                ranks=self.lab.ranks,
                waiting=frozenset(path for t in waiting for path in each(t.path, t.value)),
                errors=tuple(self.errors.items()),
                drafts=tuple(self.drafts.items()),
                asks=self._asks(experiment.task),
            )
            seen = (experiment, now, tuple(t.id for t in waiting))
            if seen == self._seen:
                return
            self.rows = rows(wanted(experiment, waiting), now)
            self._seen = seen

    def asked(self, message: dict[str, Any]) -> None:
        """A person set a knob (`change`, `value`) or pressed a button (`press`) on the page."""
        path = message.get("change") or message["press"]
        try:
            if "press" in message:
                self._press(path)
            elif ".new" in path:
                self._draft(path, typed(message))
            else:
                self._set(path, typed(message))
            self.errors.clear()  # what was refused before may be right now
        except (KnobError, RuntimeError) as error:
            self.errors[path] = str(error)
        self.refresh()

    def _set(self, path: str, value: Any) -> None:
        """What a model refuses is refused here, before the ranks do."""
        experiment = wanted(self.lab.experiment, self.lab.changes)
        settings = at_once(experiment, path, value)
        if why := refused_anew(experiment, settings, self._asks(experiment.task)):
            raise KnobError(why)
        self.lab.set(settings) if len(settings) > 1 else self.lab.set(path, value)

    def _asks(self, task: Any) -> Callable[[Any], str] | None:
        """What tells why the task's model refuses an experiment; None: not now. See [Note: When a model is asked]."""
        now = self._seen and threading.current_thread() is threading.main_thread()
        return refused_by_model if now or outlined(task) else None

    def _draft(self, path: str, value: Any) -> None:
        """The next fault is being filled in: it is nobody's setting until it is injected."""
        home, _, name = path.partition(".new")
        if name:
            self.drafts[home] = with_value(self.drafts[home], name.removeprefix("."), value)
        else:
            _, k = resolve(self.lab.experiment, home)
            self.drafts[home] = from_plain(value, cast(type, k.element))

    def _press(self, path: str) -> None:
        if told(self.lab) is not self.lab.experiment:
            raise RuntimeError("faults are hidden while a riddle is on; answer it, or riddle.give_up(), first")
        home, _, button = path.rpartition(".")
        _, k = resolve(wanted(self.lab.experiment, self.lab.changes), home)
        present = list(k.default)
        if button == "inject":
            present.append(self.drafts[home])
        else:
            del present[int(button)]
        self.lab.set(home, present)
        self.drafts.pop(home, None)


def cell_ended(controls: Any) -> Callable[..., None]:
    """What is called when a cell has ended; it keeps nobody alive."""

    def ended(*_: Any) -> None:
        if (kept := controls()) is not None:
            kept.refresh()

    return ended


def told(lab: Any) -> Any:
    """The lab's experiment as it may be shown: without its faults while its run is a riddle."""
    run, experiment = lab.run_now, lab.experiment
    return experiment.set("fabric.faults", []) if run is not None and run.secret else experiment


def wanted(experiment: Any, asked: Any) -> Any:
    """`experiment` with the changes in `asked` that wait for an answer; one that will be refused changes nothing."""
    waiting = [t.change for t in asked if t.applied_at is None and t.refused is None]
    return fold(experiment, waiting, type(experiment).set, skips=True)[-1][1]


def typed(message: dict[str, Any]) -> Any:
    """The value a person asked for; where a number is due, text becomes one if it is one, else the knob refuses it."""
    value = message["value"]
    if not message.get("number"):
        return value
    try:
        return int(value)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            return value
