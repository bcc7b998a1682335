"""The MemoryAccount of one rank: its bytes by category, recorded whenever they change.

Samples "memory CATEGORY" are a step's peaks in bytes. "memory peak" is the device's. "memory on host" and "memory on
disk" are state that a strategy keeps there. A look at activations and gradients costs time. So the account looks in the
first steps, after a change, and then every RECOUNT_STEPS steps. It looks at evaluations after a change, and as often.

A storage belongs to the first category that has it. The peak assumes that buffers in flight coincide with the worst
moment. A batch is the last one drawn. Gradients between two nodes of the graph count. Temporaries inside a node or call
(of a layer, an optimizer, gloo) do not. An evaluation counts every tensor that torch's calls make. The peak includes it
if more evaluations follow.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from workbench.host.memory import storages as memory
from workbench.host.memory.account_view import AccountView
from workbench.host.memory.budget import MB, WHEN_BETWEEN, WHEN_EVALUATED, WHEN_STEP, require_fits
from workbench.host.memory.buffers import BufferCounter
from workbench.host.memory.memory_counts import MemoryCounts, SortedBytes
from workbench.host.memory.offload import OffloadStore
from workbench.host.memory.storage_tracker import StorageTracker
from workbench.rank import Memory

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "batches", "strategy state",
              "compressor state", "buffers in flight", "evaluation")  # fmt: skip
STEP_CATEGORIES = ("gradients", "activations")  # within a step
EVALUATION_CATEGORY = "evaluation"  # between two steps
RECOUNT_STEPS = 32  # between looks
FRESH_STEPS = 3  # after a change
MIN_CHANGED_SHARE = 0.01  # of a category, to be recorded
_MadeOf = tuple[bool, int | None, int, int, dict[str, int]]  # a record's key


class MemoryAccount:
    """One rank's bytes.

    away:   state away from its device
    beside: a chip allocator's own figures, by name
    """

    def __init__(self, run: AccountView, counts: MemoryCounts, away: OffloadStore,
                 beside: Callable[[], dict[str, int]] = dict) -> None:  # fmt: skip
        self._run, self._counts, self.away, self._read_chip_bytes = run, counts, away, beside
        self.buffers = BufferCounter(run)
        self.due = True  # looks this step
        self._fresh_steps_left, self._last_recount = FRESH_STEPS, 0
        self._inputs: list[object] = []
        self._standing: dict[str, int] = {}
        self._memories: list[Memory] = []  # strategy's and compressor's
        self._recount_key: tuple[int | tuple[int, ...], ...] | None = None  # the recount's key
        self._step_peaks: dict[str, int] = {}  # peaks at the last look
        self._pass_peak = 0  # activations plus gradients
        self._recorded_bytes: dict[str, int] = {}
        self._parameter_bytes: int | None = None  # parameters' bytes now
        self._parameter_peak: int | None = None  # the step's most
        self._standing_parameters = 0  # of parameters that stay
        self._handover_bytes = 0  # a hand-over's bytes
        self._last_record: tuple[_MadeOf, dict[str, int]] | None = None  # the last record and its key
        self._evaluation_tracker: StorageTracker | None = None  # the present evaluation
        self._evaluated = 0  # its last peak
        self._evaluated_at = -1  # its step; -1: no look since a change
        self._step_extra = 0, 0  # parameters' extra bytes, and bytes in flight

    # -- between steps --

    def recount_standing(self) -> None:
        """Recounts what stays and looks at the next steps. Call it after a change or when the run begins.

        Raises OutOfMemory if what stays or the change exceeds `memory_mb`.
        """
        self._fresh_steps_left, self._recount_key = FRESH_STEPS, None
        self._evaluated, self._evaluated_at = 0, -1
        told = self._record_changes(between=True)
        self._require_budget(told, WHEN_BETWEEN)
        self._handover_bytes = 0

    def note_surge(self, nbytes: int) -> None:
        self._handover_bytes = max(self._handover_bytes, nbytes)

    @property
    def has_optimizer_state(self) -> bool:
        return bool(self._counts.list_standing()["optimizer state"])

    def note_model_cut(self) -> None:
        """Notes that the host's memory held the whole model until now."""
        self._parameter_peak = self._parameter_bytes

    def begin_step(self) -> None:
        self._recount_standing()
        self.buffers.take_peak(stepping=True)
        self._parameter_peak = self._parameter_bytes
        if not self._run.experiment.eval_every:
            self._evaluated = 0
            evaluated = [EVALUATION_CATEGORY] if self._recorded_bytes.get(EVALUATION_CATEGORY) else []
            self._write_down(dict.fromkeys(evaluated, 0))
        self.due = self._fresh_steps_left > 0 or self._run.rank.step - self._last_recount >= RECOUNT_STEPS
        if self.due:
            self._step_peaks, self._pass_peak, self._inputs, self._last_record = {}, 0, [], None

    def end_step(self) -> None:
        """Raises OutOfMemory if the step took more than `memory_mb`."""
        if self.due:
            self._note_peak("gradients", self._counts.count_gradients())
            self._recount_key, self._last_recount = None, self._run.rank.step
            self._fresh_steps_left = max(0, self._fresh_steps_left - 1)
            self._inputs = []
        told = self._record_changes()
        self._step_extra = max(0, (self._parameter_peak or 0) - (self._parameter_bytes or 0)), told["buffers in flight"]
        self._require_budget(told, WHEN_STEP)
        self.due = False

    def _require_budget(self, told: dict[str, int], when: str) -> None:
        run = self._run
        if run.experiment.memory_mb:
            of = {name: told[name] for name in CATEGORIES if name in told}
            if when != WHEN_STEP:
                of = of | dict.fromkeys(STEP_CATEGORIES, 0) | {"gradients": self._standing["gradients"]}
            require_fits(run, told["peak"], of | {"what moves": self._handover_bytes}, when)

    # -- evaluation --

    @property
    def is_evaluation_measured(self) -> bool:
        """Whether the next evaluation is measured. Nearly all are like the one before."""
        return self._evaluated_at < 0 or self._run.rank.step - self._evaluated_at >= RECOUNT_STEPS

    @contextmanager
    def measure_evaluation(self, kept: int = 0) -> Iterator[None]:
        """Inside, the model is evaluated on this thread. Raises OutOfMemory if it exceeds `memory_mb`.

        kept: bytes held for the evaluation alone
        """
        if not self.is_evaluation_measured:
            yield
            return
        self._parameter_peak = self._parameter_bytes
        with self.buffers.count_measuring(self._run.unsharder.sharded):
            self.buffers.take_peak(stepping=False)
            self._evaluation_tracker = following = StorageTracker(rises=partial(self._require_now, kept))
            try:
                self._recount_standing()
                self._require_now(kept)
                with following:
                    yield
            finally:
                self._evaluation_tracker = None
        self.note_evaluation(kept + following.most[0], self.buffers.take_peak(stepping=False))

    def _require_now(self, kept: int) -> None:
        limit = self._run.experiment.memory_mb * MB
        if self._evaluation_tracker is not None and limit:
            made, moved = kept + self._evaluation_tracker.most[0], self.buffers.most
            if sum(self._count_between_steps(moved).values()) + self._step_peaks.get("batches", 0) + made > limit:
                self.note_evaluation(made, moved, "or more ")

    def exclude_fetched(self) -> AbstractContextManager[None]:
        """Inside, fetched parameters do not count."""
        return self._evaluation_tracker.pause_counting() if self._evaluation_tracker is not None else nullcontext()

    def note_evaluation(self, nbytes: int, moved: int | None = None, more: str = "") -> None:
        """Notes an evaluation's peak. Raises OutOfMemory if the sum exceeds `memory_mb`.

        moved: bytes in flight for it; None: as in a step, and shards as well
        """
        if moved is None:
            beyond, moved = self._step_extra
            self._parameter_peak = None if self._parameter_bytes is None else self._parameter_bytes + beyond
        self._recount_standing()
        told = self._count_between_steps(moved) | {
            "batches": self._step_peaks.get("batches", 0),
            EVALUATION_CATEGORY: nbytes,
            "peak": 0,
        }
        told["peak"] = sum(told.values())
        self._parameter_peak, self._last_record = self._parameter_bytes, None
        self._evaluated, self._evaluated_at = told["peak"], self._run.rank.step
        self._write_down({EVALUATION_CATEGORY: nbytes, "peak": told["peak"]})
        self._require_budget(told, more + WHEN_EVALUATED)

    # -- in a step --

    def note_forward(self, inputs: object = None) -> None:
        if self.due:
            self._inputs.append(inputs)
            self._note_peak("batches", self._counts.count_batch())
            kept = self._counts.measure_forward(self._inputs)
            if kept is not None:
                self._note_peak("activations", kept)
            self._note_joint_peak(self._counts.count_gradients() + (kept or 0))

    def measure_backward(self, exchanged: bool) -> AbstractContextManager[None]:
        return self._measure_backward(exchanged) if self.due else nullcontext()

    @contextmanager
    def _measure_backward(self, exchanged: bool) -> Iterator[None]:
        with self._counts.measure_backward(exchanged) as most:
            yield
        gradients = self._counts.count_gradients()
        self._note_peak("gradients", gradients)
        self._note_joint_peak(max(most(), gradients + self._counts.count_activations()))

    def note_held(self, nbytes: int | None) -> None:
        """nbytes: of held parameters; None: no strategy shards them"""
        self._parameter_peak = None if nbytes is None else max(self._parameter_peak or 0, nbytes)
        self._parameter_bytes = nbytes
        self._require_now(0)

    def note_submodel(self, params: Iterable[Tensor], state: Any = None) -> None:
        """Notes a sub-model.

        params: its own parameters
        state:  its optimizer state, or its bytes
        """
        self._parameter_peak = max(self._parameter_peak or 0, self._run.layout.held + sum(p.nbytes for p in params))
        if self.due and state:
            nbytes = state if isinstance(state, int) else memory.count_bytes(memory.find_storages(dict(state)))
            self._note_peak("optimizer state", nbytes)

    def _note_peak(self, category: str, nbytes: int) -> None:
        self._step_peaks[category], self._last_record = max(self._step_peaks.get(category, 0), nbytes), None

    def _note_joint_peak(self, nbytes: int) -> None:
        self._pass_peak, self._last_record = max(self._pass_peak, nbytes), None

    # -- what stays --

    def _recount_standing(self) -> None:
        run = self._run
        stashed = sum(x.nbytes for x in run.micros_in_flight.stashed)
        seen = (
            id(run.layout.buckets),
            self._counts.has_gradient_memory,
            id(run.optimizer),
            len(run.optimizer.state),
            id(run.state),
            self.away.item_count,
            stashed,
        )
        if (*seen, *map(_measure_content, self._memories)) == self._recount_key:
            return
        self._memories = [run.rank.memory, *memory.find_memories(run.state)]
        self._recount_key = (*seen, *map(_measure_content, self._memories))
        kept, standing = run.rank.memory, self._counts.list_standing()
        held = memory.find_storages([kept.buffers, kept.parts])
        own = {"strategy state": memory.find_storages(run.state), "compressor state": held}
        key, alike = (id(standing), seen[0]), self._counts.shared_counts if not any(own.values()) else {}
        if key not in alike:
            alike[key] = self._sort_storages(standing | own)
        found = alike[key]
        self._standing, self._standing_parameters, self._last_record = dict(found.nbytes), run.layout.held, None
        self._standing["parameters"] += stashed  # for later backwards
        self.buffers.note_standing(*found[1:])

    def _sort_storages(self, every: dict[str, memory.Storages]) -> SortedBytes:
        nbytes, known = dict[str, int](), memory.Storages()
        for category, found in every.items():
            nbytes[category] = memory.count_bytes({where: s for where, s in found.items() if where not in known})
            known |= found
        buckets = self._run.layout.buckets
        known |= memory.find_storages([bucket.data for bucket in buckets])
        rooms = {id(b.data): weakref.ref(b.data) for b in buckets if len(b.parts) > 1 or b.data.is_meta}
        return SortedBytes(nbytes, {where: weakref.ref(s) for where, s in known.items()}, list(buckets), rooms)

    def _count_between_steps(self, moved: int) -> dict[str, int]:
        now = self._standing | {"buffers in flight": moved}
        if self._parameter_peak is not None:
            now["parameters"] += self._parameter_peak - self._standing_parameters
        return now

    def _record_changes(self, between: bool = False) -> dict[str, int]:
        """between: nothing is computed"""
        self._recount_standing()
        moved, away = self.buffers.take_peak(stepping=False), self.away.take_peaks()
        made_of = between, self._parameter_peak, self._handover_bytes, moved, away
        if not self.due and self._last_record is not None and self._last_record[0] == made_of:
            return self._last_record[1]
        room = self._standing["gradients"]
        now = self._count_between_steps(moved) | self._step_peaks
        now["gradients"] = max(room, now["gradients"])
        together = room + self._handover_bytes if between else max(self._pass_peak, room)
        told = {category: now[category] for category in CATEGORIES if category in now}
        others = sum(v for k, v in told.items() if k not in STEP_CATEGORIES)
        told["peak"] = others + together
        if self.due or not self._recorded_bytes:
            told |= self._read_chip_bytes()
        told |= {f"on {where}": nbytes for where, nbytes in away.items()}
        self._write_down(told | {"peak": max(told["peak"], self._evaluated)})
        self._last_record = made_of, told
        return told

    def _write_down(self, told: dict[str, int]) -> None:
        for name, value in told.items():
            before = self._recorded_bytes.get(name)
            if before is None or abs(value - before) > MIN_CHANGED_SHARE * before:
                self._recorded_bytes[name] = value
                self._run.sample(f"memory {name}", value)


def _measure_content(memory: Memory) -> tuple[int, ...]:
    return tuple(map(len, (*memory.buffers.values(), *memory.parts.values())))
