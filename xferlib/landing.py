"""The last step of a get into pageable memory: a copy by the CPU, and the event that it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from xferlib.errors import CapabilityError
from xferlib.latch import SLICE_SECONDS, Latch
from xferlib.protocol import Stream

__all__ = ["Landing", "no_stream_waits"]


def no_stream_waits() -> CapabilityError:
    """Return what is raised where a stream is to wait for a get that ends with a CPU copy."""
    return CapabilityError(
        "no stream can wait for this get: its last step is a copy by the CPU into pageable memory. "
        "Leave out away, pass out=stager.empty_pinned(...), or wait on the host with synchronize()"
    )


@final
class Landing:
    """The event of a get that ends with a CPU copy.

    `owner`: the thread that will reach it and so must not wait for it; None: a worker of ours. `holds`: a block of pinned memory
    comes back when it is reached. `memory`: the ranges of the caller's that are used until then.
    """

    __slots__ = ("_error", "_reached", "given_up", "holds", "memory", "owner")

    def __init__(self, owner: int | None = None, *, holds: bool = False) -> None:
        self.owner = owner
        self.holds = holds
        self.memory: Sequence[tuple[int, int]] = ()
        self.given_up = False
        """Set by an owner that may have been interrupted on its way to `reach`: an assignment is not. Reached then, too."""
        self._reached = Latch()
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether a copy of this transfer has failed already; what is left of it need not be made."""
        return self._error is not None

    def fail(self, error: BaseException) -> None:
        """Note the first failure. Worker only."""
        if self._error is None:
            self._error = error

    def reach(self) -> None:
        """Mark the point as reached. Its owner only."""
        self._reached.open()

    def wait(self) -> None:
        """Block until the point is reached, failed or not."""
        while not self.given_up and not self._reached.wait(SLICE_SECONDS):
            pass

    def reached(self) -> bool:
        """Tell whether the point is reached, failed or not."""
        return self.given_up or self._reached.is_open()

    def done(self) -> bool:
        """See `Event.done`."""
        if not self.reached():
            return False
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """See `Event.synchronize`."""
        self.wait()
        if self._error is not None:
            raise self._error

    def stream_wait(self, stream: object | None = None) -> Stream | None:
        """Refuse: see `Event.stream_wait`."""
        raise no_stream_waits()
