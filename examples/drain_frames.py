"""Compute frames on the device and write them to one .npy file: each is copied while later ones are computed.

    python examples/drain_frames.py --quick
    python examples/drain_frames.py --backend cupy

The file is mapped into memory and filled from the front, so it may be larger than the memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import xferlib

NUMPY_LIKE = {"host": "numpy", "cupy": "cupy", "jax": "jax.numpy"}


def frame(library: Any, number: int, height: int, width: int) -> Any:
    """Return rings that run outwards: exact arithmetic, so that every library computes the same bytes."""
    down = library.arange(height)[:, None] - height // 2
    right = library.arange(width)[None, :] - width // 2
    return (((down * down + right * right) * (number + 1) >> 10) & 255).astype(library.uint8)


def drain(stager: xferlib.Stager, path: Path, shape: tuple[int, int, int]) -> None:
    """Compute all frames and write them to the file."""
    count, height, width = shape
    library = import_module(NUMPY_LIKE[stager.name])
    frames: Iterator[Any] = (frame(library, number, height, width) for number in range(count))
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    with xferlib.drain(frames, stager, out=out) as loop:
        for _ in loop:
            pass
        print(loop.bill)
        print(loop.report())
    out.flush()


def main() -> None:
    """Write the file, and compare it with what NumPy computes."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="host", choices=NUMPY_LIKE)
    arguments.add_argument("--quick", action="store_true", help="32 small frames")
    arguments.add_argument("--file", type=Path, help="the file to write; a temporary one if not given")
    options = arguments.parse_args()
    shape = (32, 180, 320) if options.quick else (240, 1080, 1920)
    with TemporaryDirectory() as folder:
        path = options.file or Path(folder) / "frames.npy"
        with xferlib.stager(options.backend) as stager:
            drain(stager, path, shape)
            print(f"{shape[0]} frames from {stager.device}")
        written = np.load(path, mmap_mode="r")
        assert written.shape == shape
        for number, got in enumerate(written):
            assert np.array_equal(got, frame(np, number, *shape[1:])), f"frame {number} differs"
    print("every byte verified")


if __name__ == "__main__":
    main()
