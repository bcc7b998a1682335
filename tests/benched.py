"""An engine's end of a line without the engine: tests begin their own sessions there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from workbench.cluster.engines.engine_server import EngineServer
from workbench.cluster.processes.lab_place import host_name, this_process
from workbench.cluster.transport.curve_keys import CurveKeys
from workbench.cluster.transport.rpc_client import RpcClient


@contextmanager
def benched(*ranks: int) -> Iterator[tuple[EngineServer, RpcClient]]:
    """Yields an engine's end, and a line that reaches it as each of `ranks`."""
    keys = CurveKeys.make_pair()
    made = EngineServer({
        "lab": "x", "client": keys.public, "owner": this_process(), "host": host_name(), "spans_hosts": False,
        "reach": "127.0.0.1", "paths": [], "place": "",
    })  # fmt: skip
    line = RpcClient(dict.fromkeys(ranks, made.rpc_address), keys)
    try:
        yield made, line
    finally:
        line.close()
        made.close()


def begin(bench: EngineServer, session: type, path: Path, generation: str = "g", rank: int = 0) -> Any:
    """Begins a session of this class, in a run below `path`. Returns it."""
    (path / "run.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.benched.Session", session, raising=False)
        job = {"session": "tests.benched:Session", "run_id": generation, "run_dir": str(path), "rank": rank,
               "size": 1, "epoch": 0.0, "store": ("x", 0), "device": "cpu", "kind": "gloo",
               "loopback": True}  # fmt: skip
        bench.begin_session(job, cloudpickle.dumps((None, (), [])))
    return bench.session
