"""Makes malicious run directories from a seed, and uses each as a trusting user would."""

from __future__ import annotations

import ast
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from tests.unit import synthetic
from workbench import analysis, public_names
from workbench.analysis.export.export import to_perfetto
from workbench.record.stream import schema
from workbench.record.timeline import KINDS
from workbench.run import Run, RunError
from workbench.settings import KnobError

TAG = "<script>alert(1)</script>"
EVIL = "__import__('os').system('touch evil')"
TEXTS = (TAG, EVIL, "", "\0", "\ud800", "../../../../etc/passwd", "a\nb", "\u202e", "x" * 100_000, "'", '"',
         "{0.__class__}", "%s%n", "nan", "Popen", "__class__", "{{constructor}}", "\\", "]]>", "é" * 300)  # fmt: skip
NUMBERS = (0, -1, 1, 2**31, -(2**31) - 1, 2**53, 2**63, 2**64, 10**400, 1e308, -0.0, float("nan"), float("inf"))
HOLE = 8 << 30  # bytes of a file that is a hole


def values(rng: random.Random) -> Any:
    """Returns a value of a wrong type, range or length."""
    kind = rng.randrange(8)
    if kind == 0:
        deep: Any = rng.choice(TEXTS)
        for _ in range(rng.choice((3, 60, 150))):
            deep = [deep] if rng.random() < 0.5 else {rng.choice(TEXTS[:6]): deep}
        return deep
    if kind == 1:
        return rng.choice((None, True, False, [], {}, [[]], [None] * 1000))
    if kind == 2:
        return {rng.choice(TEXTS): values(rng)}
    if kind == 3:
        return {rng.choice(("Popen", "Lab", "DDP", "TopK", "Experiment", "Fabric", "Task")): {"every": values(rng)}}
    return rng.choice(TEXTS if kind < 6 else NUMBERS)


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each (container, key) of a JSON value."""
    for key, inner in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(inner, dict | list):
            yield from nodes(inner)


# -- ways to damage a directory


def json_values(path: Path, rng: random.Random) -> None:
    """Changes, renames and removes values in run.json."""
    about = json.loads((path / "run.json").read_text())
    for _ in range(rng.choice((1, 1, 2, 5))):
        holder, key = rng.choice(list(nodes(about)))
        match rng.randrange(4):
            case 0 if isinstance(holder, dict):
                holder[rng.choice(TEXTS)] = holder.pop(key, None)
            case 1:
                holder.pop(key) if isinstance(holder, list) else holder.pop(key, None)
            case _:
                if not isinstance(holder, list) or key < len(holder):
                    holder[key] = values(rng)
    (path / "run.json").write_text(json.dumps(about), "utf8", "surrogatepass")


def json_text(path: Path, rng: random.Random) -> None:
    """Makes run.json invalid or empty."""
    texts = ("", "{", "null", "[" * 200_000, '{"schema":1e999}', "\ufeff{}", '{"a":' * 5000, "9" * 6000)
    (path / "run.json").write_text(rng.choice(texts))


def bytes_flipped(path: Path, rng: random.Random) -> None:
    """Changes 1 to 30 bytes of a file."""
    file = some(path, rng)
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 3, 30))):
        at = rng.randrange(len(data))
        data[at] = rng.choice((data[at] ^ 1 << rng.randrange(8), 0, 255, 127))
    file.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    """Shortens or lengthens a file."""
    file = some(path, rng)
    data = file.read_bytes()
    at = rng.randrange(len(data))
    file.write_bytes(rng.choice((data[:at], data[at:], data[:at] + data, data + rng.randbytes(99), rng.randbytes(at))))


def other_files(path: Path, rng: random.Random) -> None:
    """Puts a link, pipe, folder, socket or foreign file in the place of one of the run."""
    name = rng.choice(("run.json", "spans-0.arrow", "spans-7.arrow", "marks-0.1.arrow", "samples-99999.arrow"))
    file = path / name
    file.unlink(missing_ok=True)
    match rng.randrange(7):
        case 0:
            file.symlink_to(rng.choice(("/etc/passwd", "/dev/zero", "/dev/random", str(file), "/", "nowhere")))
        case 1:
            os.mkfifo(file)
        case 2:
            file.mkdir()
        case 3:
            with file.open("wb") as hole:
                hole.truncate(HOLE)
        case 4:
            with socket.socket(socket.AF_UNIX) as s:
                there = os.getcwd()
                os.chdir(path)  # a socket's path may not be long
                s.bind(name)
                os.chdir(there)
        case 5:
            good = path / "samples-1.arrow"
            data = good.read_bytes() if good.exists() else b""
            with file.open("wb") as hole:
                hole.write(data)
                hole.truncate(HOLE)
        case 6:
            for n in range(300):
                (path / f"spans-{n}.{n * 10**6}.arrow").write_bytes(rng.randbytes(20))
            (path / "spans-\u0663.arrow").write_bytes(b"x")
            (path / f"spans-{10**30}.arrow").write_bytes(b"x")


def rows(path: Path, rng: random.Random) -> None:
    """Replaces a file by a complete one with rows that no rank writes."""
    kind, rank = rng.choice(list(KINDS)), rng.choice((0, 1, 32767))
    n = rng.choice((1, 5, 200))
    first = rng.choice(("0", "5", "-1", "x", "9" * 14, "9" * 40, "", "\u0663"))
    said = schema(kind, rank)
    said = said.with_metadata({**said.metadata, b"first": first.encode()})
    columns = [column(f, n, rng, rank) for f in said]
    file = path / f"{kind}-{rank}.arrow"
    file.unlink(missing_ok=True)
    compressed = rng.choice(("lz4", "zstd", None))
    with ipc.new_stream(file, said, options=ipc.IpcWriteOptions(compression=compressed)) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=said))


def column(field: pa.Field, n: int, rng: random.Random, rank: int) -> pa.Array:
    if pa.types.is_dictionary(field.type):
        words = [*rng.choices([t for t in TEXTS if t.isprintable()], k=3), "step", "loss", "change", "start"]
        return named([rng.randrange(7) for _ in range(n)], words)
    if field.type == pa.string():
        return pa.array([detail(rng) for _ in range(n)])
    if field.type == pa.float64():
        return pa.array([float(x) for x in rng.choices((*NUMBERS[:8], *NUMBERS[9:], 0.5), k=n)], pa.float64())
    most = np.iinfo(field.type.to_pandas_dtype()).max
    if field.name == "rank" and rng.random() < 0.8:
        return pa.array([rank] * n, field.type)
    picks = rng.choices((0, 1, 2, most, -1, most // 2), k=n)
    return pa.array([None if rng.random() < 0.02 else x for x in picks], field.type)


def named(numbers: Any, words: list[str]) -> pa.Array:
    """Returns a dictionary column of few words."""
    return pa.DictionaryArray.from_arrays(pa.array(numbers, pa.int32()), pa.array(words), safe=False)


def detail(rng: random.Random) -> str:
    """Returns a mark's detail with wrong values."""
    names = ("path", "value", "text", "nbytes", "dims", "ranks", "serve", "state", "stages", "parameters", "met")
    text = json.dumps({rng.choice(names): values(rng) for _ in range(3)})
    return rng.choice((text, text, "{", "[]", TAG, "[" * 50_000)).encode("utf8", "replace").decode()


