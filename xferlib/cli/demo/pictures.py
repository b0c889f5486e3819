"""Frames from images: one, those of a folder, or those that come with Matplotlib. Decoded while the demo runs, and grey.

Invariant: an image that is among the frames was decoded once before. That is the only way to know that it can be.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xferlib.cli.command_error import CommandError, require_plot
from xferlib.cli.demo.source import FrameSource, from_array
from xferlib.words import counted

__all__ = ["bundled", "open_folder", "open_image"]

Pixels = npt.NDArray[np.uint8]

SIDE = 512


def open_image(path: Path) -> FrameSource:
    """Return an image as the only frame. Raises `CommandError` where it cannot be read."""
    require_plot("an image")
    return _images([path], _shape(_decoded(path)), path.name)


def open_folder(folder: Path, pool: Executor) -> FrameSource:
    """Return the images of a folder by name, fitted to the size of the first. Folders inside it are not looked into.

    Files whose suffix is no image's are passed over. Images that cannot be read are named in `skipped`.
    """
    require_plot("a folder of images")
    from PIL import Image

    suffixes = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    inside = sorted(folder.iterdir())
    files = [file for file in inside if file.suffix.lower() in suffixes and file.is_file()]
    subfolders = tuple(file.name for file in inside if file.is_dir() and not file.name.startswith("."))
    if not files:
        hint = f". Its subfolders are not looked into: name one of them, such as {subfolders[0]!r}" if subfolders else ""
        raise CommandError(f"there is no image in {str(folder)!r}: expected files such as .png, .jpg or .tif{hint}")
    found = dict(zip(files, pool.map(_shape_or_reason, files), strict=True))
    shapes = {file: shape for file, shape in found.items() if not isinstance(shape, str)}
    skipped = {file.name: reason for file, reason in found.items() if isinstance(reason, str)}
    if not shapes:
        raise CommandError(f"none of {counted(len(files), 'image')} in {str(folder)!r} can be read: {skipped[files[0].name]}")
    source = _images(list(shapes), next(iter(shapes.values())), f"{counted(len(shapes), 'image')} in {folder.name or folder}")
    return replace(source, skipped=skipped, subfolders=subfolders)


def bundled() -> FrameSource:
    """Return Matplotlib's pictures as square frames: a photograph, elevations, a scan. Pictures that it lacks are left out."""
    require_plot("the demo without PATH")
    from matplotlib import get_data_path

    folder = Path(get_data_path()) / "sample_data"
    pictures: dict[str, Callable[[Path], npt.NDArray[Any]]] = {
        "grace_hopper.jpg": _decoded,
        "jacksboro_fault_dem.npz": lambda file: _stretched(np.load(file)["elevation"]),
        "s1045.ima.gz": lambda file: _stretched(np.frombuffer(gzip.decompress(file.read_bytes()), ">u2").reshape(256, 256)),
        "topobathy.npz": lambda file: _stretched(np.load(file)["topo"]),
    }
    frames = [_square(load(folder / name)) for name, load in pictures.items() if (folder / name).is_file()]
    if not frames:
        raise CommandError(f"Matplotlib came without its sample data: nothing in {str(folder)!r}. Name a .npy file or a folder")
    return from_array(np.stack(frames), "Matplotlib's sample pictures")


def _images(files: Sequence[Path], shape: tuple[int, int], label: str) -> FrameSource:
    def read(start: int, out: npt.NDArray[Any]) -> None:
        for frame, file in zip(out, files[start : start + len(out)], strict=True):
            frame[:] = _decoded(file, shape)

    return FrameSource(
        label=label,
        frames=len(files),
        frame_shape=shape,
        dtype=np.dtype(np.uint8),
        read=read,
        original=lambda number: _decoded(files[number], shape),
    )


def _shape(picture: Pixels) -> tuple[int, int]:
    height, width = picture.shape
    return height, width


def _shape_or_reason(file: Path) -> tuple[int, int] | str:
    try:
        return _shape(_decoded(file))
    except CommandError as error:
        return str(error.__cause__)


def _decoded(file: Path, shape: tuple[int, int] | None = None) -> Pixels:
    """Return an image grey and upright, fitted to a shape if one is given."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            grey = _grey(ImageOps.exif_transpose(image))
    except Exception as error:
        # Any error: the bytes may be anything, and decoders raise nearly everything.
        raise CommandError(
            f"cannot read {str(file)!r} as an image: {error}. Expected an image that is whole, a .npy file, or a folder of images"
        ) from error
    size = grey.size if shape is None else (shape[1], shape[0])
    return np.asarray(grey if grey.size == size else ImageOps.fit(grey, size))


def _grey(image: Any) -> Any:
    from PIL import Image

    # Pillow would clip these to 255 instead of scaling them.
    return Image.fromarray(_stretched(np.asarray(image))) if image.mode.startswith(("I", "F")) else image.convert("L")


def _stretched(values: npt.NDArray[Any]) -> Pixels:
    doubles = values.astype(np.float64)
    low, high = doubles.min(), doubles.max()
    stretched: Pixels = ((doubles - low) * (255 / max(high - low, 1e-300))).astype(np.uint8)
    return stretched


def _square(picture: npt.NDArray[Any]) -> Pixels:
    from PIL import Image, ImageOps

    # The upper part of a portrait is the one to keep.
    return np.asarray(ImageOps.fit(Image.fromarray(picture), (SIDE, SIDE), Image.Resampling.BICUBIC, centering=(0.5, 0.0)))
