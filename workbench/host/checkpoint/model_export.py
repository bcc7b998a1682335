"""A checkpoint of the model alone, for a user's own loop. No run resumes from it.

Drifted replicas become their mean.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor

from workbench.host.checkpoint.rank_image import RankImage
from workbench.host.checkpoint.restore import RestoredState
from workbench.host.checkpoint.value_encoding import UnsavableValue
from workbench.host.core.rank_view import RankView
from workbench.host.transfer.handover import average_tensors

MODEL_KIND = "model"  # of a checkpoint


async def make_model_image(run: RankView) -> RankImage:
    """Returns the same on all ranks. Raises UnsavableValue for state that is not a tensor."""
    state = dict(run.model.state_dict())
    if other := next((name for name, x in state.items() if not isinstance(x, Tensor)), None):
        raise UnsavableValue(f"{other} of the model's state is not a tensor")
    state = {name: x.detach().clone() for name, x in state.items()}
    await _average_drifted(run, state)
    image = RankImage(run.rank.step)
    image.entries["step"] = image.step
    image.entries["parameters"] = {
        name: image.add_tensor(f"model.{name}", x, tuple(x.shape)) for name, x in state.items()
    }
    return image


async def average_model(run: RankView) -> None:
    """Averages `run`'s own model."""
    state = {name: x.detach() for name, x in run.model.state_dict().items() if isinstance(x, Tensor)}
    with torch.no_grad():
        await _average_drifted(run, state)


async def _average_drifted(run: RankView, state: dict[str, Tensor]) -> None:
    learned = {name for name, _ in run.model.named_parameters(remove_duplicate=False)}
    for here in (learned, state.keys() - learned):  # ranks may have own statistics
        mine = [x for name, x in state.items() if name in here and x.numel()]
        if len(set(await run.gather(_compute_digest(mine)))) > 1:
            await average_tensors(run.rank, mine, "model")


def _compute_digest(every: list[Tensor]) -> int:
    digest = 0
    for x in every:
        bytes_of = x.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        digest = crc32(bytes_of.numpy().tobytes(), digest)
    return digest


def read_model_state(image: RestoredState) -> dict[str, Tensor]:
    """Raises KnobError if the image has none."""
    with image.refuse_misfits():
        return {
            str(name): image.read_tensor(int(number)).clone() for name, number in image.entries["parameters"].items()
        }
