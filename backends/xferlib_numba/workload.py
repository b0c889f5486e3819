"""The device work of the Numba backend: edges of frames, in kernels that Numba compiles, on its default stream.

Numba has no other current stream. Transfers do not stop for it, since their streams are non-blocking. Every buffer exists before
the first launch, so nobody is asked for memory while frames stream.
"""

from __future__ import annotations

import functools
import math
import warnings
from types import TracebackType
from typing import Any, NamedTuple, Self, final

import numpy as np
import numpy.typing as npt

from xferlib.errors import BackendUnavailableError
from xferlib.workload import EdgeSpec, FrameworkCopy
from xferlib_numba import _memory
from xferlib_numba._arrays import as_array
from xferlib_numba._memory import Block
from xferlib_numba._module import load
from xferlib_numba._probe import open_device

__all__ = ["EdgeJob", "edge_job", "framework_copies", "idle_stream"]

NON_BLOCKING = 1
THREADS = 256
TILE = (32, 8)
BLOCKS_PER_FRAME = 256
"""At most, where a thread goes through many pixels."""
FEWEST_BLOCKS = 256
"""Numba warns of smaller grids; blocks without a frame end at once."""
MOST_LAYERS = 65535
"""What CUDA allows along the last axis of a grid."""
COMPILERS = ("nvvm", "nvrtc", "nvjitlink", "libdevice")


def edge_job(spec: EdgeSpec, *, device: int = 0) -> EdgeJob:
    """Compile the kernels and make a job."""
    return EdgeJob(spec, device)


def framework_copies(pageable: npt.NDArray[np.uint8], pinned: npt.NDArray[np.uint8], array: Any) -> list[FrameworkCopy]:
    """Return Numba's own ways. See `xferlib.workload.CopiesItself`. The compute is on Numba's default stream, the NULL stream."""
    cuda = load().cuda
    default, other = cuda.default_stream(), cuda.stream()
    return [
        FrameworkCopy(
            call="array.copy_to_device(pageable)",
            direction="h2d",
            why="It is on the default stream, behind the compute, and pageable: the driver copies the source first, and keeps the "
            "caller for it",
            start=lambda: array.copy_to_device(pageable),
            finish=lambda _: default.synchronize(),
        ),
        FrameworkCopy(
            call="array.copy_to_device(pinned)",
            direction="h2d",
            why="It is on the default stream, behind the compute, and keeps the caller until it is made",
            start=lambda: array.copy_to_device(pinned),
            finish=lambda _: default.synchronize(),
        ),
        FrameworkCopy(
            call="array.copy_to_device(pinned, stream=cuda.stream())",
            direction="h2d",
            why="The streams that Numba makes are blocking: they wait for the default stream, where the compute is, and it for "
            "them. Launch the kernels on a stream of their own as well",
            start=lambda: array.copy_to_device(pinned, stream=other),
            finish=lambda _: other.synchronize(),
        ),
        FrameworkCopy(
            call="array.copy_to_host()",
            direction="d2h",
            why="It is on the default stream, behind the compute, and keeps the caller until it is made",
            start=array.copy_to_host,
            finish=lambda _: None,
        ),
    ]


def idle_stream() -> Any:
    """See `xferlib.workload.NamesStreams`. Streams that Numba makes stop for the NULL stream, where its users' compute is."""
    return _non_blocking(load().cuda.get_current_device().id)


@functools.cache
def _non_blocking(device: int) -> Any:
    """Make a stream on a device, the current one. Nothing destroys it, so there is one for the process."""
    numba = load()
    status, handle = numba.driver.binding.cuStreamCreate(NON_BLOCKING)
    if status:
        raise BackendUnavailableError(f"backend 'numba': the driver made no stream on device {device} ({status})")
    return numba.cuda.external_stream(int(handle))


class Kernels(NamedTuple):
    """For one kind of pixel. Indices of pixels and frames may run past the end: grids are whole."""

    find_extremes: Any
    normalise: Any
    blur: Any
    sobel: Any


