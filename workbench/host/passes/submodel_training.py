"""Lets a rank train a sub-model: smaller matrices, with an optimizer of their own.

Uncut parameters are trained in place. On leaving, a rank puts the sub-model's values into the whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from workbench.experiment import Experiment
from workbench.host.passes.hidden_units import find_units
from workbench.host.passes.submodel import (
    SmallerParameter,
    compute_share,
    make_sizes_only,
    make_smaller,
    place_smaller,
    restore_whole,
)
from workbench.rank import Entries, StrategyError, Units
from workbench.settings import KnobError
from workbench.tasks import Learner


class SubModelTraining:
    """Switches one rank's model. With sizes only, ranks share it.

    made:   returns the run's optimizer for these parameters, at its current rate
    lies:   whether the model holds this rank's own values
    counts: how many units of each kind the sub-model keeps; empty: the model is whole
    """

    def __init__(self, model: nn.Module, learner: Learner, made: Callable[[list[nn.Parameter]], Any],
                 now: Callable[[], Experiment], lies: bool = True) -> None:  # fmt: skip
        self._model, self._learner, self._made, self._now, self._lies = model, learner, made, now, lies
        self._cuts: list[SmallerParameter] = []
        self._entries: Entries | None = None
        self._optimizer: Any = None
        self._shares = {"forward": 1.0, "backward": 1.0, "update": 1.0}
        self.counts: tuple[int, ...] = ()

    @cached_property
    def hidden_units(self) -> list[Units]:
        """Raises StrategyError if there are none."""
        try:
            return find_units(self._model, self._learner)
        except KnobError as error:
            raise StrategyError(str(error)) from error

    @property
    def is_narrow(self) -> bool:
        return self._entries is not None

    def compute_share(self, phase: str) -> float:
        return 1.0 if self._entries is None else self._shares[phase]

    def require_awaited(self, exchanged: bool) -> None:
        if exchanged and self.is_narrow:
            raise StrategyError(
                "the gradients of a sub-model cannot be exchanged: await the whole rank.backward() and "
                "rank.update(), or call narrow(None) first"
            )

    @property
    def own_params(self) -> list[nn.Parameter]:
        """Only the sub-model has them."""
        return [cut.small for cut in self._cuts]

    @property
    def optimizer_state(self) -> dict[Any, Any]:
        return self._optimizer.state if self._optimizer is not None else {}

    def switch_to(self, kept: list[Tensor] | None, scaled: bool = False) -> float:
        """Switches to the sub-model that keeps these units, or to the whole model (None).

        Returns a forward's share of the whole model's operations. Raises StrategyError if `kept` lacks a kind.

        scaled: multiply weights that read k of F units by F / k
        """
        if self.is_narrow:
            self._restore_model()
        if kept is None:
            return 1.0
        if [len(kept), *(each.numel() > 0 for each in kept)] != [
            len(self.hidden_units),
            *[True] * len(self.hidden_units),
        ]:
            raise StrategyError(
                f"narrow: give the units to keep for each of the {len(self.hidden_units)} kinds of units"
            )
        self._entries, self.counts = Entries(self.hidden_units, kept), tuple(index.numel() for index in kept)
        model, units = self._model, self.hidden_units
        cuts = make_smaller(model, units, kept) if self._lies else make_sizes_only(model, units, self.counts)
        forward = compute_share(self._now(), self._learner, self.hidden_units, self.counts)
        params = [p for p in self._model.parameters() if p.requires_grad]
        numel = sum(p.numel() for p in params)
        small = numel - sum(cut.whole.numel() - cut.small.numel() for cut in cuts)
        forward = small / numel if forward is None else forward
        self._shares = {"forward": forward, "backward": forward, "update": small / numel}
        self._cuts = cuts
        if self._lies:
            for each, n in zip(self.hidden_units if scaled else (), self.counts, strict=False):
                next(cut for cut in cuts if cut.name == each.reader).scale_values(each.size / n)
            place_smaller(cuts)
            self._optimizer = self._made([p for p in self._model.parameters() if p.requires_grad])
        return forward

    def _restore_model(self) -> None:
        entries, self._entries, self.counts = self._entries, None, ()
        assert entries is not None
        if self._lies:
            restore_whole(self._cuts)
            for cut in self._cuts:
                entries.put(cut.name, cut.whole.data, cut.small.data.div(cut.scale))
        self._cuts, self._optimizer = [], None

    def step_optimizer(self, longest: float, by: Callable[[], None] | None) -> float | None:
        """Clips gradients and returns their norm, if `longest` > 0."""
        norm = None
        params = [p for p in self._model.parameters() if p.requires_grad]
        if longest:
            norm = float(nn.utils.clip_grad_norm_(params, longest))
        (by or self._optimizer.step)()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    @contextmanager
    def use_submodel(self) -> Iterator[nn.Module]:
        """Only for models with sizes only."""
        place_smaller(self._cuts)
        try:
            yield self._model
        finally:
            restore_whole(self._cuts)
