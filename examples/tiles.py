"""Labelled images from Matplotlib's sample photograph: squares cut from it. The label is the quarter of the height they are from.

A dataset as the loaders want it: it has a length, and an item for every index. `cut` instead writes an item where it is wanted.
`fill` does so for a whole batch, in worker processes, so nothing is imported here that they do not need.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CLASSES = 4

Image = npt.NDArray[np.uint8]


@lru_cache
def photograph() -> Image:
    """Return the picture: 600 x 512 pixels in three colours."""
    from matplotlib import get_data_path
    from PIL import Image as Pillow

    with Pillow.open(Path(get_data_path()) / "sample_data" / "grace_hopper.jpg") as file:
        return np.asarray(file.convert("RGB"))


class Tiles:
    """So many tiles, always the same ones."""

    def __init__(self, count: int, side: int = 32) -> None:
        self.count = count
        self.side = side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = np.empty((self.side, self.side, 3), np.uint8)
        return {"image": image, "label": self.cut(int(index), image)}

    def cut(self, index: int, out: Image) -> np.int32:
        """Write one tile into `out` and return its label."""
        picture = photograph()
        band = len(picture) // CLASSES
        random = np.random.default_rng(index)
        label = random.integers(CLASSES, dtype=np.int32)
        top = label * band + random.integers(band - self.side + 1)
        left = random.integers(picture.shape[1] - self.side + 1)
        out[...] = picture[top : top + self.side, left : left + self.side]
        return label

    def spec(self, batch: int) -> dict[str, Any]:
        """Return the shapes and dtypes of a batch."""
        return {"image": ((batch, self.side, self.side, 3), "uint8"), "label": ((batch,), "int32")}

    def ranges(self, batch: int) -> list[range]:
        """Return the indices of every batch; the last one may be smaller."""
        return [range(first, min(first + batch, self.count)) for first in range(0, self.count, batch)]

    def fill(self, indices: range, arrays: Any) -> int:
        """Write a batch into arrays as `spec` says, and return how many tiles it has."""
        for row, index in enumerate(indices):
            arrays["label"][row] = self.cut(index, arrays["image"][row])
        return len(indices)
