"""Checks user input at the public entry points. Each error says what to do instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from workbench.experiment.experiment import Experiment
from workbench.settings import Change, KnobError, knobs, resolved, short, with_values
from workbench.strategies import TorchDDP
from workbench.tasks.script import Script

MAX_RANKS = 64
RANKS_LIMIT = next(int(k.high or 0) for k in knobs(Experiment) if k.name == "ranks")
MAX_INTEGER = 10**9
MAX_PATH_LENGTH, MAX_NAME_LENGTH = 1024, 200  # characters


def system() -> None:
    """Raises KnobError on Windows: it cannot start, freeze and end ranks as processes."""
    if sys.platform == "win32":
        raise KnobError(
            "platform=win32: must be Linux or macOS, because Windows cannot start, freeze and end ranks as the "
            "workbench does; install WSL (`wsl --install` in PowerShell), open its Ubuntu, and clone and start the "
            "workbench there"
        )


def ranks(value: Any) -> int:
    """Checks a lab's number of ranks."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANKS:
        raise KnobError(f"ranks={short(value)}: must be an integer in [1, {MAX_RANKS}], the most processes of a lab; "
        f"simulate(experiment) takes up to {RANKS_LIMIT} ranks")  # fmt: skip
    return value


def spare(value: Any) -> int:
    """Checks a number of spare engines."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_RANKS:
        raise KnobError(f"spare={short(value)}: must be an integer in [0, {MAX_RANKS - 1}] engines")
    return value


def text(value: Any, field: str, example: str) -> str:
    """Checks a name."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > MAX_NAME_LENGTH:
        raise KnobError(f"{field}={short(value)}: must be text, such as {example!r}")
    return value


def device(value: Any) -> str | int:
    """Checks a device or a number of GPUs. Only engines can tell whether enough exist."""
    good = value in ("auto", "cpu", "cuda") if isinstance(value, str) else isinstance(value, int) and value >= 1
    if not good or isinstance(value, bool):
        raise KnobError(f"device={short(value)}: must be auto, cpu, cuda or a number of GPUs")
    return value


def path(value: Any, field: str, example: str) -> Path:
    """Checks a path to read or write."""
    good = isinstance(value, str | os.PathLike) and 0 < len(str(value)) <= MAX_PATH_LENGTH and "\0" not in str(value)
    if not good:
        raise KnobError(f"{field}={short(value)}: must be a path, such as {example!r}")
    return Path(value)


def instance(value: Any, kind: type, field: str, example: str) -> None:
    """Raises KnobError unless `value` is a `kind` or None."""
    if value is not None and not isinstance(value, kind):
        raise KnobError(f"{field}={short(value)}: must be a {kind.__name__}, such as {example}, or None")


def experiment(value: Any) -> Experiment:
    """Checks an experiment. The error for a text suggests `recipe(...)`."""
    if isinstance(value, Experiment):
        return value
    hint = f"; recipe({short(value)}) makes an Experiment from the name of a recipe" if isinstance(value, str) else ""
    raise KnobError(f"experiment={short(value)}: must be an Experiment, such as Experiment() or recipe('digits'){hint}")


def script(file: str, words: Sequence[str] = ()) -> Experiment:
    """Returns an experiment that runs a script as torchrun would, under torch's own DDP."""
    if not Path(file).is_file():
        raise KnobError(f"file={short(file)}: there is no such file; must be a training script, such as 'train.py'")
    return Experiment(task=Script(file=file, args=tuple(words)), strategy=TorchDDP(), eval_every=0)


def changes(value: Any) -> tuple[Change, ...]:
    """Checks planned changes. Each may also be `(at_step, path, value)` or `(at_step, {path: value, ...})`."""
    wanted = "must be Change(at_step, path, value)"
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise KnobError(f"changes={short(value)}: must be a list, and each element {wanted[8:]}")
    out = []
    for number, change in enumerate(value):
        if isinstance(change, Sequence) and not isinstance(change, str) and len(change) in (2, 3):
            change = Change(*change)
        if not isinstance(change, Change):
            raise KnobError(f"changes[{number}]={short(change)}: {wanted}")
        step = change.at_step
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_INTEGER:
            raise KnobError(f"changes[{number}].at_step={short(step)}: must be an integer in [0, {MAX_INTEGER}] steps")
        out.append(change)
    return tuple(out)


def planned(experiment: Experiment, changes: Sequence[Change]) -> tuple[Change, ...]:
    """Returns the changes sorted by step. Checks each against the settings before it."""
    out = []
    for change in sorted(changes, key=lambda change: change.at_step):
        if (step := change.at_step) < 0:
            raise KnobError(f"at_step={step}: must be an integer in [0, 1000000000] steps")
        made, experiment = resolved(experiment, change, "; give it to the experiment")
        out.append(made)
    return tuple(out)


def turned(start: Experiment, settings: Iterable[tuple[str, Any]]) -> Experiment:
    """Sets several knobs at once in any order. Checks and returns the result. Raises KnobError."""
    return with_values(start, settings).checked()
