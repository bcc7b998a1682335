"""Hidden units that a sub-model can omit, and the entries of parameters that it keeps.

A unit is an output of one layer that only the next one reads: a feature, a channel, an attention head. Without it both
layers' matrices have fewer rows or columns: a smaller model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from workbench.rank.outline import outlined

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.rank.bucket import Bucket


class Cut(NamedTuple):
    """A parameter that units cut: in the shape `view`, the units are along dimension `dim`."""

    param: str
    view: tuple[int, ...]
    dim: int


class Units(NamedTuple):
    """`size` units between two layers, named after the first, and the parameters that they cut.

    reader: the weight by which the next layer reads them
    """

    name: str
    size: int
    cuts: tuple[Cut, ...]
    reader: str = ""


class Entries:
    """The entries of all parameters that a sub-model keeps.

    kept: for each of the `units`, the kept indices, (k,) int64 each
    """

    def __init__(self, units: Sequence[Units], kept: Sequence[Tensor]) -> None:
        self._cuts: dict[str, list[tuple[Cut, Tensor]]] = {}
        for each, index in zip(units, kept, strict=True):
            for cut in each.cuts:
                self._cuts.setdefault(cut.param, []).append((cut, index))

    def cuts(self, name: str) -> bool:
        """Whether the parameter is smaller in the sub-model."""
        return name in self._cuts

    def of(self, name: str, x: Tensor) -> Tensor:
        """Returns the sub-model's entries of a whole parameter of any shape, in the parameter's view."""
        if name not in self._cuts:
            return x
        x = x.reshape(self._cuts[name][0][0].view)
        for cut, index in self._cuts[name]:
            x = x.index_select(cut.dim, index)
        return x

    def shape(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Returns a parameter's shape in the sub-model; `whole` is its shape in the model."""
        if name not in self._cuts:
            return whole
        view = self._cuts[name][0][0].view
        kept = list(view)
        for cut, index in self._cuts[name]:
            kept[cut.dim] = index.numel()
        found, at = [], 0
        for n in whole:  # each axis is 1 or several dimensions of the view
            axis, size = view[at], kept[at]
            at += 1
            while axis < n:
                axis, size, at = axis * view[at], size * kept[at], at + 1
            found.append(size)
        return tuple(found)

    def put(self, name: str, x: Tensor, values: Tensor) -> None:
        """Writes `values` into these entries of `x`, a whole parameter in contiguous memory."""
        if name not in self._cuts:
            x.copy_(values.view(x.shape))
            return
        cuts = self._cuts[name]
        _put(x.view(cuts[0][0].view), cuts, values)

    @outlined(lambda self, bucket: bucket.data.new_empty(self.numel(bucket)))
    def pick(self, bucket: Bucket) -> Tensor:
        """Returns (m,): the sub-model's entries of a bucket of whole parameters, in order."""
        parts = [self.of(p.name, bucket.data[p.start : p.stop]).reshape(-1) for p in bucket.parts]
        return parts[0].clone() if len(parts) == 1 else _cat(parts)

    def numel(self, bucket: Bucket) -> int:
        return sum(self._numel(p.name, p.stop - p.start) for p in bucket.parts)

    @outlined(lambda *_: None)
    def mix(self, bucket: Bucket, values: Tensor, share: float = 1.0) -> None:
        """Moves the bucket's entries in the sub-model by `share` towards `values`, (m,)."""
        at = 0
        for p in bucket.parts:
            whole = bucket.data[p.start : p.stop]
            own = self.of(p.name, whole)
            came = values[at : at + own.numel()].view(own.shape)
            at += own.numel()
            self.put(p.name, whole, came if share == 1.0 else own.lerp(came, share))

    def _numel(self, name: str, whole: int) -> int:
        for cut, index in self._cuts.get(name, ()):
            whole = whole // cut.view[cut.dim] * index.numel()
        return whole


def _put(x: Tensor, cuts: list[tuple[Cut, Tensor]], values: Tensor) -> None:
    """Writes into the entries of `x` that remain after all cuts."""
    (cut, index), *inner = cuts
    if inner:
        some = x.index_select(cut.dim, index)
        _put(some, inner, values)
        values = some
    x.index_copy_(cut.dim, index, values.view(*x.shape[: cut.dim], index.numel(), *x.shape[cut.dim + 1 :]))


def _cat(parts: list[Tensor]) -> Tensor:
    from torch import cat

    return cat(parts)
