"""A slice of the model that travels together, and what is remembered about places in the model. No verb lives here."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Generator, Tensor, dtype

MOMENTUM = "momentum"  # the buffer of a compressor's Memory for the optimizer's momentum, where it keeps that itself


class Part(NamedTuple):
    """One parameter's place inside a bucket: elements [start, stop) of the bucket's flat data."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Bucket:
    """A flat, named slice of the model's gradients or parameters.

    `data` is 1-D and contiguous; `offset` is where it begins in the model's flat vector. State that belongs
    to it is kept in a `Memory`, by place in the model, so it survives a change of bucket size.

    kept:   of a bucket of gradients that gave its memory back, what is left of them; else None
    forget: of a bucket of gradients, what makes its layout hold them no longer; else None
    """

    __slots__ = ("_places", "data", "forget", "index", "kept", "name", "offset", "parts")

    def __init__(self, index: int, data: Tensor, parts: tuple[Part, ...], offset: int) -> None:
        self.index = index
        self.name = f"bucket {index}"
        self.data = data  # (n,) of one dtype; buckets never mix dtypes
        self.parts = parts
        self.offset = offset
        self.kept: Tensor | None = None
        self.forget: Callable[[], None] | None = None
        self._places = ""

    @property
    def places(self) -> str:
        """The names of its parameters, by which a Memory finds what it keeps of this slice."""
        if not self._places:
            self._places = "/".join([part.name for part in self.parts])
        return self._places

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def shard(self, index: int, size: int) -> Bucket:
        """The `index`-th of `size` slices of ceil(n / size) elements (the last may be shorter), at its place."""
        n, whole = -(-self.data.numel() // size), self.data.numel()
        start, stop = min(index * n, whole), min((index + 1) * n, whole)
        cut = [(p.name, max(p.start, start) - start, min(p.stop, stop) - start) for p in self.parts]
        parts = tuple(Part(name, (to - at,), at, to) for name, at, to in cut if to > at)
        return Bucket(self.index, self.data[start:stop], parts, self.offset + start)

    def give_back(self, kept: Tensor) -> None:
        """Of these gradients only `kept`, which lies elsewhere, is left; its layout makes room for the next ones."""
        self.kept = kept
        if self.forget is not None:
            self.forget()

    def like(self, data: Tensor) -> Bucket:
        """The same place in the model holding other data of the same length."""
        made = Bucket(self.index, data, self.parts, self.offset)
        made._places = self._places
        return made

    def __repr__(self) -> str:
        return f"{self.name} ({self.nbytes / 1e6:.2f} MB, {len(self.parts)} parameters)"


class Memory:
    """What a compressor or a strategy remembers per element or per parameter, on one rank.

    `flat` keeps one value per element of the model (an error-feedback residual, an anchor); `parts` keeps
    one object per parameter (a PowerSGD factor). Both are addressed by place in the model, never by bucket.
    `generator` draws this rank's own random numbers, which touch nobody else's.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.buffers: dict[str, dict[str, Tensor]] = {}  # name -> parameter -> (n,)
        self.parts: dict[str, dict[str, Any]] = {}  # name -> parameter -> anything
        self._joined: dict[tuple[str, str], Tensor] = {}
        self._generator: dict[str, Generator] = {}

    @property
    def draws(self) -> bool:
        """Has it drawn random numbers?"""
        return bool(self._generator)

    def generator(self, device: Any = "cpu") -> Generator | None:
        """Random numbers for tensors on `device`: other ones on every rank, the same in every run of one seed.

        None for tensors without values (torch's meta device), for which nothing is drawn.
        """
        if str(device) == "meta":
            return None
        if str(device) not in self._generator:
            from torch import Generator

            self._generator[str(device)] = Generator(device).manual_seed(self.seed)
        return self._generator[str(device)]

    def flat(self, name: str, bucket: Bucket, kind: dtype | None = None) -> Tensor:
        """The buffer's values for `bucket`: (n,) in the bucket's dtype or in `kind`, zero when first asked for.

        Contiguous and shared: writing into it is remembered. Cut anew when the bucket's parameters change.
        """
        key = (name, bucket.places)
        found = self._joined.get(key)
        return self._join(name, key, bucket, kind) if found is None else found

    def keep(self, name: str, bucket: Bucket, values: Tensor) -> None:
        """`values`, (n,), take the place of what `flat` gave for `bucket`, without being copied."""
        self._joined[name, bucket.places] = values
        for part in bucket.parts:
            self.buffers[name][part.name] = values[part.start : part.stop]

    def _join(self, name: str, key: tuple[str, str], bucket: Bucket, kind: dtype | None) -> Tensor:
        pieces = self.buffers.setdefault(name, {})
        whole = bucket.data.new_zeros(bucket.data.numel(), dtype=kind)
        for part in bucket.parts:
            if part.name in pieces:
                whole[part.start : part.stop] = pieces[part.name]
        here = {part.name for part in bucket.parts}
        for old in [k for k in self._joined if k[0] == name and here & set(k[1].split("/"))]:
            del self._joined[old]
        for part in bucket.parts:
            pieces[part.name] = whole[part.start : part.stop]
        self._joined[key] = whole
        return whole

    def copied(self) -> Memory:
        """The same values in memory of their own; the random numbers go on together."""
        made = Memory(self.seed)
        made.buffers = {kind: {name: x.clone() for name, x in of.items()} for kind, of in self.buffers.items()}
        made.parts, made._generator = deepcopy(self.parts), self._generator
        return made

    def clear(self) -> None:
        """Forgets everything but how its random numbers go on."""
        for name in {*self.buffers, *self.parts}:
            self.drop(name)

    def drop(self, name: str) -> None:
        """Forgets a buffer."""
        self.buffers.pop(name, None)
        self.parts.pop(name, None)
        self._joined = {k: v for k, v in self._joined.items() if k[0] != name}
