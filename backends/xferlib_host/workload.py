"""The device work of the host backend: edges of frames on an `xferlib_host.Stream`, in buffers that are made once.

Sums are separable and in place; nothing is padded, and nothing is allocated per frame except what a table look-up or a division of
floats needs. `xferlib.workload` defines the arithmetic; the code that verifies it is not shared.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt

from xferlib.errors import BackendUnavailableError
from xferlib.workload import EdgeSpec, FrameworkCopy
from xferlib_host._stream import Stream

__all__ = ["EdgeJob", "edge_job", "framework_copies", "idle_stream"]

Pixels = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.int16]


def edge_job(spec: EdgeSpec, *, device: int = 0) -> EdgeJob:
    """Make a job with a stream of its own."""
    if device != 0:
        raise BackendUnavailableError(f"backend 'host' cannot run here: there is no device {device!r}. Use device=0")
    return EdgeJob(spec)


def framework_copies(pageable: Pixels, pinned: Pixels, array: Pixels) -> list[FrameworkCopy]:
    """Return NumPy's own ways: the calling thread copies. See `xferlib.workload.CopiesItself`."""
    back = pageable.copy()
    why = "The calling thread makes the copy and does nothing else meanwhile"
    return [
        FrameworkCopy(
            call="np.copyto(array, batch)",
            direction="h2d",
            why=why,
            start=lambda: np.copyto(array, pageable),
            finish=lambda _: None,
        ),
        FrameworkCopy(
            call="np.copyto(batch, array)",
            direction="d2h",
            why=why,
            start=lambda: np.copyto(back, array),
            finish=lambda _: None,
        ),
    ]


def idle_stream() -> Stream:
    """See `xferlib.workload.NamesStreams`."""
    return Stream()


@final
class EdgeJob:
    """See `xferlib.workload.EdgeJob`."""

    def __init__(self, spec: EdgeSpec) -> None:
        plane = (spec.height, spec.width)
        self._stream = Stream()
        self._results: list[Pixels] = [np.zeros((spec.frames, *plane), np.uint8) for _ in range(spec.slots)]
        self._image: Pixels = np.empty(plane, np.uint8)
        self._sums: tuple[Sums, Sums, Sums] = (np.empty(plane, np.int16), np.empty(plane, np.int16), np.empty(plane, np.int16))

    def __enter__(self) -> Self:
        self._stream.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stream.__exit__(kind, error, trace)
        self._stream.close()

    def launch(self, frames: npt.NDArray[Any], slot: int, *, rounds: int) -> Pixels:
        results = self._results[slot][: len(frames)]
        self._stream.submit(self._run, frames, results, rounds)
        return results

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _run(self, frames: npt.NDArray[Any], results: Pixels, rounds: int) -> None:
        for frame, result in zip(frames, results, strict=True):
            normalise(grey(frame), self._image)
            for _ in range(rounds):
                blur(self._image, *self._sums[:2])
            sobel(self._image, result, *self._sums)


def grey(frame: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return one value per pixel: of the frame's dtype, or wider where channels are mixed."""
    if frame.ndim == 2:
        return frame
    if frame.shape[2] < 3:
        return frame[:, :, 0]
    if frame.dtype.kind == "f":
        with np.errstate(all="ignore"):
            mixed: npt.NDArray[np.float64] = np.multiply(frame[:, :, 0], 0.299, dtype=np.float64)
            mixed += np.multiply(frame[:, :, 1], 0.587, dtype=np.float64)
            mixed += np.multiply(frame[:, :, 2], 0.114, dtype=np.float64)
        return mixed
    whole: npt.NDArray[np.int32] = np.multiply(frame[:, :, 0], 77, dtype=np.int32)
    whole += np.multiply(frame[:, :, 1], 150, dtype=np.int32)
    whole += np.multiply(frame[:, :, 2], 29, dtype=np.int32)
    whole >>= 8
    return whole


def normalise(values: npt.NDArray[Any], image: Pixels) -> None:
    """Stretch to bytes by the least and greatest value."""
    if values.dtype.kind == "f":
        _normalise_floats(values.astype(np.float64), image)
        return
    low, high = int(np.min(values)), int(np.max(values))
    span = high - low
    if span == 0:
        image.fill(0)
    elif values.dtype == np.uint8:
        # 256 divisions instead of one per pixel; entries outside low..high are never looked up.
        table = (np.arange(-low, 256 - low) * 255 // span).astype(np.uint8)
        np.take(table, values, out=image)
    else:
        scaled = np.subtract(values, low, dtype=np.int32)
        scaled *= 255
        scaled //= span
        np.copyto(image, scaled, casting="unsafe")


def _normalise_floats(values: npt.NDArray[np.float64], image: Pixels) -> None:
    wild = ~np.isfinite(values)
    low = np.min(values, where=~wild, initial=np.inf)
    high = np.max(values, where=~wild, initial=-np.inf)
    span = high * 0.5 - low * 0.5
    if not span > 0:
        image.fill(0)
        return
    values[wild] = low
    values *= 0.5
    values -= low * 0.5
    values /= span
    values *= 255.0
    np.copyto(image, values, casting="unsafe")


def blur(image: Pixels, across: Sums, down: Sums) -> None:
    """One round, in place: three in a row, then three in a column, rounded once at the end."""
    _smooth_across(image, across)
    _smooth_down(across, down)
    down += 8
    down >>= 4
    np.copyto(image, down, casting="unsafe")


def sobel(image: Pixels, result: Pixels, one: Sums, two: Sums, three: Sums) -> None:
    """Write min(255, |gx| + |gy|)."""
    np.copyto(one, image)
    # Slopes across of columns smoothed down.
    _smooth_down(one, two)
    _slope(two.T, three.T)
    # Slopes down of rows smoothed across.
    _smooth_across(image, one)
    _slope(one, two)
    np.abs(three, out=three)
    np.abs(two, out=two)
    two += three
    np.minimum(two, 255, out=two)
    np.copyto(result, two, casting="unsafe")


def _smooth_across(image: npt.NDArray[Any], out: Sums) -> None:
    """out = left + 2 centre + right; past the ends the end pixel counts again."""
    np.multiply(image, 2, out=out, dtype=np.int16)
    out[:, 1:] += image[:, :-1]
    out[:, :-1] += image[:, 1:]
    out[:, 0] += image[:, 0]
    out[:, -1] += image[:, -1]


def _smooth_down(rows: Sums, out: Sums) -> None:
    np.multiply(rows, 2, out=out)
    out[1:] += rows[:-1]
    out[:-1] += rows[1:]
    out[0] += rows[0]
    out[-1] += rows[-1]


def _slope(rows: Sums, out: Sums) -> None:
    """out = next row - row before; past the ends the end row counts again."""
    if len(rows) == 1:
        out.fill(0)
        return
    np.subtract(rows[2:], rows[:-2], out=out[1:-1])
    np.subtract(rows[1], rows[0], out=out[0])
    np.subtract(rows[-1], rows[-2], out=out[-1])
