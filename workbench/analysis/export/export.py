"""Exports a run: a merged trace for Perfetto, and Python code that repeats the run."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench import public_names
from workbench.record.check_run_json import find_fault, name_of_class, name_of_code
from workbench.record.store import RunError, replace_file
from workbench.settings import short

if TYPE_CHECKING:
    from workbench.record.run import Run
    from workbench.settings import Change

# from top to bottom
LANES = ("step", "compute", "wait", "comm", "port", "codec", "measuring", "offload", "ticket", "eval", "switch")
_FIELDS = {
    "task": "tasks", "strategy": "strategies", "partition": "partitions", "compressor": "compressors",
    "fabric": "fabric", "optimizer": "optimizers", "policy": "policies",
}  # fmt: skip


def to_perfetto(run: Run, path: Path | str) -> Path:
    """Writes a Chrome trace: a process per rank and a thread per lane. A name with .gz compresses.

    For ui.perfetto.dev. All ranks use the run's clock, with an error of up to `metadata.clock_error_s`.
    """
    path = Path(path)
    ranks = run.environment.get("ranks", {})
    about = {
        "name": run.name,
        "started": run.started,
        "experiment": run.settings,
        "clock_error_s": {str(r): said.get("clock_error") for r, said in ranks.items()},
        "clock": "seconds since the run began, aligned when it began; ranks may be off by clock_error_s",
        "missing_rows": run.missing,
    }
    with replace_file(path) as draft, gzip.open(draft, "wt") if path.suffix == ".gz" else draft.open("w") as out:
        out.write('{"displayTimeUnit":"ms","metadata":' + _to_json(about) + ',"traceEvents":[\n')
        for i, event in enumerate(_list_events(run)):
            out.write((",\n" if i else "") + _to_json(event))
        out.write("\n]}\n")
    return path


def _to_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def _list_events(run: Run) -> Iterator[dict[str, Any]]:
    tl = run.timeline
    spans, samples, marks = tl.spans.rows(), tl.samples.rows(), tl.marks.rows()
    lanes = list(dict.fromkeys([*LANES, *spans.coded("lane").words.texts])) if len(spans) else list(LANES)
    thread = {lane: i + 1 for i, lane in enumerate(lanes)}
    for rank in sorted({*spans.rank.tolist(), *samples.rank.tolist(), *marks.rank.tolist()}):
        yield _make_meta("process_name", rank, 0, {"name": f"rank {rank}"})
        yield _make_meta("process_sort_index", rank, 0, {"sort_index": rank})
        for lane in sorted(set(spans.lane[spans.rank == rank]), key=thread.__getitem__):
            yield _make_meta("thread_name", rank, thread[lane], {"name": lane})
            yield _make_meta("thread_sort_index", rank, thread[lane], {"sort_index": thread[lane]})
    columns = (spans.rank, spans.step, spans.lane, spans.name, spans.asked, spans.t0, spans.t1, spans.nbytes)
    for rank, step, lane, name, asked, t0, t1, nbytes in zip(*(c.tolist() for c in columns), strict=True):
        args = {"step": step, "queued_us": _to_microseconds(t0 - asked)} | ({"nbytes": nbytes} if nbytes else {})
        yield {
            "ph": "X",
            "pid": rank,
            "tid": thread[lane],
            "name": name,
            "cat": lane,
            "ts": _to_microseconds(t0),
            "dur": _to_microseconds(t1 - t0),
            "args": args,
        }
    for rank, step, name, t, value in zip(*(c.tolist() for c in samples.columns.values()), strict=True):
        if value == value and abs(value) != float("inf"):
            yield {
                "ph": "C",
                "pid": rank,
                "tid": 0,
                "name": name,
                "ts": _to_microseconds(t),
                "args": {"value": value, "step": step},
            }
    for rank, step, name, t, detail in zip(*(c.tolist() for c in marks.columns.values()), strict=True):
        scope = "g" if name in ("change", "state") else "p"
        yield {
            "ph": "i",
            "pid": rank,
            "tid": 0,
            "name": name,
            "ts": _to_microseconds(t),
            "s": scope,
            "args": {"step": step, "detail": json.loads(detail)},
        }


def _make_meta(name: str, rank: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": name, "args": args}


def _to_microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def as_python(run: Run) -> str:
    """Returns Python code that repeats the experiment and its changes at the same steps.

    Two such runs of a lockstep strategy on one machine have bit-identical losses. Without a planned end, the code has
    the steps made so far. It resumes the run's checkpoint. It names only classes that ship with the project. Other
    classes stay data for `Experiment.read`. Raises RunError for invalid names.
    """
    from workbench.analysis import last_steps

    if reason := find_fault({"experiment": run.settings, "epoch": 0}):
        raise RunError(f"run {short(run.name)} cannot be written as Python: {reason}")
    ships = {name: _find_package(at) for name, at in public_names().items() if at.split(".")[1] in _FIELDS.values()}
    names: dict[str, set[str]] = {}
    settings = run.settings_today
    comment = {}
    if not settings.get("steps"):
        settings["steps"] = last_steps(run.timeline)[1]
        comment["steps"] = "  # as far as this run got"
    texts: dict[str, str] = {}
    theirs = False
    for field, value in settings.items():
        home, used, own = field in _FIELDS, set[str](), set[str]()
        texts[field] = _format_call(value, ships, used, own) if home else _format_literal(value)
        if field == "task" and "'<" in texts[field]:
            texts[field], comment[field] = "...", "  # your own Task(...): its functions are not in the record"
            continue
        for name in used:
            names.setdefault(ships[name], set()).add(name)
        if home and own:
            theirs, comment[field] = True, f"  # {', '.join(sorted(own))}: your own, to be defined before"
    opens, closes = ("experiment = Experiment.read({", "})") if theirs else ("experiment = Experiment(", ")")
    said = [(f'"{k}": {text}' if theirs else f"{k}={text}", comment.get(k, "")) for k, text in texts.items()]
    lines = [f"    {text},{about}" for text, about in said]
    changes = [f"    Change({c.at_step}, {_format_change(c)}{_format_decider(c)})," for c in run.changes]
    imports = [f"from workbench.{home} import {', '.join(sorted(used))}" for home, used in names.items() if used]
    head = ["from workbench import Change, Experiment, Lab", *sorted(imports)]
    body = [opens, *lines, closes, "changes = [", *changes, "]"]
    begun = run.parent.get("checkpoint")
    resume = f", resume={begun!r}" if isinstance(begun, str) else ""
    tail = [f"lab = Lab(ranks={settings.get('ranks', 4)})", f"run = lab.run(experiment, changes=changes{resume})"]
    tail += ["run.wait()"]
    return "\n".join([*head, "", *body, *tail, ""])


def _format_change(change: Change) -> str:
    settings = change.settings
    return _format_literal(settings) if len(settings) > 1 else f"{change.path!r}, {_format_literal(change.value)}"


def _format_decider(change: Change) -> str:
    """Returns the argument `by` of a policy's decision, so that the policy decides nothing more."""
    return f", by={change.by!r}" if change.by else ""


