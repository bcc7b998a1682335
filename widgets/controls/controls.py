"""Shows the knobs of a lab's experiment as inputs on the page.

A control calls `lab.set`. A refusal appears next to its control.

[Note: When a model is asked] A model can make a setting impossible, such as a partition that cannot cut it. To find
out, the controls call the task's own function for the model's sizes. It may draw random numbers, so the call restores
the generators' state. The call happens on the kernel's main thread when no other code draws: in answer to a page or at
the end of a cell. It also waits for the first rows, because the simulator takes a second to import.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast
from weakref import finalize, ref

import anywidget
import traitlets
from IPython import get_ipython

from widgets.controls.rows import ControlState, at_once, make_rows, refused_anew
from widgets.static import read_static
from workbench.run import outlined, refused_by_model
from workbench.settings import KnobError, each, fold, from_plain, resolve, with_value


class Controls(anywidget.AnyWidget):
    """The inputs for `lab.experiment`. `refresh()` sends only changes."""

    _esm = read_static("hearing.js", "controls.js")
    _css = read_static("look.css")
    rows = traitlets.List(traitlets.Dict()).tag(sync=True)
    opened = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def __init__(self, lab: Any) -> None:
        super().__init__()
        self.lab = lab
        self.errors: dict[str, str] = {}
        self.drafts: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._seen: tuple[Any, ...] = ()
        self.on_msg(lambda _, message, __: self.handle_message(message))
        if (shell := get_ipython()) is not None:
            hook = cell_ended(ref(self))
            shell.events.register("post_run_cell", hook)
            finalize(self, shell.events.unregister, "post_run_cell", hook)
        self.refresh()

    def refresh(self) -> None:
        with self._lock:
            waiting = [t for t in self.lab.changes if t.applied_at is None and t.refused is None]
            experiment = shown_experiment(self.lab)
            now = ControlState(
                live=self.lab.live,
                ranks=self.lab.ranks,
                waiting=frozenset(path for t in waiting for path in each(t.path, t.value)),
                errors=tuple(self.errors.items()),
                drafts=tuple(self.drafts.items()),
                asks=self._find_check(experiment.task),
            )
            seen = (experiment, now, tuple(t.id for t in waiting))
            if seen == self._seen:
                return
            self.rows = make_rows(apply_pending(experiment, waiting), now)
            self._seen = seen

    def handle_message(self, message: dict[str, Any]) -> None:
        """Handles a knob that a page sets (`change`, `value`) or a button that it presses (`press`)."""
        path = message.get("change") or message["press"]
        try:
            if "press" in message:
                self._press_button(path)
            elif ".new" in path:
                self._edit_draft(path, parse_value(message))
            else:
                self._set_knob(path, parse_value(message))
            self.errors.clear()  # refusals may be outdated
        except (KnobError, RuntimeError) as error:
            self.errors[path] = str(error)
        self.refresh()

    def _set_knob(self, path: str, value: Any) -> None:
        """Raises KnobError if the model refuses, before the ranks would."""
        experiment = apply_pending(self.lab.experiment, self.lab.changes)
        settings = at_once(experiment, path, value)
        if why := refused_anew(experiment, settings, self._find_check(experiment.task)):
            raise KnobError(why)
        self.lab.set(settings) if len(settings) > 1 else self.lab.set(path, value)

    def _find_check(self, task: Any) -> Callable[[Any], str] | None:
        """Returns the model's check; None if it cannot run now. See [Note: When a model is asked]."""
        now = self._seen and threading.current_thread() is threading.main_thread()
        return refused_by_model if now or outlined(task) else None

    def _edit_draft(self, path: str, value: Any) -> None:
        """Edits the next fault. It becomes a setting when the user injects it."""
        home, _, name = path.partition(".new")
        if name:
            self.drafts[home] = with_value(self.drafts[home], name.removeprefix("."), value)
        else:
            _, k = resolve(self.lab.experiment, home)
            self.drafts[home] = from_plain(value, cast(type, k.element))

    def _press_button(self, path: str) -> None:
        if shown_experiment(self.lab) is not self.lab.experiment:
            raise RuntimeError("a riddle hides the faults; answer it or call riddle.give_up() first")
        home, _, button = path.rpartition(".")
        _, k = resolve(apply_pending(self.lab.experiment, self.lab.changes), home)
        present = list(k.default)
        if button == "inject":
            present.append(self.drafts[home])
        else:
            del present[int(button)]
        self.lab.set(home, present)
        self.drafts.pop(home, None)


def cell_ended(controls: Any) -> Callable[..., None]:
    """Returns a hook that holds the controls weakly."""

    def ended(*_: Any) -> None:
        if (kept := controls()) is not None:
            kept.refresh()

    return ended


def shown_experiment(lab: Any) -> Any:
    """Returns the experiment, without faults during a riddle."""
    run, experiment = lab.run_now, lab.experiment
    return experiment.set("fabric.faults", []) if run is not None and run.secret else experiment


def apply_pending(experiment: Any, asked: Any) -> Any:
    """Returns `experiment` with the pending changes in `asked` that will not be refused."""
    waiting = [t.change for t in asked if t.applied_at is None and t.refused is None]
    return fold(experiment, waiting, type(experiment).set, skips=True)[-1][1]


def parse_value(message: dict[str, Any]) -> Any:
    """Converts text to a number for numeric knobs."""
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
