"""A rank that trains a part of its model: matrices of fewer rows and columns, and an optimizer of their own.

What is not cut is trained where it lies. The whole parameters, which `params` gives at any time, change when the part
is put back into them. A pass makes fewer operations and keeps less, which hosts are told as a share.

With sizes only ranks have one model among them: nothing is put in its place, and numbers are all that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from workbench.experiment import Experiment
from workbench.host.passes.hidden import units_of
from workbench.host.passes.part import Smaller, computes, place, restore, sized, smaller
from workbench.rank import Entries, StrategyError, Units
from workbench.settings import KnobError
from workbench.tasks import Learner


class Narrowing:
    """One rank's way into a part of its model, and out again

    made:  makes the run's optimizer, at its present rate, for these parameters
    now:   the run as it is
    lies:  does the model have values of this rank's own?
    """

    def __init__(self, model: nn.Module, learner: Learner, made: Callable[[list[nn.Parameter]], Any],
                 now: Callable[[], Experiment], lies: bool = True) -> None:  # fmt: skip
        self._model, self._learner, self._made, self._now, self._lies = model, learner, made, now, lies
        self._cuts: list[Smaller] = []
        self._entries: Entries | None = None
        self._optimizer: Any = None
        self._shares = {"forward": 1.0, "backward": 1.0, "update": 1.0}
        self.counts: tuple[int, ...] = ()  # of each units, how many the part keeps; none: it is the whole

    @cached_property
    def units(self) -> list[Units]:
        """Of which it can be without some. Raises StrategyError where there are none."""
        try:
            return units_of(self._model, self._learner)
        except KnobError as error:
            raise StrategyError(str(error)) from error

    @property
    def narrow(self) -> bool:
        return self._entries is not None

    def share(self, phase: str) -> float:
        """What a phase computes of what it does for the whole model."""
        return 1.0 if self._entries is None else self._shares[phase]

    def require_awaited(self, exchanged: bool) -> None:
        """Raises StrategyError where the whole model's gradients are asked for, and there are a part's."""
        if exchanged and self.narrow:
            raise StrategyError(
                "a sub-model's gradients stay with it: await rank.backward() whole and rank.update(), or ask for "
                "narrow(None) first"
            )

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters of the part that are not the whole model's."""
        return [cut.small for cut in self._cuts]

    @property
    def state(self) -> dict[Any, Any]:
        """What its optimizer remembers."""
        return self._optimizer.state if self._optimizer is not None else {}

    def to(self, kept: list[Tensor] | None, scaled: bool = False) -> float:
        """The part that keeps these of each of the units, or the whole; of a forward's operations, those it makes."""
        if self.narrow:
            self._back()
        if kept is None:
            return 1.0
        if [len(kept), *(each.numel() > 0 for each in kept)] != [len(self.units), *[True] * len(self.units)]:
            raise StrategyError(f"narrow: a sub-model keeps some of each of the {len(self.units)} kinds of units")
        self._entries, self.counts = Entries(self.units, kept), tuple(index.numel() for index in kept)
        model, units = self._model, self.units
        cuts = smaller(model, units, kept) if self._lies else sized(model, units, self.counts)
        forward = computes(self._now(), self._learner, self.units, self.counts)
        params = [p for p in self._model.parameters() if p.requires_grad]
        numel = sum(p.numel() for p in params)
        small = numel - sum(cut.whole.numel() - cut.small.numel() for cut in cuts)
        forward = small / numel if forward is None else forward
        self._shares = {"forward": forward, "backward": forward, "update": small / numel}
        self._cuts = cuts
        if self._lies:
            for each, n in zip(self.units if scaled else (), self.counts, strict=False):
                next(cut for cut in cuts if cut.name == each.reader).grow(each.size / n)
            place(cuts)
            self._optimizer = self._made([p for p in self._model.parameters() if p.requires_grad])
        return forward

    def _back(self) -> None:
        """The whole model again, with what the part has learned."""
        entries, self._entries, self.counts = self._entries, None, ()
        assert entries is not None
        if self._lies:
            restore(self._cuts)
            for cut in self._cuts:
                entries.put(cut.name, cut.whole.data, cut.small.data.div(cut.scale))
        self._cuts, self._optimizer = [], None

    def step(self, longest: float, by: Callable[[], None] | None) -> float | None:
        """One step of the part's optimizer; the norm of its gradient if that was not to be above `longest`."""
        norm = None
        params = [p for p in self._model.parameters() if p.requires_grad]
        if longest:
            norm = float(nn.utils.clip_grad_norm_(params, longest))
        (by or self._optimizer.step)()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    @contextmanager
    def within(self) -> Iterator[nn.Module]:
        """With sizes only: inside, the model is the part."""
        place(self._cuts)
        try:
            yield self._model
        finally:
            restore(self._cuts)
