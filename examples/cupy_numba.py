"""CuPy and Numba on the same device arrays: put once, blurred by a Numba kernel, measured by CuPy, taken back once.

    python examples/cupy_numba.py

Needs an NVIDIA GPU, CuPy and Numba for CUDA; says so and fails where there is none.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from tiles import Image, photograph

import xferlib

THREADS = (16, 16)


def compile_blur() -> Any:
    """Compile a kernel: every pixel becomes the mean of three by three, in whole numbers; the border stays black."""
    from numba import cuda

    if not hasattr(np, "row_stack"):
        # numba-cuda cannot compile on NumPy 2.5 otherwise: https://github.com/NVIDIA/numba-cuda/issues/907
        vars(np)["row_stack"] = np.vstack

    def blur(source: Any, out: Any) -> None:
        row, column = cuda.grid(2)
        if 0 < row < source.shape[0] - 1 and 0 < column < source.shape[1] - 1:
            for channel in range(source.shape[2]):
                total = np.int32(0)
                for down in range(-1, 2):
                    for right in range(-1, 2):
                        total += np.int32(source[row + down, column + right, channel])
                out[row, column, channel] = total // 9

    return cuda.jit(blur)


def process(stager: xferlib.Stager, batch: Image) -> tuple[Image, float]:
    """Return the blurred picture and its mean."""
    import cupy
    from numba import cuda

    blur = compile_blur()
    source = stager.put(batch).value
    out = cupy.zeros_like(source)
    # Numba's own default is another stream. On CuPy's current stream the kernel comes after the copy, so nothing has to wait on the
    # host, and Numba need not synchronize either.
    stream = cuda.external_stream(cupy.cuda.get_current_stream().ptr)
    views = [cuda.as_cuda_array(array, sync=False) for array in (source, out)]
    blocks = tuple(-(-length // threads) for length, threads in zip(batch.shape, THREADS, strict=False))
    blur[blocks, THREADS, stream](*views)
    average = out.mean()
    return stager.get(out).result(), float(average)


def expected(picture: Image) -> Image:
    """Return what the kernel should compute."""
    height, width, _ = picture.shape
    total = np.zeros((height - 2, width - 2, 3), np.int32)
    for down in range(3):
        for right in range(3):
            total += picture[down : down + height - 2, right : right + width - 2]
    result = np.zeros_like(picture)
    result[1:-1, 1:-1] = total // 9
    return result


def main() -> None:
    """Blur the photograph on the GPU, and compare with NumPy."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="cupy", choices=["cupy"])
    arguments.add_argument("--quick", action="store_true", help="a corner of the picture")
    options = arguments.parse_args()
    try:
        stager = xferlib.stager(options.backend)
    except xferlib.BackendUnavailableError as error:
        sys.exit(f"this example needs a GPU: {error}")
    with stager:
        picture = stager.empty_pinned((64, 64, 3) if options.quick else photograph().shape, np.uint8)
        picture[...] = photograph()[: len(picture), : picture.shape[1]]
        blurred, average = process(stager, picture)
        print(f"mean brightness {average:.1f} on {stager.device}")
    want = expected(picture)
    assert np.array_equal(blurred, want), "the kernel computed something else"
    assert abs(average - want.mean()) < 1e-6
    print("every byte verified")


if __name__ == "__main__":
    main()
