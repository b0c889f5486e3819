"""Pinned slots that batches are written into where they lie, over and over: no host copy at all.

Invariants: a slot is free, or with whoever acquired it, or in flight; one in flight is free again when its copy is done, and is
handed out no sooner. What was acquired and dropped, arrays and all, comes back by itself.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, final

import numpy as np

from xferlib.checks import uncopied
from xferlib.debug import verify_done
from xferlib.errors import AllocationError, ClosedError, TransferError
from xferlib.memory.arrays import Array
from xferlib.pipeline.bill import Bill, Charge, in_words
from xferlib.pipeline.ends import End, end_of, reap_all, under_way
from xferlib.pipeline.shared.layout import Layout
from xferlib.stager import Stager, check_stager
from xferlib.transfer import Transfer
from xferlib.tree import flatten, unflatten

__all__ = ["Ring", "Slot"]

COLLECT_AFTER = 1.0
"""Seconds."""
FIRST_NAP = 100e-6
LONGEST_NAP = 2e-3
STUCK = 10.0
"""Seconds without a slot, none in flight, before who waits is told so."""


@final
class Ring:
    """A fixed number of pinned slots for batches of one spec, used in turn.

    `spec`: the tree of one batch, at its leaves arrays, anything else with a shape and a dtype, or pairs (shape, dtype).
    Any thread may acquire, and another one put. A context manager; `close()` waits for what is in flight.

        ring = Ring(stager, {"image": ((64, 224, 224, 3), "uint8"), "label": ((64,), "int32")})
        slot = ring.acquire()
        np.stack(images, out=slot["image"])
        transfer = slot.put()

    Raises `TypeError` and `ValueError` for the spec, and `AllocationError` where the stager's pinned_limit forbids so many slots.
    """

    __reduce_ex__ = uncopied("Threads may share it; another process makes one of its own")

    def __init__(self, stager: Stager, spec: Any, slots: int = 3) -> None:
        check_stager(stager)
        if slots < 1:
            raise ValueError(f"slots={slots!r}: expected 1 or more")
        self._layout = layout = Layout(spec)
        self.stager = stager
        self.slots = slots
        self.bill = Bill((Charge("pinned", slots, layout.nbytes, "slots"),))
        self._check(stager)
        self._places = [stager.empty_pinned(layout.nbytes, np.uint8) for _ in range(slots)]
        self._free: SimpleQueue[int | None] = SimpleQueue()
        for index in range(slots):
            self._free.put(index)
        # Appended to and taken from in single steps.
        self._flying: deque[tuple[int, End]] = deque()
        self._acquired_by = [0] * slots
        """Threads."""
        self._waiting = threading.RLock()
        self._closed = False

    def acquire(self) -> Slot:
        """Return a slot to be written, its contents undefined.

        Where none is free it waits for the oldest one in flight; where none is in flight either, for one to be put or let go of by
        whoever has it, with a `RuntimeWarning` after ten seconds. Raises `ClosedError`.
        """
        began = time.perf_counter()
        waited = False
        # One at a time, so that slots are waited for in the order in which they were put.
        with self._waiting:
            while True:
                self._check_open()
                index = self._free_now()
                if index is not None:
                    # Whoever gets it may write to it.
                    verify_done()
                    self._acquired_by[index] = threading.get_ident()
                    seconds = time.perf_counter() - began if waited else 0.0
                    return Slot(self, self._layout, _Lease(self._free, index, self._places[index]), seconds)
                waited = True
                if self._flying:
                    self._wait_oldest()
                else:
                    self._wait_for_holders()

    def close(self) -> None:
        """Wait for the copies in flight and give the memory back; twice is fine. Slots that are held stay valid until they go."""
        self._closed = True
        # For whoever waits in acquire.
        self._free.put(None)
        while self._flying:
            self._wait_oldest()
        self._places.clear()

    def _in_flight(self, lease: _Lease, end: End) -> None:
        """Note that a slot comes back when something is done."""
        lease.disarm()
        self._flying.append((lease.index, end))
        # Somebody may wait for a slot to be let go of: now there is a copy to wait for.
        self._free.put(None)

    def _free_now(self) -> int | None:
        self._reap()
        with suppress(queue.Empty):
            while True:
                index = self._free.get_nowait()
                if index is not None:
                    return index
        return None

    def _reap(self) -> None:
        """Take back the slots whose copies are done."""
        while self._flying:
            try:
                index, end = self._flying[0]
                if not end.done():
                    return
            except IndexError:
                return
            except TransferError:
                # It reads no more. Who holds the transfer is told.
                pass
            self._land(index, end)

    def _wait_for_holders(self) -> None:
        """Wait until a slot is put or let go of, or the ring is closed."""
        nap = FIRST_NAP
        began = time.monotonic()
        collect_at, tell_at = began + COLLECT_AFTER, began + STUCK
        while True:
            # Its arrays may be held by copies that were not started by `Slot.put`: until somebody asks whether they are done.
            reap_all()
            try:
                self._free.put(self._free.get(timeout=nap))
                return
            except queue.Empty:
                nap = min(2 * nap, LONGEST_NAP)
            now = time.monotonic()
            if now >= collect_at:
                # One in a reference cycle comes back when the collector runs.
                gc.collect()
                collect_at = now + COLLECT_AFTER
            if now >= tell_at and self._free.empty():
                tell_at = float("inf")
                self._tell()

    def _tell(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        holders = Counter(repr(names[ident]) if ident in names else "a thread that has ended" for ident in self._acquired_by)
        warnings.warn(
            f"no slot has come back for {STUCK:.0f} seconds: all {self.slots} are held, by whoever acquired them ("
            f"{', '.join(f'{count} on {name}' for name, count in holders.items())}) or by copies under way. "
            "Put or release one before another is acquired, let go of its arrays, or give the ring more slots",
            RuntimeWarning,
            4,
        )

    def _wait_oldest(self) -> None:
        try:
            index, end = self._flying[0]
        except IndexError:
            return
        with suppress(TransferError):
            end.synchronize()
        self._land(index, end)

    def _land(self, index: int, end: End) -> None:
        try:
            self._flying.remove((index, end))
        except (ValueError, IndexError):
            # Another thread, in `close`, was faster.
            return
        self._free.put(index)

    def _check(self, stager: Stager) -> None:
        limit = stager.stats().pinned_limit_nbytes
        fit = limit // self._layout.nbytes
        if self.slots > fit:
            advice = f"Use slots={fit}, or raise pinned_limit" if fit else "Raise pinned_limit, or use smaller batches"
            raise AllocationError(
                f"{self.slots} slots of {in_words(self._layout.nbytes)} are {in_words(self.bill.pinned_nbytes)} of pinned memory, "
                f"more than pinned_limit={limit} ({in_words(limit)}). {advice}"
            )

    def _check_open(self) -> None:
        if self._closed:
            # For the next one who waits.
            self._free.put(None)
            raise ClosedError("this ring is closed. Make another Ring")

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Ring {self.slots} slots of {self._layout.nbytes} bytes{', closed' if self._closed else ''}>"


@final
class Slot:
    """One pinned slot, to be written and then put, once.

    `slot["image"]` and `slot.tree` are its arrays. One that is dropped without a put goes back to its ring, when the last view of
    its arrays is gone; as a context manager it goes back at the end of the block. Where its arrays are held then, and copies are
    under way that may be of them, it goes back when these are done.
    """

    __reduce_ex__ = uncopied("Copy its arrays, or acquire another slot")

    def __init__(self, ring: Ring, layout: Layout, lease: _Lease, waited_seconds: float) -> None:
        self.ring = ring
        self._waited_seconds = waited_seconds
        self._acquired_by = threading.get_ident()
        self._lease: _Lease | None = lease
        self._tree = layout.whole.views(np.asarray(lease))
        self._rows: int | None = None
        self._done = "put"

    @property
    def tree(self) -> Any:
        """The arrays, to be written in place. Raises `RuntimeError` once the slot was put or let go of."""
        self._check()
        return self._tree

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    @property
    def rows(self) -> int | None:
        """How many rows along each first axis are put, for a last batch that is smaller; None: all."""
        return self._rows

    @rows.setter
    def rows(self, rows: int | None) -> None:
        self._check()
        leaves, _ = flatten(self._tree)
        room = min((len(leaf) if leaf.ndim else 0) for leaf in leaves)
        if rows is not None and not 0 <= rows <= room:
            raise ValueError(f"rows={rows!r}: the first axes of this slot have room for 0 to {room}")
        self._rows = rows

    def waited_here(self) -> float:
        """Return the seconds that this thread waited for the slot; 0 from the second call on."""
        seconds, self._waited_seconds = self._waited_seconds, 0.0
        return seconds if self._acquired_by == threading.get_ident() else 0.0

    def put(self, *, stream: object | None = None) -> Transfer:
        """Start the transfer; the slot is its ring's again when that is done. Raises as `Stager.put`, and keeps the slot then.

        Its arrays are made read-only. Views that were taken of them before are not: do not write through those any more.
        """
        lease = self._check()
        leaves, spec = flatten(self._tree)
        sent = leaves if self._rows is None else [leaf[: self._rows] for leaf in leaves]
        transfer = self.ring.stager.put(unflatten(spec, sent), stream=stream)
        self._lease = None
        _freeze(leaves)
        del self._tree
        self.ring._in_flight(lease, end_of(transfer))
        return transfer

    def release(self) -> None:
        """Give the slot back; nothing if it was put or given back before."""
        if self._lease is None:
            return
        _freeze(flatten(self._tree)[0])
        lease = weakref.ref(self._lease)
        del self._tree
        self._lease = None
        self._done = "given back"
        # It goes back by itself if nobody holds it, and what is done with it must not.
        if lease() is not None:
            reap_all()
        held = lease()
        if held is not None:
            # By somebody who is told not to write to it any more, or by a copy that was not started by `put`.
            self.ring._in_flight(held, under_way())

    def _check(self) -> _Lease:
        if self._lease is None:
            raise RuntimeError(f"this slot was {self._done} already, and its memory belongs to the next batch. Acquire another one")
        return self._lease

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Slot {'acquired' if self._lease is not None else self._done}>"


def _freeze(arrays: Sequence[Array]) -> None:
    for array in arrays:
        array.flags.writeable = False


@final
class _Lease:
    """The bytes of a slot while somebody may write them, for arrays to be based on. Its end, on any thread, takes no lock."""

    def __init__(self, free: SimpleQueue[int | None], index: int, place: Array) -> None:
        self.index = index
        self._free: SimpleQueue[int | None] | None = free
        self._place = place
        self.__array_interface__ = {"shape": place.shape, "typestr": "|u1", "data": (place.ctypes.data, False), "version": 3}

    def disarm(self) -> None:
        """Come back no more by itself."""
        self._free = None

    def end(self) -> None:
        """Give the slot back, once."""
        free, self._free = self._free, None
        if free is not None:
            free.put(self.index)

    def __del__(self) -> None:
        self.end()
