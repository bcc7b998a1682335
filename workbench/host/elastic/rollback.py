"""Takes a rank back to the last boundary or to its own update after a lost peer ended a step.

A step needs no copy if it ends in one update of everything, after all exchanges: until then the model is unchanged, and
an update needs no peer. All other strategies write parameters between or during exchanges, and a broken exchange or
switch leaves invalid values. So they copy parameters, optimizer state and buffers at each boundary. A compressor's
residual changes while gradients are sent, so every strategy copies it.

Only runs that go on after losses make copies. A rank that needs none can always go back, because a person may remove
a rank that hangs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from workbench.experiment import Experiment
from workbench.host.core.change_queue import ChangeQueue
from workbench.host.elastic.recovery_sources import count_copies, has_parts
from workbench.host.memory.offload import OffloadStore
from workbench.host.placement.optimizer_slots import read_slots
from workbench.host.transfer.boundary import Bound, Boundary, count_steps_apart, make_boundary
from workbench.host.transfer.change_view import ChangeView

if TYPE_CHECKING:
    from workbench.strategies import Strategy

Key = tuple[str, str]  # kind and name


def has_final_update(strategy: Strategy) -> bool:
    """Whether a step ends in one update of everything, without other exchanges or writes."""
    apart = strategy.periodic or strategy.late_update or strategy.has_background or strategy.shared
    return bool(strategy.clips and not apart and not strategy.shards)


class RollbackView(ChangeView, Protocol):
    """A rank that can go back to a boundary."""

    experiment: Experiment

    @property
    def queue(self) -> ChangeQueue: ...
    @property
    def offloaded_state(self) -> OffloadStore:
        """State off the device."""


class Rollback:
    """One rank's way back.

    is_wanted:    whether the run goes on without a lost or hanging rank
    is_free:      whether going back needs no copies
    open:         whether the rank is in something that cannot be undone
    kept:         its boundaries if ranks hold parts, the newest last
    is_void:      whether this rank's state is invalid after it went back
    outer:        its whole outer momentum after it went back, as in `Strategy.hands_on`
    is_gathering: whether ranks assemble the whole state for a resize
    whole_state:  this rank's whole state in a resize from parts; other ranks may lack theirs
    copies:       how many ranks had each piece at the last boundary; 0: unknown
    """

    def __init__(self, run: RollbackView) -> None:
        self.run = run
        self.kept: deque[Boundary] = deque()
        self._parts = False  # whether ranks held parts before the step
        self._kept: dict[Key, Tensor] = {}
        self._was: tuple[Experiment, Optimizer] | None = None  # during a step
        self._updated = False
        self._apart = 0  # of the last boundary
        self.is_void = False
        self.outer: dict[str, Tensor] | None = None
        self.open = self.is_gathering = False
        self.whole_state: Boundary | None = None
        self.copies = 0

    @property
    def is_wanted(self) -> bool:
        e = self.run.experiment
        return (e.on_death != "end" or e.on_hang != "wait") and self.run.rank.size > 1

    @property
    def is_free(self) -> bool:
        e, rank = self.run.experiment, self.run.rank
        return rank.size > 1 and not has_parts(e) and has_final_update(e.strategy) and not rank.memory.buffers

    @property
    def nbytes(self) -> int:
        kept = [x for b in self.kept for state in (b.state, *b.memory.values()) for x in state.values()]
        return sum(x.nbytes for x in (*self._kept.values(), *kept))

    @property
    def has_slots(self) -> bool:
        """Whether the optimizer has state, also off the device."""
        run = self.run
        return bool(read_slots(run.layout, run.optimizer)) or bool(run.offloaded_state.item_count)

    @contextmanager
    def guard_step(self, changes: bool = False) -> Iterator[None]:
        """Encloses a step or something that `changes` the whole rank. `go_back` can undo it after an error."""
        if self._was is not None:  # nested
            yield
            return
        self._parts, self.is_gathering, self.whole_state = has_parts(self.run.experiment), False, None
        self._apart = count_steps_apart(self.run)
        if not self.is_wanted and (changes or not self.is_free):
            self.open = True
            self.kept.clear()
            yield
            self.open = False
            return
        run = self.run
        self._updated = False
        if self._parts:
            self._copy_state({})
            self._keep_boundary()
        else:
            self.kept.clear()
            self._copy_state(self._list_state(changes or not has_final_update(run.experiment.strategy)))
        self._was = run.experiment, run.optimizer
        yield
        self._was = None

    def _keep_boundary(self) -> None:
        """Keeps a boundary if another rank may have the lost parts, or if only a wire may be lost.

        Tables are too large to copy for a wire.
        """
        run = self.run
        self.copies = count_copies(run.experiment, run.rank.size, self.has_slots)
        if self._is_elsewhere or (self.copies < 2 and run.experiment.strategy.tables):
            return self.kept.clear()
        spare = self.kept.pop() if self.kept and self.kept[-1].bound == self._current_bound else None
        while len(self.kept) > run.experiment.partition.ahead(0) + 1:
            spare = self.kept.popleft()
        self.kept.append(make_boundary(run, self._current_bound, spare))

    @property
    def _is_elsewhere(self) -> bool:
        return self.run.experiment.strategy.opaque or bool(self.run.offloaded_state.item_count)

    @property
    def _current_bound(self) -> Bound:
        return self.run.rank.step, self.run.queue.obeyed

    def note_update(self) -> None:
        """Call it before the update."""
        self._updated = True

    def begin_gathering(self) -> None:
        self.is_gathering = True

    def note_whole_state(self, stays: bool) -> None:
        """Call it once this rank is whole. stays: False if an heir already has its compressor's residual"""
        if self._parts and not self.run.experiment.strategy.tables:
            here = make_boundary(self.run, self._current_bound, copied=False)._replace(
                spread=None, cut=None, sharded=False
            )
            self.whole_state = here if stays else here._replace(memory={})

    def end_guard(self) -> None:
        """For a change that succeeded, although by an exception."""
        self._was, self.open = None, False
        if self.whole_state is not None:
            self.is_void, self.kept = True, deque([self.whole_state])

    def go_back(self) -> int:
        """Returns 1 if the present step counts, else 0. While `open`, a rank cannot go back."""
        if self._was is None:
            self._apart = count_steps_apart(self.run)
            self.outer = None if has_parts(self.run.experiment) else self._find_momentum()
            return 0
        run = self.run
        (e, optimizer), self._was = self._was, None
        if self._parts or has_parts(run.experiment):  # the state is invalid
            if not self._parts:
                self.kept = deque([self._make_boundary()])
            elif self.whole_state is not None:
                self.kept = deque([self.whole_state])
            run.experiment = e
            self.is_void = True
            return 0
        if self._updated and has_final_update(e.strategy) and e is run.experiment:
            return 1
        if e.bucket_mb != run.experiment.bucket_mb:
            run.layout.resize_buckets(e.bucket_mb)
        run.experiment = e
        run.use_optimizer(optimizer)
        self._restore_copies()
        self.outer = {name: x for (kind, name), x in self._kept.items() if kind == "outer"} or None
        return 0

    def _find_momentum(self) -> dict[str, Tensor] | None:
        run, strategy = self.run, self.run.experiment.strategy
        return dict(strategy.hands_on(run.rank.replicas, run.state) or {}) if strategy.has_outer else None

    def list_bounds(self) -> list[Boundary]:
        """Returns the boundaries that this rank can use, the newest last."""
        if self.is_void or (has_parts(self.run.experiment) and self._is_elsewhere):
            return list(self.kept)
        kept = [b for b in self.kept if b.bound != self._current_bound]
        return [*kept, make_boundary(self.run, self._current_bound, copied=False)._replace(apart=self._apart)]

    def _make_boundary(self) -> Boundary:
        state, memory = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        for (kind, name), x in self._kept.items():
            if kind.startswith("residual "):
                memory.setdefault(kind.removeprefix("residual "), {})[name] = x
            elif x.numel():
                state[name] = x.reshape(-1)
        run = self.run
        return Boundary(self._current_bound, run.rank.id, run.rank.size, None, None, False, state, memory, self._apart)

    def _list_state(self, everything: bool) -> dict[Key, Tensor]:
        memory = self.run.rank.memory.buffers
        found = {(f"residual {kind}", name): x for kind, of in memory.items() for name, x in of.items()}
        if everything:
            layout, optimizer = self.run.layout, self.run.optimizer
            found |= {("parameter", place.name): place.param.data for place in layout.order}
            found |= {("buffer", name): x for name, x in self.run.model.named_buffers()}
            found |= {("slot", name): x for name, x in read_slots(layout, optimizer).items()}
            found |= {("outer", name): x for name, x in (self._find_momentum() or {}).items()}
        return found

    def _copy_state(self, state: dict[Key, Tensor]) -> None:
        """Reuses earlier copies."""
        for key in self._kept.keys() - state.keys():
            del self._kept[key]
        with torch.no_grad():
            for key, x in state.items():
                old = self._kept.get(key)
                if old is not None and old.shape == x.shape and old.dtype == x.dtype:
                    old.copy_(x)
                else:
                    self._kept[key] = x.detach().clone()

    def _restore_copies(self) -> None:
        run, memory = self.run, self.run.rank.memory
        for kind in [k for k in memory.buffers if not any(key[0] == f"residual {k}" for key in self._kept)]:
            memory.drop(kind)
        kinds = {key[0] for key in self._kept}
        now = self._list_state("parameter" in kinds)
        with torch.no_grad():
            for key, x in now.items():
                if key in self._kept:
                    x.copy_(self._kept[key])
        for place in run.layout.order if "parameter" in kinds else ():
            made = run.optimizer.state.get(place.param, {})
            if made and not any(("slot", f"{slot}/{place.name}") in self._kept for slot in made):
                del run.optimizer.state[place.param]
