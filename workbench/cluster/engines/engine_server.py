"""The engine's side: holds its rank's session, publishes its rows and answers the kernel's requests.

The lab calls these functions over ipyparallel before a run. A run uses the engine's own two sockets, so `%%px` may
occupy the main thread.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import zmq

from workbench.cluster.engines import process_restart
from workbench.cluster.engines.preemption_signal import PreemptionSignal
from workbench.cluster.engines.rpc_handlers import RpcHandlers
from workbench.cluster.processes.lab_place import alive, host_name
from workbench.cluster.processes.supervised_thread import SupervisedThread
from workbench.cluster.transport.curve_keys import CurveKeys, admit_client
from workbench.cluster.transport.output_capture import OutputCapture
from workbench.cluster.transport.row_encoding import RowBatch, encode_batch
from workbench.settings.describe_error import said, speaks, traceback_of

ABANDONED_AFTER = 60.0  # seconds of a remote kernel's silence

_server: EngineServer | None = None


def open_server(setup: dict[str, Any]) -> dict[str, Any]:
    """Opens this engine's sockets for a lab. Returns their addresses. Raises RuntimeError in another lab's run."""
    global _server
    if _server and _server.is_busy and _server.lab != setup["lab"]:
        raise RuntimeError("this engine is training for another lab; stop that run or use other engines")
    if _server:
        _server.close()
    sys.path += [p for p in setup["paths"] if p not in sys.path and os.path.isdir(p)]
    _server = EngineServer(setup)
    return {"rows_address": _server.rows_address, "rpc_address": _server.rpc_address}


def host_store(session: str, where: str) -> tuple[str, int]:
    """Returns the address of the ranks' meeting point, kept here."""
    return _require_server().host_store(session, where)


def begin_session(arguments: dict[str, Any], blob: bytes) -> str:
    """blob: the pickled experiment. Returns the session's spool folder."""
    try:
        return _require_server().begin_session(arguments, blob)
    except BaseException as error:
        if speaks(error):
            raise
        raise RuntimeError(said(error)) from None  # ipyparallel shows this text


def load_modules() -> None:
    """Imports a rank's modules in advance."""
    importlib.import_module("workbench.engine.rank.session")


def restart_engine(lab: str) -> None:
    """Raises RuntimeError if this engine cannot restart, trains, or serves another lab."""
    if _server is None or _server.lab != lab or _server.is_busy:
        raise RuntimeError("this engine serves another lab, or trains")
    process_restart.refuse_restart()
    close_server()
    process_restart.restart_soon()


def _require_server() -> EngineServer:
    if _server is None:
        raise RuntimeError("this engine was not opened for a lab")
    return _server


def close_server() -> None:
    """Ends this engine's work for a lab."""
    global _server
    if _server:
        _server.close()
    _server = None


