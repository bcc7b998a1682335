"""The whole contract of a synchronisation strategy, on one screen."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Part, Rank
from workbench.settings import Family


@dataclass(frozen=True, kw_only=True)
class Strategy(Family):
    """How ranks agree: knobs, `init` for what is remembered, and one coroutine that is one step.

    Claims are class variables; the laws in tests/laws check each.

    exact:      one step equals one step on the joined batch of all ranks
    lockstep:   all ranks ask the same operations in the same order
    periodic:   ranks may differ between rounds; the canonical state is their mean
    exchanges:  "gradients", "moments", "displacements" or "parameters"; compressors act on all but the last
    opaque:     the exchange is torch's own and cannot be compressed or re-bucketed by us
    workers:    how many `step`s run at once on each rank that trains; `rank.worker` tells them apart
    shared:     all workers of one machine, whatever their rank, have one vector of parameters in common; on the
                engine all ranks are on that machine, and `leave` has nothing to average
    in_flight:  exchanges are under way, or things are kept by bucket, when a step ends; `drain` ends that before
                anything is changed, and before buckets are cut anew
    clips:      when `update` is asked for, all gradients that it uses are there, so their norm can be told and limited
    plain:      on one rank its step is the optimizer's and no more (no outer momentum, no moments of its own)
    staged:     rank i holds and computes only the i-th of `size` consecutive parts of the model (a pipeline stage)

    `lockstep` = False means asynchronous: ranks do not meet each step, and changes wait until all have drained.
    """

    home: ClassVar[str] = "workbench.strategies"
    exact: ClassVar[bool] = False
    lockstep: ClassVar[bool] = True
    periodic: ClassVar[bool] = False
    opaque: ClassVar[bool] = False
    exchanges: ClassVar[str] = "gradients"
    workers: ClassVar[int] = 1
    shared: ClassVar[bool] = False
    plain: ClassVar[bool] = True
    staged: ClassVar[bool] = False
    in_flight: ClassVar[bool] = False
    clips: ClassVar[bool] = True

    def trains(self, index: int, size: int) -> bool:
        """Does rank `index` of `size` train? One that does not is a server: only its `background` runs."""
        return True

    def dims(self, size: int) -> tuple[tuple[str, int], ...]:
        """The mesh in which this strategy arranges the `size` ranks that train, as (name, size), neighbours last.

        `rank.group(name)` is then this rank among those along that dimension. One dimension, "data", is all of them.
        """
        return (("data", size),)

    def batches(self, size: int) -> int:
        """How many batches of one rank make the global batch that a learning rate may be scaled with."""
        return sum(self.trains(r, size) for r in range(size))

    def propagation(self, size: int) -> int:
        """Steps until every rank has heard, through messages, what rank 0 says; 0: they meet, or come when called.

        For strategies whose ranks only wait for those they exchange messages with: all of them act on a change at
        a step that rank 0 names, and each message tells it.
        """
        return 0

    def propagation_in(self, size: int, step: int) -> int:
        """`propagation` in step `step`, where a common step is kept only for a while, up to a step of the run."""
        return self.propagation(size)

    def newest(self, rank: Rank, state: Any) -> int:
        """On rank 0, where `propagation` > 0: the newest step any rank may have begun, if others may overtake it."""
        return rank.step

    def init(self, rank: Rank, params: list[Bucket]) -> Any:
        """What this strategy remembers between steps on one rank; None for nothing.

        params: the parameters as `rank.params()` gives them, the same on all ranks at this moment; `rank.role` is known
        """
        return None

    @abstractmethod
    async def step(self, rank: Rank, state: Any) -> int | None:
        """One step of training on one rank; returns for how many it counts if not for one, as when it caught up."""

    async def background(self, rank: Rank, state: Any) -> None:
        """A second coroutine beside `step`, with a thread and a wire of its own; it changes parameters by `params`.

        Symmetric ones loop `while await rank.again()`, which comes round at most once per step; a server loops on
        `recv` until it gets None. It ends when all steps stand still, before `leave` is asked, and begins again.
        """

    @property
    def has_background(self) -> bool:
        """Does this strategy run anything beside `step`?"""
        return type(self).background is not Strategy.background

    async def leave(self, rank: Rank, state: Any) -> None:
        """Finishes what is under way, so that the mean of the ranks is the canonical state."""

    async def drain(self, rank: Rank, state: Any) -> None:
        """Where it `in_flight`: finishes what is under way, to go on with the same `state`. Without it: `leave`."""
        await self.leave(rank, state)

    def hands_on(self, rank: Rank, state: Any) -> Any:
        """After `leave`: an outer momentum, if it has one, as displacements by parameter's name; else None."""
        return None

    def takes(self, rank: Rank, state: Any, momentum: Any) -> None:
        """After `init`: what the strategy before `hands_on`, which one with an outer momentum goes on with."""

    @property
    def can_drain(self) -> bool:
        """Can it finish what is under way without being left? In lockstep it does so when the run is over, too."""
        return type(self).drain is not Strategy.drain

    async def known(self, rank: Rank, state: Any) -> Any:
        """Where ranks keep no common step: the parameters that all agree on, as far as this rank knows, as Buckets.

        It asks nobody, so that no rank waits when rank 0 evaluates; None for this rank's own.
        """
        return None

    def refuses_size(self, size: int) -> str | None:
        """Why it cannot run on `size` ranks, in a sentence that says what would do; or None."""
        return None

    def refuses_model(self, parts: list[Part]) -> str | None:
        """Why it cannot train a model of these parameters, in a sentence that says what would do; or None."""
        return None

    def refuses(self, compressor: Any) -> str | None:
        """Why `compressor` cannot work under this strategy, in a sentence that says what would; or None."""
        if self.opaque and not compressor.immediate:
            return (
                f"{type(self).__name__} sends gradients by torch's own rules and cannot use "
                f"{compressor}; use Dense with it, or DDP with {compressor}"
            )
        if self.exchanges == "parameters" and not compressor.immediate:
            return (
                f"{type(self).__name__} exchanges raw parameters, which must not be compressed; use Dense "
                f"with it, or a strategy that exchanges gradients or displacements (DDP, LocalSGD)"
            )
        return None
