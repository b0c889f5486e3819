"""The pinned chunks of one stager: a few, of one size, used over and over by both directions.

Invariants: a chunk is with one thread or in one queue; who waits for a chunk waits only for threads that will give one back
without waiting for another; a direction never has so many that the other has none. Chunks come from the stager's pool when they
are first wanted, and go back to it when it needs the room, by `release`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, final

import numpy as np

from xferlib.errors import AllocationError
from xferlib.memory.arrays import Array
from xferlib.memory.pool import HostBlock, PinnedPool
from xferlib.protocol import Event

__all__ = ["D2H", "H2D", "Chunk", "Chunks"]

H2D: Final = 0
D2H: Final = 1


@final
class Chunk:
    """Pinned bytes. `busy`: the copy that may still read them."""

    __slots__ = ("address", "busy", "bytes", "kept")

    def __init__(self, block: HostBlock, *, kept: bool) -> None:
        self.address = block.address
        self.bytes: Array | None = np.asarray(block)
        self.busy: Event | None = None
        self.kept = kept

    def drop(self) -> None:
        """Give the memory back to the pool, whoever still holds this object."""
        self.bytes = None

    def view(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return the first bytes."""
        assert self.bytes is not None
        return self.bytes[:nbytes]


@final
class Chunks:
    """Any thread."""

    def __init__(self, pool: PinnedPool, failures: tuple[type[Exception], ...]) -> None:
        self.nbytes = self.count = self._share = 0
        self._pool = pool
        self._failures = failures
        self._idle: tuple[deque[Chunk], deque[Chunk]] = (deque(), deque())
        self._owned = [0, 0]
        # Reentrant: a finalizer may transfer while its thread is in here. Entered by itself: an interrupt inside a condition's
        # own `__enter__`, which is Python, would leave it held.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._waiting = 0
        self._users: list[int] = []
        self._asking: list[int] = []
        """Threads that count as owning a chunk which they still ask the pool for."""
        self._goal = [0, 0]
        """How many a direction may have so far: as many as its largest transfer has parts, so that it does not depend on luck."""
        self._wanting = [False, False]
        """Directions that have less than half of the chunks, and would use more."""

    def shape(self, *, nbytes: int, count: int) -> None:
        """Say how large the chunks are and how many there may be: before the first is taken."""
        self.nbytes = nbytes
        self.count = count
        self._share = count - max(1, count // 8)

    def expect(self, direction: int, parts: int) -> None:
        """Have chunks for a transfer of so many parts, as far as the pool has room: none is page-locked in the middle of it."""
        goal = min(parts, self._share)
        if goal > self._goal[direction]:
            self._goal[direction] = goal
        while self._owned[direction] < goal:
            chunk = self._grown(direction)
            if chunk is None:
                return
            self.give(direction, chunk)

    def take(self, direction: int, *, wait: bool) -> Chunk | None:
        """Return a chunk; its `busy` is the caller's to wait for. None, without `wait`, if there is none now.

        Raises `AllocationError` if the pool has no room for even one.
        """
        idle = self._idle[direction]
        try:
            chunk = idle.popleft()
        except IndexError:
            return self._more(direction, wait=wait)
        # The oldest. If even that is busy, more of them let the copies go on while the threads fill the next.
        if self._owned[direction] < self._goal[direction] and self._is_busy(chunk):
            more = self._grown(direction) or self._stolen(direction)
            if more is not None:
                idle.appendleft(chunk)
                return more
            self._wanting[direction] = self._owned[direction] < self.count // 2
        elif self._wanting[1 - direction] and idle and not self._is_busy(chunk):
            self._hand_over(direction, chunk)
            return self.take(direction, wait=wait)
        return chunk

    def give(self, direction: int, chunk: Chunk) -> None:
        """Put a chunk back."""
        if not chunk.kept:
            chunk.drop()
            return
        self._idle[direction].append(chunk)
        # After the chunk can be seen: who is about to wait looks once more.
        if self._waiting:
            with self._lock:
                self._room.notify_all()

    def lose(self, direction: int, chunk: Chunk) -> None:
        """Count a chunk no more that may be read or written for ever. Who keeps it keeps its memory."""
        if chunk.kept:
            self._disown(direction)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Note that the calling thread takes chunks and gives them back."""
        me = threading.get_ident()
        self._users.append(me)
        try:
            yield
        finally:
            self._users.remove(me)

    def wait_for_rest(self) -> bool:
        """Block until a chunk that is with a thread, or busy, is at rest. Returns False if there is none to wait for."""
        me = threading.get_ident()
        with self._lock:
            self._waiting += 1
            try:
                idle = [chunk for queue in self._idle for chunk in queue.copy()]
                busy = next((chunk.busy for chunk in idle if self._is_busy(chunk)), None)
                if busy is None:
                    # Idle ones may have come a moment ago. What a finalizer's own thread has comes back after the finalizer only.
                    if idle or sum(self._owned) <= len(self._asking) or (me in self._users and me not in self._asking):
                        return bool(idle)
                    self._room.wait()
                    return True
            finally:
                self._waiting -= 1
        with suppress(*self._failures):
            busy.synchronize()
        return True

    def release(self) -> bool:
        """Give idle chunks back to the pool, and tell whether there were any. Never blocks."""
        found = False
        with self._lock:
            for direction in (H2D, D2H):
                idle = self._idle[direction]
                for _ in range(len(idle)):
                    try:
                        chunk = idle.popleft()
                    except IndexError:
                        break
                    if self._is_busy(chunk):
                        idle.append(chunk)
                        continue
                    self._owned[direction] -= 1
                    chunk.drop()
                    found = True
            if found:
                self._room.notify_all()
        return found

    def _more(self, direction: int, *, wait: bool) -> Chunk | None:
        turns = PATIENCE
        while True:
            chunk = self._grown(direction) or self._stolen(direction)
            if chunk is not None:
                return chunk
            self._wanting[direction] = self._owned[direction] < self.count // 2
            if not wait:
                # The other direction gives some back, if it is at work; then there is work here for whoever helps.
                turns -= 1
                if not turns or not self._wanting[direction]:
                    return None
            if not self._wait_for_one(direction):
                # Nobody has one to give back. The pool knows whom to wait for, and what to say if there is none.
                return self._asked(direction) if wait else None
            try:
                return self._idle[direction].popleft()
            except IndexError:
                continue

    def _wait_for_one(self, direction: int) -> bool:
        """Wait until there may be a chunk; False: there are none anywhere."""
        with self._lock:
            if not sum(self._owned):
                return False
            self._waiting += 1
            try:
                if not self._idle[direction]:
                    self._room.wait(None if self._owned[direction] >= self.count // 2 else RETRY_SECONDS)
            finally:
                self._waiting -= 1
        return True

    def _grown(self, direction: int) -> Chunk | None:
        with self._lock:
            if sum(self._owned) >= self.count or self._owned[direction] >= max(1, self._goal[direction]):
                return None
            self._owned[direction] += 1
        block = None
        try:
            # What the driver refuses is not missed while there are others; where there is none, `_asked` says why.
            with suppress(AllocationError):
                block = self._pool.try_take(self.nbytes)
        finally:
            if block is None:
                self._disown(direction)
        return None if block is None else Chunk(block, kept=True)

    def _asked(self, direction: int) -> Chunk:
        with self._lock:
            self._owned[direction] += 1
            self._asking.append(threading.get_ident())
        block = None
        try:
            block = self._pool.take(self.nbytes)
            return Chunk(block, kept=True)
        finally:
            with self._lock:
                self._asking.remove(threading.get_ident())
            if block is None:
                self._disown(direction)

    def _stolen(self, direction: int) -> Chunk | None:
        """Take one that the other direction does not use."""
        other = 1 - direction
        with self._lock:
            if self._owned[direction] >= self._share:
                return None
            try:
                chunk = self._idle[other].popleft()
            except IndexError:
                return None
            if self._is_busy(chunk):
                self._idle[other].appendleft(chunk)
                return None
            self._owned[other] -= 1
            self._owned[direction] += 1
            return chunk

    def _hand_over(self, direction: int, chunk: Chunk) -> None:
        """Give a chunk that is at rest to the other direction, until each has half."""
        other = 1 - direction
        with self._lock:
            self._owned[direction] -= 1
            self._owned[other] += 1
            self._wanting[other] = self._owned[other] < self.count // 2
            self._idle[other].append(chunk)
            self._room.notify_all()

    def _disown(self, direction: int) -> None:
        with self._lock:
            self._owned[direction] -= 1
            self._room.notify_all()

    def _is_busy(self, chunk: Chunk) -> bool:
        if chunk.busy is None:
            return False
        with suppress(*self._failures):
            return not chunk.busy.done()
        # A failed copy reads no more; its transfer says so to whoever asks.
        return False


RETRY_SECONDS = 0.0005
"""How often a direction with few chunks looks whether the other has one that is at rest by now: no thread tells it."""
PATIENCE = 8
"""Such looks of a thread that only helps."""
