"""Writes a model's state dict to a file atomically."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.settings import KnobError, short
from workbench.tasks._base import TaskError


class Unwritable(TaskError):
    """The file cannot be written; the message has the reason."""


def written(path: Path | str, made: Callable[[], Mapping[str, Any]]) -> Path:
    """Writes the state dict `made()` to `path`. Raises KnobError and Unwritable.

    The suffix `.safetensors` selects that format, any other suffix torch's.
    """
    if not isinstance(path, str | Path) or not str(path) or "\0" in str(path):
        raise KnobError(f"path={short(path)}: must be a file to write, such as 'model.safetensors' or 'model.pt'")
    path = Path(path)
    save = _safe(path) if path.suffix == ".safetensors" else _plain
    if not path.parent.is_dir():
        raise Unwritable(f"path={path}: there is no folder {path.parent}; make it or give another path")
    state, part = made(), path.with_name(f".{path.name}.part")
    try:
        save(state, str(part))
        part.replace(path)
    except Exception as error:  # safetensors' own error is no OSError or RuntimeError
        part.unlink(missing_ok=True)
        raise Unwritable(f"path={path}: the model cannot be written ({error}); give another path") from None
    return path


def _plain(state: Mapping[str, Any], to: str) -> None:
    import torch

    torch.save(state, to)


def _safe(path: Path) -> Callable[[Mapping[str, Any], str], None]:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise Unwritable(f"path={path}: needs safetensors, which is not installed; install it, or give "
                         f"'{path.stem}.pt'") from None  # fmt: skip

    def save(state: Mapping[str, Any], to: str) -> None:  # safetensors refuses tied weights
        save_file({name: x.contiguous().clone() for name, x in state.items()}, to)

    return save
