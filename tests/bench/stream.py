"""Measures the bytes that a stream of many ranks sends to the page and its kernel time, on a virtual clock.

    python -m tests.bench.stream --ranks 64 --seconds 60

Ranks make 20 steps/s (dashboard_source.py) and push 4 times a second. The board is read 6 times a second, as by its
timer. Results are the bytes of all messages, and the CPU time to decode rows, keep them and make the messages,
independent of other load. `dashboard_budget` measures the same in a real JupyterLab, including plotly and Jupyter.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import NamedTuple
from unittest import mock

from tests.bench.dashboard_source import PUSHES, Rank
from widgets.charts.feed import Feed
from workbench.cluster.transport.row_encoding import decode_batches
from workbench.run import Run

LOOKS = 6.0  # per second


class Streamed(NamedTuple):
    """Rates per second of the stream after its start."""

    kilobytes: float
    messages: float
    cpu: float  # share of a core
    rows: float


def streamed(ranks: int, seconds: float, warm: float = 4.0) -> Streamed:
    """Measures `seconds` of a stream of `ranks`, after `warm` uncounted seconds."""
    made = [Rank(r) for r in range(ranks)]
    run = Run({"ranks": ranks, "strategy": {"DDP": {}}}, name="stream", live=True)
    feed, now = Feed(run), 0.0
    sent = messages = rows = 0
    cpu = 0.0
    with mock.patch("time.monotonic", lambda: now):
        feed.make_opening()
        pushed = 0.0
        while now < warm + seconds:
            now += 1 / LOOKS
            counts, frames = now > warm, []
            if now - pushed >= 1 / PUSHES:
                pushed = now
                for rank in made:
                    rank.until(now)
                    frames.append(rank.message())
            began = time.process_time()
            for message in frames:
                for batch in decode_batches(message):
                    rows += counts * run.append(batch.kind, batch.rank, batch.seq, batch.columns)
            news = feed.make_news()
            if counts:
                cpu += time.process_time() - began
            if news and counts:
                messages += 1
                sent += len(json.dumps(news[0])) + sum(map(len, news[1]))
    assert not feed.troubles, feed.troubles
    return Streamed(sent / 1e3 / seconds, messages / seconds, cpu / seconds, rows / seconds)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--ranks", type=int, default=64)
    ask.add_argument("--seconds", type=float, default=60.0)
    said = ask.parse_args()
    found = streamed(said.ranks, said.seconds)
    print(f"{said.ranks} ranks, {found.rows:.0f} rows/s: {found.kilobytes:.0f} kB/s, {found.messages:.1f} messages/s, "
          f"{found.cpu:.2f} of a core")  # fmt: skip


if __name__ == "__main__":
    main()
