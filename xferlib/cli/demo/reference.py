"""The edges of one frame in plain NumPy: what every device result is compared with, bit for bit.

Written for being read: padded sums in wide integers, one frame at a time. It shares no code with any backend's workload, so that a
match means something. The definition stands in `xferlib.workload`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["edges", "grey", "normalised"]

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

BINOMIAL = np.array([[1, 2, 1], [2, 4, 2], [1, 2, 1]])
SOBEL_X = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
SOBEL_Y = SOBEL_X.T


def edges(frame: np.ndarray, *, rounds: int) -> Pixels:
    """Return the edge magnitude of a frame, (height, width) or (height, width, channels), after `rounds` rounds of blur."""
    image = normalised(grey(frame))
    for _ in range(rounds):
        image = ((_weighted(image, BINOMIAL) + 8) >> 4).astype(np.uint8)
    strength = np.abs(_weighted(image, SOBEL_X)) + np.abs(_weighted(image, SOBEL_Y))
    return np.minimum(strength, 255).astype(np.uint8)


def grey(frame: np.ndarray) -> np.ndarray:
    """Return one value per pixel, as 64-bit integers, or as doubles for a frame of floats."""
    wide = frame.astype(np.float64 if frame.dtype.kind == "f" else np.int64)
    if wide.ndim == 2:
        return wide
    if wide.shape[2] < 3:
        return wide[:, :, 0]
    red, green, blue = wide[:, :, 0], wide[:, :, 1], wide[:, :, 2]
    if wide.dtype.kind == "f":
        with np.errstate(all="ignore"):
            return (0.299 * red + 0.587 * green) + 0.114 * blue
    return (77 * red + 150 * green + 29 * blue) >> 8


def normalised(values: np.ndarray) -> Pixels:
    """Stretch what `grey` returned so that its least and greatest value become 0 and 255."""
    if values.dtype.kind != "f":
        low, span = values.min(), np.ptp(values)
        return ((values - low) * 255 // max(span, 1)).astype(np.uint8)
    finite = np.isfinite(values)
    if not finite.any():
        return np.zeros(values.shape, np.uint8)
    halves = np.where(finite, values, values[finite].min()) * 0.5
    span = halves.max() - halves.min()
    if span == 0:
        return np.zeros(values.shape, np.uint8)
    return ((halves - halves.min()) / span * 255.0).astype(np.uint8)


def _weighted(image: Pixels, weights: np.ndarray) -> np.ndarray:
    height, width = image.shape
    padded = np.pad(image.astype(np.int64), 1, mode="edge")
    total = np.zeros(image.shape, np.int64)
    for (down, right), weight in np.ndenumerate(weights):
        total += weight * padded[down : down + height, right : right + width]
    return total
