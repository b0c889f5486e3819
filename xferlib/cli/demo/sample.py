"""The pictures that come with Matplotlib: a photograph, elevations, a scan. Real ones, for a demo that is given nothing."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xferlib.cli.demo.source import ArraySource
from xferlib.cli.errors import CommandError, require_plot

__all__ = ["bundled"]

SIDE = 512


def bundled() -> ArraySource:
    """Return the pictures as square frames of bytes. Those that this Matplotlib does not have are left out."""
    require_plot("the demo without PATH")
    from matplotlib import get_data_path

    folder = Path(get_data_path()) / "sample_data"
    pictures: list[tuple[str, Callable[[Path], npt.NDArray[Any]]]] = [
        ("grace_hopper.jpg", _photograph),
        ("jacksboro_fault_dem.npz", lambda file: _stretched(np.load(file)["elevation"])),
        ("s1045.ima.gz", _scan),
        ("topobathy.npz", lambda file: _stretched(np.load(file)["topo"])),
    ]
    frames = [_square(load(folder / name)) for name, load in pictures if (folder / name).is_file()]
    if not frames:
        raise CommandError(f"Matplotlib came without its sample data: nothing in {str(folder)!r}. Name a .npy file or a folder")
    return ArraySource(np.stack(frames), "Matplotlib's sample pictures")


def _photograph(file: Path) -> npt.NDArray[Any]:
    from PIL import Image

    with Image.open(file) as image:
        return np.asarray(image.convert("L"))


def _scan(file: Path) -> npt.NDArray[Any]:
    with gzip.open(file) as stream:
        return _stretched(np.frombuffer(stream.read(), ">u2").reshape(256, 256))


def _stretched(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    low, high = float(values.min()), float(values.max())
    return ((values - low) * (255 / (high - low))).astype(np.uint8)


def _square(picture: npt.NDArray[Any]) -> npt.NDArray[Any]:
    from PIL import Image, ImageOps

    # The upper part of a portrait is the one to keep.
    return np.asarray(ImageOps.fit(Image.fromarray(picture), (SIDE, SIDE), Image.Resampling.BICUBIC, centering=(0.5, 0.0)))
