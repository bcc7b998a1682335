"""Packs patches into a JSON header and one binary buffer, for `unpack` in chart.js.

Numbers are float32 or small unsigned integers relative to a base: `[offset, count, type, base]`. The base keeps the
microseconds of late times.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from widgets.views._base import Columns, Patch


class MessagePacker:
    """One message under construction."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def joined_buffer(self) -> bytes:
        return b"".join(self._parts)

    def pack_patch(self, patch: Patch) -> dict[str, Any]:
        header: dict[str, Any] = {}
        if patch.append:
            header["append"] = {i: self._pack_columns(c) for i, c in patch.append.items()}
        if patch.replace:
            header["replace"] = {i: self._pack_columns(c) for i, c in patch.replace.items()}
        for key in ("layout", "facts"):
            if value := getattr(patch, key):
                header[key] = value
        if patch.html is not None:
            header["html"] = patch.html
        return header

    def _pack_columns(self, columns: Columns) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, list) else self._pack_numbers(np.asarray(v)) for k, v in columns.items()}

    def _pack_numbers(self, values: np.ndarray) -> list[Any]:
        if values.dtype.kind in "iub":
            base: float = int(values.min()) if len(values) else 0
            rest = values.astype("i8") - base
            top = int(rest.max()) if len(rest) else 0
            kind = "u1" if top < 256 else "u2" if top < 65536 else "u4" if top < 2**32 else "f8"
        else:
            finite = values[np.isfinite(values)]
            base = float(finite.min()) if len(finite) else 0.0
            rest, kind = values - base, "f4"
        data = rest.astype("<" + kind).tobytes()
        where = self._size
        pad = -len(data) % 8
        self._parts.append(data + b"\0" * pad)
        self._size += len(data) + pad
        return [where, len(values), kind, base]
