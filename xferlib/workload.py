"""The contract of a backend's `workload`: the submodule beside its entry point that holds the device work of our commands.

A backend without one still transfers; only the commands that compute refuse it. The arithmetic is fixed to the last bit, so that
whoever checks a result needs no tolerance and no trust in the device. No framework is named here, and nothing here runs.

The edges of a frame, all arithmetic in integers unless said otherwise:

1. *Grey.* One or two channels: the first. Three or four: `(77 r + 150 g + 29 b) >> 8`, for floats `(0.299 r + 0.587 g) + 0.114 b`.
2. *Normalise* to bytes by the least and the greatest grey value of the frame: `(v - low) * 255 // (high - low)`, and 0 everywhere
   if they are equal. Floats, in double precision, each operation rounded on its own: `(v/2 - low/2) / (high/2 - low/2) * 255`,
   rounded down (halves, so that no span overflows). Values that are not finite do not count for low and high, and become 0.
3. *Blur*, `rounds` times: `(1 2 1) x (1 2 1)`, `(sum + 8) >> 4`; outside the frame the nearest pixel of the frame counts.
4. *Edges*: Sobel, `min(255, |gx| + |gy|)`, the same rule outside the frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

__all__ = ["CopiesItself", "EdgeJob", "EdgeSpec", "FrameworkCopy", "Workload"]


@dataclass(frozen=True, kw_only=True)
class EdgeSpec:
    """What a job must be ready for: batches of up to `frames` frames, and results in `slots` places."""

    frames: int
    height: int
    width: int
    channels: int | None
    """Length of the last axis of a frame, 1 to 4; None: a frame has two axes."""
    dtype: np.dtype[Any]
    """One of uint8, int16, uint16, float32, float64, in native byte order."""
    slots: int

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """The shape of one input frame."""
        plane = (self.height, self.width)
        return plane if self.channels is None else (*plane, self.channels)

    @property
    def frame_nbytes(self) -> int:
        """The size of one input frame; a result frame has `height * width` bytes."""
        return self.height * self.width * (self.channels or 1) * self.dtype.itemsize


class EdgeJob(Protocol):
    """Edges of batches of frames, on one compute stream, by one thread: the one that entered it.

    Everything is allocated, compiled and warm once it exists: `launch` allocates nothing.
    """

    def __enter__(self) -> Self:
        """Make the job's compute stream the calling thread's current one."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Wait for what was launched, give back the stream, and restore the thread's current one."""

    def launch(self, frames: Any, slot: int, *, rounds: int) -> Any:
        """Enqueue the edges of a batch and return the device array that will hold them: uint8, (frames, height, width).

        Does not wait. The array is the memory of `slot`: the next launch into that slot overwrites it.
        """

    def synchronize(self) -> None:
        """Block until all that was launched is done. Raises if any of it failed."""


class Workload(Protocol):
    """What the module offers, as functions."""

    def edge_job(self, spec: EdgeSpec, *, device: int = 0) -> EdgeJob:
        """Make a job. Raises `BackendUnavailableError`, with what to type, if this machine cannot compile or run it."""


@dataclass(frozen=True, kw_only=True)
class FrameworkCopy:
    """A copy by a call of the framework's own, as its users write it, for `measure_overlap` to set beside xferlib's."""

    call: str
    """The call, with what matters of its arguments: people read it in a table."""
    direction: Literal["h2d", "d2h", "both"]
    """Both: one copy of each, at once."""
    why: str
    """Said where the copy turns out not to overlap: the reason, and what to do instead."""
    start: Callable[[], Any]
    """Make the call and return what `finish` needs. May block; how long it does is measured."""
    finish: Callable[[Any], object]
    """Wait for the copy that `start` began."""
    launch_on: Callable[[], AbstractContextManager[object]] = nullcontext
    """Makes the context in which compute is launched beside this copy, where that is another stream than the job's own."""
    synchronize: Callable[[], object] | None = None
    """Wait for compute that was launched in that context. None: the job's `synchronize` does."""
    renew: Callable[[], object] = lambda: None
    """Make ready for the next copy, when this one and the compute beside it are done. Not timed."""


class NamesStreams(Protocol):
    """What the module may offer in addition, where streams can be named."""

    def idle_stream(self) -> object:
        """Return a stream of the framework's, of the current device, that has no work and that no other stream holds up.

        Called by the thread that has entered a job of this workload.
        """


class CopiesItself(Protocol):
    """What the module may offer in addition: copies by the framework's own calls."""

    def framework_copies(
        self, pageable: npt.NDArray[np.uint8], pinned: npt.NDArray[np.uint8], array: Any
    ) -> Sequence[FrameworkCopy]:
        """Return ways to copy between these and the device, among them the usual ones that do not overlap.

        All three have the same shape and size; `pinned` is page-locked where the backend can, and `array` is on the device. Called
        by the thread that has entered a job of this workload, and so are the calls in what is returned.
        """
