"""What a rank can go back to where a step cannot be ended, for a peer is gone: the last boundary, or its own update.

A step that ends in one update of everything, after all that it exchanges, needs no copy: before the update the model
is as it was, and an update needs no peer. All other strategies write parameters between exchanges or in them, and what
an exchange that broke off has written is void; so does a change of strategy. For these the parameters, what the
optimizer remembers of them and the model's buffers are copied at each boundary. What a compressor remembers (a
residual) changes while gradients are sent, so that is copied under every strategy.

Copies are made where the run is to outlive its ranks. Where none is needed there is a way back in any case, for a
person may put out a rank that hangs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from workbench.experiment import Experiment
from workbench.host.changing import Changing
from workbench.host.reentry import unfit
from workbench.host.slots import slots

Key = tuple[str, str]  # of what kind, and its name


def updates_last(strategy: Any) -> bool:
    """Does a step of `strategy` end in one update of everything, with no exchange after it and no write before it?"""
    apart = strategy.periodic or strategy.late_update or strategy.has_background or strategy.shared
    return bool(strategy.clips and not apart and not strategy.shards)


class Rollback:
    """One rank's way back.

    wanted: whether anybody would go back: does the run outlive a rank, or what hangs?
    free:   is there a way back that costs nothing?
    open:   is the rank in something from which there is none?
    """

    def __init__(self, run: Changing) -> None:
        self.run = run
        self._kept: dict[Key, Tensor] = {}
        self._was: tuple[Experiment, Any] | None = None  # the experiment and the optimizer, while something goes on
        self._updated = False
        self.open = False

    @property
    def wanted(self) -> bool:
        e = self.run.experiment
        return (e.on_death != "end" or e.on_hang != "wait") and self.run.rank.size > 1 and not unfit(e)

    @property
    def free(self) -> bool:
        e, rank = self.run.experiment, self.run.rank
        return rank.size > 1 and not unfit(e) and updates_last(e.strategy) and not rank.memory.buffers

    @property
    def nbytes(self) -> int:
        """Of what is copied."""
        return sum(x.nbytes for x in self._kept.values())

    @contextmanager
    def within(self, changes: bool = False) -> Iterator[None]:
        """A step goes on, or something that `changes` the whole rank; what fails in it leaves it open."""
        if self._was is not None:  # a part of what goes on already
            yield
            return
        if not self.wanted and (changes or not self.free):
            self.open = True
            yield
            self.open = False
            return
        self._updated = False
        self._keep(self._all(changes or not updates_last(self.run.experiment.strategy)))
        self._was = self.run.experiment, self.run.optimizer
        yield
        self._was = None

    def updates(self) -> None:
        """The optimizer is about to update everything."""
        self._updated = True

    def back(self) -> int:
        """Puts this rank at a boundary, if it is not at one; how many steps after the one that it was in last.

        Where it is `open` there is no way back.
        """
        if self._was is None:
            return 0
        run = self.run
        (e, optimizer), self._was = self._was, None
        if self._updated and updates_last(e.strategy) and e is run.experiment:
            return 1
        if e.bucket_mb != run.experiment.bucket_mb:
            run.layout.rebucket(e.bucket_mb)
        run.experiment = e
        run.use_optimizer(optimizer)
        self._restore()
        return 0

    def _all(self, everything: bool) -> dict[Key, Tensor]:
        memory = self.run.rank.memory.buffers
        found = {(f"residual {kind}", name): x for kind, of in memory.items() for name, x in of.items()}
        if everything:
            layout, optimizer = self.run.layout, self.run.optimizer
            found |= {("parameter", place.name): place.param.data for place in layout.order}
            found |= {("buffer", name): x for name, x in self.run.model.named_buffers()}
            found |= {("slot", name): x for name, x in slots(layout, optimizer).items()}
        return found

    def _keep(self, state: dict[Key, Tensor]) -> None:
        """Copies `state` into what was kept before, where that has its shape."""
        for key in self._kept.keys() - state.keys():
            del self._kept[key]
        with torch.no_grad():
            for key, x in state.items():
                old = self._kept.get(key)
                if old is not None and old.shape == x.shape and old.dtype == x.dtype:
                    old.copy_(x)
                else:
                    self._kept[key] = x.detach().clone()

    def _restore(self) -> None:
        run, memory = self.run, self.run.rank.memory
        for kind in [k for k in memory.buffers if not any(key[0] == f"residual {k}" for key in self._kept)]:
            memory.drop(kind)
        kinds = {key[0] for key in self._kept}
        now = self._all("parameter" in kinds)
        with torch.no_grad():
            for key, x in now.items():
                if key in self._kept:
                    x.copy_(self._kept[key])
        for place in run.layout.order if "parameter" in kinds else ():
            made = run.optimizer.state.get(place.param, {})
            if made and not any(("slot", f"{slot}/{place.name}") in self._kept for slot in made):
                del run.optimizer.state[place.param]
