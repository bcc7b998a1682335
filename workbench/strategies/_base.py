"""The contract of a strategy: what most strategies need. `_capabilities` has optional parts."""

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
    """How ranks train together: knobs, `init` for the state, and one coroutine for a step.

    Claims are class variables; the laws in tests/laws check each of them.

    dtypes:       element types of the parameters that it trains; hosts refuse other models
    exact:        one step equals one step on the joined batch of all ranks
    periodic:     ranks may differ between rounds; the canonical state is their mean
    exchanges:    "gradients", "moments", "displacements" or "parameters"; compressors act on all but "parameters"
    clips:        at `update` all gradients that it uses exist, so hosts can limit their norm
    skips:        if a host leaves out a step's update, the state contains none of that step's gradients
    moves_frozen: its own momentum or rounding moves parameters that are frozen during the run, so hosts refuse to
                  freeze them. Any other strategy keeps them unchanged after the ranks' next averaging
    plain:        on one rank its step is the optimizer's alone, without an outer momentum or moments of its own
    opaque:       the exchange is torch's own, so its compressor and buckets cannot be changed
    sees_all:     its step needs all gradients or examples of a replica, so a rank must be a whole replica
    narrows:      ranks train sub-models (`narrow`), so the task must declare its units
    follows:      a step is one forward, backward and optimizer update in this order, so a user's own loop can make them

    Its methods take these arguments:

    rank:       this rank with its verbs
    state:      the result of `init` on this rank
    bucket:     a bucket of parameters, `data` `(n,)`
    size:       number of training ranks
    parts:      the model's parameters in order, each with its name and shape
    compressor: the Compressor that the experiment asks for
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
        """Returns the mesh of the `size` training ranks as (name, size) pairs. Neighbours differ in the last dimension.

        `rank.group(name)` is then this rank within that dimension. The default is one dimension "data" with all ranks.
        """
        return (("data", size),)

    def init(self, rank: Rank, params: list[Bucket]) -> Any:
        """Creates the strategy's state on one rank. The rank keeps it between steps. None for no state.

        params: the parameters as `rank.params()` returns them, equal on all ranks at this moment. `rank.role` is set
        """
        return None

    @abstractmethod
    async def step(self, rank: Rank, state: Any) -> int | None:
        """Makes one training step on one rank. Returns how many steps it counts for, if not 1."""

    async def leave(self, rank: Rank, state: Any) -> None:
        """Finishes exchanges under way, so that the mean of the ranks is the canonical state."""

    def left(self, state: Any) -> str | None:
        """Returns a sentence for the record about what `leave` cut short on this rank; or None."""
        return None

    def refuses_size(self, size: int) -> str | None:
        """Returns why it cannot run on `size` ranks, with an alternative, or None."""
        return None

    def refuses_model(self, parts: list[Part]) -> str | None:
        """Returns why it cannot train a model of these parameters, with an alternative, or None."""
        return None

    def refuses_values(self, params: Mapping[str, Tensor]) -> str | None:
        """Returns why it cannot begin with these parameters, by name, with an alternative, or None.

        Hosts pass the parameters that this rank holds whole. `init` receives all of them.

        params:  the tensors by name
        """
        return None

    def refuses(self, compressor: Any) -> str | None:
        """Returns why `compressor` cannot work under this strategy, with an alternative, or None."""
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
