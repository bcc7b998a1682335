"""Four bits per element in numpy: a sign and one of eight magnitudes. The mean over ranks sends nothing wider.

Streaming DiLoCo sends E3M0 and adds up in fp32. Its scale and its code of zero could not be established. This file
follows the workbench's documentation: blocks of 256 elements, their largest magnitude s as an fp32 scale, and the
nearest of 0 and s 2^-6, ..., s. Each rank adds up one of p chunks of ceil(n / p) elements, and sends the mean in this
form.
"""

from __future__ import annotations

import numpy as np

BLOCK = 256
MAGNITUDES = np.array([2.0**-k for k in range(7)] + [0.0])  # from the largest: of two as near argmin takes the first


def rounded(x: np.ndarray) -> np.ndarray:
    """(n,) -> (n,) float32: x after rounding and sending."""
    return np.concatenate([_block(x[at : at + BLOCK].astype(np.float32)) for at in range(0, len(x), BLOCK)])


def _block(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max()
    if scale == 0:
        return x
    nearest = np.abs((np.abs(x) / scale)[:, None] - MAGNITUDES).argmin(1)
    return (np.sign(x) * MAGNITUDES[nearest] * scale).astype(np.float32)


def mean_in_four_bits(x: np.ndarray) -> np.ndarray:
    """(ranks, n) -> (n,): about the mean over ranks."""
    ranks, n = x.shape
    chunk = -(-n // ranks)
    means = []
    for at in range(0, n, chunk):
        total = np.zeros(min(chunk, n - at), np.float32)
        for row in x:
            total += rounded(row[at : at + chunk])
        means.append(rounded(total / np.float32(ranks)))
    return np.concatenate(means)