@final
class EdgeJob:
    """See `xferlib.workload.EdgeJob`. Its memory is freed when it is left; one that is never entered keeps it."""

    def __init__(self, spec: EdgeSpec, device: int) -> None:
        self._own = own = open_device(device)
        self._blocks: list[Block] = []
        self._cuda = cuda = own.numba.cuda
        self._device = cuda.gpus[device]
        self._spec = spec
        floats = spec.dtype.kind == "f"
        self._kernels = _kernels(cuda, spec.channels or 1, floats)
        with self._device:
            plane = (spec.frames, spec.height, spec.width)
            self._images = [self._array(np.zeros(plane, np.uint8)) for _ in range(2)]
            self._results = [self._array(np.zeros(plane, np.uint8)) for _ in range(spec.slots)]
            # The search for the extremes begins with these.
            limits = (math.inf, -math.inf) if floats else (np.iinfo(np.int64).max, np.iinfo(np.int64).min)
            unknown = np.array([limits] * spec.frames, np.float64 if floats else np.int64)
            self._unknown, self._extremes = self._array(unknown), self._array(unknown)
            self._warm(self._array(np.zeros((spec.frames, *spec.frame_shape), spec.dtype)))

    def __enter__(self) -> Self:
        self._device.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.synchronize()
        finally:
            self._device.__exit__(kind, error, trace)
            while self._blocks:
                _memory.free(self._own, self._blocks.pop())

    def launch(self, frames: Any, slot: int, *, rounds: int) -> Any:
        spec, count = self._spec, len(frames)
        pixels = spec.height * spec.width
        flat = frames.reshape(count, pixels, spec.channels or 1)
        image, other = (_first(array, count) for array in self._images)
        result = _first(self._results[slot], count)
        stream = self._cuda.default_stream()
        self._extremes.copy_to_device(self._unknown, stream=stream)
        lines = _line_grid(pixels, count, limit=BLOCKS_PER_FRAME), THREADS
        self._kernels.find_extremes[lines](flat, self._extremes)
        lines = _line_grid(pixels, count), THREADS
        self._kernels.normalise[lines](flat, self._extremes, image.reshape(count, pixels))
        tiles = _tile_grid(spec.height, spec.width, count), TILE
        for _ in range(rounds):
            self._kernels.blur[tiles](image, other)
            image, other = other, image
        self._kernels.sobel[tiles](image, result)
        return result

    def synchronize(self) -> None:
        self._cuda.default_stream().synchronize()

    def _array(self, values: np.ndarray[Any, np.dtype[Any]]) -> Any:
        """Return an array over a block of ours: Numba frees its own late, perhaps when no context is current, and then fails."""
        block = _memory.alloc(self._own, values.nbytes)
        self._blocks.append(block)
        array = as_array(self._own, block.address, values.shape, values.dtype, stream=0, lease=block)
        array.copy_to_device(values)
        return array

    def _warm(self, frames: Any) -> None:
        try:
            # A kernel's first launch compiles and loads it, which waits for whatever runs then.
            self.launch(frames, 0, rounds=1)
        except Exception as error:
            # The classes differ from version to version, and some of them are ImportErrors.
            if not any(name in str(error).lower() for name in COMPILERS):
                raise
            raise BackendUnavailableError(
                "backend 'numba' transfers here, but cannot compile kernels: a part of the CUDA toolkit is missing "
                f'({error}). Install it with: pip install "numba-cuda[cu12]" or "numba-cuda[cu13]"'
            ) from error
        self.synchronize()


@functools.cache
def _kernels(cuda: Any, channels: int, floats: bool) -> Kernels:
    """Return the kernels; each is compiled when it is first launched."""
    if not hasattr(np, "row_stack"):
        # numba-cuda cannot compile on NumPy 2.5 otherwise: https://github.com/NVIDIA/numba-cuda/issues/907
        vars(np)["row_stack"] = np.vstack
    with warnings.catch_warnings():
        # Numba's own use of what NumPy deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        grey = _grey(cuda, channels, floats)
        extremes, normalise = _find_extremes(cuda, grey, floats), _normalise(cuda, grey, floats)
        return Kernels(extremes, normalise, _blur(cuda), _sobel(cuda))


def _grey(cuda: Any, channels: int, floats: bool) -> Any:
    """Return the device function that gives the grey value of a pixel."""
    # Rounded one by one: the compiler would fuse a product and a sum.
    multiply, add = cuda.libdevice.dmul_rn, cuda.libdevice.dadd_rn

    def first(frames: Any, frame: Any, pixel: Any) -> Any:
        return np.float64(frames[frame, pixel, 0]) if floats else np.int64(frames[frame, pixel, 0])

    def weighted(frames: Any, frame: Any, pixel: Any) -> Any:
        red = multiply(np.float64(frames[frame, pixel, 0]), 0.299)
        green = multiply(np.float64(frames[frame, pixel, 1]), 0.587)
        return add(add(red, green), multiply(np.float64(frames[frame, pixel, 2]), 0.114))

    def shifted(frames: Any, frame: Any, pixel: Any) -> Any:
        red, green, blue = frames[frame, pixel, 0], frames[frame, pixel, 1], frames[frame, pixel, 2]
        return (np.int64(77) * red + np.int64(150) * green + np.int64(29) * blue) >> 8

    return cuda.jit(device=True)(first if channels < 3 else weighted if floats else shifted)


def _find_extremes(cuda: Any, grey: Any, floats: bool) -> Any:
    kind = np.float64 if floats else np.int64
    threads = THREADS

    def find_extremes(frames: Any, extremes: Any) -> None:
        """Lower and raise the extremes of each frame; a layer of blocks per frame."""
        lows = cuda.shared.array(threads, kind)
        highs = cuda.shared.array(threads, kind)
        thread = cuda.threadIdx.x
        for frame in range(cuda.blockIdx.z, frames.shape[0], cuda.gridDim.z):
            low, high = extremes[frame, 0], extremes[frame, 1]
            for pixel in range(cuda.blockIdx.x * threads + thread, frames.shape[1], cuda.gridDim.x * threads):
                value = grey(frames, frame, pixel)
                if not floats or math.isfinite(value):
                    low, high = min(low, value), max(high, value)
            lows[thread], highs[thread] = low, high
            cuda.syncthreads()
            left = threads // 2
            while left > 0:
                if thread < left:
                    lows[thread] = min(lows[thread], lows[thread + left])
                    highs[thread] = max(highs[thread], highs[thread + left])
                cuda.syncthreads()
                left //= 2
            if thread == 0:
                cuda.atomic.min(extremes, (frame, 0), lows[0])
                cuda.atomic.max(extremes, (frame, 1), highs[0])
            cuda.syncthreads()

    return cuda.jit(find_extremes)


