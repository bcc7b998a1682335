"""Exchanges a codec's payloads in the middle of a pass, in place of tensors.

Each tensor of a payload takes one ordinary meeting. All ranks decode the same payloads and add in rank order, so
results are bit-identical. A meeting itself sums a linear codec's payloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from workbench.compressors import Coder
from workbench.partitions import PLAIN, Coding
from workbench.rank import StrategyError

Payload = tuple[Tensor, ...]


@runtime_checkable
class ChoosingCoder(Coder, Protocol):
    """A Coder with more methods of a Codec."""

    @property
    def linear(self) -> bool: ...
    def chosen(self, payload: Payload) -> Tensor | None: ...
    def through(self, chosen: Tensor) -> Coder: ...


class MeetingKind(NamedTuple):
    """A meeting: how each rank's answer follows from the ranks' tensors.

    what: "sum" over ranks; "gather", concatenated along `dim`; "own", this rank's part of a tensor that all ranks have;
          "scatter", this rank's part of the sum; "swap", each rank's part for this rank; "", no meeting
    name: the tensor and its module, such as "activation blocks.0.mlp_out"
    """

    what: str
    name: str
    dim: int = -1


Ask = Callable[[MeetingKind, Tensor], Tensor]
Coded = Callable[[str, Callable[[], Any], int], Any]  # given a codec's name, work, bytes


def run_unrecorded(name: str, work: Callable[[], Any], nbytes: int) -> Any:
    """Runs a codec's work."""
    return work()


class GroupPeers(NamedTuple):
    """The tensor-parallel group, of `ways` ranks.

    ask:    performs a meeting and returns its answer
    coding: codecs of activations and of their gradients
    """

    ask: Ask
    ways: int
    coding: Coding = PLAIN
    coded: Coded = run_unrecorded

    def encode(self, x: Tensor, meeting: MeetingKind, coder: Coder) -> Payload:
        """Raises StrategyError if `x` is complex."""
        require_floats(x, meeting.name)
        made: Payload = self.coded(f"encode {meeting.name}", lambda: coder.encode(x), x.nbytes)
        return made

    def decode(self, payload: Payload, like: Tensor, meeting: MeetingKind, coder: Coder) -> Tensor:
        """Returns a tensor of the shape and dtype of `like`."""
        made: Tensor = self.coded(f"decode {meeting.name}", lambda: coder.decode(payload, like), like.nbytes)
        return made


def require_floats(x: Tensor, name: str) -> None:
    """Raises StrategyError for complex numbers, because codecs drop imaginary parts."""
    if x.is_complex():
        kind = str(x.dtype)[6:]
        raise StrategyError(f"{name}: compressors take real floats, and this tensor has {kind}; take "
        f"activations=Dense() and "
                            f"gradients=Dense()")  # fmt: skip


def exchange_tensor(x: Tensor, others: GroupPeers, meeting: MeetingKind, coder: Coder | None) -> tuple[Tensor, Payload]:
    """Returns a meeting's answer, and the payloads, if any."""
    if not meeting.what:
        return x.view_as(x), ()
    if coder is None or meeting.what == "own":
        return others.ask(meeting, x), ()
    if meeting.what == "scatter":
        return _scatter_sum(x, others, meeting, coder)
    payload = others.encode(x, meeting, coder)
    if meeting.what == "sum" and _is_linear(coder):
        summed = tuple(others.ask(MeetingKind("sum", name), part) for name, part in _name_parts(meeting, payload))
        return others.decode(summed, x, meeting, coder), payload
    return _decode_all(gather_payloads(payload, others, meeting), x, others, meeting, coder), payload


def gather_payloads(payload: Payload, others: GroupPeers, meeting: MeetingKind) -> list[Payload]:
    """Returns every rank's payload."""
    parts = [others.ask(MeetingKind("gather", name, 0), part[None]) for name, part in _name_parts(meeting, payload)]
    return list(zip(*parts, strict=True))


def join_payloads(every: list[Payload], like: Tensor, others: GroupPeers, meeting: MeetingKind, coder: Coder) -> Tensor:
    """Concatenates all ranks' decoded payloads."""
    return torch.cat([others.decode(one, like, meeting, coder) for one in every], meeting.dim)


def _decode_all(every: list[Payload], like: Tensor, others: GroupPeers, meeting: MeetingKind, coder: Coder) -> Tensor:
    how = join_payloads if meeting.what == "gather" else _add_payloads
    return how(every, like, others, meeting, coder)


def _add_payloads(every: list[Payload], like: Tensor, others: GroupPeers, meeting: MeetingKind, coder: Coder) -> Tensor:
    total = others.decode(every[0], like, meeting, coder).clone()
    for one in every[1:]:
        total += others.decode(one, like, meeting, coder)
    return total


def _scatter_sum(x: Tensor, others: GroupPeers, meeting: MeetingKind, coder: Coder) -> tuple[Tensor, Payload]:
    parts = cut_parts(x, others.ways, meeting)
    payloads = [others.encode(part, meeting, coder) for part in parts]
    rows = [torch.stack(same) for same in zip(*payloads, strict=True)]
    sent = tuple(part for payload in payloads for part in payload)
    if _is_linear(coder):
        summed = tuple(
            others.ask(MeetingKind("scatter", name, 0), row)[0] for name, row in _name_parts(meeting, tuple(rows))
        )
        return others.decode(summed, parts[0], meeting, coder), sent
    came = [others.ask(MeetingKind("swap", name, 0), row) for name, row in _name_parts(meeting, tuple(rows))]
    return _add_payloads(list(zip(*came, strict=True)), parts[0], others, meeting, coder), sent


def list_choices(payload: Payload, coding: Coding, count: int) -> Payload:
    """Returns the choices in `count` parts' payloads that mask the gradient."""
    if not (payload and coding.masks and isinstance(coding.there, ChoosingCoder)):
        return ()
    each = len(payload) // count
    found = [coding.there.chosen(payload[k * each : (k + 1) * each]) for k in range(count)]
    return tuple(one for one in found if one is not None)


def mask_gradient(grad: Tensor, chosen: Payload, coding: Coding, dim: int) -> Tensor:
    """Masks the gradient of a tensor that crossed in parts along `dim`."""
    if not chosen:
        return grad
    assert isinstance(coding.there, ChoosingCoder)
    ways = [coding.there.through(one) for one in chosen]
    parts = grad.chunk(len(ways), dim)
    return torch.cat([way.decode(way.encode(part), part) for way, part in zip(ways, parts, strict=True)], dim)


def _is_linear(coder: Coder) -> bool:
    return isinstance(coder, ChoosingCoder) and coder.linear


def _name_parts(meeting: MeetingKind, payload: Payload) -> list[tuple[str, Tensor]]:
    names = [meeting.name, *(f"{meeting.name} part {number}" for number in range(1, len(payload)))]
    return list(zip(names, payload, strict=True))


def cut_parts(x: Tensor, count: int, meeting: MeetingKind) -> list[Tensor]:
    """Raises StrategyError if the parts cannot be equal."""
    if x.shape[meeting.dim] % count:
        raise StrategyError(
            f"{meeting.name}: {x.shape[meeting.dim]} positions cannot be split evenly over {count} ranks; take a "
            f"sequence length that is a multiple of {count}, or sequence=false"
        )
    return list(x.chunk(count, meeting.dim))
