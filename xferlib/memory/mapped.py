"""Mapped memory: views that the device has of pinned host memory, and what holds the memory while work may use it.

A ticket stands for "some view may reach this memory". The next look after its end turns it into memory behind an event, for the
work that was enqueued before, and lets the memory go when the event is done. There is no lock in here: see `in_flight`.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any, TypeAlias, cast, final

from xferlib.errors import TransferError
from xferlib.forks import forget_in_child, leak
from xferlib.in_flight import meet
from xferlib.latch import is_over
from xferlib.memory.arrays import Array, address_of
from xferlib.protocol import Event, HostStager, MapsMemory, Stream
from xferlib.tickets import Returns
from xferlib.words import in_words

__all__ = ["View", "Views"]

Fenced: TypeAlias = tuple[Array, Event]
"""Memory, and the event after which it may be let go."""


@final
class View:
    """A row: the memory of a view. `stream` is where work on the view is enqueued; None: nothing is to be waited for."""

    __slots__ = ("memory", "stream")

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self.stream: Stream | None = None


@final
class Views:
    """The views of one stager. Any thread. Asked for what is in flight by whoever waits for memory."""

    def __init__(self, backend: HostStager[Any]) -> None:
        self._backend = backend
        self._failures = backend.failures
        self._returns = Returns()
        self._count = itertools.count().__next__
        self._rows: dict[int, View] = {}
        self._fenced: dict[int, Fenced] = {}
        self._stuck: list[Array] = []
        """Memory of which nobody can say when the work on its views ends."""
        self._over = False
        forget_in_child(self)

    @property
    def busy(self) -> bool:
        """Whether work on views that are gone may be under way."""
        return bool(self._returns or self._fenced)

    def view(self, array: Array, address: int, stream: object | None) -> Any:
        """Return a view of what `mappable` gave. The backend has the capability `mapped`. Nothing is copied, nothing waited for."""
        row, lease = self.lease(array)
        backend = cast("MapsMemory[Any]", self._backend)
        try:
            view, row.stream = backend.as_mapped(address, array.shape, array.dtype, stream=stream, lease=lease)
        except self._failures as error:
            raise TransferError(f"the device could not be given a view of {in_words(array.nbytes)}: {error}") from error
        return view

    def lease(self, memory: Array) -> tuple[View, object]:
        """Enter memory that a view will reach, and return its row and what the view is to hold."""
        number = self._count()
        ticket = self._returns.ticket(number)
        view = self._rows[number] = View(memory)
        return view, ticket

    def held(self, address: int, nbytes: int) -> bool:
        """Tell whether a view that is not gone reaches part of this memory: work on it may be enqueued at any time.

        Also true where nobody can say when the work on one that is gone ends.
        """
        self._fence_ended()
        # In this order: a view that gets stuck meanwhile is in the second.
        held = [*(view.memory for view in list(self._rows.values())), *self._stuck]
        return any(meet(address_of(memory), memory.nbytes, address, nbytes) for memory in held)

    def readers(self, address: int, nbytes: int) -> list[Event]:
        """Return the events after which no view that is gone uses part of this memory."""
        self._fence_ended()
        return [event for memory, event in list(self._fenced.values()) if meet(address_of(memory), memory.nbytes, address, nbytes)]

    def reap(self) -> bool:
        """Let go of memory whose work is done, and tell whether there was any. Never blocks."""
        if not self.busy:
            return False
        self._fence_ended()
        fenced = self._fenced.copy().items()
        gone = [self._fenced.pop(number, None) for number, (_, event) in fenced if is_over(event.done, self._failures)]
        # What is let go of now may run foreign finalizers, which may come back here.
        return any(gone)

    def wait_oldest(self) -> bool:
        """Block until some memory is let go of. Returns False if there was none."""
        self._fence_ended()
        for number, (_, event) in self._fenced.copy().items():
            self._wait(event)
            return self._fenced.pop(number, None) is not None
        return False

    def wait_all(self) -> None:
        """Block until the work enqueued before the call is done, on views that are gone and on those that are not."""
        self._fence_ended()
        live = [view.stream for view in list(self._rows.values())]
        for stream in {stream.handle: stream for stream in live if stream is not None}.values():
            with suppress(*self._failures):
                event = self._backend.retire((stream,))
                if event is not None:
                    event.synchronize()
        for _, event in list(self._fenced.values()):
            self._wait(event)
        self.reap()

    def close(self) -> None:
        """Ask the backend nothing any more: from here on a view that goes lets its memory go. Nothing is in flight."""
        self._over = True
        self._fence_ended()
        self._fenced.clear()

    def settle(self) -> bool:
        """Let go of memory whose views are gone; tell whether any view is left. See `ClosedTable`."""
        self._fence_ended()
        return bool(self._rows)

    def forget(self) -> None:
        """See `ForkSafe`."""
        leak(self._rows, self._fenced, self._stuck)
        self._over = True
        self._rows, self._fenced = {}, {}

    def _fence_ended(self) -> None:
        if not self._returns:
            return
        for number in self._returns.unsettled():
            view = self._rows.get(number)
            if view is not None:
                self._fence(number, view)
            # In this order: whoever waits meanwhile must find it. Two threads may do the same: memory that is held twice is held.
            self._rows.pop(number, None)
            self._returns.settled(number)

    def _fence(self, number: int, view: View) -> None:
        if self._over or view.stream is None:
            return
        try:
            event = self._backend.retire((view.stream,))
        except self._failures:
            # Nobody can say any more when the work ends: better to lose the memory than to have it written under its next owner.
            self._stuck.append(view.memory)
            return
        if event is not None:
            self._fenced[number] = (view.memory, event)

    def _wait(self, event: Event) -> None:
        with suppress(*self._failures):
            event.synchronize()
