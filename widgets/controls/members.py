"""Members: what can be done to single ranks of a lab's run from the page: put one out, or teach with a fault.

The faults are real ones, done to processes that this lab started. What became of each is a mark on the charts.
"""

from __future__ import annotations

import threading
from typing import Any

import anywidget
import traitlets

from widgets.static import read_static
from workbench.settings import KnobError
from workbench.settings.said import said

WHY = {
    "evict": "end the engine of a rank that hangs; the others go on without it",
    "freeze": "stop its process, as a machine does that hangs",
    "thaw": "let a frozen process go on",
    "preempt": "tell its process to leave, as Slurm or a spot instance does, and kill it 30 s later",
    "kill": "end its process, as a crash does; the others do as on_death says",
    "profile": "record its next 5 steps operator by operator with torch.profiler, beside the run",
    "resize": "let so many ranks train together: some are taken out, or idle engines come in",
}


class Members(anywidget.AnyWidget):
    """The ranks that train now, and what may be asked of one; `refresh()` sends only what changed.

    ranks: those that train; most: as many as could; error: what the last request met
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
        self.on_msg(lambda _, message, __: self.begin(message))
        self.refresh()

    def refresh(self) -> None:
        """Reads which ranks train."""
        with self.hold_trait_notifications():
            self.ranks, self.most = list(self.lab.members), self.lab.ranks

    def begin(self, message: dict[str, Any]) -> None:
        """A person pressed a button. It may take seconds, and the kernel is not to wait."""
        threading.Thread(target=self.asked, args=(message,), name="dashboard request", daemon=True).start()

    def asked(self, message: dict[str, Any]) -> None:
        """Does what was asked: {"do": one of WHY, "rank": a rank, "ranks": how many}."""
        self.error = ""
        verbs = {"evict": self.lab.evict, "freeze": self.lab.freeze, "thaw": self.lab.thaw, "kill": self.lab.kill,
                 "preempt": self.lab.preempt, "profile": lambda rank: self.lab.run_now.profile(rank)}  # fmt: skip
        try:
            if message["do"] == "resize":
                self.lab.resize(int(message["ranks"]))
            else:
                verbs[message["do"]](int(message["rank"]))
        except Exception as error:  # whatever it is, the person who pressed the button must read it
            self.error = str(error) if isinstance(error, (KnobError, RuntimeError)) else said(error)
        self.refresh()
