"""The contract of a synchronisation strategy: what most need, on one screen; `_capabilities` has what some can do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.rank import COMPLEX, FLOATS, Bucket, Part, Rank
from workbench.settings import Family
from workbench.strategies._capabilities import (
    Apart,
    Beside,
    InPieces,
    OneMemory,
    Outer,
    Remembering,
    Serving,
    Sharding,
    Unfinished,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Strategy(Serving, Apart, Beside, Unfinished, InPieces, Sharding, Outer, Remembering, OneMemory, Family):
    """How ranks agree: knobs, `init` for what is remembered, and one coroutine that is one step.

    Claims are class variables; the laws in tests/laws check each.

    dtypes:     element types of the parameters that it trains; hosts refuse a model with others
    exact:      one step equals one step on the joined batch of all ranks
    periodic:   ranks may differ between rounds; the canonical state is their mean
    exchanges:  "gradients", "moments", "displacements" or "parameters"; compressors act on all but the last
    clips:      when `update` is asked for, all gradients that it uses are there, so their norm can be told and limited
    skips:      what it remembers has nothing of a step's gradients when that step's update is left out
    moves_frozen: a parameter that is frozen during the run would move all the same, by a momentum of the strategy's
                own or by rounding, so hosts refuse to freeze it. Any other strategy leaves it alone once ranks have
                averaged it
    plain:      on one rank its step is the optimizer's and no more (no outer momentum, no moments of its own)
    opaque:     the exchange is torch's own and cannot be compressed or re-bucketed by us
    sees_all:   its step goes by all gradients of a replica, or by its examples, so a rank must be a whole replica
    narrows:    ranks train sub-models (`rank.narrow`), so the task must show of which units they can be
    follows:    a step is one forward, one backward and one update by the optimizer, in this order, so that it can be a
                loop's own that makes them
    """

    home: ClassVar[str] = "workbench.strategies"
    renamed: ClassVar[dict[str, str]] = {
        "heard": "propagation", "heard_in": "propagation_in", "crosses": "in_flight", "settle": "drain",
    }  # fmt: skip
    dtypes: ClassVar[tuple[str, ...]] = FLOATS + COMPLEX
    exact: ClassVar[bool] = False
    periodic: ClassVar[bool] = False
    exchanges: ClassVar[str] = "gradients"
    clips: ClassVar[bool] = True
    skips: ClassVar[bool] = True
    moves_frozen: ClassVar[bool] = False
    plain: ClassVar[bool] = True
    opaque: ClassVar[bool] = False
    sees_all: ClassVar[bool] = False
    narrows: ClassVar[bool] = False
    follows: ClassVar[bool] = False

    def dims(self, size: int) -> tuple[tuple[str, int], ...]:
        """The mesh in which this strategy arranges the `size` ranks that train, as (name, size), neighbours last.

        `rank.group(name)` is then this rank among those along that dimension. One dimension, "data", is all of them.
        """
        return (("data", size),)

    def init(self, rank: Rank, params: list[Bucket]) -> Any:
        """What this strategy remembers between steps on one rank; None for nothing.

        params: the parameters as `rank.params()` gives them, the same on all ranks at this moment; `rank.role` is known
        """
        return None

    @abstractmethod
    async def step(self, rank: Rank, state: Any) -> int | None:
        """One step of training on one rank; returns for how many it counts if not for one, as when it caught up."""

    async def leave(self, rank: Rank, state: Any) -> None:
        """Finishes what is under way, so that the mean of the ranks is the canonical state."""

    def left(self, state: Any) -> str | None:
        """After `leave`, what it cut short on this rank, in words for the record; or None."""
        return None

    def refuses_size(self, size: int) -> str | None:
        """Why it cannot run on `size` ranks, in a sentence that says what would do; or None."""
        return None

    def refuses_model(self, parts: list[Part]) -> str | None:
        """Why it cannot train a model of these parameters, in a sentence that says what would do; or None."""
        return None

    def refuses_values(self, params: Mapping[str, Tensor]) -> str | None:
        """Why it cannot begin with these parameters, by name, in a sentence that says what would do; or None.

        Asked of those that this rank holds whole; `init` is given all.
        """
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
