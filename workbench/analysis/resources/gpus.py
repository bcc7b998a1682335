"""Each rank's GPU use, power and link traffic. Empty if no GPU was read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.record.timeline import Timeline

SAMPLES = {"gpu use": "use", "gpu power": "power", "gpu link sent": "sent", "gpu link received": "received"}


class RankGpu(NamedTuple):
    """Means of one rank's last readings: use (a share), W and bytes/s out and in. NaN: unavailable."""

    rank: int
    use: float
    power: float
    sent: float
    received: float


def measure_gpus(tl: Timeline, seconds: float = 10.0) -> list[RankGpu]:
    """Returns the means over the record's last `seconds`."""
    rows = tl.samples.rows()
    if not len(rows):
        return []
    rows = rows[rows.t >= float(rows.t.max()) - seconds]
    known = {name: rows.equal("name", name) for name in SAMPLES}
    ranks = np.unique(rows.rank[np.logical_or.reduce(list(known.values()))])
    return [
        RankGpu(int(r), *(_mean_or_nan(rows.value[mask & (rows.rank == r)]) for mask in known.values())) for r in ranks
    ]


def _mean_or_nan(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
