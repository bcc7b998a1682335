"""Messages between two stages: activations and gradients, or a codec's payloads of them.

An empty tensor precedes a payload. Its shape holds the number of tensors and the decoded shape. If a codec sends only a
part of an activation, as TopK does, only this part of the gradient crosses. Both stages know it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.compressors import Codec, Coder
from workbench.host.passes.coded_exchange import require_floats
from workbench.partitions import Partition
from workbench.rank import Op, Rank

Entry = tuple[int, int]  # micro-batch, receiving piece


class StageMessages:
    """One stage's messages, until the pipeline flushes."""

    def __init__(self, rank: Rank, partition: Partition) -> None:
        self.rank, self.pieces = rank, partition.pieces
        self._there, self._back, self.masks = partition.between(rank.memory)
        self._chosen: dict[Entry, Coder] = {}  # sent parts of activations, until their gradients cross
        self._shapes: dict[Entry, torch.Size] = {}  # of whole activations, on the sender

    async def send_activation(self, x: Tensor, to: int, entry: Entry) -> None:
        name = self._name_message("activation", entry)
        if self._there is None:
            await self.rank.send(x, to, name)
            return
        payload = await self._send_payload(x, to, name, self._there)
        self._note_choice(entry, payload)
        self._shapes[entry] = x.shape

    async def receive_activation(self, source: int, entry: Entry) -> Tensor:
        name = self._name_message("activation", entry)
        if self._there is None:
            return await receive_tensor(self.rank, source, name)
        payload, x = await self._receive_payload(source, name, self._there)
        self._note_choice(entry, payload)
        return x

    async def send_gradient(self, grad: Tensor, to: int, entry: Entry) -> None:
        name, chosen = self._name_message("gradient", entry), self._chosen.pop(entry, None)
        (x,) = (grad,) if chosen is None else chosen.encode(grad)
        if self._back is None:
            await self.rank.send(x, to, name)
        else:
            await self._send_payload(x, to, name, self._back)

    async def receive_gradient(self, source: int, entry: Entry) -> Tensor:
        name, chosen = self._name_message("gradient", entry), self._chosen.pop(entry, None)
        shape = self._shapes.pop(entry, None)
        if self._back is None:
            x = await receive_tensor(self.rank, source, name)
        else:
            _, x = await self._receive_payload(source, name, self._back)
        if chosen is None:
            return x
        assert shape is not None
        return chosen.decode((x,), x.new_empty(shape))

    async def _send_payload(self, x: Tensor, to: int, name: str, coder: Any) -> Any:
        require_floats(x, name)
        payload = await Op("coded", f"encode {name}", lambda: coder.encode(x), x.nbytes)
        await self.rank.send(x.new_empty((0, len(payload), *x.shape)), to, f"{name} shape")
        for number, part in enumerate(payload):
            await self.rank.send(part, to, name if not number else f"{name} part {number}")
        return payload

    async def _receive_payload(self, source: int, name: str, coder: Any) -> tuple[Any, Tensor]:
        said = await receive_tensor(self.rank, source, f"{name} shape")
        count, *shape = said.shape[1:]
        names = [name, *(f"{name} part {number}" for number in range(1, count))]
        payload = tuple([await receive_tensor(self.rank, source, each) for each in names])
        like = said.new_empty(shape)
        return payload, await Op("coded", f"decode {name}", lambda: coder.decode(payload, like), like.nbytes)

    def _note_choice(self, entry: Entry, payload: Any) -> None:
        if self.masks and isinstance(self._there, Codec) and (chosen := self._there.chosen(payload)) is not None:
            self._chosen[entry] = self._there.through(chosen)

    def _name_message(self, what: str, entry: Entry) -> str:
        micro, piece = entry
        return f"{what} {micro}" if self.pieces == 1 else f"{what} {micro} of piece {piece}"


async def receive_tensor(rank: Rank, source: int, kind: str) -> Tensor:
    """Raises ConnectionError if no message can come."""
    got = await rank.recv(None, source, kind)
    if got is None:
        raise ConnectionError(f"Connection closed by peer: stage {source} sent no {kind} before it ended")
    came: Tensor = got[0]
    return came
