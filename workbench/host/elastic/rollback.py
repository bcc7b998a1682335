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

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from workbench.experiment import Experiment
from workbench.host.elastic.salvage import copies, in_parts
from workbench.host.placement.slots import slots
from workbench.host.transfer.boundary import Bound, Boundary, steps_apart, stood

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
    kept:   boundaries at which this rank stood, the newest last, where ranks hold parts
    void:   once this rank went back: is what lies here not to be gone on from?
    outer:  once it went back, the outer momentum that it had then, whole, as `Strategy.hands_on` gives it
    coming: are ranks coming together, so that each has all, for others are to come or go?
    together: once this one has all, while the others may not: what it has, where ranks held parts before
    copies: how many ranks had each piece at the last boundary, where they hold parts; 0: not known yet
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self.kept: deque[Boundary] = deque()
        self._parts = False  # does what goes on begin where ranks hold parts?
        self._kept: dict[Key, Tensor] = {}
        self._was: tuple[Experiment, Any] | None = None  # the experiment and the optimizer, while something goes on
        self._updated = False
        self._apart = 0  # as in Boundary, at the last boundary
        self.void = False
        self.outer: dict[str, Tensor] | None = None
        self.open = self.coming = False
        self.together: Boundary | None = None
        self.copies = 0

    @property
    def wanted(self) -> bool:
        e = self.run.experiment
        return (e.on_death != "end" or e.on_hang != "wait") and self.run.rank.size > 1

    @property
    def free(self) -> bool:
        e, rank = self.run.experiment, self.run.rank
        return rank.size > 1 and not in_parts(e) and updates_last(e.strategy) and not rank.memory.buffers

    @property
    def nbytes(self) -> int:
        """Of what is copied."""
        kept = [x for b in self.kept for state in (b.state, *b.memory.values()) for x in state.values()]
        return sum(x.nbytes for x in (*self._kept.values(), *kept))

    @property
    def remembers(self) -> bool:
        """Is there anything that this rank's optimizer remembers, here or away from its device?"""
        run = self.run
        return bool(slots(run.layout, run.optimizer)) or bool(run.kept_away.count)

    @contextmanager
    def within(self, changes: bool = False) -> Iterator[None]:
        """A step goes on, or something that `changes` the whole rank; what fails in it leaves it open."""
        if self._was is not None:  # a part of what goes on already
            yield
            return
        self._parts, self.coming, self.together = in_parts(self.run.experiment), False, None
        self._apart = steps_apart(self.run)
        if not self.wanted and (changes or not self.free):
            self.open = True
            self.kept.clear()
            yield
            self.open = False
            return
        run = self.run
        self._updated = False
        if self._parts:
            self._keep({})
            self._keep_boundary()
        else:
            self.kept.clear()
            self._keep(self._all(changes or not updates_last(run.experiment.strategy)))
        self._was = run.experiment, run.optimizer
        yield
        self._was = None

    def _keep_boundary(self) -> None:
        """This boundary, too: others may have the same as a rank that is lost, or a wire is lost, and nobody.

        Tables are too large to be copied in each step for a wire alone.
        """
        run = self.run
        self.copies = copies(run.experiment, run.rank.size, self.remembers)
        if self._elsewhere or (self.copies < 2 and run.experiment.strategy.tables):
            return self.kept.clear()
        spare = self.kept.pop() if self.kept and self.kept[-1].bound == self._here else None
        while len(self.kept) > run.experiment.partition.ahead(0) + 1:
            spare = self.kept.popleft()
        self.kept.append(stood(run, self._here, spare))

    @property
    def _elsewhere(self) -> bool:
        """Is a part of what this rank holds neither in its model nor with its optimizer, where it could be copied?"""
        return self.run.experiment.strategy.opaque or bool(self.run.kept_away.count)

    @property
    def _here(self) -> Bound:
        return self.run.rank.step, self.run.obeyed

    def updates(self) -> None:
        """The optimizer is about to update everything."""
        self._updated = True

    def has_all(self, stays: bool) -> None:
        """This rank has all of the model now. stays: else what its compressor owes is an heir's already."""
        if self._parts and not self.run.experiment.strategy.tables:
            here = stood(self.run, self._here, copied=False)._replace(spread=None, cut=None, sharded=False)
            self.together = here if stays else here._replace(memory={})

    def past(self) -> None:
        """What was going on has ended well, though by an exception: nobody goes back from it."""
        self._was, self.open = None, False
        if self.together is not None:
            self.void, self.kept = True, deque([self.together])

    def back(self) -> int:
        """Puts this rank at a boundary, if it is not at one; how many steps after the one that it was in last.

        Where it is `open` there is no way back.
        """
        if self._was is None:
            self._apart = steps_apart(self.run)
            self.outer = None if in_parts(self.run.experiment) else self._handed()
            return 0
        run = self.run
        (e, optimizer), self._was = self._was, None
        if self._parts or in_parts(run.experiment):  # what lies here is void, and may lie in any way
            if not self._parts:
                self.kept = deque([self._of_copies()])
            elif self.together is not None:
                self.kept = deque([self.together])
            run.experiment = e
            self.void = True
            return 0
        if self._updated and updates_last(e.strategy) and e is run.experiment:
            return 1
        if e.bucket_mb != run.experiment.bucket_mb:
            run.layout.rebucket(e.bucket_mb)
        run.experiment = e
        run.use_optimizer(optimizer)
        self._restore()
        self.outer = {name: x for (kind, name), x in self._kept.items() if kind == "outer"} or None
        return 0

    def _handed(self) -> dict[str, Tensor] | None:
        """The outer momentum as it is now."""
        run, strategy = self.run, self.run.experiment.strategy
        return dict(strategy.hands_on(run.rank.replicas, run.state) or {}) if strategy.has_outer else None

    def bounds(self) -> list[Boundary]:
        """Once this rank went `back`: all boundaries that it can go on from, the newest last."""
        if self.void or (in_parts(self.run.experiment) and self._elsewhere):
            return list(self.kept)
        kept = [b for b in self.kept if b.bound != self._here]
        return [*kept, stood(self.run, self._here, copied=False)._replace(apart=self._apart)]

    def _of_copies(self) -> Boundary:
        """The boundary of what was copied, where the model was whole."""
        state, memory = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        for (kind, name), x in self._kept.items():
            if kind.startswith("residual "):
                memory.setdefault(kind.removeprefix("residual "), {})[name] = x
            elif x.numel():
                state[name] = x.reshape(-1)
        run = self.run
        return Boundary(self._here, run.rank.id, run.rank.size, None, None, False, state, memory, self._apart)

    def _all(self, everything: bool) -> dict[Key, Tensor]:
        memory = self.run.rank.memory.buffers
        found = {(f"residual {kind}", name): x for kind, of in memory.items() for name, x in of.items()}
        if everything:
            layout, optimizer = self.run.layout, self.run.optimizer
            found |= {("parameter", place.name): place.param.data for place in layout.order}
            found |= {("buffer", name): x for name, x in self.run.model.named_buffers()}
            found |= {("slot", name): x for name, x in slots(layout, optimizer).items()}
            found |= {("outer", name): x for name, x in (self._handed() or {}).items()}
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
