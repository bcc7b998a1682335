"""Tests that a checkpoint contains each value of a tensor."""

from __future__ import annotations

import pytest
import torch

from workbench.host.checkpoint import piece_files as filing
from workbench.host.checkpoint.rank_image import ImageTensor, RankImage


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_each_value_of_a_tensor_lies_in_one_piece(shape: tuple[int, ...]) -> None:
    image = RankImage(step=0)
    image.add_own(torch.ones(shape))
    (item,) = filing.hash_pieces(image)
    assert [tuple(x.shape) for _, x in item] == [shape]


def test_an_item_whose_boxes_leave_values_out_is_an_error() -> None:
    image = RankImage(step=0, items=[ImageTensor("", (3,), [], torch.ones(3))])
    with pytest.raises(RuntimeError, match="split_sizes"):
        filing.hash_pieces(image)
