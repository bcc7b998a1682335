"""Messages between ranks: the sender does not wait, and the receiver takes them in order of arrival."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from torch import Tensor

from workbench.rank import StrategyError, message_name
from workbench.sim.clock.fiber import Fiber
from workbench.sim.clock.world_state import WorldState
from workbench.sim.costs.even_ranks import SIMULATE_ALL


class Message(NamedTuple):
    """A message with data of any shape."""

    source: int
    to: int
    kind: str
    data: Tensor


class _PendingReceive(NamedTuple):
    """A fiber that waits for a message from `source`, `replayed` (the recorded sender) or any rank."""

    fiber: Fiber
    into: Tensor | None
    source: int | None
    replayed: int | None
    kind: str
    since: float

    def accepts_message(self, message: Message) -> bool:
        anyone = self.source is self.replayed is None
        return anyone or message.source in (self.source, self.replayed)


class Mailboxes:
    """Messages of a simulated run."""

    def __init__(self, world: WorldState) -> None:
        self.world = world
        self._come: dict[tuple[int, str], deque[Message]] = {}
        self.waiting: dict[tuple[int, str], list[_PendingReceive]] = {}

    def send(self, fiber: Fiber, tensor: Tensor, to: int, kind: str) -> None:
        world, source = self.world, fiber.host.index
        if not 0 <= to < world.size:
            raise StrategyError(f"a message to rank {to}: there are ranks 0 to {world.size - 1}")
        if to >= world.first:
            raise StrategyError(
                f"a message to rank {to}, which is not simulated, because another rank stands for it; {SIMULATE_ALL}"
            )
        nbytes = tensor.numel() * tensor.element_size()
        now = world.clock.now
        begins, left, comes = world.ports.price_message(now, fiber.host.experiment.fabric, source, to, nbytes)
        if to != source:
            fiber.host.span("comm", message_name("send", kind, to=to), now, begins, left, nbytes)
            fiber.host.count_sent(nbytes)
        fiber.host.memory_account.buffers.note_message(tensor)
        data = tensor if tensor.is_meta else tensor.clone()
        world.clock.resume_at(comes, _Arrival(self, Message(source, to, kind, data)))

    def recv(self, fiber: Fiber, into: Tensor | None, source: int | None, kind: str) -> Any:
        """Returns the next message of `kind`, or parks the fiber until one arrives."""
        world, index = self.world, fiber.host.index
        replayed = world.replay.next_sender(index, kind) if world.replay is not None and source is None else None
        wait = _PendingReceive(fiber, into, source, replayed, kind, world.clock.now)
        come = self._come.setdefault((index, kind), deque())
        for message in come:
            if wait.accepts_message(message):
                come.remove(message)
                return self._take_message(wait, message)
        self.waiting.setdefault((index, kind), []).append(wait)
        return fiber.park(("recv", kind, source))

    def deliver_message(self, message: Message) -> None:
        if self.world.missed:
            return
        waiting = self.waiting.get((message.to, message.kind), [])
        for place, wait in enumerate(waiting):
            if wait.accepts_message(message):
                del waiting[place]
                return wait.fiber.wake(self._take_message(wait, message))
        self._come.setdefault((message.to, message.kind), deque()).append(message)

    def release_receiver(self) -> bool:
        """Answers None to a fiber that waits on a leaving rank. Returns False if no fiber does.

        Call it when no event is pending.
        """
        for (index, kind), waiting in self.waiting.items():
            for place, wait in enumerate(waiting):
                if wait.fiber.host.leaving:
                    del waiting[place]
                    if wait.replayed is not None and self.world.replay is not None:
                        self.world.replay.return_sender(index, kind, wait.replayed)
                    wait.fiber.wake()
                    return True
        return False

    def _take_message(self, wait: _PendingReceive, message: Message) -> tuple[Tensor, int]:
        host, now = wait.fiber.host, self.world.clock.now
        if now > wait.since and wait.fiber.lane is None:
            name = message_name("recv", wait.kind, **{"from": wait.source})
            host.span("wait", name, wait.since, wait.since, now, 0)
        if wait.source is None:
            host.note(message_name("recv", wait.kind), message.source)
        return _copy_message(message, wait.into)


class _Arrival:
    """A message's arrival."""

    __slots__ = ("mail", "message")

    def __init__(self, mail: Mailboxes, message: Message) -> None:
        self.mail, self.message = mail, message

    def resume(self, _: Any) -> None:
        self.mail.deliver_message(self.message)


def _copy_message(message: Message, into: Tensor | None) -> tuple[Tensor, int]:
    if into is None:
        return message.data, message.source
    if into.numel() != message.data.numel() or into.dtype != message.data.dtype:
        raise StrategyError(
            f"rank {message.source} sent {tuple(message.data.shape)} {message.data.dtype} of {message.kind!r} to rank "
            f"{message.to}, which has room for {tuple(into.shape)} {into.dtype}: both ends must agree"
        )
    if not into.is_meta:
        into.copy_(message.data.view(into.shape))
    return into, message.source
