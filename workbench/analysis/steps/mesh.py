"""The mesh of a run's ranks: dimensions, places and servers."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from workbench.record.timeline import Timeline


class Arrangement(NamedTuple):
    """The last mesh of a record.

    dims:   `(name, size)`, outermost first; ranks of the last dimension are neighbours
    ranks:  the training ranks, in the order of the mesh
    inside: the dimensions within one replica of the model
    serve:  servers, outside of the mesh
    """

    dims: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]
    inside: tuple[str, ...] = ()
    serve: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The sizes: "data 2 × stage 2, 1 serves"."""
        serving = f", {len(self.serve)} serve{'s' if len(self.serve) == 1 else ''}" if self.serve else ""
        return " × ".join(f"{name} {size}" for name, size in self.dims) + serving


def _last_mark(tl: Timeline, name: str, since: float) -> tuple[dict[str, Any], float]:
    rows = tl.marks.rows()
    mine = rows[rows.equal("name", name) & (rows.t >= since)] if len(rows) else rows
    found = [(float(t), json.loads(text)) for t, text in zip(mine.t, mine.detail, strict=True)]
    told = [(t, said) for t, said in found if name != "members" or "members" in said]
    return (max(told, key=lambda one: one[0])[1], max(t for t, _ in told)) if told else ({}, since)


def find_arrangement(tl: Timeline, ranks: int) -> Arrangement:
    """Returns the last arrangement, by default one line of `ranks` replicas."""
    members, since = _last_mark(tl, "members", float("-inf"))
    there = tuple(members.get("members", range(ranks)))  # rank by place, also after losses
    found = Arrangement((("data", len(there)),), there)
    said, _ = _last_mark(tl, "mesh", since)
    if said:
        at = tuple(there[place] for place in said["ranks"])
        found = Arrangement(tuple(said["dims"].items()), at, tuple(said.get("inside", ())))
    serve = tuple(there[place] for place in _last_mark(tl, "roles", since)[0].get("serve", ()))
    return found._replace(serve=serve) if not set(serve) & set(found.ranks) else found
