"""`SharedRing`: what users hold of batches that worker processes write straight into pinned memory.

No host copy is made after a worker's own write: the slot it fills is the memory that the copy engine reads. Workers are spawned,
never touch the device, and are told which slot to fill by number.
"""

from __future__ import annotations

import itertools
import os
import pickle
import pickletools
import reprlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Generic, final

from xferlib.callers import user_line
from xferlib.checks import uncopied, whole_number
from xferlib.errors import AllocationError, BackendUnavailableError, ClosedError, XferError, anew
from xferlib.forks import forget_in_child, leak, unavailable_in_child
from xferlib.memory.registered import Pin
from xferlib.pipeline.one_pass import known_length
from xferlib.pipeline.workers.layout import SlotLayout
from xferlib.pipeline.workers.memory import SharedMemory
from xferlib.pipeline.workers.messages import Begin
from xferlib.pipeline.workers.pool import WorkerPool
from xferlib.pipeline.workers.process import Worker
from xferlib.pipeline.workers.run import OnDeath, Run
from xferlib.pipeline.workers.slots import Slots
from xferlib.pipeline.workers.worker import serve
from xferlib.reaper import close_later, closed_when_dropped
from xferlib.stager import Stager, check_stager
from xferlib.typed import TreeT_co
from xferlib.uninterrupted import collects, start_thread, uninterrupted
from xferlib.words import counted, in_words

__all__ = ["SharedRing"]

FINISHING = 1.0
"""Seconds that `close()` gives workers to finish what they are filling."""


@final
class _Holdings:
    """What a ring takes from the system and gives back, where no interrupt comes. It refers to no ring, so that a ring can be
    dropped."""

    def __init__(self, stager: Stager, layout: SlotLayout, slots: int) -> None:
        self.words = ""
        """The ring in words, for a warning."""
        self._opened_at = user_line()
        self.memory: SharedMemory | None = None
        self.pool: WorkerPool | None = None
        self._stager = stager
        self._layout = layout
        self._slots = slots
        self._pin: Pin | None = None
        self._closed = False
        self._changing = threading.RLock()
        """Held by `open`, `close`, and what starts and ends workers: after an interrupt, another thread may still be at it."""

    def open(self) -> tuple[WorkerPool, Slots]:
        """Take everything but the workers. Raises `AllocationError`; `close` must follow then, too."""
        layout, slots = self._layout, self._slots
        with self._changing:
            if self._closed:
                raise ClosedError("nobody waits for this ring any more")
            self.memory = memory = SharedMemory(slots * layout.nbytes)
            if self._stager.capabilities.register:
                try:
                    self._pin = self._stager.pin(memory.raw)
                except AllocationError as error:
                    error.add_note(f"for {counted(slots, 'slot')} of {in_words(layout.nbytes)}. Use fewer or smaller slots")
                    raise
            start = partial(Worker, serve, (memory.descriptor, layout.whole, layout.nbytes, slots))
            self.pool = pool = WorkerPool(start, self._changing)
            return pool, Slots(memory.raw, layout, slots)

    def close(self) -> None:
        """Give everything back. Twice is fine; what was refused may be tried again."""
        with self._changing:
            self._closed = True
            with ExitStack() as steps:
                # Last in, first out.
                if self.memory is not None:
                    steps.callback(self.memory.close)
                if self._pin is not None:
                    steps.callback(self._pin.close)
                if self.pool is not None:
                    steps.callback(self.pool.close, FINISHING)
            self.memory = self.pool = self._pin = None

    def dropped(self) -> None:
        """Close what nobody has closed. On the reaper."""
        if not self._closed or self.memory is not None:
            _start_beside(self._close_dropped)

    def _close_dropped(self) -> None:
        try:
            if self.pool is not None:
                self._opened_at.warn(f"{self.words} was never closed. Use it as a context manager", ResourceWarning)
        finally:
            self.close()

    def forget(self) -> None:
        """Let go of everything in a forked child."""
        leak(self._pin)
        if self.memory is not None:
            self.memory.close()
        if self.pool is not None:
            self.pool.forget()


