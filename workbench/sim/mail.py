"""Messages between two ranks: posted at once, taken in the order in which they come."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from workbench.ops import StrategyError
from workbench.sim.fiber import PARK, Fiber

if TYPE_CHECKING:
    from workbench.sim.world import World


class Letter(NamedTuple):
    """A message that has come, or is on its way: (any shape) data."""

    source: int
    to: int
    kind: str
    data: Tensor


class Mail:
    """All messages of a simulated run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._come: dict[tuple[int, str], deque[Letter]] = {}
        self._waiting: dict[tuple[int, str], list[tuple[Fiber, Tensor | None, int | None]]] = {}

    def send(self, fiber: Fiber, tensor: Tensor, to: int, kind: str) -> None:
        """Posts a copy of `tensor`; it comes when both ports have carried it."""
        world, source = self.world, fiber.host.index
        if not 0 <= to < world.size:
            raise StrategyError(f"a message to rank {to}: there are ranks 0 to {world.size - 1}")
        nbytes = tensor.numel() * tensor.element_size()
        now = world.clock.now
        begins, left, comes = world.ports.post(now, fiber.host.experiment.fabric, source, to, nbytes)
        if to != source:
            fiber.host.span("comm", f"send {kind}".rstrip(), now, begins, left, nbytes)
            fiber.host.sent += nbytes
        data = tensor if tensor.is_meta else tensor.detach().clone()
        world.clock.at(comes, _Arrival(self, Letter(source, to, kind, data)))

    def recv(self, fiber: Fiber, into: Tensor | None, source: int | None, kind: str) -> Any:
        """The next letter of `kind`, or the fiber waits for it."""
        key = fiber.host.index, kind
        for letter in self._come.get(key, ()):
            if source is None or letter.source == source:
                self._come[key].remove(letter)
                return _put(letter, into)
        fiber.on = ("recv", kind, source)
        self._waiting.setdefault(key, []).append((fiber, into, source))
        return PARK

    def come(self, letter: Letter) -> None:
        """A letter is here."""
        waiting = self._waiting.get((letter.to, letter.kind), [])
        for place, (fiber, into, source) in enumerate(waiting):
            if source is None or source == letter.source:
                del waiting[place]
                fiber.on = None
                return fiber.resume(_put(letter, into))
        self._come.setdefault((letter.to, letter.kind), deque()).append(letter)

    def nothing_more(self) -> bool:
        """Nothing is under way: who waits for a message while its rank leaves is told that none will come."""
        for waiting in self._waiting.values():
            for place, (fiber, _, _) in enumerate(waiting):
                if fiber.host.leaving:
                    del waiting[place]
                    fiber.on = None
                    fiber.resume(None)
                    return True
        return False


class _Arrival:
    """A letter's arrival."""

    __slots__ = ("letter", "mail")

    def __init__(self, mail: Mail, letter: Letter) -> None:
        self.mail, self.letter = mail, letter

    def resume(self, _: Any) -> None:
        self.mail.come(self.letter)


def _put(letter: Letter, into: Tensor | None) -> tuple[Tensor, int]:
    if into is None:
        return letter.data, letter.source
    if into.numel() != letter.data.numel() or into.dtype != letter.data.dtype:
        raise StrategyError(
            f"rank {letter.source} sent {tuple(letter.data.shape)} {letter.data.dtype} of {letter.kind!r} to rank "
            f"{letter.to}, which has room for {tuple(into.shape)} {into.dtype}: both ends must agree"
        )
    if not into.is_meta:
        into.copy_(letter.data.view(into.shape))
    return into, letter.source
