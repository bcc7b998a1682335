"""An error of the machine is not reported as a checkpoint that does not fit."""

from __future__ import annotations

import pytest
import torch

from workbench.host.checkpoint.restore import RestoredState
from workbench.host.memory.budget import OutOfMemory
from workbench.settings import KnobError


def saved() -> RestoredState:
    return RestoredState("kept", "exact", {"parameters": {"w": 0}}, [], lambda number: torch.zeros(4), lambda: None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OutOfMemory("memory_mb=1: needs 2 MB"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:30],
)
def test_an_error_that_is_not_about_the_settings_passes_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as came, saved().refuse_misfits():
        raise error
    assert came.value is error


def test_a_tensor_that_the_host_cannot_allocate_is_no_misfit() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory") as came, saved().refuse_misfits():
        torch.empty(10**15)
    assert not isinstance(came.value, KnobError)


def test_a_shape_that_does_not_fit_is_refused_with_the_checkpoint() -> None:
    with pytest.raises(KnobError, match=r"resume=kept: does not fit this run: shape '\[3\]' is invalid.*settings"):
        with saved().refuse_misfits():
            saved().read_tensor(0).view(3)
