"""Controls: the knobs of a lab's experiment as inputs on the page.

What is drawn comes from `rows`; what a person asks for goes to `lab.set`, and a refusal is shown beside
the control that asked. No strategy, compressor or fault is known here by name.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import anywidget
import traitlets

from widgets.rows import Now, rows
from workbench.settings import KnobError, fold, from_plain, resolve, with_value

HERE = Path(__file__).parent / "static"


def page_js(name: str) -> str:
    """The page half in the file of that name, as one module with what all of them need."""
    return "".join((HERE / part).read_text("utf8") for part in ("hearing.js", name))


class Controls(anywidget.AnyWidget):
    """The inputs for `lab.experiment`; `refresh()` brings them up to date and sends only what changed."""

    _esm = page_js("controls.js")
    _css = (HERE / "look.css").read_text("utf8")
    rows = traitlets.List(traitlets.Dict()).tag(sync=True)

    def __init__(self, lab: Any) -> None:
        super().__init__()
        self.lab = lab
        self.errors: dict[str, str] = {}
        self.drafts: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._seen: tuple[Any, ...] = ()
        self.on_msg(lambda _, message, __: self.asked(message))
        self.refresh()

    def refresh(self) -> None:
        """Draws the experiment as it will be once every requested change is applied."""
        with self._lock:
            waiting = [t for t in self.lab.changes if t.applied_at is None and t.refused is None]
            now = Now(
                live=self.lab.live,
                ranks=self.lab.ranks,
                waiting=frozenset(t.path for t in waiting),
                errors=tuple(self.errors.items()),
                drafts=tuple(self.drafts.items()),
            )
            experiment = told(self.lab)
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
                self.lab.set(path, typed(message))
            self.errors.clear()  # what was refused before may be right now
        except (KnobError, RuntimeError) as error:
            self.errors[path] = str(error)
        self.refresh()

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
