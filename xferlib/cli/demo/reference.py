"""The edges of one frame in plain NumPy: what every device result is compared with, bit for bit.

Written for being read: padded sums in wide integers, one frame at a time. It shares no code with any backend's workload, so that a
match means something. The definition stands in `xferlib.workload`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["edges", "grey", "normalised"]

Pixels = npt.NDArray[np.uint8]
Whole = npt.NDArray[np.int32]

BINOMIAL: Whole = np.array([[1, 2, 1], [2, 4, 2], [1, 2, 1]], np.int32)
SOBEL_X: Whole = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], np.int32)
SOBEL_Y: Whole = SOBEL_X.T


def edges(frame: npt.NDArray[Any], *, rounds: int) -> Pixels:
    """Return the edge magnitude of a frame, (height, width) or (height, width, channels), after `rounds` rounds of blur."""
    image = normalised(grey(frame))
    for _ in range(rounds):
        image = ((_weighted(image, BINOMIAL) + 8) >> 4).astype(np.uint8)
    strength: Whole = np.abs(_weighted(image, SOBEL_X)) + np.abs(_weighted(image, SOBEL_Y))
    return strength.clip(0, 255).astype(np.uint8)


def grey(frame: npt.NDArray[Any]) -> Whole | npt.NDArray[np.float64]:
    """Return one value per pixel: integers, or doubles for a frame of floats."""
    first, *others = [frame] if frame.ndim == 2 else [frame[:, :, channel] for channel in range(frame.shape[2])]
    if frame.dtype.kind == "f":
        if len(others) < 2:
            return first.astype(np.float64)
        # Channels that are not finite need no warning: the definition covers them.
        with np.errstate(all="ignore"):
            weighted = [
                np.multiply(part, weight, dtype=np.float64)
                for part, weight in zip((first, *others[:2]), (0.299, 0.587, 0.114), strict=True)
            ]
            doubles: npt.NDArray[np.float64] = (weighted[0] + weighted[1]) + weighted[2]
        return doubles
    if len(others) < 2:
        return first.astype(np.int32)
    red, green, blue = (part.astype(np.int32) for part in (first, *others[:2]))
    whole: Whole = (77 * red + 150 * green + 29 * blue) >> 8
    return whole


def normalised(values: Whole | npt.NDArray[np.float64]) -> Pixels:
    """Stretch what `grey` returned so that its least and greatest value become 0 and 255."""
    if values.dtype.kind != "f":
        low, high = int(np.min(values)), int(np.max(values))
        stretched: Whole = (values - low).astype(np.int32) * 255 // max(high - low, 1)
        return stretched.astype(np.uint8)
    finite = np.isfinite(values)
    if not finite.any():
        return np.zeros(values.shape, np.uint8)
    halves: npt.NDArray[np.float64] = np.where(finite, values, np.min(values[finite])) * 0.5
    least, greatest = np.min(halves), np.max(halves)
    if least == greatest:
        return np.zeros(values.shape, np.uint8)
    shares: npt.NDArray[np.float64] = (halves - least) / (greatest - least) * 255.0
    return shares.astype(np.uint8)


def _weighted(image: Pixels, weights: Whole) -> Whole:
    height, width = image.shape
    padded = np.pad(image.astype(np.int32), 1, mode="edge")
    total: Whole = np.zeros(image.shape, np.int32)
    for (down, right), weight in np.ndenumerate(weights):
        total += weight * padded[down : down + height, right : right + width]
    return total
