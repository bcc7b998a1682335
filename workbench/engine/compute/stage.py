"""Performs the forward and backward of micro-batches in a stage of a replica, on the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engine.compute.joint import Joint
from workbench.host.core.drive import drive
from workbench.host.passes.flow import Flow
from workbench.host.passes.meetings import Plans
from workbench.host.passes.piece import Piece
from workbench.host.passes.pipelining import WEIGHTS, one_batch, pass_name
from workbench.host.placement.layout import Layout
from workbench.host.placement.spread import Spread
from workbench.rank import Op, StrategyError


class Stage(Joint):
    """The part of a Host that is a stage, if `piece` is set."""

    alone: AbstractContextManager[Any]
    layout: Layout
    ledger: Any
    loss_of: Callable[..., Tensor]
    model: nn.Module
    piece: Piece | None = None
    _hooks: Any
    _listen: Callable[..., None]
    _perform: Callable[[Op], Any]
    _computed: Callable[[], None]
    _stretch: tuple[str, Any] | None
    _batches: dict[int, Any]  # batches without a backward so far
    flow: Flow
    _count = 1  # micro-batches of a batch
    _share = 1.0  # this stage's share of the model's compute
    _shares: tuple[float, ...] = ()  # the share of each of its pieces
    _left: list[int]  # by piece: the backwards left of this batch
    _exchanged = False

    def lie(self, spread: Spread | None, seed: int) -> None:
        """Takes over this rank's part of the model: the whole model if `spread` is None.

        seed: of random numbers that ranks with slices draw alike
        """
        self.piece, self._share = None, 1.0
        here, index = spread.place(self.rank.id) if spread else (0, 0)
        dealt = spread.split.share if spread and spread.split else 1.0
        if spread and (stages := spread.stages):
            self.piece = Piece(self.model, stages.of(here), here, len(stages))
            self._share, self._shares = stages.share(here), tuple(s * dealt for s in stages.shares[here :: len(stages)])
        self._share *= dealt
        self.deal(spread.split if spread else None, index, seed)

    def tune(self, plans: tuple[Plans, ...], units: list[nn.Module], again: tuple[float, ...]) -> None:
        here = slice(self.piece.stage, None, self.piece.stages) if self.piece else slice(None)
        super().tune(plans[here], units, again[here])

    def _through_stages(self, grad: float | None, micro: int, exchanged: bool) -> None:
        assert self.piece is not None
        if micro not in self._batches:
            raise StrategyError(f"backward of micro-batch {micro} was asked for before its forward")
        partition = self.partition()
        self._count = count = partition.micro_batches
        self._left = [count] * partition.pieces
        batch, self._exchanged = self._batches.pop(micro), exchanged
        self.flow.open(batch, partition)
        self.meet_before(batch)
        share = (1.0 if grad is None else grad) / count
        passes = one_batch(self.rank.group("stage"), partition, share, self.flow, self.rank.step)
        self.losses.append(drive(passes, self._perform, self.alone))

    def _stage_forward(self, x: Tensor | None, micro: int, chunk: int) -> Tensor:
        assert self.piece is not None
        self._begin("forward", micro, chunk)
        part, number = self.flow.part(micro), self.flow.number(micro)
        with torch.enable_grad(), self._together_in(x, chunk):
            with self.flow.forward(micro):
                made = self.piece.forward(self.loss_of, part, x, number, chunk)
        self.ledger.forward(list(self.flow.inputs.values()))
        self._end()
        return made

    def _together_in(self, x: Tensor | None, chunk: int) -> AbstractContextManager[None]:
        """Wraps a piece's forward, which runs with the ranks that hold the other slices of its matrices."""
        assert self.piece is not None
        return self.together.passing(x, self.piece.params(chunk)) if self.together else nullcontext()

    def _stage_backward(self, grad: Tensor | float, micro: int, chunk: int) -> Tensor | None:
        assert self.piece is not None
        return self._backward_of("backward", partial(self.piece.backward, grad), micro, chunk)

    def _stage_inputs(self, grad: Tensor | float, micro: int, chunk: int) -> Tensor | None:
        assert self.piece is not None
        self._begin("backward", micro, chunk, 0.5)
        came = self.piece.inputs(grad, self.flow.number(micro), chunk)
        self._end()
        return came

    def _stage_weights(self, micro: int, chunk: int) -> None:
        assert self.piece is not None
        self._backward_of(WEIGHTS, self.piece.weights, micro, chunk, 0.5)

    def _backward_of(self, name: str, run: Callable[[int, int], Any], micro: int, chunk: int, part: float = 1.0) -> Any:
        """Runs a backward, or its second half, that gives parameters their gradients."""
        assert self.piece is not None
        begun = sum(self._left) < len(self._left) * self._count
        self._left[chunk] -= 1
        if self._exchanged and not any(self._left):  # with this one, gradients are those of the whole batch
            mine = {id(p) for p in self.piece.params(chunk)}  # a parameter may be tied to another piece's
            self._listen([place.param for place in self.layout.order if id(place.param) not in mine])
        self._begin(name, micro, chunk, part)
        with self.ledger.backward(self._hooks.listening), self.flow.backward(micro):
            came = run(self.flow.number(micro), chunk)
            if self._exchanged and not begun and any(self._left):
                self._hooks.attach()
                self.layout.take_in()
        self._end()
        return came

    def _begin(self, name: str, micro: int, chunk: int, part: float = 1.0) -> None:
        """Begins a pass, or `part` of one."""
        assert self.piece is not None
        phase = name.partition(" ")[0]
        self.at(f"{name} of micro-batch {micro}")
        self.begin_pass(phase, chunk)
        self._stretch = pass_name(name, self.flow.number(micro), chunk, len(self.piece.pieces)), self.watch.now()
        self.pace.begin(phase, self.rank.step, self._shares[chunk] * part / self._count,
                        self.again(phase, chunk))  # fmt: skip

    def _end(self) -> None:
        self.paced(1.0)
        self._computed()

    def _coded(self, name: str, work: Callable[[], Any], nbytes: int) -> Any:
        """Runs a codec's own work on `nbytes` that cross between stages, or inside of one."""
        began = self.watch.now()
        value = work()
        self.watch.write(self.rank.step, "codec", name, began, began, self.watch.now(), nbytes)
        return value

    @property
    def _device(self) -> torch.device:
        return self.layout.order[0].param.device

    def _of_replica(self, squares: float) -> float:
        """Returns the sum over all stages of a replica."""
        x = torch.tensor([squares], dtype=torch.float64, device=self._device)
        return float(self._perform(self.rank.inside.all_reduce(x, "sum", "gradient norm")))

