"""A process that sends rows of many ranks in real time, and a live Run that receives them.

    python dashboard_source.py PORT EPOCH RANKS     # publishes rows as they end, 4 times a second per rank
    run = live_run()                    # in a notebook: starts that process, relays its rows as a Lab does

Ranks publish at different moments, as engines do. The numbers are synthetic; their rate and shape are real.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from workbench.cluster.transport.curve_keys import CurveKeys
from workbench.cluster.transport.row_encoding import RowBatch, encode_batch
from workbench.cluster.transport.row_subscriber import RowSubscriber
from workbench.run import Run

RANKS, RATE, BUCKETS, PUSHES = 8, 20.0, 4, 4.0
NBYTES = 1_500_000


class Rank:
    """The rows of one rank, made step by step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step = 0
        self.rows: dict[str, list[tuple[Any, ...]]] = {"spans": [], "samples": [], "marks": []}
        self.sent = dict.fromkeys(self.rows, 0)
        self.noise = np.random.default_rng(rank)

    def until(self, t: float) -> None:
        """Makes the steps that have ended by `t`."""
        while (self.step + 1) / RATE <= t:
            self._one(self.step / RATE)
            self.step += 1

    def _one(self, t: float) -> None:
        length = 1 / RATE
        lag = 0.04 * length * float(self.noise.random())
        a, b, c = t + 0.25 * length, t + 0.65 * length + lag, t + 0.93 * length
        put = lambda lane, name, asked, t0, t1, n=0: self.rows["spans"].append(  # noqa: E731
            (self.rank, self.step, lane, name, asked, t0, t1, n)
        )
        put("compute", "forward", t, t, a)
        put("compute", "backward", a, a, b)
        begin = a + 0.1 * length
        for k in range(BUCKETS):
            arrival, end = begin + lag, begin + 0.13 * length
            put("comm", f"all_reduce bucket {k}", arrival - 1e-4, arrival, end, NBYTES)
            if end > b:
                put("wait", f"bucket {k}", b, b, end)
                b = end
            begin = end
        put("compute", "update", b, b, c)
        put("step", "DDP", t, t, c)
        loss = 2.5 + 3 * np.exp(-self.step / 400) + 0.05 * self.noise.standard_normal()
        self.rows["samples"].append((self.rank, self.step, "loss", c, float(loss)))
        if self.step % 20 == 19:
            self.rows["samples"].append((self.rank, self.step, "drift", c, 1e-9 * self.rank))
            if self.rank == 0:
                put("eval", "held-out", c, c, c + 0.02 * length)
                self.rows["samples"].append((0, self.step, "held_out", c, float(loss)))
        if self.rank == 0 and self.step % 400 == 200:
            text = '{"id": "x", "path": "strategy.every", "value": 8, "text": "every = 8"}'
            self.rows["marks"].append((0, self.step, "change", t, text))

    def message(self) -> list[bytes]:
        """Returns the new rows as one message, like a rank's, and forgets them."""
        out: list[bytes] = []
        for kind, rows in self.rows.items():
            if rows:
                columns = dict(zip(_NAMES[kind], map(list, zip(*rows, strict=True)), strict=True))
                out += encode_batch(RowBatch("bench", kind, self.rank, self.sent[kind], columns))
                self.sent[kind] += len(rows)
                rows.clear()
        return out


_NAMES = {
    "spans": ("rank", "step", "lane", "name", "asked", "t0", "t1", "nbytes"),
    "samples": ("rank", "step", "name", "t", "value"),
    "marks": ("rank", "step", "name", "t", "detail"),
}


def publish(port: int, epoch: float, count: int = RANKS) -> None:
    """Publishes until this process or its parent ends."""
    keys, out = CurveKeys(*sys.stdin.readline().split()), zmq.Context().socket(zmq.PUB)
    keys.lock_socket(out)
    out.bind(f"tcp://127.0.0.1:{port}")
    ranks = [Rank(r) for r in range(count)]
    while True:
        for rank in ranks:  # in turn within a push, as independent engines do
            time.sleep(1 / PUSHES / count)
            rank.until(time.time() - epoch)
            if frames := rank.message():
                out.send_multipart(frames)


def live_run(settings: dict[str, Any] | None = None, ranks: int = RANKS) -> Run:
    """Returns a live run whose rows come from another process."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    keys, epoch = CurveKeys.make_pair(), time.time() + 1.0
    command = [sys.executable, str(Path(__file__)), str(port), repr(epoch), str(ranks)]
    source = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    assert source.stdin
    source.stdin.write(" ".join(keys) + "\n")
    source.stdin.flush()
    run = Run(settings or {"ranks": ranks, "strategy": {"DDP": {}}}, name="bench", epoch=epoch, live=True)
    take = lambda batch: run.append(batch.kind, batch.rank, batch.seq, batch.columns)  # noqa: E731
    run.relay, run.source = (
        RowSubscriber([f"tcp://127.0.0.1:{port} {keys.public}"], CurveKeys.make_pair(), take),
        source,
    )  # type: ignore[attr-defined]
    return run


if __name__ == "__main__":
    publish(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
