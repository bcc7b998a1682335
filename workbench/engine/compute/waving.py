"""Performs waves through pieces of a model and passes of sub-models on the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench.engine.compute.compute import Compute
from workbench.host.passes.pipelining import pass_name
from workbench.rank import StrategyError


class Waving(Compute):
    """The part of a Host that computes parts of a model. waves, narrowing: its session's, once it has a model"""

    waves: Any = None
    batches: Callable[[], Any]

    def _pieces(self, most: int) -> int:
        return self.waves.count(most)

    def _rise(self, micro: int, piece: int, of: int, falls: bool) -> torch.Tensor | None:
        self._turn("forward", micro, piece, of)
        with torch.enable_grad():
            drawn, loss = self.waves.rise(self.batches, micro, piece, of, falls)
        if loss is not None:
            self.losses.append(loss.detach())
            if not falls:
                self._open[micro] = loss
            self._look_at_loss(drawn)
        self.ledger.forward(drawn)
        self.paced(1.0)
        self._computed()
        return None if loss is None else self.losses[-1]

    def _fall(self, micro: int, piece: int, of: int, grad: float) -> None:
        self._turn("backward", micro, piece, of)
        with self.ledger.backward(False):
            self.waves.fall(micro, piece, of, grad)
        self.paced(1.0)
        self._computed()

    def _turn(self, phase: str, micro: int, piece: int, of: int) -> None:
        self.at(f"{phase} of wave {micro}")
        self.begin_pass(phase)
        self._stretch = pass_name(phase, micro, piece, of), self.watch.now()
        again = self.again(phase) if phase == "backward" else 0.0
        self.pace.begin(phase, self.rank.step, self._share * self.waves.share(piece, of), again)

    def _narrow(self, kept: list[torch.Tensor] | None, scaled: bool) -> float:
        if self._open:
            raise StrategyError("narrow: a forward is open; ask for its backward first")
        self.at("narrow")
        share: float = self.narrowing.to(kept, scaled)
        self.ledger.part(self.narrowing.trained)
        return share
