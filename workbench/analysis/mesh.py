"""How a run's ranks are arranged: the dimensions of their mesh, who stands where, and who serves outside of it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from workbench.record.timeline import Timeline


class Arrangement(NamedTuple):
    """A mesh as the record has it last.

    dims:   (name, size), outermost first; the last one's ranks are neighbours
    ranks:  those that train, in the order in which they fill it
    inside: the dimensions over which one replica of the model is spread
    serve:  ranks that serve, outside of the mesh
    """

    dims: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]
    inside: tuple[str, ...] = ()
    serve: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The sizes in words: "data 2 × stage 2, 1 serves"."""
        serving = f", {len(self.serve)} serve{'s' if len(self.serve) == 1 else ''}" if self.serve else ""
        return " × ".join(f"{name} {size}" for name, size in self.dims) + serving


def arrangement(tl: Timeline, ranks: int) -> Arrangement:
    """As it is at the record's end; one line of replicas where that says nothing else. ranks: how many there are"""
    rows = tl.marks.rows()
    found = Arrangement((("data", ranks),), tuple(range(ranks)))
    last: dict[str, dict[str, Any]] = {}
    for name in ("mesh", "roles"):
        mine = rows[rows.equal("name", name) & (rows.rank == 0)] if len(rows) else rows
        if len(mine):
            last[name] = json.loads(mine.detail[int(mine.t.argmax())])
    if said := last.get("mesh"):
        found = Arrangement(tuple(said["dims"].items()), tuple(said["ranks"]), tuple(said.get("inside", ())))
    serve = tuple(last["roles"]["serve"]) if "roles" in last else ()
    return found._replace(serve=serve) if not set(serve) & set(found.ranks) else found
