"""Bucket, a slice of the model for exchange. Memory, state by place in the model."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Generator, Tensor, dtype

MOMENTUM = "momentum"  # of a compressor's Memory; replaces the optimizer's


class Part(NamedTuple):
    """One parameter's place in a bucket: elements [start, stop) of the bucket's flat data."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Bucket:
    """A flat, named slice of the model's gradients or parameters.

    `data` is 1-D and contiguous; `offset` is its start in the model's flat vector. A bucket's state is in a `Memory` by
    place in the model. So it survives a change of bucket size.

    index:  the bucket's number, from 0
    data:   `(n,)` of one dtype
    parts:  the places of its parameters in `data`
    offset: its start in the model's flat vector
    kept:   the part of a gradient bucket that is left after `give_back`; else None
    forget: releases a bucket of gradients from its layout; else None
    """

    __slots__ = ("_places", "data", "forget", "index", "kept", "name", "offset", "parts")

    def __init__(self, index: int, data: Tensor, parts: tuple[Part, ...], offset: int,
                 forget: Callable[[], None] | None = None) -> None:  # fmt: skip
        self.index = index
        self.name = f"bucket {index}"
        self.data = data  # (n,) of one dtype
        self.parts = parts
        self.offset = offset
        self.kept: Tensor | None = None
        self.forget = forget
        self._places = ""

    @property
    def places(self) -> str:
        """The joined names of its parameters, as a Memory's key."""
        if not self._places:
            self._places = "/".join([part.name for part in self.parts])
        return self._places

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.data.numel() * self.data.element_size()

    def shard(self, index: int, size: int) -> Bucket:
        """Returns one of `size` slices of ceil(n / size) elements, at its place. The last may be shorter.

        index:  the slice, from 0
        size:   number of slices
        """
        n, whole = -(-self.data.numel() // size), self.data.numel()
        start, stop = min(index * n, whole), min((index + 1) * n, whole)
        cut = [(p.name, max(p.start, start) - start, min(p.stop, stop) - start) for p in self.parts]
        parts = tuple(Part(name, (to - at,), at, to) for name, at, to in cut if to > at)
        return Bucket(self.index, self.data[start:stop], parts, self.offset + start)

    def give_back(self, kept: Tensor) -> None:
        """Keeps only `kept`, which is stored elsewhere. The layout of these gradients releases its memory.

        kept:  a part of the gradients, `(m,)`
        """
        self.kept = kept
        if self.forget is not None:
            self.forget()

    def allocate(self) -> None:
        """Allocates zeros for its elements."""
        self.data = self.data.new_zeros(self.data.numel())

    def release(self) -> None:
        """Frees the memory of its elements. Their stand-in is one zero."""
        self.data = self.data.new_zeros(1).expand(self.data.numel())

    def release_used(self) -> None:
        """Drops what is left after `give_back`, and gradients that are a parameter's own, after their last use."""
        self.kept = None
        if len(self.parts) == 1 and self.data.stride(0):
            self.release()

    def like(self, data: Tensor) -> Bucket:
        """Returns a bucket at the same place with other data.

        data:  of the same length
        """
        made = Bucket(self.index, data, self.parts, self.offset)
        made._places = self._places
        return made

    def __repr__(self) -> str:
        return f"{self.name} ({self.nbytes / 1e6:.2f} MB, {len(self.parts)} parameters)"


class Memory:
    """The state that a compressor or a strategy keeps per element or per parameter on one rank.

    `flat` keeps one value per element of the model, such as an error-feedback residual or an anchor. `parts` keeps one
    object per parameter, such as a PowerSGD factor. Their keys are places in the model, never buckets. `generator`
    draws this rank's own random numbers.

    seed:    of the random numbers
    name:    of the values, such as "residual"
    bucket:  the bucket of gradients or parameters that the values belong to
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.buffers: dict[str, dict[str, Tensor]] = {}  # name -> parameter -> (n,)
        self.parts: dict[str, dict[str, Any]] = {}  # name -> parameter -> anything
        self._joined: dict[tuple[str, str], Tensor] = {}
        self._generator: dict[str, Generator] = {}

    @property
    def draws(self) -> bool:
        """Whether it has drawn random numbers."""
        return bool(self._generator)

    def generator(self, device: Any = "cpu") -> Generator | None:
        """Returns the generator for tensors on a device. It differs between ranks and repeats for the same seed.

        device:  torch's device or its name

        None for torch's meta device, because its tensors have no values.
        """
        if str(device) == "meta":
            return None
        if str(device) not in self._generator:
            from torch import Generator

            self._generator[str(device)] = Generator(device).manual_seed(self.seed)
        return self._generator[str(device)]

    def flat(self, name: str, bucket: Bucket, kind: dtype | None = None) -> Tensor:
        """Returns the buffer for a bucket: `(n,)`, initially zero.

        kind:  its dtype. None: the bucket's

        The tensor is contiguous and shared: writing into it changes the memory. It is cut again if the bucket's
        parameters change.
        """
        key = (name, bucket.places)
        found = self._joined.get(key)
        return self._join(name, key, bucket, kind) if found is None else found

    def keep(self, name: str, bucket: Bucket, values: Tensor) -> None:
        """Replaces the tensor of `flat` for a bucket without a copy.

        values:  `(n,)`
        """
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
        """Returns a copy with its own tensors. Both share the random generators."""
        made = Memory(self.seed)
        made.copy_from(self)
        return made

    def copy_from(self, other: Memory) -> None:
        """Takes over copies of another Memory's tensors; both share the random generators.

        other:  the Memory to copy
        """
        buffers = {kind: {name: x.clone() for name, x in of.items()} for kind, of in other.buffers.items()}
        self.restore(buffers, deepcopy(other.parts), other.seed, other._generator)

    def begin_anew(self) -> None:
        """Drops everything but the seed. The random generators begin again."""
        self.restore({}, {}, self.seed, {})

    def restore(self, buffers: dict[str, dict[str, Tensor]], parts: dict[str, dict[str, Any]], seed: int,
                generators: dict[str, Generator]) -> None:  # fmt: skip
        """Takes over saved state in place of its own.

        buffers:     `(n,)` by name and parameter
        parts:       objects by name and parameter
        generators:  by device
        """
        self.buffers, self.parts, self._joined = buffers, parts, {}
        self.seed, self._generator = seed, generators

    def clear(self) -> None:
        """Drops all buffers. The random generators continue."""
        for name in {*self.buffers, *self.parts}:
            self.drop(name)

    def drop(self, name: str) -> None:
        """Drops the values of one name."""
        self.buffers.pop(name, None)
        self.parts.pop(name, None)
        self._joined = {k: v for k, v in self._joined.items() if k[0] != name}