def _find_package(module: str) -> str:
    """Returns the package to import a member from: `strategies` for "workbench.strategies.ddp"."""
    _, first, *rest = module.split(".")
    return ".".join([first, *rest[:-1]])


def _format_call(value: Any, ships: Collection[str], used: set[str], own: set[str]) -> str:
    """Returns a settings value as a call if all its classes ship (added to `used`).

    Otherwise it stays plain data, so that no unknown class is called. Its classes are added to `own`.
    """
    if isinstance(value, list):
        inner = [_format_call(v, ships, used, own) for v in value]
        return f"({', '.join(inner)}{',' * (len(inner) == 1)})"
    if isinstance(value, dict) and len(value) == 1:
        ((name, rest),) = value.items()
        if isinstance(rest, dict) and name_of_class(name) and name[0].isupper() and all(map(name_of_code, rest)):
            used_here, own_here = set[str](), set[str]() if name in ships else {name}
            inner = [f"{k}={_format_call(v, ships, used_here, own_here)}" for k, v in rest.items()]
            own |= own_here
            if not own_here:
                used |= {name, *used_here}
                return f"{name}({', '.join(inner)})"
    return _format_literal(value)


def _format_literal(value: Any) -> str:
    """Returns Python for plain JSON; any other value as quoted text."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format_literal(k)}: {_format_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_format_literal, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value if value is None or type(value) in (bool, int, float, str) else str(value))
