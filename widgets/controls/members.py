"""Actions on single ranks: evict one, or inject a real fault into its process."""

from __future__ import annotations

import threading
from typing import Any

import anywidget
import traitlets

from widgets.static import read_static
from workbench.settings import KnobError
from workbench.settings.describe_error import said

WHY = {
    "evict": "end the engine of a hanging rank; other ranks continue",
    "freeze": "stop its process, like a machine that hangs",
    "thaw": "continue a frozen process",
    "preempt": "tell its process to leave, and kill it 30 s later",
    "kill": "end its process, like a crash; other ranks follow on_death",
    "profile": "record its next 5 steps with torch.profiler, beside the run",
    "resize": "train with this number of ranks; idle engines join",
}


class Members(anywidget.AnyWidget):
    """The training ranks and the actions on them. `refresh()` sends only changes.

    ranks: the training ranks
    most:  the possible number of ranks
    error: of the last request
    """

    _esm = read_static("hearing.js", "members.js")
    _css = read_static("look.css")
    ranks = traitlets.List(traitlets.Int()).tag(sync=True)
    most = traitlets.Int(1).tag(sync=True)
    why = traitlets.Dict(WHY).tag(sync=True)
    error = traitlets.Unicode("").tag(sync=True)
    opened = traitlets.Bool(False).tag(sync=True)

    def __init__(self, lab: Any) -> None:
        super().__init__()
        self.lab = lab
        self.on_msg(lambda _, message, __: self.handle_button(message))
        self.refresh()

    def refresh(self) -> None:
        with self.hold_trait_notifications():
            self.ranks, self.most = list(self.lab.members), self.lab.ranks

    def handle_button(self, message: dict[str, Any]) -> None:
        """Uses a thread, because a request may take seconds."""
        threading.Thread(target=self.execute_request, args=(message,), name="dashboard request", daemon=True).start()

    def execute_request(self, message: dict[str, Any]) -> None:
        """message: {"do": a key of WHY, "rank": a rank, "ranks": a number of ranks}"""
        self.error = ""
        verbs = {"evict": self.lab.evict, "freeze": self.lab.freeze, "thaw": self.lab.thaw, "kill": self.lab.kill,
                 "preempt": self.lab.preempt, "profile": lambda rank: self.lab.run_now.profile(rank)}  # fmt: skip
        try:
            if message["do"] == "resize":
                self.lab.resize(int(message["ranks"]))
            else:
                verbs[message["do"]](int(message["rank"]))
        except Exception as error:  # shown to the person who pressed the button
            self.error = str(error) if isinstance(error, (KnobError, RuntimeError)) else said(error)
        self.refresh()
