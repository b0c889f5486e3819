"""Frames from a folder of images: decoded while the demo runs, grey, and fitted to the size of the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from xferlib.cli.errors import CommandError, require_plot

__all__ = ["FolderSource"]


@final
class FolderSource:
    """The images of a folder by name, not of the folders in it. Files that are no images by their suffix are passed over."""

    def __init__(self, folder: Path) -> None:
        require_plot("a folder of images")
        from PIL import Image

        suffixes = Image.registered_extensions()
        self._files = sorted(file for file in folder.iterdir() if file.suffix.lower() in suffixes and file.is_file())
        if not self._files:
            raise CommandError(f"there is no image in {str(folder)!r}: expected files such as .png, .jpg or .tif")
        for file in self._files:
            _size(file)
        width, height = _size(self._files[0])
        self.frame_shape: tuple[int, ...] = (height, width)
        self.frames = len(self._files)
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        self.label = f"{self.frames} image{'s' if self.frames > 1 else ''} in {folder.name or folder}"

    def read(self, start: int, out: npt.NDArray[Any]) -> None:
        for index in range(len(out)):
            out[index] = self.original(start + index)

    def original(self, number: int) -> npt.NDArray[Any]:
        from PIL import Image, ImageOps

        height, width = self.frame_shape
        file = self._files[number]
        try:
            with Image.open(file) as image:
                grey = _grey(ImageOps.exif_transpose(image))
                return np.asarray(grey if grey.size == (width, height) else ImageOps.fit(grey, (width, height)))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise _unreadable(file, error) from error


def _grey(image: Any) -> Any:
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image.convert("L")
    # Pillow would clip these to 255 instead of scaling them.
    values = np.asarray(image, np.float64)
    low, high = float(values.min()), float(values.max())
    return Image.fromarray(((values - low) * (255 / max(high - low, 1e-300))).astype(np.uint8))


def _size(file: Path) -> tuple[int, int]:
    """Read the size, turned upright, from the header."""
    from PIL import ExifTags, Image

    try:
        with Image.open(file) as image:
            width, height = image.size
            return (height, width) if image.getexif().get(ExifTags.Base.Orientation, 1) >= 5 else (width, height)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> CommandError:
    return CommandError(f"cannot read the image {str(file)!r}: {error}. Remove it from the folder or convert it")
