"""The device work of the CuPy backend: edges of frames, in kernels that CuPy compiles, on a stream of the job's own.

Every buffer exists before the first launch: neither CuPy's pool nor CUDA is asked for memory while frames stream.
"""

from __future__ import annotations

from importlib.resources import files
from types import TracebackType
from typing import Any, Self, final

import cupy
import numpy as np
import numpy.typing as npt

from xferlib.errors import BackendUnavailableError
from xferlib.workload import EdgeSpec, FrameworkCopy

__all__ = ["EdgeJob", "edge_job", "framework_copies", "idle_stream"]

CTYPES = {"uint8": "unsigned char", "int16": "short", "uint16": "unsigned short", "float32": "float", "float64": "double"}
THREADS = 256
WARPS = THREADS // 32
# As in edges.cu.
CHUNK = 4096
STRIP = 16


def edge_job(spec: EdgeSpec, *, device: int = 0) -> EdgeJob:
    """Compile the kernels and make a job with a stream of its own."""
    return EdgeJob(spec, device)


@final
class EdgeJob:
    """See `xferlib.workload.EdgeJob`."""

    def __init__(self, spec: EdgeSpec, device: int) -> None:
        self._spec = spec
        self._device = cupy.cuda.Device(device)
        self._words = -(-spec.width // 4)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._kernels = _Kernels(spec)
            plane = (spec.frames, spec.height, self._words)
            self._images = [cupy.empty(plane, np.uint32), cupy.empty(plane, np.uint32)]
            self._extremes = cupy.empty((spec.frames, 2), np.uint64)
            self._graphs: dict[int, Any] = {}
            self._results = [cupy.zeros((spec.frames, spec.height, spec.width), np.uint8) for _ in range(spec.slots)]
            frames = cupy.zeros((spec.frames, *spec.frame_shape), spec.dtype)
            # The fills above are on another stream.
            self._device.synchronize()
            with self._stream:
                # A kernel's first launch loads it, which waits for whatever runs then, and which a graph may not have in it.
                self._kernels.blur(self._images[0], self._images[1], spec.frames)
                self.launch(frames, 0, rounds=1)
            self._stream.synchronize()

    def __enter__(self) -> Self:
        self._device.__enter__()
        self._stream.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._stream.synchronize()
        finally:
            self._stream.__exit__(kind, error, trace)
            self._device.__exit__(kind, error, trace)

    def launch(self, frames: Any, slot: int, *, rounds: int) -> Any:
        count = len(frames)
        result = self._results[slot][:count]
        self._kernels.extremes(frames, self._extremes, count)
        self._kernels.normalise(frames, self._extremes, self._images[0], count)
        if rounds:
            self._blurs(rounds).launch()
        self._kernels.sobel(self._images[rounds % 2], result, count)
        return result

    def _blurs(self, rounds: int) -> Any:
        """Return a graph of so many blurs, from the first image to the second, back, and so on.

        They are of a full batch, also where a batch is smaller: nobody reads the rest, and no graph is made while frames stream.
        Between the launches of many, the caller would wait for the interpreter each time, beside threads that read and write.
        """
        graph = self._graphs.get(rounds)
        if graph is None:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                stream.begin_capture()
                for turn in range(rounds):
                    self._kernels.blur(self._images[turn % 2], self._images[(turn + 1) % 2], self._spec.frames)
                self._graphs[rounds] = graph = stream.end_capture()
        return graph

    def synchronize(self) -> None:
        self._stream.synchronize()


@final
class _Kernels:
    """The kernels of `edges.cu` for one spec. Each launch is of a batch of `count` frames, on the current stream."""

    def __init__(self, spec: EdgeSpec) -> None:
        module = _compiled(spec)
        names = ("reset", "find_extremes", "normalise", "blur", "sobel")
        self._reset, self._find_extremes, self._normalise, self._blur, self._sobel = map(module.get_function, names)
        words = -(-spec.width // 4)
        pixels = spec.height * spec.width
        self._chunks_per_frame = -(-pixels // CHUNK)
        self._words_per_frame, self._strips_per_frame = spec.height * words, -(-spec.height // STRIP) * words
        # CuPy passes a Python int as 64 bits wide.
        self._pixels, self._chunks = np.uint64(pixels), np.uint32(self._chunks_per_frame)
        self._height, self._width, self._words = np.uint32(spec.height), np.uint32(spec.width), np.uint32(words)
        self._tail = np.uint32(spec.width % 4)

    def extremes(self, frames: Any, extremes: Any, count: int) -> None:
        self._reset(_grid(count), (THREADS,), (extremes, np.uint32(count)))
        warps = count * self._chunks_per_frame
        arguments = (frames, extremes, self._pixels, self._chunks, np.uint32(warps))
        self._find_extremes((-(-warps // WARPS),), (THREADS,), arguments)

    def normalise(self, frames: Any, extremes: Any, image: Any, count: int) -> None:
        total = count * self._words_per_frame
        arguments = (frames, extremes, image, self._height, self._width, self._words, np.uint32(total))
        self._normalise(_grid(total), (THREADS,), arguments)

    def blur(self, source: Any, target: Any, count: int) -> None:
        total = count * self._strips_per_frame
        self._blur(_grid(total), (THREADS,), (source, target, self._height, self._words, self._tail, np.uint32(total)))

    def sobel(self, source: Any, result: Any, count: int) -> None:
        total = count * self._strips_per_frame
        self._sobel(_grid(total), (THREADS,), (source, result, self._height, self._width, self._words, np.uint32(total)))


def _compiled(spec: EdgeSpec) -> Any:
    header = (
        f"#define PIXEL {CTYPES[spec.dtype.name]}\n"
        f"#define FLOATS {int(spec.dtype.kind == 'f')}\n"
        f"#define CHANNELS {spec.channels or 1}\n"
    )
    module = cupy.RawModule(code=header + files("xferlib_cupy").joinpath("edges.cu").read_text())
    try:
        module.compile()
    except (ImportError, OSError, RuntimeError) as error:
        if "nvrtc" not in str(error).lower():
            raise
        raise BackendUnavailableError(
            "backend 'cupy' transfers here, but cannot compile kernels: CuPy finds no NVRTC. Install it with: pip install "
            f'"cupy-cuda{cupy.cuda.runtime.runtimeGetVersion() // 1000}x[ctk]"'
        ) from error
    return module


def _grid(threads: int) -> tuple[int]:
    return (-(-threads // THREADS),)


def framework_copies(pageable: npt.NDArray[np.uint8], pinned: npt.NDArray[np.uint8], array: Any) -> list[FrameworkCopy]:
    """Return CuPy's own ways. See `xferlib.workload.CopiesItself`."""
    null, blocking, own = cupy.cuda.Stream.null, cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    current = cupy.cuda.get_current_stream()
    # Written, so that no page is fetched under the clock.
    touched = pageable.copy()
    return [
        FrameworkCopy(
            call="array.set(pageable)",
            direction="h2d",
            why="It is on the stream of the compute, and pageable: the driver copies the source first, and keeps the caller for it",
            start=lambda: array.set(pageable),
            finish=lambda _: current.synchronize(),
        ),
        FrameworkCopy(
            call="array.set(pageable, stream=own)",
            direction="h2d",
            why="The source is pageable: the call returns when the driver has staged it, so nothing is launched meanwhile. Fill "
            "pinned memory",
            start=lambda: array.set(pageable, stream=own),
            finish=lambda _: own.synchronize(),
        ),
        FrameworkCopy(
            call="array.set(pinned)",
            direction="h2d",
            why="It is on the current stream, which is that of the compute: name another, non-blocking one",
            start=lambda: array.set(pinned),
            finish=lambda _: current.synchronize(),
        ),
        FrameworkCopy(
            call="array.set(pinned, stream=Stream()), compute on the NULL stream",
            direction="h2d",
            why="cupy.cuda.Stream() is blocking: it and the NULL stream wait for each other. Use Stream(non_blocking=True)",
            start=lambda: array.set(pinned, stream=blocking),
            finish=lambda _: blocking.synchronize(),
            launch_on=lambda: null,
            synchronize=null.synchronize,
        ),
        FrameworkCopy(
            call="array.set(pinned, stream=Stream(non_blocking=True))",
            direction="h2d",
            why="",
            start=lambda: array.set(pinned, stream=own),
            finish=lambda _: own.synchronize(),
        ),
        FrameworkCopy(
            call="array.get()",
            direction="d2h",
            why="It waits for the compute before it on the current stream, and keeps the caller until the copy is made",
            start=array.get,
            finish=lambda _: None,
        ),
        FrameworkCopy(
            call="array.get(stream=Stream(non_blocking=True), out=pageable)",
            direction="d2h",
            why="The target is pageable: the call returns when the copy is made. Give pinned memory as out=",
            start=lambda: array.get(stream=own, out=touched, blocking=False),
            finish=lambda _: own.synchronize(),
        ),
    ]


def idle_stream() -> cupy.cuda.Stream:
    """See `xferlib.workload.NamesStreams`."""
    return cupy.cuda.Stream(non_blocking=True)