def marks(path: Path, rng: random.Random) -> None:
    """Writes marks of all known names, with fields of any type."""
    from workbench.record.marks import FIELDS, MUST

    names = [rng.choice([*FIELDS, "policy", "log", "left", TAG]) for _ in range(30)]
    good = {"path": "lr", "value": 0.1, "text": TAG, "state": "done", "nbytes": [5], "ranks": [0], "dims": {"data": 2},
            "serve": [1], "seconds": 1.0, "rank": 0, "step": 1, "op": TAG, "type": TAG, "reason": TAG, "met": True,
            "texts": [TAG], "loss": "nan", "stages": 2, "slices": 2, "parameters": 10, "stands_for": 2}  # fmt: skip
    said = []
    for name in names:
        about = {k: good[k] for k in sorted({*MUST.get(name, ()), *FIELDS.get(name, {}), "text"}) if k in good}
        if rng.random() < 0.7 and about:
            about[rng.choice(list(about))] = values(rng)
        said.append(json.dumps(about))
    n, kind = len(names), schema("marks", 0)
    steps = pa.array(rng.choices((0, 5, 2**31 - 1), k=n), pa.int32())
    times = pa.array([0.1 * i for i in range(n)])
    made = [pa.array([0] * n, pa.int16()), steps, named(range(n), names), times, pa.array(said)]
    with ipc.new_stream(path / "marks-0.arrow", kind) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(made, schema=kind))


def invalid(path: Path, rng: random.Random) -> None:
    """Writes buffers that Arrow would not make: offsets and word numbers out of range, and invalid text."""
    kind = schema("marks", 0)
    n = 3
    offsets = rng.choice(([0, 5, 2, 9], [0, 9, -3, 9], [0, 2**31 - 1, 6, 9], [0, 3, 6, 9]))
    buffers = [None, pa.py_buffer(np.array(offsets, "i4")), pa.py_buffer(b"\xff" * 9)]
    text = pa.Array.from_buffers(pa.string(), n, buffers)
    names = named([0, rng.choice((99, -1, 2**31 - 1)), 1], ["a", "b"])
    made = [pa.array([0] * n, pa.int16()), pa.array([0] * n, pa.int32()), names, pa.array([0.0] * n), text]
    with ipc.new_stream(path / "marks-0.arrow", kind) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(made, schema=kind))


