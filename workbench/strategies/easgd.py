"""Elastic averaging SGD (EASGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.rank import Bucket, Handle, Memory, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._copies import copies

_Pending = list[tuple[Handle, Bucket, Bucket]]  # (exchange under way, parameters, the sum)


class _State:
    """State of one rank: steps since the last exchange, and the centre. The centre is equal on all ranks."""

    def __init__(self, params: list[Bucket]) -> None:
        self.since = 0
        self.memory = copies(params, "centre")


@dataclass(frozen=True, kw_only=True)
class EASGD(Strategy):
    """Ranks train alone. Periodically each rank and a common centre move towards each other without meeting.

        params_i <- optimizer_i(params_i, grad_i)                          every step
        params_i <- params_i - alpha (params_i - centre)                   every `every` steps
        centre   <- centre + alpha sum_i (params_i - centre)               at the same time
        alpha = beta / p

    Both lines use the old values, so the sum of all params_i and the centre stays constant. Each exchange leaves 1 -
    alpha of the distances between ranks. It leaves 1 - (p+1) alpha of the distance between the centre and the ranks'
    mean. With beta = p / (p+1) the centre equals the mean afterwards. From beta = 2 p / (p+1) on they diverge, so EASGD
    refuses it. One all-reduce of the differences keeps every rank's copy of the centre equal. It sends 2 (p-1)/p of the
    model's bytes per exchange. As in the paper's algorithm, that step's gradient belongs to the parameters before the
    exchange. So the exchange runs during forward and backward, and the rank waits for it before the update.

    The first exchange comes in the `every`-th step before its update, so after `every` - 1 updates. The paper exchanges
    one step later, after tau updates. EASGD with a Nesterov optimizer is not EAMSGD. EAMSGD pulls x_i itself and looks
    ahead only for the gradient. Torch's Nesterov stores only the point ahead (x_i + delta v_i), so EASGD would pull
    that point.

    When the strategy is left, ranks make one more exchange and continue from the centre. The centre is the method's
    result. Held-out losses during training are those of the mean.

    When to use it: the network is slow, `every` is long, and many local optima make differences between ranks useful.
    LocalSGD sends as much and makes ranks equal each time.

    Reference: Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015,
    https://arxiv.org/abs/1412.6651
    """

    every: int = knob(4, 1, 256, unit="steps", log=True, doc="tau: steps between two exchanges with the centre")
    beta: float = knob(0.9, 0.0, 2.0, doc="beta = p alpha: moving rate of the centre to the mean (elasticity)")

    alike: ClassVar[bool] = True
    periodic: ClassVar[bool] = True
    plain: ClassVar[bool] = False
    follows: ClassVar[bool] = True
    exchanges: ClassVar[str] = "displacements"
    own: ClassVar[dict[str, str]] = {"centre": "drop", "since": "drop"}

    def refuses_size(self, size: int) -> str | None:
        limit = 2 * size / (size + 1)
        if self.beta < limit:
            return None
        return (
            f"beta={self.beta:g} moves the centre of {size} ranks so far past their mean that both diverge; use less "
            f"than {limit:.4g}, such as {size / (size + 1):.3g}"
        )

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State(params)

    async def step(self, rank: Rank, state: _State) -> None:
        buckets = await rank.params()
        centre = state.memory
        state.since += 1
        pending = await self._pull(rank, state, buckets, centre) if state.since >= self.every else []
        await rank.forward()
        await rank.backward()
        await self._give_way(rank, pending, centre)
        await rank.update()

    async def _pull(self, rank: Rank, state: _State, buckets: list[Bucket], centre: Memory) -> _Pending:
        """Starts the sums over all ranks of the displacements that pull the centre, bucket by bucket."""
        pending = []
        for bucket in buckets:
            pull = bucket.like((bucket.data - centre.flat("centre", bucket)).mul_(self.beta / rank.size))
            handle = await rank.start(rank.compressor.reduce(rank, pull, rank.memory), name=bucket.name)
            pending.append((handle, bucket, pull))
        state.since = 0
        return pending

    async def _give_way(self, rank: Rank, pending: _Pending, centre: Memory) -> None:
        """Moves this rank towards the centre and the centre towards all ranks."""
        for handle, bucket, pull in pending:
            await rank.wait(handle)
            place = centre.flat("centre", bucket)
            bucket.data.lerp_(place, self.beta / rank.size)
            place.add_(pull.data)

    async def leave(self, rank: Rank, state: _State) -> None:
        buckets, centre = await rank.params(), state.memory
        await self._give_way(rank, await self._pull(rank, state, buckets, centre), centre)
        for bucket in buckets:
            bucket.data.copy_(centre.flat("centre", bucket))
