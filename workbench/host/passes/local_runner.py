"""Runs several ranks' passes in one process, with meetings between them.

One pass's thread runs at a time, until it asks for a meeting or ends. Sums are in rank order. So results do not depend
on thread scheduling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.host.passes.coded_exchange import MeetingKind, cut_parts

Work = Callable[[Callable[[MeetingKind, Tensor], Tensor]], Any]


class _PassAborted(BaseException):
    """Ends a waiting pass after another has failed."""


class _LocalRank:
    """One rank's pass.

    turn: released when the pass may run
    rest: released when the pass has asked, ended or failed
    """

    def __init__(self, work: Work) -> None:
        self.turn, self.rest = threading.Semaphore(0), threading.Semaphore(0)
        self.asked: tuple[MeetingKind, Tensor] | None = None
        self.answer: Tensor | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.over = False
        self._grad = torch.is_grad_enabled()
        self._numbers = torch.get_rng_state()
        self._thread = threading.Thread(target=self._run_thread, args=(work,), daemon=True)

    def run_to_meeting(self) -> None:
        torch.set_rng_state(self._numbers)
        if self._thread.ident is None:
            self._thread.start()
        self.turn.release()
        self.rest.acquire()
        self._numbers = torch.get_rng_state()

    def take_answer(self, answer: Tensor) -> None:
        """Takes the answer to its request. The pass goes on in `run_to_meeting`."""
        self.asked, self.answer = None, answer

    def end_pass(self) -> None:
        if self._thread.ident is not None:
            self.error = self.error or _PassAborted()
            self.turn.release()
            self._thread.join()

    def _run_thread(self, work: Work) -> None:
        self.turn.acquire()
        try:
            with torch.set_grad_enabled(self._grad):
                self.value = work(self._request_meeting)
        except BaseException as error:
            self.error = error
        self.over, self.asked = True, None
        self.rest.release()

    def _request_meeting(self, meeting: MeetingKind, x: Tensor) -> Tensor:
        self.asked = meeting, x.detach()
        self.rest.release()
        self.turn.acquire()
        if self.error is not None:
            raise self.error
        answer, self.answer = self.answer, None  # lets the pass free it
        assert answer is not None
        return answer


def run_together(works: Sequence[Work]) -> list[Any]:
    """Runs all passes, each with a function that performs meetings.

    Raises a pass's first error, or RuntimeError if passes ask for different meetings.
    """
    members = [_LocalRank(work) for work in works]
    try:
        while not all(member.over for member in members):
            for member in members:
                if not member.over:
                    member.run_to_meeting()
                if member.error is not None:
                    raise member.error
            _answer_meeting(members)
    finally:
        for member in members:
            if not member.over:
                member.end_pass()
    return [member.value for member in members]


def _answer_meeting(members: list[_LocalRank]) -> None:
    asked = [member.asked for member in members if member.asked is not None]
    if not asked:
        return
    meeting = asked[0][0]
    if len(asked) < len(members) or any(other != meeting for other, _ in asked):
        said = ", ".join(member.asked[0].name if member.asked else "the end" for member in members)
        raise RuntimeError(
            f"ranks that compute a layer together must make the same requests in the same order; they made {said}"
        )
    for member, answer in zip(members, compute_answers(meeting, [x for _, x in asked]), strict=True):
        member.take_answer(answer)


def compute_answers(meeting: MeetingKind, xs: list[Tensor]) -> list[Tensor]:
    """Computes each rank's answer."""
    if meeting.what == "own":
        return [cut_parts(x, len(xs), meeting)[k].clone() for k, x in enumerate(xs)]
    if meeting.what == "gather":
        return [torch.cat(xs, meeting.dim) for _ in xs]
    if meeting.what == "swap":
        return [torch.stack([x[k] for x in xs]) for k in range(len(xs))]
    total = xs[0].clone()
    for other in xs[1:]:
        total += other
    return [total.clone() for _ in xs] if meeting.what == "sum" else cut_parts(total, len(xs), meeting)