def _normalise(cuda: Any, grey: Any, floats: bool) -> Any:
    multiply, add, divide = cuda.libdevice.dmul_rn, cuda.libdevice.dadd_rn, cuda.libdevice.ddiv_rn
    threads = THREADS

    def normalise_whole(frames: Any, extremes: Any, image: Any) -> None:
        pixel = cuda.blockIdx.x * threads + cuda.threadIdx.x
        if pixel >= frames.shape[1]:
            return
        for frame in range(cuda.blockIdx.z, frames.shape[0], cuda.gridDim.z):
            low, span = extremes[frame, 0], extremes[frame, 1] - extremes[frame, 0]
            byte = 0
            if span > 0:
                byte = (grey(frames, frame, pixel) - low) * 255 // span
            image[frame, pixel] = np.uint8(byte)

    def normalise_floats(frames: Any, extremes: Any, image: Any) -> None:
        pixel = cuda.blockIdx.x * threads + cuda.threadIdx.x
        if pixel >= frames.shape[1]:
            return
        for frame in range(cuda.blockIdx.z, frames.shape[0], cuda.gridDim.z):
            below = multiply(extremes[frame, 0], -0.5)
            span = add(multiply(extremes[frame, 1], 0.5), below)
            value = grey(frames, frame, pixel)
            byte = 0
            if span > 0.0 and math.isfinite(value):
                byte = int(multiply(divide(add(multiply(value, 0.5), below), span), 255.0))
            image[frame, pixel] = np.uint8(byte)

    return cuda.jit(normalise_floats if floats else normalise_whole)


def _sums(cuda: Any) -> tuple[Any, Any]:
    """Return the device functions that add three pixels by the weights 1, 2, 1, along a row and down a column."""

    def along(source: Any, frame: Any, y: Any, left: Any, x: Any, right: Any) -> Any:
        return np.int64(source[frame, y, left]) + 2 * np.int64(source[frame, y, x]) + np.int64(source[frame, y, right])

    def down(source: Any, frame: Any, above: Any, y: Any, below: Any, x: Any) -> Any:
        return np.int64(source[frame, above, x]) + 2 * np.int64(source[frame, y, x]) + np.int64(source[frame, below, x])

    return cuda.jit(device=True)(along), cuda.jit(device=True)(down)


def _blur(cuda: Any) -> Any:
    along, _ = _sums(cuda)

    def blur(source: Any, target: Any) -> None:
        """A thread per pixel and layer."""
        x = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        y = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
        frames, height, width = source.shape
        if x >= width or y >= height:
            return
        left, right, above, below = max(x - 1, 0), min(x + 1, width - 1), max(y - 1, 0), min(y + 1, height - 1)
        for frame in range(cuda.blockIdx.z, frames, cuda.gridDim.z):
            total = along(source, frame, above, left, x, right) + along(source, frame, below, left, x, right)
            total += 2 * along(source, frame, y, left, x, right)
            target[frame, y, x] = np.uint8((total + 8) >> 4)

    return cuda.jit(blur)


def _sobel(cuda: Any) -> Any:
    along, down = _sums(cuda)

    def sobel(source: Any, target: Any) -> None:
        """A thread per pixel and layer."""
        x = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        y = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
        frames, height, width = source.shape
        if x >= width or y >= height:
            return
        left, right, above, below = max(x - 1, 0), min(x + 1, width - 1), max(y - 1, 0), min(y + 1, height - 1)
        for frame in range(cuda.blockIdx.z, frames, cuda.gridDim.z):
            across = down(source, frame, above, y, below, right) - down(source, frame, above, y, below, left)
            upright = along(source, frame, below, left, x, right) - along(source, frame, above, left, x, right)
            target[frame, y, x] = np.uint8(min(255, abs(across) + abs(upright)))

    return cuda.jit(sobel)


def _first(array: Any, count: int) -> Any:
    return array if count == len(array) else array[:count]


def _line_grid(pixels: int, frames: int, *, limit: int | None = None) -> tuple[int, int, int]:
    """Return a grid of blocks of `THREADS` along the pixels, in a layer per frame."""
    blocks = -(-pixels // THREADS)
    return _with_layers(blocks if limit is None else min(blocks, limit), 1, frames)


def _tile_grid(height: int, width: int, frames: int) -> tuple[int, int, int]:
    return _with_layers(-(-width // TILE[0]), -(-height // TILE[1]), frames)


def _with_layers(columns: int, rows: int, frames: int) -> tuple[int, int, int]:
    return columns, rows, min(max(frames, -(-FEWEST_BLOCKS // (columns * rows))), MOST_LAYERS)
