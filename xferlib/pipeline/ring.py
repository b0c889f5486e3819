"""Pinned slots that batches are written into directly, over and over: no host copy at all.

Invariants: a slot is idle, or with whoever acquired it, or put; one that was put is idle again when its copy is done and nothing
else uses its memory, and is handed out no sooner. What was acquired and dropped, arrays and all, comes back by itself.

A slot is acquired under a number that is never used again. It comes back once, by whoever first finds that it may. In one step the
number is taken out of one table and the slot is put into the other, so that an interrupt or a finalizer in between loses nothing.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import TracebackType
from typing import Any, Generic, NoReturn, final

import numpy as np

from xferlib.callers import user_line
from xferlib.checks import check_iterable, checked_at, package_of, shorten, uncopied, whole_number
from xferlib.debug import verify_done
from xferlib.errors import ClosedError, TransferError
from xferlib.forks import forget_in_child, unavailable_in_child
from xferlib.latch import Latch
from xferlib.ledger import reap_all
from xferlib.memory.arrays import Array, address_of
from xferlib.memory.blocks import HostBlock
from xferlib.pipeline.completion import Completion, completion_of
from xferlib.pipeline.memory_estimate import Charge, MemoryEstimate
from xferlib.pipeline.memory_users import MemoryUsers
from xferlib.pipeline.stacking import stack_as
from xferlib.pipeline.workers.layout import SlotLayout
from xferlib.sketch import sketched
from xferlib.stager import Stager, check_stager
from xferlib.tickets import Returns
from xferlib.transfer import Transfer
from xferlib.tree import trees_of, unflatten
from xferlib.typed import TreeT_co
from xferlib.words import counted

__all__ = ["Ring", "Slot"]

COLLECT_AFTER_SECONDS = 1.0
FIRST_NAP_SECONDS = 100e-6
LONGEST_NAP_SECONDS = 20e-3
NAP_SHARE = 1 / 16
"""Of the time waited so far. What nobody tells of, such as an array that is dropped, is found later by so much, at most."""
SHOWN = 16
"""Names, in an error."""
STUCK_SECONDS = 10.0
"""Without a slot, with none in flight, before whoever waits is told so."""


@final
class Ring(Generic[TreeT_co]):
    """A fixed number of pinned slots for batches of one spec, used in turn.

    `spec`: the tree of one batch. At its leaves are arrays, anything else with a shape and a dtype, or pairs (shape, dtype).
    Any thread may acquire, and another one put. A context manager; `close()` waits for what is in flight.

        ring = Ring(stager, {"image": ((64, 224, 224, 3), "uint8"), "label": ((64,), "int32")})
        slot = ring.acquire()
        np.stack(images, out=slot["image"])
        transfer = slot.put()

    Attributes:
        stager: The one that puts its slots.
        slots: How many there are.
        bill: What they cost in memory.

    Tell a type checker what a batch is: `ring: Ring[Batch] = Ring(stager, spec)`. Slots, and what they put, then have that type.

    Raises `TypeError` and `ValueError` for the spec, as `Stager.put` for a dtype that the framework would narrow, and
    `AllocationError` where the stager's pinned_limit forbids so many slots.
    """

    __reduce_ex__ = uncopied("Threads may share it; another process makes one of its own")

    def __init__(self, stager: Stager, spec: Any, slots: int = 3) -> None:
        check_stager(stager, spec, comes="first")
        slots = whole_number(slots, "slots", least=1)
        self._layout = layout = self._laid_out(stager, spec)
        self.stager = stager
        self.slots = slots
        self.bill = MemoryEstimate((Charge("pinned", slots, layout.nbytes, "slots"),))
        layout.check_room(slots, stager.stats().pinned_limit_nbytes)
        self._arrays = sum(0 not in array.shape for array in layout.whole.arrays)
        """How many arrays of a slot have memory, by which they are known."""
        self._words = layout.in_words
        """The arrays of a slot, for people."""
        self._memory = {index: stager.empty_pinned(layout.nbytes, np.uint8) for index in range(slots)}
        self._idle = deque(range(slots))
        self._out: dict[int, int] = {}
        """The slots that are acquired or put, by the numbers under which they are."""
        self._put: dict[int, Completion] = {}
        """The copies of those that are put, in this order."""
        self._used: dict[int, MemoryUsers] = {}
        """For slots that come back when nobody uses their memory: what used it when this was last asked."""
        self._numbers = itertools.count()
        self._returns = Returns()
        self._changed = Latch()
        """Wakes whoever waits for a slot, where ordinary code has put one, given it back or closed the ring."""
        self._acquired_by = [0] * slots
        """By slot, the thread that acquired it last."""
        self._waiting = threading.RLock()
        self._closed = self._forked = False
        forget_in_child(self)

    @staticmethod
    def _laid_out(stager: Stager, spec: Any) -> SlotLayout:
        """Return the layout of a slot that this stager can put."""
        backend = stager.backend
        try:
            layout = SlotLayout(spec, trees_of(backend))
            for index, array in enumerate(layout.whole.arrays):
                checked_at(layout.structure, index, backend.check_dtype, array.dtype)
        except (TypeError, ValueError) as error:
            shorten(error, package_of(backend))
            raise
        return layout

    def acquire(self) -> Slot[TreeT_co]:
        """Return a slot to be written, its contents undefined.

        If none is idle, it waits for the oldest one in flight. If none is in flight either, it waits until whoever has one puts it
        or lets go of it, with a `RuntimeWarning` after ten seconds. Raises `ClosedError`, and `BackendUnavailableError` in a forked
        child, whose slots would be the parent's.
        """
        self._check_open()
        began = time.perf_counter()
        waited = False
        # One at a time, so that slots are waited for in the order in which they were put.
        with self._waiting:
            while True:
                self._check_open()
                taken = self._taken()
                if taken is not None:
                    # Whoever gets it may write to it.
                    verify_done()
                    return Slot(self, self._layout, *taken, time.perf_counter() - began if waited else 0.0)
                waited = True
                if self._put:
                    self._wait_oldest()
                else:
                    self._wait_for_holders()

    def collate(self, items: Iterable[Any]) -> Slot[TreeT_co]:
        """Acquire a slot, write items into its first rows as `xferlib.stack` does, and return it: what loaders call `collate_fn`.

        Its `rows` are as many as the items. Raises as `acquire` and `stack`, and then keeps no slot.
        """
        check_iterable(items, "items")
        slot = self.acquire()
        try:
            slot.rows = stack_as(trees_of(self.stager.backend), items, slot.tree)
        except BaseException:
            slot.release()
            raise
        return slot

    def close(self) -> None:
        """Wait for the copies of slots that were put, and give the memory back; twice is fine.

        Slots that are held stay valid until they go, and so do those that something else uses.
        """
        self._closed = True
        if self._forked:
            return
        # Whoever waits in acquire is told.
        self._changed.wake()
        while self._put:
            self._wait_oldest()
        self._memory.clear()

    def _in_flight(self, number: int, completion: Completion) -> None:
        """Have a slot come back when something is done, and nothing else uses its memory."""
        self._put[number] = completion
        # Somebody may wait for a slot to be let go of: now there is a copy to wait for.
        self._changed.wake()

    def _let_go(self, number: int) -> None:
        """Have a slot come back as soon as nothing uses its memory, if it has not come back by itself."""
        self._settle()
        if number in self._out:
            self._land(number)
        # Also where it has come back by itself: whoever waits knows nothing of that.
        self._changed.wake()

    def _taken(self) -> tuple[int, HostBlock] | None:
        """Take an idle slot, and return the number under which it is out, and its bytes; None if there is none."""
        self._reap()
        if not self._idle:
            return None
        number = next(self._numbers)
        # First the ticket that gives it back. Then the slot, in one step: nothing that comes in between can lose it.
        ticket = self._returns.ticket(number)
        with suppress(IndexError):
            self._out.update(zip((number,), iter(self._idle.popleft, None), strict=False))
        index = self._out.get(number)
        memory = None if index is None else self._memory.get(index)
        if index is None or memory is None:
            return None
        self._acquired_by[index] = threading.get_ident()
        return number, HostBlock(address_of(memory), memory.nbytes, (memory, ticket))

    def _come_back(self, number: int) -> None:
        with suppress(KeyError):
            self._idle.extend(map(self._out.pop, (number,)))
        self._put.pop(number, None)
        self._used.pop(number, None)

    def _settle(self) -> None:
        """Take back the slots that have no array left."""
        for number in self._returns.unsettled():
            self._come_back(number)
            self._returns.settled(number)

    def _reap(self) -> None:
        """Take back the slots that nothing uses any more."""
        self._settle()
        for number, completion in self._put.copy().items():
            try:
                if not completion.done():
                    break
            except TransferError:
                # It reads no more. Whoever holds the transfer is told.
                pass
            self._land(number)
        for number, users in self._used.copy().items():
            if users.done():
                self._land(number)

    def _land(self, number: int) -> None:
        """Take a slot back whose own copy is done, or note what else uses its memory."""
        index = self._out.get(number)
        memory = None if index is None else self._memory.get(index)
        users = None if memory is None else MemoryUsers(address_of(memory), memory.nbytes)
        if users is None or users.done():
            self._come_back(number)
            return
        self._used[number] = users
        self._put.pop(number, None)

    def _wait_oldest(self) -> None:
        for number, completion in self._put.copy().items():
            with suppress(TransferError):
                completion.synchronize()
            self._land(number)
            return

    def _wait_for_holders(self) -> None:
        """Wait until a slot is put or comes back, or the ring is closed."""
        began = now = time.monotonic()
        collect_at, tell_at = began + COLLECT_AFTER_SECONDS, began + STUCK_SECONDS
        while True:
            # A slot's arrays may be held by copies that `Slot.put` did not start, until somebody asks whether they are done.
            reap_all()
            self._reap()
            if self._has_changed():
                return
            # Dropped arrays wake nobody: a finalizer only posts. Nor does other work that ends with a slot's memory.
            nap = max(FIRST_NAP_SECONDS, min((now - began) * NAP_SHARE, LONGEST_NAP_SECONDS))
            self._changed.wait_for(lambda: self._returns or self._has_changed(), nap)
            now = time.monotonic()
            if now >= collect_at:
                # One in a reference cycle comes back when the collector runs. That takes a large program a while: ever less often.
                gc.collect()
                collect_at = now + max(now - began, COLLECT_AFTER_SECONDS)
            if now >= tell_at and not self._returns:
                tell_at = float("inf")
                self._tell()

    def _has_changed(self) -> bool:
        return bool(self._idle or self._put) or self._closed

    def _tell(self) -> None:
        names: dict[int | None, str] = {thread.ident: repr(thread.name) for thread in threading.enumerate()}
        # Not refused: it may have handed a slot over to another thread, or to one that Python does not know and that calls back.
        names[threading.get_ident()] = f"{threading.current_thread().name!r}, the thread that waits here for another"
        holders = Counter(names.get(ident, "a thread that has ended") for ident in self._acquired_by)
        user_line().warn(
            f"no slot has come back for {STUCK_SECONDS:.0f} seconds: all {self.slots} are held, by whoever acquired them ("
            f"{', '.join(f'{count} on {name}' for name, count in holders.items())}) or by copies under way and device views. "
            "Put or release one before another is acquired, let go of its arrays, or give the ring more slots. Threads that fill "
            "slots for batches in order must get them in that order: acquire where the batches are given out, not on the threads"
        )

    def forget(self) -> None:
        """Refuse to give out slots: this process is a forked child. See `ForkSafe`."""
        self._forked = True

    def _check_open(self) -> None:
        if self._forked:
            advice = "Make a Ring in the child, with a stager of the child's, or let a SharedRing's workers fill slots"
            raise unavailable_in_child("a ring gives out no slots", "it was made", advice)
        if self._closed:
            raise ClosedError("this ring is closed. Make another Ring")

    def __enter__(self) -> Ring[TreeT_co]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._idle)} idle"
        return f"<Ring of {counted(self.slots, 'slot')}: {self._words}, {state}>"


@final
class Slot(Generic[TreeT_co]):
    """One pinned slot, to be written and then put, once.

    `slot["image"]` and `slot.tree` are its arrays. A slot that is dropped without a put goes back to its ring when the last view of
    its arrays is gone; as a context manager, at the end of the block. If copies of any stager, or device views, use its memory
    then, and also after a put, it goes back when they no longer do.
    """

    # So a misspelt name, for example of `rows`, is refused.
    __slots__ = ("__weakref__", "_acquired_by", "_block", "_done", "_number", "_rows", "_tree", "_trees", "_waited_seconds", "ring")

    __reduce_ex__ = uncopied("Copy its arrays, or acquire another slot")

    def __init__(self, ring: Ring[TreeT_co], layout: SlotLayout, number: int, block: HostBlock, waited_seconds: float) -> None:
        self.ring = ring
        self._waited_seconds = waited_seconds
        self._acquired_by = threading.get_ident()
        self._number = number
        """Under which its ring has it out."""
        self._block: HostBlock | None = block
        """Its bytes, while somebody may write them."""
        self._trees = trees_of(ring.stager.backend)
        self._tree: TreeT_co = layout.views(np.asarray(block))
        self._rows: int | None = None
        self._done = "put"

    @property
    def tree(self) -> TreeT_co:
        """The arrays, to be written in place. Raises `RuntimeError` once the slot was put or let go of."""
        self._check()
        return self._tree

    def __getitem__(self, key: Any) -> Any:
        tree: Any = self.tree
        try:
            return tree[key]
        except KeyError:
            # A class of a framework's registry need not name what it has.
            if not isinstance(tree, Mapping):
                raise
            there = ", ".join(map(repr, islice(tree, SHOWN)))
            raise KeyError(f"there is no {key!r} in this slot: there are {there}{', ...' if len(tree) > SHOWN else ''}") from None
        except (IndexError, TypeError):
            if not isinstance(key, str):
                raise
            raise TypeError(f"slot[{key!r}]: no names in {self.ring._words}. Look at slot.tree") from None

    def __setitem__(self, key: Any, value: object) -> NoReturn:
        if not isinstance(key, str):
            raise TypeError("a slot's arrays are written in place: slot.tree[...] = values, or slot.tree[name][...] = values")
        raise TypeError(
            f"a slot's arrays are written in place: slot[{key!r}][...] = values. Names go beside them: slot.tree[{key!r}] = text"
        )

    @property
    def rows(self) -> int | None:
        """How many rows along each first axis are put, for a last batch that is smaller; None: all."""
        return self._rows

    @rows.setter
    def rows(self, rows: int | None) -> None:
        self._check()
        leaves, _ = self._trees.arrays(self._tree)
        room = min((len(leaf) if leaf.ndim else 0) for leaf in leaves)
        if rows is not None and not hasattr(type(rows), "__index__"):
            raise TypeError(f"rows={rows!r}: expected an int, or None for all")
        if rows is not None and not 0 <= rows <= room:
            raise ValueError(f"rows={rows!r}: the first axes of this slot have room for 0 to {room}")
        self._rows = rows

    def waited_here(self) -> float:
        """Return the seconds that this thread waited for the slot; 0 from the second call on."""
        seconds, self._waited_seconds = self._waited_seconds, 0.0
        return seconds if self._acquired_by == threading.get_ident() else 0.0

    def put(self, *, stream: object | None = None) -> Transfer[TreeT_co]:
        """Start the transfer; the slot is its ring's again when that is done.

        Raises as `Stager.put`, and `TypeError` where an array of the slot is gone from its tree; then the slot is kept. Its arrays
        are made read-only. Views that were taken of them before are not: do not write through those any more. What was put beside
        them is yours, and read until the transfer is done if it is pinned.
        """
        block = self._check()
        leaves, spec = self._trees.arrays(self._tree)
        if sum(_lies_in(leaf, block) and leaf.nbytes > 0 for leaf in leaves) < self.ring._arrays:
            raise TypeError(
                "an array of this slot is gone from slot.tree, or something else stands in its place: arrays of slots are written "
                "in place, as slot[name][...] = values. What comes with a batch goes beside them, under a name of its own"
            )
        sent = leaves if self._rows is None else [leaf[: self._rows] for leaf in leaves]
        transfer = self.ring.stager.put(unflatten(spec, sent), stream=stream)
        # Let go of first: what is interrupted here comes back when the copy does.
        self._block = None
        _freeze(leaves, block)
        del self._tree
        self.ring._in_flight(self._number, completion_of(transfer))
        return transfer

    def release(self) -> None:
        """Give the slot back. Does nothing if it was put or given back before."""
        if self._block is None:
            return
        _freeze(self._trees.arrays(self._tree)[0], self._block)
        self._block = None
        self._done = "given back"
        del self._tree
        # Its arrays may be held by somebody who is told not to write to them any more, or by copies that `put` did not start.
        self.ring._let_go(self._number)

    def _check(self) -> HostBlock:
        if self._block is None:
            raise RuntimeError(f"this slot was {self._done} already, and its memory belongs to the next batch. Acquire another one")
        return self._block

    def __enter__(self) -> Slot[TreeT_co]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        # Asked once: another thread may put it meanwhile.
        tree = getattr(self, "_tree", None)
        rows = "" if self._rows is None else f", {counted(self._rows, 'row')}"
        return f"<Slot: {self.ring._words if tree is None else sketched(tree)}{rows}, {self._done if tree is None else 'acquired'}>"


def _freeze(arrays: Sequence[Array], block: HostBlock) -> None:
    """Make those arrays read-only that lie in the slot; others are the caller's."""
    for array in arrays:
        if _lies_in(array, block):
            array.flags.writeable = False


def _lies_in(array: Array, block: HostBlock) -> bool:
    return isinstance(array, np.ndarray) and block.address <= address_of(array) < block.address + block.nbytes