def some(path: Path, rng: random.Random) -> Path:
    return rng.choice([p for p in sorted(path.iterdir()) if p.is_file() and p.stat().st_size])


WAYS: tuple[Callable[[Path, random.Random], None], ...] = (
    json_values, json_values, json_values, json_text, bytes_flipped, bytes_flipped, cut, other_files, rows, rows, marks,
    marks, invalid,
)  # fmt: skip


def good(path: Path) -> Path:
    """Makes an undamaged run directory."""
    changes = ((5, "strategy.every", 4), (8, "compressor", {"TopK": {"density": 0.1}}))
    run = synthetic.run(ranks=2, steps=12, changes=changes)
    run.settings |= {"compressor": {"ErrorFeedback": {"of": {"TopK": {"density": 0.01}}}}, "lr": 0.1, "steps": 12}
    return run.save(path)


# -- use by a person


def used(path: Path, out: Path) -> str:
    """Opens a run and calls all its analyses. Returns "opened", or the message of a refusal."""
    out.mkdir(exist_ok=True)
    try:
        run = Run.open(path)
    except RunError as error:
        return sentence(str(error))
    for said in run.warnings:
        sentence(said)
    assert isinstance(repr(run), str) and json.dumps(run.summary(), default=str)
    for look in (run.state, run.holdup, run.changes, run.environment, run.memory(), run.settings_today, run.spans,
                 run.samples, run.marks, run.details("error")):  # fmt: skip
        assert look is not None
    tl = run.timeline
    for ask in (
        analysis.last_steps,
        analysis.stands_for,
        analysis.list_unheeded,
        analysis.change_steps,
        analysis.measure_bubble,
    ):
        ask(tl)
    assert analysis.find_arrangement(tl, 2).dims and analysis.spread_at(tl, 5)
    to_perfetto(run, out / "trace.json")
    again = run.save(out / "again")
    Run.open(again)
    try:
        assert run.experiment
    except KnobError as error:
        assert len(str(error)) < 2000, str(error)[:500]
    try:
        harmless(run.as_python())
    except RunError as error:
        sentence(str(error))
    return "opened"


def sentence(text: str) -> str:
    """Returns `text`. Fails if a terminal cannot show it as one sentence."""
    assert text and len(text) < 1000 and text.isprintable(), repr(text[:300])
    return text


ALLOWED = (ast.Module, ast.ImportFrom, ast.alias, ast.Assign, ast.Expr, ast.Call, ast.Name, ast.Load, ast.Store,
           ast.Constant, ast.keyword, ast.List, ast.Tuple, ast.Dict, ast.UnaryOp, ast.USub, ast.Attribute)  # fmt: skip


def harmless(code: str) -> None:
    """Fails if `code` does anything but make settings of shipped members and run them."""
    calls = {*public_names()} - {"Run", "simulate", "plan", "tune", "balance", "recipe"}
    for node in ast.walk(ast.parse(code)):
        assert isinstance(node, ALLOWED), ast.dump(node)[:200]
        if isinstance(node, ast.ImportFrom):
            assert node.module == "workbench" or str(node.module).startswith("workbench."), node.module
            assert all(alias.name in public_names() and alias.asname is None for alias in node.names)
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) in ("lab.run", "run.wait", "Experiment.read"), ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id in calls | {"float"}, node.func.id
            assert node.func.id != "Lab" or ast.unparse(node).startswith("Lab(ranks=")
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            assert node.id in calls | {"float", "lab", "run", "experiment", "changes"}, node.id


def tried(first: int, stop: int, out: Path) -> dict[str, Any]:
    """Tries the directories of these seeds. Returns failures, the longest time and the growth of memory."""
    start = good(out / "good")
    used(start, out)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failed: dict[str, str] = {}
    longest = opened = 0.0
    for seed in range(first, stop):
        rng, path = random.Random(seed), out / f"case {seed}"
        shutil.copytree(start, path)
        way = WAYS[seed % len(WAYS)]
        way(path, rng)
        began = time.process_time()  # CPU time: other processes may use the machine
        signal.alarm(300)
        try:
            opened += used(path, path / "out") == "opened"
        except BaseException as error:
            failed[f"{seed} {way.__name__}"] = "".join(traceback.format_exception(error))[-1500:]
        signal.alarm(0)
        longest = max(longest, time.process_time() - began)
        shutil.rmtree(path)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"failed": failed, "opened": opened, "longest_s": longest, "grown_mb": grown}


if __name__ == "__main__":
    print(json.dumps(tried(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
