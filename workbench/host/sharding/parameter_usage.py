"""Which parameters a step used, and which the model has unfrozen.

[Note: The raised hand] Ranks exchange every parameter of a bucket, and one without a gradient counts as zero. If no
rank has a gradient, torch's DDP leaves `grad` at None, and the optimizer does not move the parameter. To compare usage
in every step would cost each step a round trip. So a rank that lacks a gradient raises a hand: it writes the step's
number and its first bucket without a gradient into memory that all ranks of the host share. Then it hands out that
bucket and the later ones. A rank that has completed the exchange of bucket k has data of all ranks, so it sees every
hand for the buckets up to k. Before it updates bucket k it compares usage if such a hand is up. It ignores a hand for a
later bucket, which other ranks may not see yet. So all ranks decide alike. Ranks of several hosts share no memory and
compare usage in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.host.placement.bucket_groups import ParameterPlace
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.rank import Handle, Rank, StrategyError

if TYPE_CHECKING:
    from workbench.strategies import Strategy


class RaisedView(Protocol):
    """By rank, the last step in which it raised a hand, and the first bucket that the hand is for."""

    def raise_in(self, step: int, bucket: int) -> None: ...
    def raised_in(self, step: int, ranks: Iterable[int], bucket: int | None) -> bool: ...
    def close(self) -> None: ...


class ParameterUsage:
    """One rank's notes on its steps' usage.

    hands:    None if ranks share no memory: they compare usage in every step
    step:     of a completed exchanged backward, until the ranks agree on its parameters; else None
    last:     the last child of that backward; once it is over the ranks can agree
    listening: whether an exchanged backward runs, if the host does not note that by itself
    settled:  whether the ranks agreed in this step on unfrozen parameters
    unfrozen: parameters that train on some rank and are not in the layout, by name, agreed among the ranks
    """

    def __init__(self, hands: RaisedView | None = None) -> None:
        self.hands = hands
        self.step: int | None = None
        self.last: Handle | None = None
        self.listening = False
        self.settled = False
        self.unfrozen: dict[str, nn.Parameter] = {}
        self.frozen: dict[str, nn.Parameter] = {}  # outside the layout when that was made
        self._trained: list[ParameterPlace] = []  # then trained
        self._is_whole = True  # whether all trained parameters are here

    def take_layout(self, model: nn.Module, layout: ParameterLayout, whole: bool = True) -> None:
        """whole: whether all trained parameters are here"""
        here = {id(place.param) for place in layout.order}
        named = model.named_parameters()
        self.frozen = {name: p for name, p in named if id(p) not in here and (whole or not p.requires_grad)}
        self.unfrozen, self._is_whole = {}, whole
        self._trained = [place for place in layout.order if place.param.requires_grad]

    def begin_listening(self) -> None:
        """Notes that an exchanged backward runs, until the strategy has all buckets."""
        self.listening = True

    def note_backward(self, step: int) -> None:
        """Notes that an exchanged backward of `step` is over, so that the ranks can agree."""
        self.step = step

    def note_last(self, handle: Handle | None) -> None:
        self.last = handle

    def require_trained(self, strategy: Strategy) -> None:
        """Raises StrategyError if `strategy` would move a frozen parameter."""
        frozen = (place.name for place in self._trained if not place.param.requires_grad)
        if strategy.moves_frozen and (name := next(frozen, "")):
            raise StrategyError(
                f"parameter {name}: was frozen during the run, and {type(strategy).__name__} would still change it "
                f"by its momentum or by rounding; freeze it before the run, or take DDP or LocalSGD"
            )

    def list_unfrozen(self) -> list[str]:
        """Lists parameters outside the layout."""
        return [name for name, p in self.frozen.items() if p.requires_grad]

    def explain_change(self, model: nn.Module, layout: ParameterLayout) -> str:
        """Returns which parameter the model has replaced, removed or added during the run, as a sentence; or ""."""
        known = {id(place.param): place.name for place in layout.order}
        known |= {id(p): name for name, p in self.frozen.items()}
        now = {id(p): name for name, p in model.named_parameters()}
        trained = [(name, id(p)) for name, p in model.named_parameters() if p.requires_grad] if self._is_whole else []
        changed = [f"{name} was replaced or removed" for key, name in known.items() if key not in now]
        changed += [f"{name} was added" for name, key in trained if key not in known]
        return f"parameter {changed[0]} during the run, and a resumed run starts without this change" if changed else ""

    def begin_backward(self, step: int) -> None:
        """Raises a hand if the model has unfrozen parameters."""
        self.settled = False
        if self.list_unfrozen():
            self.raise_hand(step)

    def raise_hand(self, step: int, bucket: int = 0) -> None:
        """Call it before you hand out `bucket`, the first one that lacks a gradient."""
        if self.hands is not None:
            self.hands.raise_in(step, bucket)

    def must_agree(self, rank: Rank, bucket: int | None) -> bool:
        """Whether the ranks must agree before `rank` updates `bucket`, or the whole model if None."""
        if self.step is None:
            return False
        return bucket is None or self.hands is None or rank.size == 1 or self._is_raised(rank, self.step, bucket)

    def _is_raised(self, rank: Rank, step: int, bucket: int | None = None) -> bool:
        """Whether a rank has raised a hand for a bucket up to `bucket`."""
        assert self.hands is not None
        ranks = rank.within.ranks if rank.within is not None else range(rank.size)
        return self.hands.raised_in(step, ranks, bucket)

    def note_handed_out(self, step: int) -> None:
        """Call it once the strategy has all buckets."""
        if self.listening:
            self.listening, self.step = False, step

    async def agree_on_unused(self, host: Any) -> None:
        """After an exchange for which `must_agree` holds: `layout.unused` names the parameters that no rank used.

        Gradients of unfrozen parameters become the sum over ranks, as if they had been in a bucket.

        host: has the rank, and its layout, model, module, optimizer, lock and strategy
        """
        step, self.step, self.last = self.step, None, None
        rank, layout = host.rank.replicas, host.layout
        if step is None:
            return
        if rank.size == 1:
            self.unfrozen = {name: self.frozen[name] for name in self.list_unfrozen()}
        elif self.hands is None or self._is_raised(rank, step):
            await self._compare_usage(host, rank, layout)
        self.settled = True
        if self.unfrozen and not host.strategy().follows:
            self._update_unfrozen(host)

    async def _compare_usage(self, host: Any, rank: Rank, layout: ParameterLayout) -> None:
        """0: frozen or without a gradient; 1: unfrozen and unused; 2: used."""
        mine = [0 if place.name in layout.unused else 2 for place in layout.order]
        mine += [p.requires_grad + (p.requires_grad and p.grad is not None) for p in self.frozen.values()]
        noted = torch.empty(len(mine), dtype=torch.int32, device=layout.order[0].param.device)
        noted.copy_(torch.tensor(mine, dtype=torch.int32))
        noted = await rank.all_reduce(noted, "max", "used")
        of_layout, others = noted.tolist()[: len(layout.order)], noted.tolist()[len(layout.order) :]
        layout.note_unused({place.name for place, use in zip(layout.order, of_layout, strict=True) if not use})
        uses = dict(zip(self.frozen, others, strict=True))
        self.unfrozen = {name: p for name, p in self.frozen.items() if uses[name]}
        how = "sum" if host.module is host.model else "mean"  # torch's DDP has not scaled the loss
        for name, p in self.unfrozen.items():
            if uses[name] == 2:
                grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense().contiguous()
                p.grad = (await rank.all_reduce(grad.view(-1), how, f"unfrozen {name}")).view(p.shape)

    def _update_unfrozen(self, host: Any) -> None:
        """Updates by bucket miss these parameters."""
        with host.alone, restrict_optimizer(host.optimizer, self.unfrozen.values()):
            host.optimizer.step()
        for p in self.unfrozen.values():
            p.grad = None

    def close_flags(self) -> None:
        if self.hands is not None:
            self.hands.close()


@contextmanager
def restrict_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, the optimizer has only these parameters."""
    wanted, before = {id(p) for p in params}, [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in wanted]
        yield
    finally:
        for group, every in zip(optimizer.param_groups, before, strict=True):
            group["params"] = every
