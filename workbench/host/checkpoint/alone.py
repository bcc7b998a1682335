"""A model alone, of which no run goes on: what a loop of its own has trained, for whoever wants it back.

Of replicas that drifted apart it is the mean, as when a strategy is left; of those that are alike to the bit, one.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from workbench.host.checkpoint.image import Image
from workbench.host.checkpoint.regain import Regained
from workbench.host.checkpoint.tree import Unkept
from workbench.host.transfer.handover import averaged

KIND = "model"  # of a checkpoint


async def alone(run: Any) -> Image:
    """What `run`'s model would save, the same on all ranks. Raises Unkept for what is no tensor."""
    state = dict(run.model.state_dict())
    if other := next((name for name, x in state.items() if not isinstance(x, Tensor)), None):
        raise Unkept(f"{other} of the model's state is no tensor")
    state = {name: x.detach().clone() for name, x in state.items()}
    await _agreed(run, state)
    image = Image(run.rank.step)
    image.said["step"] = image.step
    image.said["parameters"] = {name: image.add(f"model.{name}", x, tuple(x.shape)) for name, x in state.items()}
    return image


async def mean_taken(run: Any) -> None:
    """`run`'s own model becomes that."""
    state = {name: x.detach() for name, x in run.model.state_dict().items() if isinstance(x, Tensor)}
    with torch.no_grad():
        await _agreed(run, state)


async def _agreed(run: Any, state: dict[str, Tensor]) -> None:
    """What ranks have of these under the same name is the same from now on."""
    learned = {name for name, _ in run.model.named_parameters(remove_duplicate=False)}
    for here in (learned, state.keys() - learned):  # each rank may have statistics of its own
        mine = [x for name, x in state.items() if name in here and x.numel()]
        if len(set(await run.gather(_digest(mine)))) > 1:
            await averaged(run.rank, mine, "model")


def _digest(every: list[Tensor]) -> int:
    """The same for the same bits."""
    digest = 0
    for x in every:
        bytes_of = x.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        digest = crc32(bytes_of.numpy().tobytes(), digest)
    return digest


def state_of(image: Regained) -> dict[str, Tensor]:
    """The state dict that `alone` has kept. Raises KnobError where it is none."""
    with image.refusing():
        return {str(name): image.tensor(int(number)).clone() for name, number in image.said["parameters"].items()}
