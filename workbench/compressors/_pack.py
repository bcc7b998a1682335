"""Packs codes of 1 to 8 bits without gaps."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor


def packed(codes: Tensor, width: int) -> Tensor:
    """Packs `(rows, n)` uint8 codes of `width` bits into `(rows, ceil(n width / 8))` uint8.

    A group of codes fills whole bytes: 8 codes of 3 bits fill 3. Its codes come from different planes, so a few shifts
    of whole planes pack everything. Last codes that are fewer than a group are packed separately.
    """
    share, nbytes = _share(width)
    if share == 1:
        return codes
    n = codes.shape[1]
    rest = n % share
    out = _joined(codes[:, : n - rest], share, nbytes, width)
    if not rest:
        return out
    last = _joined(torch.nn.functional.pad(codes[:, n - rest :], (0, share - rest)), share, nbytes, width)
    return torch.cat([out, last[:, : length(rest, width)]], 1)


def unpacked(data: Tensor, width: int, n: int) -> Tensor:
    """Restores the n codes of each row that `packed` packed: (rows, n) uint8."""
    share, nbytes = _share(width)
    if share == 1:
        return data.contiguous()
    rest = n % share
    start = length(n - rest, width)
    out = _split(data[:, :start], share, nbytes, width)
    if not rest:
        return out
    last = torch.nn.functional.pad(data[:, start:], (0, nbytes - length(rest, width)))
    return torch.cat([out, _split(last, share, nbytes, width)[:, :rest]], 1)


def length(n: int, width: int) -> int:
    """Bytes of n codes of `width` bits."""
    return -(-n * width // 8)


def _share(width: int) -> tuple[int, int]:
    """The fewest codes that fill whole bytes, and the number of these bytes."""
    return 8 // gcd(8, width), width // gcd(8, width)


def _joined(codes: Tensor, share: int, nbytes: int, width: int) -> Tensor:
    """Joins `(rows, share m)` into `(rows, nbytes m)`: code j of a share begins at its bit j width."""
    rows, n = codes.shape
    planes = codes.reshape(rows, share, n // share)
    out = codes.new_zeros(rows, nbytes, n // share)
    for j in range(share):
        byte, bit = divmod(j * width, 8)
        out[:, byte] |= planes[:, j] << bit
        if bit + width > 8:
            out[:, byte + 1] |= planes[:, j] >> (8 - bit)
    return out.flatten(1)


def _split(data: Tensor, share: int, nbytes: int, width: int) -> Tensor:
    """Inverts `_joined`: `(rows, nbytes m)` -> `(rows, share m)`."""
    rows, n = data.shape
    planes = data.reshape(rows, nbytes, n // nbytes)
    out = data.new_empty(rows, share, n // nbytes)
    for j in range(share):
        byte, bit = divmod(j * width, 8)
        code = planes[:, byte] >> bit
        if bit + width > 8:
            code |= planes[:, byte + 1] << (8 - bit)
        out[:, j] = code & (2**width - 1)
    return out.flatten(1)
