"""When in a pass the ranks of a tensor-parallel group meet, and with how much: from one pass that computes nothing."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from workbench.host.layout import Layout
from workbench.host.splitting import Split
from workbench.host.together import Meeting, computing
from workbench.tasks import Learner


class Planned(NamedTuple):
    """A meeting to come.

    share:  of the pass, what is computed before
    brings: a tensor like that which each rank brings
    """

    share: float
    meeting: Meeting
    brings: Tensor


class Plans(NamedTuple):
    """The meetings of a pass, and in which order gradients come.

    forward:  in order; what is computed counts by its floating-point operations
    backward: in order, with how many gradients have come before
    arrival:  names of parameters
    """

    forward: tuple[Planned, ...] = ()
    backward: tuple[tuple[int, Meeting, Tensor], ...] = ()
    arrival: tuple[str, ...] = ()

    def of(self, phase: str, layout: Layout) -> list[Planned]:
        """The meetings of a phase on a rank that trains what `layout` has: backward counts as the elements come."""
        if phase != "backward":
            return list(self.forward)
        numel = {place.name: place.numel for place in layout.order}
        sums = [0, *accumulate(numel.get(name, 0) for name in self.arrival)]
        return [Planned(sums[count] / (layout.numel or 1), meeting, x) for count, meeting, x in self.backward]


def planned(part: nn.Module, learner: Learner, split: Split, batch: Any) -> Plans:
    """The meetings of one forward and one backward. part: the model on the meta device, with one rank's slices.

    Raises what a model raises that does not run on the meta device.
    """
    ahead: list[tuple[int, Meeting, Tensor]] = []
    back: list[tuple[int, Meeting, Tensor]] = []
    arrival: list[str] = []

    def ask(meeting: Meeting, x: Tensor) -> Tensor:
        if turned:
            back.append((len(arrival), meeting, x.detach()))
        else:
            ahead.append((counter.get_total_flops(), meeting, x.detach()))
        return answer_like(meeting, x, split.ways)

    def came(name: str, _: Any) -> None:
        arrival.append(name)

    trained = [(name, p) for name, p in part.named_parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(partial(came, name)) for name, p in trained]
    try:
        with computing(part, split, 0, ask, draws=False), torch.enable_grad():
            turned = False
            with FlopCounterMode(display=False) as counter:
                loss = learner.loss(part, batch)
            turned = True
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
        part.zero_grad(set_to_none=True)
    flops = counter.get_total_flops() or 1
    forward = tuple(Planned(done / flops, meeting, x) for done, meeting, x in ahead)
    return Plans(forward, tuple(back), tuple(arrival))


def answer_like(meeting: Meeting, x: Tensor, ways: int) -> Tensor:
    """A tensor of the answer's shape."""
    if meeting.what == "gather":
        return x.new_empty((*x.shape[:-1], x.shape[-1] * ways))
    return x.chunk(ways, -1)[0] if meeting.what == "own" else torch.empty_like(x)