@final
class SharedRing(Generic[TreeT_co]):
    """A ring of slots that worker processes fill: `for batch in ring.run(fill, tasks, workers=4): ...`.

    `spec` is the tree of one batch. At its leaves are arrays, anything else with a shape and a dtype, or pairs (shape, dtype).
    All slots are in one anonymous mapping of shared memory, page-locked once where the backend can; elsewhere puts stage it.
    Workers start with the first run and stay for the next. A context manager; `close()` ends them.
    Tell a type checker what a batch is: `ring: SharedRing[Batch] = SharedRing(stager, spec)`.

    Raises `TypeError` and `ValueError` for the spec, and `AllocationError` for memory that cannot be had or that the stager's
    pinned_limit forbids.

    Attributes:
        slots: How many there are.
        nbytes: Of all slots: what the ring costs in pinned memory.
    """

    __reduce_ex__ = uncopied("Threads may share it; another process makes one of its own")

    def __init__(self, stager: Stager, spec: Any, slots: int = 8) -> None:
        self._refusal: XferError | None = None
        check_stager(stager, spec, comes="first")
        # A consumer holds one while the next is filled.
        slots = whole_number(slots, "slots", least=2)
        self._layout = layout = SlotLayout(spec)
        self.slots = slots
        self.nbytes = slots * layout.nbytes
        layout.check_room(slots, stager.stats().pinned_limit_nbytes, least=2)
        self._runs = itertools.count()
        self._run: weakref.ref[Run[TreeT_co]] | None = None
        self._holdings = holdings = _Holdings(stager, layout, slots)
        holdings.words = repr(self)
        self._ticket = closed_when_dropped(holdings.dropped)
        try:
            self._pool, self._slots = uninterrupted(holdings.open)
        except BaseException:
            uninterrupted(holdings.close)
            raise
        forget_in_child(self)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot."""
        return self._layout.nbytes

    @property
    def pids(self) -> tuple[int, ...]:
        """The worker processes."""
        return self._pool.pids

    def run(
        self,
        fill: Callable[[Any, TreeT_co], Any],
        tasks: Iterable[Any],
        *,
        workers: int = 4,
        ordered: bool = True,
        on_death: OnDeath = "replace",
        retries: int = 2,
    ) -> Run[TreeT_co]:
        """Have `fill(task, slot)` called in worker processes for every task, and return an iterator of the filled batches.

        `slot` is the tree of the spec with arrays to write into. `fill` returns None if it has filled them all, the number of rows
        (along every first axis) that it has filled, or a tree of views of them. What belongs to the batch and is no array of the
        spec goes beside these, as in `slot["file"] = names`, and into the tree that `fill` returns, if it does: text, numbers,
        `xferlib.Host(value)`. It is pickled, and comes out with the batch. The worker finds `fill` by import, and what it carries
        is pickled, so it must stand in a module and not in a notebook. Each task is pickled, too, and should be small: a path, an
        index.

        The batches are trees of arrays in the slots themselves: `stager.put` reads them where they are. Keep one as long as you
        like; its slot is filled again when no array over it is left and no copy reads it. `ordered`: they come in the order of the
        tasks, else as they are ready. Tasks are taken as slots become free, one ahead. No more workers are started than there are
        slots.

        An exception in `fill` is raised in place of its batch, with the worker's traceback as its cause. A worker that dies loses
        the batch that it was filling and nothing else; another takes its place. `on_death="replace"`: the batch is tried again,
        with a warning, up to `retries` times; after that, and at once with `on_death="raise"`, `WorkerDiedError` is raised in
        place of it. The iteration may go on after any of these.

        One run at a time: if the one before has not ended, it raises `RuntimeError` from now on. So does a run that was
        interrupted, for example by Ctrl-C while it waited: its workers are killed, and the next run starts others.
        """
        if self._refusal is not None:
            raise anew(self._refusal)
        if not callable(fill):
            raise TypeError(f"fill={reprlib.repr(fill)}: expected a function, called with a task and a slot")
        workers = whole_number(workers, "workers", least=1)
        retries = whole_number(retries, "retries", least=0)
        if on_death not in ("replace", "raise"):
            raise ValueError(f"on_death={on_death!r}: expected 'replace' or 'raise'")
        try:
            iterator = iter(tasks)
        except TypeError as error:
            raise TypeError(f"tasks={reprlib.repr(tasks)}: expected something to iterate, one task for each batch") from error
        begin = Begin(next(self._runs), _pickled(fill))
        # Not refused: the run before may have ended in an exception whose traceback still holds it.
        self._end_run(RuntimeError("a later run of this ring has begun. Use another ring for two at a time"))
        self._pool.wakeup.wake()
        run: Run[TreeT_co] = Run(
            self,
            self._pool,
            self._slots,
            begin,
            iterator,
            # More would have nothing to write into.
            workers=min(workers, self.slots),
            length=known_length(tasks),
            ordered=ordered,
            on_death=on_death,
            retries=retries,
        )
        self._run = weakref.ref(run)
        if self._refusal is not None:
            # It was closed meanwhile, and `close` did not know of the run.
            run.end(self._refusal)
        return run

    def close(self) -> None:
        """End the workers and give the memory back; twice is fine. Any thread.

        A run under way raises `ClosedError`. Batches that are still held stay valid, though no longer page-locked; it waits for
        the transfers in flight, since one of them may read a slot. In a finalizer, and where the tasks of a run close its ring, it
        returns at once, and another thread does the rest.
        """
        if isinstance(self._refusal, BackendUnavailableError):
            return
        self._refuse(ClosedError("this ring is closed. Make another SharedRing"))
        self._pool.wakeup.wake()
        if self._pool.reentered or collects():
            # This thread, or one that waits for it, is in the middle of a step. That must come to its end first.
            close_later(partial(_start_beside, self.close))
            return
        with self._pool.lock:
            uninterrupted(self._holdings.close)

    def forget(self) -> None:
        """Refuse everything: this process is a forked child. See `ForkSafe`."""
        self._refuse(unavailable_in_child("this ring cannot be used", "it was made", "Make rings in the child"))
        self._holdings.forget()

    def __enter__(self) -> SharedRing[TreeT_co]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._refusal is None else ", closed"
        return f"<SharedRing of {counted(self.slots, 'slot')}: {self._layout.in_words}{state}>"

    def _refuse(self, refusal: XferError) -> None:
        if self._refusal is None:
            self._refusal = refusal
        self._end_run(refusal)

    def _end_run(self, reason: Exception) -> None:
        run = None if self._run is None else self._run()
        if run is not None:
            run.end(reason)


def _start_beside(close: Callable[[], None]) -> None:
    """Call on a thread of its own: the reaper has more to do than wait for workers."""
    start_thread(threading.Thread(target=close, name="xferlib-workers", daemon=True), lambda error: close())


def _pickled(fill: Callable[[Any, Any], Any]) -> bytes:
    try:
        pickled = pickle.dumps(fill, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"fill={fill!r} cannot be sent to a worker process: {error}. Define it, or its class, at the top of a module"
        ) from error
    if _is_interactive() and any(argument == "__main__" for _, argument, _ in pickletools.genops(pickled)):
        # A worker would find out only after it was started, and say that __main__ has no such attribute.
        raise TypeError(
            f"fill={fill!r} is defined in an interactive session, where a worker process cannot import it. Write it to a module, "
            "such as fills.py beside the notebook (there: a cell that begins with %%writefile fills.py), and import it from there"
        )
    return pickled


def _is_interactive() -> bool:
    """Tell whether the main module is no file that a spawned process could run: that of a notebook, a prompt, or `python -c`."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (file is None or not os.path.exists(file))
