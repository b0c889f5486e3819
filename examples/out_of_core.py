"""Map a function over a file of images that is larger than the device memory it may use: in, compute and out, all at once.

    python examples/out_of_core.py --quick
    python examples/out_of_core.py --backend cupy --gib 16

Source and result are .npy files, mapped into memory. Only some batches are on the device at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from tiles import Image, photograph

import xferlib

NUMPY_LIKE = {"host": "numpy", "cupy": "cupy", "jax": "jax.numpy"}
MIB = 1 << 20


def grey(library: Any, colour: Any) -> Any:
    """Return the brightness of every pixel, in whole numbers, so that every library computes the same bytes."""
    red, green, blue = (colour[..., channel].astype(library.int32) for channel in range(3))
    return ((77 * red + 150 * green + 29 * blue) >> 8).astype(library.uint8)


def write_source(path: Path, nbytes: int) -> npt.NDArray[np.uint8]:
    """Write so many bytes of pictures, each a photograph turned a little further, and map the file for reading."""
    picture = photograph()
    count = -(-nbytes // picture.nbytes)
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(count, *picture.shape))
    for number in range(count):
        out[number] = np.roll(picture, 7 * number, axis=1)
    out.flush()
    mapped: npt.NDArray[np.uint8] = np.load(path, mmap_mode="r")
    return mapped


def convert(stager: xferlib.Stager, source: Image, path: Path, batch: int) -> None:
    """Write the grey pictures of all of the source to a file."""
    library = import_module(NUMPY_LIKE[stager.name])
    batches: Iterator[Image] = (source[first : first + batch] for first in range(0, len(source), batch))
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=source.shape[:-1])
    # Nobody writes to the source, so the copies may borrow its pages.
    with xferlib.stream_map(lambda images: grey(library, images), batches, stager, out=out, rewrites=False) as loop:
        for _ in loop:
            pass
        print(loop.bill)
        print(loop.report())
    out.flush()


def main() -> None:
    """Convert the file, and compare the result with what NumPy computes."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="host", choices=NUMPY_LIKE)
    arguments.add_argument("--gib", type=float, default=4, help="size of the source")
    arguments.add_argument("--quick", action="store_true", help="64 MiB")
    options = arguments.parse_args()
    nbytes = 64 * MIB if options.quick else int(options.gib * 1024 * MIB)
    device_limit = nbytes // 4
    # The bill of a loop is four batches and its results.
    batch = max(1, device_limit // 8 // photograph().nbytes)
    with TemporaryDirectory() as folder:
        source = write_source(Path(folder) / "colour.npy", nbytes)
        with xferlib.stager(options.backend, device_limit=device_limit) as stager:
            convert(stager, source, Path(folder) / "grey.npy", batch)
            peak = stager.stats().device_peak_nbytes
            print(f"{source.nbytes / MIB:.0f} MiB through at most {peak / MIB:.0f} MiB of batches on {stager.device}")
        assert peak <= device_limit < source.nbytes
        result = np.load(Path(folder) / "grey.npy", mmap_mode="r")
        for number, picture in enumerate(source):
            assert np.array_equal(result[number], grey(np, picture)), f"picture {number} differs"
    print("every byte verified")


if __name__ == "__main__":
    main()
