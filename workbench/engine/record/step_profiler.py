"""Profiles some steps of one rank with torch.profiler: a Chrome trace in the run directory, and a Mark.

A process's first profiler loads libraries for seconds, and writing a trace takes a while. Both have threads of their
own, so that no other rank waits. A profile slows down only this rank, a little per operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.record.folders import make_private_folder
from workbench.settings.describe_error import said

PROFILE_FOLDER = "profiles"  # in the run directory
CLOSE_TIMEOUT = 2.0  # seconds for a trace at the end of a run; after 3 s the lab would end the engine


class StepProfiler:
    """One rank's profiler. Any thread may call `request_profile`, only the training thread the other methods.

    folder: for traces, or None; mark: writes a Mark
    """

    def __init__(self, rank: int, run_dir: Path | None, device: str, mark: Callable[[str, dict[str, Any]], None],
                 ) -> None:  # fmt: skip
        self.rank, self.device, self.mark = rank, device, mark
        self.folder = Path(run_dir) / PROFILE_FOLDER if run_dir is not None else None
        self._traces = 0
        self._busy = threading.Lock()
        self._steps_due = 0  # steps to profile from the next one on
        self._steps_left = 0  # steps left in the profile under way
        self._first = self._requested_steps = 0  # its first step, and its requested number of steps
        self._profile: Any = None
        self._path = Path()
        self._thread = threading.Thread()  # the last one that loaded libraries or wrote a trace

    def request_profile(self, steps: int) -> str:
        """Returns the path of the future trace of the next `steps` steps.

        Raises RuntimeError if the run has no directory, or if a profile is under way.
        """
        if self.folder is None:
            raise RuntimeError("this run has no directory to write a trace into")
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(f"rank {self.rank} is being profiled already; its trace comes as {self._path.name}")
        self._traces += 1
        self._path = self.folder / f"rank-{self.rank}-{self._traces}.json"
        self._begin_thread(self._load_libraries, steps, daemon=True)
        return str(self._path)

    def begin_step(self, step: int) -> None:
        if self._steps_due:
            self._steps_left, self._first, self._steps_due = self._steps_due, step, 0
            self._run_guarded(self._start_profile)

    def end(self, made: int = 1) -> None:
        if self._profile is None:
            return
        self._steps_left -= made
        if self._steps_left <= 0:
            self._run_guarded(self._stop_profile)

    def stop_profile(self) -> None:
        if self._profile is not None:
            self._run_guarded(self._stop_profile)

    def close(self) -> None:
        """Waits CLOSE_TIMEOUT seconds at most for the trace, and reports a profile that no step has begun."""
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT)
        if self._steps_due:
            self._steps_due = 0
            self._report_failure("the run ended before the next step")

    def _begin_thread(self, what: Callable[..., None], *given: Any, daemon: bool) -> None:
        self._thread = threading.Thread(target=what, args=given, name=f"rank {self.rank} profiler", daemon=daemon)
        self._thread.start()

    def _load_libraries(self, steps: int) -> None:
        """Loads the profiler's libraries by an empty profile."""
        try:
            made = _make_profiler(self.device)
            made.start()
            made.stop()
            self._steps_due = steps
        except Exception as error:
            self._report_failure(said(error))

    def _start_profile(self) -> None:
        self._profile, self._requested_steps = _make_profiler(self.device), self._steps_left
        self._profile.start()

    def _stop_profile(self) -> None:
        done, self._profile = self._profile, None
        done.stop()
        steps = self._requested_steps - max(self._steps_left, 0)
        self._begin_thread(self._write_trace, done, steps, daemon=False)

    def _write_trace(self, done: Any, steps: int) -> None:
        try:
            make_private_folder(self._path.parent)
            part = self._path.with_suffix(".part")
            done.export_chrome_trace(str(part))
            if not part.is_file():  # torch does not raise if it cannot write
                raise OSError(f"torch could not write {part}")
            part.rename(self._path)
            text = f"rank {self.rank}: {steps} step{'s' * (steps != 1)} from step {self._first} on are in {self._path}"
            self.mark("profile", {"path": str(self._path), "steps": steps, "first": self._first, "text": text})
            self._busy.release()
        except Exception as error:
            self._report_failure(said(error))

    def _run_guarded(self, what: Callable[[], None]) -> None:
        """Reports an error, so that training goes on."""
        try:
            what()
        except Exception as error:
            self._profile = None
            self._report_failure(said(error))

    def _report_failure(self, why: str) -> None:
        text = f"rank {self.rank} could not be profiled: {why}"
        self.mark("profile", {"path": "", "steps": 0, "first": self._first, "text": text})
        self._busy.release()


def _make_profiler(device: str) -> Any:
    """Includes all threads of the process, because lanes have their own."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.startswith("cuda") else [])]
    return profile(activities=kinds, experimental_config=_ExperimentalConfig(profile_all_threads=True))