def _load_object(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


class EngineServer(RpcHandlers):
    """An engine's place in a lab: its two sockets, and its rank's session."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.lab = setup["lab"]
        self.owner, self.owner_host = setup["owner"], setup["host"]
        self.session: Any = None
        self.session_arguments: dict[str, Any] = {}
        self.pickled_experiment = b""
        self.secret = ""
        self.store: Any = None
        self.sent_rows: dict[str, int] = {}
        self.run_folder = Path()
        self.learned_classes: list[Any] = []  # classes from notebook cells, kept alive for lookups by name
        self.last_request_at = time.monotonic()
        self.is_end_reported = False  # the kernel knows that the session is over
        self.last_error = ""  # of a request
        self._dismissed: set[tuple[str, int]] = set()  # (run_id, rank) dismissed before it began
        self._session_lock = threading.Lock()  # held while a session begins or a command runs
        self._context = zmq.Context()
        keys = CurveKeys.make_pair()
        self._authenticator = admit_client(setup["client"], self._context)
        self._rows_socket, self.rows_address = self._bind_socket(zmq.PUB, keys, setup)
        self._rpc_socket, self.rpc_address = self._bind_socket(zmq.ROUTER, keys, setup)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._preemption = PreemptionSignal(self, Path(setup["place"]))
        self._preemption.install_handler()
        self._capture = OutputCapture("rank ", self._record_output).__enter__()
        self._thread = SupervisedThread(
            "line", self._serve_once, self._closing, self.report_rpc_error, lambda: self._rpc_socket.close(0)
        ).start()

    def _bind_socket(self, kind: int, keys: CurveKeys, setup: dict[str, Any]) -> tuple[Any, str]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = 5_000
        keys.lock_socket(socket)
        port = socket.bind_to_random_port(f"tcp://{'*' if setup['spans_hosts'] else '127.0.0.1'}")
        return socket, f"tcp://{setup['reach']}:{port} {keys.public}"

    @property
    def is_busy(self) -> bool:
        return self.session is not None and not self.session.join(0)

    # -- a run

    def host_store(self, session: str, where: str) -> tuple[str, int]:
        if self.store is None:
            self.store = _load_object(session).host_store(where)
        return str(self.store[1]), int(self.store[2])

    def begin_session(self, arguments: dict[str, Any], blob: bytes) -> str:
        if self.is_busy:
            self.session.abort()
            if not self.session.join(5.0):
                raise RuntimeError(f"this rank has not left its last run: {self.session.status()['busy'] or 'busy'}")
        process_restart.refuse_second_loop()
        where = Path(arguments["run_dir"])
        if not (where / "run.json").exists():  # on another host: the kernel fetches the rows
            where = Path(tempfile.mkdtemp(prefix="training-workbench-run-"))
        experiment, changes, learned = cloudpickle.loads(blob)
        session = _load_object(arguments["session"])(
            experiment, rank=arguments["rank"], size=arguments["size"], store=tuple(arguments["store"]), run_dir=where,
            run_id=arguments["run_id"], push=self.publish_rows, epoch=arguments["epoch"], changes=changes,
            device=arguments["device"], kind=arguments["kind"], loopback=arguments["loopback"],
            secret=bytes.fromhex(self.secret),
            **{name: arguments[name] for name in ("joins", "resume", "owns_process") if arguments.get(name)},
        )  # fmt: skip
        session.before_end = self._capture.end_lines
        with self._session_lock:
            # before the arguments, because readers of the arguments use these
            self.session, self.run_folder, self.learned_classes = session, where, learned
            process_restart.note_run(bool(arguments.get("leads")))
            self.session_arguments, self.pickled_experiment = arguments, blob
            self.sent_rows, self.is_end_reported = {}, False
            if (arguments["run_id"], arguments["rank"]) in self._dismissed:
                session.abort()
            self._dismissed = {life for life in self._dismissed if life[0] == arguments["run_id"]}
        _show_in_cells("workbench_session", session)
        try:
            session.start()
        except BaseException:
            with self._session_lock:
                self.session = None  # a session that never started would block waiters
                # ignores later commands and attaching kernels, but lets the kernel fetch its files
                self.session_arguments, self.pickled_experiment = {"rank": arguments["rank"]}, b""
            raise
        return str(where)

    def publish_rows(self, new: list[tuple[str, int, dict[str, Any]]]) -> None:
        """Rows go in one message. Without a listener they stay on disk only."""
        frames = []
        for kind, seq, columns in new:
            batch = RowBatch(self.session_arguments["run_id"], kind, self.session_arguments["rank"], seq, columns)
            self.sent_rows[kind] = seq + len(batch)
            frames += encode_batch(batch)
        with self._lock:
            if not self._rows_socket.closed:
                self._rows_socket.send_multipart(frames)

    def _record_output(self, stream: str, text: str) -> None:
        if self.session is not None:
            self.session.mark("log", {"stream": stream, "text": text})

    # -- requests

    def _serve_once(self) -> None:
        if self._rpc_socket.poll(200):
            who, head, blob = self._rpc_socket.recv_multipart()
            self.last_request_at = time.monotonic()
            self._rpc_socket.send_multipart([who, *self._make_reply(json.loads(head), blob)])
        elif self.is_busy and self.is_abandoned():
            self.session.abort()

    def report_rpc_error(self, error: BaseException) -> None:
        """Reports a request's error in log file, status and record."""
        text = traceback_of(error)
        print(text, file=sys.__stderr__, flush=True)
        self.last_error = said(error)
        self._record_output("stderr", f"the engine's line: {text}")

    def _make_reply(self, request: dict[str, Any], blob: bytes) -> list[bytes]:
        answer: dict[str, Any] = {"number": request.pop("number")}
        out, of, what = b"", request.pop("of", None), request.pop("what")
        try:
            value = self._execute_command(what, of, blob, request) if of else self.handle_request(what, blob, request)
            if isinstance(value, bytes):
                out = value
            else:
                answer["value"] = value
        except BaseException as error:  # unpickling a cell's class may do anything
            answer["error"] = said(error)
        return [json.dumps(answer, default=str).encode(), out]

    def _execute_command(self, what: str, of: tuple[str, list[int]], blob: bytes, request: dict[str, Any]) -> Any:
        """Runs a command for this session's run and rank, and ignores other commands.

        A session comes through the controller. A command to leave that overtakes it makes it leave as it begins.
        """
        run_id, ranks = of
        with self._session_lock:
            if self.session_arguments.get("run_id") == run_id and self.session_arguments["rank"] in ranks:
                return self.handle_request(what, blob, request)
            if what == "abort":
                self._dismissed |= {(run_id, rank) for rank in ranks}

    def is_abandoned(self) -> bool:
        """Whether the lab's kernel ended without detaching."""
        if self.owner is None:
            return False
        if self.owner_host == host_name():
            return not alive(self.owner)
        return time.monotonic() - self.last_request_at > ABANDONED_AFTER

    def close(self) -> None:
        if self.is_busy:
            self.session.abort()
            self.session.join(5.0)
        self._preemption.restore_handler()
        self._closing.set()
        self._thread.join(2.0)
        self._capture.__exit__()
        with self._lock:
            self._rows_socket.close(0)
        self._authenticator.stop()
        self._context.destroy(0)


def _show_in_cells(name: str, value: Any) -> None:
    from ipyparallel.engine.app import IPEngine

    if IPEngine.initialized():
        IPEngine.instance().kernel.shell.user_ns[name] = value
