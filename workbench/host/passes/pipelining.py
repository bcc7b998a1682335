"""One batch through a pipeline, as one stage computes it.

Four Ops compute a piece:

- Op("stage_forward", x, micro, chunk) returns its output, or the last piece's loss.
- Op("stage_backward", grad, micro, chunk) returns the gradient of its input.
- Op("stage_inputs", grad, micro, chunk) returns it without gradients of parameters.
- Op("stage_weights", micro, chunk) computes the gradients of parameters afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.host.memory.storage_tracker import count_arrived
from workbench.host.passes.in_flight import InFlight
from workbench.host.passes.stage_messages import receive_tensor
from workbench.host.passes.stage_module import list_tensors
from workbench.host.placement.checksum import compute_checksum
from workbench.host.placement.stage_cuts import run_parts
from workbench.partitions import Partition
from workbench.rank import Op, Rank, StrategyError
from workbench.tasks import TaskError

WEIGHT_HALF = "backward weights"  # second half's name
LOSS_MESSAGE = "loss"


async def require_same_batch(rank: Rank, batch: object, device: torch.device) -> None:
    """Raises StrategyError if a replica's stages drew different batches."""
    told = compute_checksum({str(number): x for number, x in enumerate(list_tensors(batch))})
    mine = torch.tensor([told], device=device)
    rows = await rank.all_gather(mine, "batch")
    if not rows.is_meta and len(set(rows.reshape(-1).tolist())) > 1:
        raise StrategyError(
            "the stages of a replica read different batches: data(rank, ranks, seed) must return the same examples "
            "for the same rank; draw random values from `seed`, or from torch's, numpy's or Python's global generators"
        )


async def run_batch(rank: Rank, partition: Partition, share: float, micros_in_flight: InFlight, step: int) -> Tensor:
    """Runs one batch in the schedule's order. Returns its mean loss.

    rank:   this rank among the stages of its replica
    share:  the weight of each micro-batch's loss, so that gradients add up to the batch's
    """
    losses: list[Tensor] = []
    before, after = (rank.index - 1) % rank.size, (rank.index + 1) % rank.size
    actions, end = micros_in_flight.begin_batch(rank, partition, step), partition.pieces * rank.size - 1
    crossing = micros_in_flight.crossing
    for what, micro, chunk in actions:
        piece, number = chunk * rank.size + rank.index, micros_in_flight.number_micro(micro)
        if what == "F":
            x = await crossing.receive_activation(before, (number, piece)) if piece else None
            micros_in_flight.note_forward(micro)
            made = await Op("stage_forward", x, micro, chunk)
            if piece == end:
                losses.append(made)
            else:
                await crossing.send_activation(made, after, (number, piece + 1))
        elif what == "W":
            await Op("stage_weights", micro, chunk)
            micros_in_flight.free_micro(micro)
        else:
            grad: Any = share if piece == end else await crossing.receive_gradient(after, (number, piece + 1))
            came = await Op("stage_backward" if what == "B" else "stage_inputs", grad, micro, chunk)
            if piece:
                await crossing.send_gradient(came, before, (number, piece))
            micros_in_flight.free_micro(micro)
    micros_in_flight.end_batch()
    if rank.index < rank.size - 1:
        return await receive_tensor(rank, rank.size - 1, LOSS_MESSAGE)
    mean = sum(losses[1:], losses[0]) / len(losses)
    for other in range(rank.size - 1):
        await rank.send(mean, other, LOSS_MESSAGE)
    return mean


async def drain_pipeline(micros_in_flight: InFlight) -> None:
    """Drops all forwards of later batches.

    It first receives the activations that the previous stage has already sent.
    """
    if not micros_in_flight.batches:
        return
    stage, ahead = micros_in_flight.crossing.rank.index, micros_in_flight.partition.ahead
    for micro in range(ahead(stage), ahead(stage - 1)) if stage else ():
        if micros_in_flight.has_step(micro):
            await micros_in_flight.crossing.receive_activation(stage - 1, (micros_in_flight.number_micro(micro), stage))
    micros_in_flight.drop_micros()


async def evaluate_pipeline(rank: Rank, pieces: Sequence[Sequence[nn.Module]], *inputs: object, **named: object) -> Any:
    """Returns the whole model's output on all stages."""
    last = rank.size - 1
    x: Any = None
    for number, parts in enumerate(pieces):
        if number or rank.index:
            inputs, named = (await receive_tensor(rank, (rank.index - 1) % rank.size, "activation"),), {}
            count_arrived(inputs)
        x = await Op("do", partial(run_parts, parts, *inputs, **named))  # also tensor-parallel meetings
        if rank.index < last or number < len(pieces) - 1:
            await rank.send(x, (rank.index + 1) % rank.size, "activation")
    if rank.index < last:
        x = await _receive_output(rank, last)
        count_arrived(x)
        return x
    for other in range(last):
        await _send_output(rank, x, other)
    return x


class NamedOutput(dict[str, Any]):
    """The output of a model that returns several tensors, as transformers' models do."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the model's output has {', '.join(self) or 'nothing'} and no {name}")
        return self[name]


async def _send_output(rank: Rank, x: object, to: int) -> None:
    several = dict(x) if isinstance(x, Mapping) else {}
    named = {"": x} if isinstance(x, Tensor) else {k: v for k, v in several.items() if isinstance(v, Tensor)}
    if not named:
        raise TaskError(
            f"partition=Pipeline: in an evaluation the last stage sends one tensor or a dict of tensors to the other "
            f"stages, and the model returns a {type(x).__name__}; return a tensor or a dict of tensors"
        )
    like = next(iter(named.values()))
    names = torch.tensor(list("\n".join(named).encode()), dtype=torch.uint8, device=like.device)
    await rank.send(names, to, "names of the answer")
    for name, tensor in named.items():
        await rank.send(tensor, to, f"answer {name}".rstrip())


async def _receive_output(rank: Rank, source: int) -> Any:
    said = await receive_tensor(rank, source, "names of the answer")
    if not said.numel():
        return await receive_tensor(rank, source, "answer")
    names = bytes(said.tolist()).decode().split("\n")
    return NamedOutput({name: await receive_tensor(rank, source, f"answer {name}") for name in names})


def name_pass(phase: str, micro: int, chunk: int, pieces: int) -> str:
    """Returns "forward 3", or "forward 3.1" if there are several pieces."""
    return f"{phase} {micro}" if pieces == 1 else f"{phase} {micro}.{chunk}"
