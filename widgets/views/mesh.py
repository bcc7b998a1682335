"""The arrangement of ranks as squares in the boxes of their groups."""

from __future__ import annotations

from html import escape
from typing import Any, ClassVar

from widgets.views._base import Patch, View, ranks_of
from workbench.analysis import Arrangement, find_arrangement

MAX_RANKS = 64  # a picture of more ranks would be illegible


class Mesh(View):
    """Nested boxes from the mesh's outermost dimension inwards. Each rank is a square."""

    name: ClassVar[str] = "mesh"
    title: ClassVar[str] = "How ranks are arranged"
    about: ClassVar[str] = (
        "Every rank as a numbered square in the boxes of its groups. The box of a replica holds its stages. The box of "
        "a stage holds the ranks that share its matrices. Ranks at the same place of two replicas hold the same part "
        "of the model. They have the same colour, out of eight."
    )
    order: ClassVar[int] = 8
    quiet: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._said: str | None = None

    def update(self, run: Any) -> Patch:
        if self._said is not None and len(run.timeline.marks) == self.cursor:
            return Patch()
        self.cursor = len(run.timeline.marks)
        said = draw_mesh(find_arrangement(run.timeline, ranks_of(run)))
        if said == self._said:
            return Patch()
        self._said = said
        return Patch(html=said)


def draw_mesh(found: Arrangement) -> str:
    """Returns the picture; "" for a single group of equal ranks."""
    if sum(size > 1 for _, size in found.dims) < 2 and not found.serve and not found.inside:
        return ""
    text = f'<p class="wb-mesh-text">{escape(found.text)}</p>'
    if len(found.ranks) > MAX_RANKS:
        return text
    parts = 1
    for name, size in found.dims:
        parts *= size if name in found.inside else 1
    colours = {rank: at % parts % 8 if parts > 1 else 0 for at, rank in enumerate(found.ranks)}
    boxes = _draw_boxes(found.dims, found.ranks, colours)
    serving = "".join(_draw_rank(rank, "wb-mesh-server") for rank in found.serve)
    also = f'<div class="wb-mesh-box"><span>servers</span>{serving}</div>' if serving else ""
    return f'{text}<div class="wb-mesh" role="img" aria-label="{escape(found.text)}">{boxes}{also}</div>'


def _draw_boxes(dims: tuple[tuple[str, int], ...], ranks: tuple[int, ...], colours: dict[int, int]) -> str:
    (name, size), *rest = dims
    each = len(ranks) // size
    if not rest:
        return "".join(_draw_rank(rank, f"wb-mesh-{colours[rank]}") for rank in ranks)
    inner = (_draw_boxes(tuple(rest), ranks[k * each : (k + 1) * each], colours) for k in range(size))
    named = ((f"{escape(name)} {k}", held) for k, held in enumerate(inner))
    return "".join(f'<div class="wb-mesh-box"><span>{label}</span>{held}</div>' for label, held in named)


def _draw_rank(rank: int, look: str) -> str:
    return f'<b class="wb-mesh-rank {look}" title="rank {rank}">{rank}</b>'
