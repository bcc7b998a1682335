"""Several ranks' passes of a model in one process, where each needs what the others compute half way.

Each runs in a thread of its own, but only one at a time: until it asks for a meeting, or ends. Once all have asked they
are answered, with sums added up in rank order. So what comes out does not depend on how threads are scheduled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.host.passes.coded import Combining, parts_of

Work = Callable[[Callable[[Combining, Tensor], Tensor]], Any]


class _Left(BaseException):
    """Ends a pass that waits for others of which one has failed."""


class _Member:
    """One rank's pass. turn: it may run; rest: it has asked, ended or failed"""

    def __init__(self, work: Work) -> None:
        self.turn, self.rest = threading.Semaphore(0), threading.Semaphore(0)
        self.asked: tuple[Combining, Tensor] | None = None
        self.answer: Tensor | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.over = False
        self._grad = torch.is_grad_enabled()
        self._numbers = torch.get_rng_state()
        self._thread = threading.Thread(target=self._live, args=(work,), daemon=True)

    def run(self) -> None:
        """Until it asks, ends or fails."""
        torch.set_rng_state(self._numbers)
        if self._thread.ident is None:
            self._thread.start()
        self.turn.release()
        self.rest.acquire()
        self._numbers = torch.get_rng_state()

    def leave(self) -> None:
        """Ends it where it waits."""
        if self._thread.ident is not None:
            self.error = self.error or _Left()
            self.turn.release()
            self._thread.join()

    def _live(self, work: Work) -> None:
        self.turn.acquire()
        try:
            with torch.set_grad_enabled(self._grad):
                self.value = work(self._ask)
        except BaseException as error:
            self.error = error
        self.over, self.asked = True, None
        self.rest.release()

    def _ask(self, meeting: Combining, x: Tensor) -> Tensor:
        self.asked = meeting, x.detach()
        self.rest.release()
        self.turn.acquire()
        if self.error is not None:
            raise self.error
        answer, self.answer = self.answer, None  # who asked has it alone, and lets it go
        assert answer is not None
        return answer


def together(works: Sequence[Work]) -> list[Any]:
    """What each of them returns, given how it may ask the others. Raises what the first of them raises."""
    members = [_Member(work) for work in works]
    try:
        while not all(member.over for member in members):
            for member in members:
                if not member.over:
                    member.run()
                if member.error is not None:
                    raise member.error
            _answer(members)
    finally:
        for member in members:
            if not member.over:
                member.leave()
    return [member.value for member in members]


def _answer(members: list[_Member]) -> None:
    asked = [member.asked for member in members if member.asked is not None]
    if not asked:
        return
    meeting = asked[0][0]
    if len(asked) < len(members) or any(other != meeting for other, _ in asked):
        said = ", ".join(member.asked[0].name if member.asked else "the end" for member in members)
        raise RuntimeError(f"ranks that compute together must ask for the same in the same order; they came to {said}")
    for member, answer in zip(members, answered(meeting, [x for _, x in asked]), strict=True):
        member.asked, member.answer = None, answer


def answered(meeting: Combining, xs: list[Tensor]) -> list[Tensor]:
    """What each rank is answered, given what each brings."""
    if meeting.what == "own":
        return [parts_of(x, len(xs), meeting)[k].clone() for k, x in enumerate(xs)]
    if meeting.what == "gather":
        return [torch.cat(xs, meeting.dim) for _ in xs]
    if meeting.what == "swap":
        return [torch.stack([x[k] for x in xs]) for k in range(len(xs))]
    total = xs[0].clone()
    for other in xs[1:]:
        total += other
    return [total.clone() for _ in xs] if meeting.what == "sum" else parts_of(total, len(xs), meeting)
