"""Results on their way to the host while later ones are computed, between the thread that makes them and the one that takes them.

The copy of each result is started on the thread that made it, right behind the work, and waited for on the thread that takes it.
Results come out in the order in which they were submitted; what was raised instead of one comes out in its place.

Both sides share state that changes in single steps, and wake each other to look at it: an interrupt leaves no lock held.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, NoReturn, final

from xferlib.checks import uncopied, whole_number
from xferlib.d2h import pinned_nbytes
from xferlib.errors import REFUSALS, AllocationError, ClosedError, XferError
from xferlib.latch import Latch
from xferlib.pipeline.failed import STAGER_CLOSED, Failed
from xferlib.pipeline.memory_estimate import Charge, MemoryEstimate, at_a_time, check_room, described, tree_nbytes
from xferlib.pipeline.one_pass import steps
from xferlib.pipeline.output_writer import OutputWriter
from xferlib.stager import Stager, check_stager
from xferlib.transfer import Transfer
from xferlib.tree import trees_of
from xferlib.typed import TreeT_co
from xferlib.words import counted

__all__ = ["Drain", "Results"]


@final
class Drain(Generic[TreeT_co]):
    """Takes results on one side and gives them out on the other, on two threads or on one.

    `submit(tree)` starts the copy to the host and returns; it waits while `depth` results are under way. `results()` iterates them
    as host trees. `end()` says that no more come.

    Without `out` each result is in pinned memory of the stager's pool, which comes back when the last view of it is gone: keep few.
    `depth` then counts results that are submitted and not taken, so somebody must take them: on another thread, or on this one
    before there are more. If `pinned_limit` has no room for `depth` + 2 results like the first, the first one is refused.
    `out`: a tree of arrays that results fill from the front, along the first axis (`numpy.lib.format.open_memmap` makes one of a
    file). Results are then views of it, and `depth` counts results that are not yet copied, so nobody need take them.

    If a result fails, whoever takes it is told, in its place, and those after it follow. A result whose copy could not be started
    takes no rows of `out`; one whose copy failed leaves its rows undefined.

    A context manager; `close()` waits for what is in flight. If `out` was given, the end of a `with` block raises as `synchronize`
    does, since perhaps nobody else is told. One thread submits at a time, any number may take.

    Attributes:
        depth: How many results may be under way.
        bill: What the loop costs in memory, known from the first result on.
    """

    __reduce_ex__ = uncopied("Make another one")

    def __init__(self, stager: Stager, depth: int = 2, *, out: TreeT_co | None = None) -> None:
        check_stager(stager)
        whole_number(depth, "depth", least=1)
        self.depth = depth
        self.bill: MemoryEstimate | None = None
        self._length: int | None = None
        self._stager = stager
        self._writer = None if out is None else OutputWriter(out, trees_of(stager.backend))
        self._changed = Latch()
        # Reentrant: a finalizer may take while its thread is in here.
        self._taking = threading.RLock()
        self._pending: deque[Transfer[TreeT_co] | Failed] = deque()
        self._flying: deque[Transfer] = deque()
        self._taken = 0
        self._taker: int | None = None
        self._asked = self._ended = self._closed = self._cut = False

    @property
    def pending(self) -> int:
        """How many results are submitted and not taken."""
        return len(self._pending)

    @property
    def taken(self) -> int:
        """How many results were taken, and errors in the place of one."""
        return self._taken

    @property
    def failing(self) -> bool:
        """Whether the newest result that is not taken is one that `fail` was told of."""
        try:
            return isinstance(self._pending[-1], Failed)
        except IndexError:
            return False

    def submit(self, tree: Any, *, stream: object | None = None) -> None:
        """Start copying a tree of device arrays to the host, after what `stream` (None: this thread's current one) has enqueued.

        Waits while `depth` results are under way. Raises `RuntimeError` if the wait could not end, because only this thread takes,
        or nobody; `ValueError` where `out` has no room; else as `Stager.get`.
        """
        self._check_open()
        if self._writer is not None:
            self._land_until(self.depth - 1)
        elif not self._wait_for_taker():
            raise RuntimeError(
                f"not taken yet: {counted(len(self._pending), 'result')}, and nobody else takes: call results() first and "
                "iterate it on another thread, use drain(...), or give out="
            )
        self.start(tree, stream)

    def expect(self, length: int | None) -> None:
        """Say how many results there are to come, where that is known: memory for more is not needed."""
        self._length = length

    def start(self, tree: Any, stream: object | None = None) -> None:
        """Submit without waiting for anything, however many are under way."""
        self._check_open()
        self._estimate(tree)
        try:
            transfer = self._pinned(tree, stream) if self._writer is None else self._into_out(self._writer, tree, stream)
            if self._writer is not None:
                self._flying.append(transfer)
            self._pending.append(transfer)
        except ClosedError as error:
            error.add_note(STAGER_CLOSED)
            raise
        except BaseException as error:
            if not isinstance(error, REFUSALS):
                # It may have begun, and nobody could wait for it any more.
                with suppress(XferError):
                    self._stager.idle()
            raise
        self._changed.wake()
        if self._closed:
            # Another thread closed it meanwhile, and may know nothing of this result: nobody may take it after a gap.
            for queue in (self._pending, self._flying):
                with suppress(ValueError):
                    queue.remove(transfer)
            with suppress(XferError):
                transfer.synchronize()
            self._check_open()

    def fail(self, error: BaseException) -> None:
        """Submit that there is no result: whoever takes it gets this error. Waits for nothing."""
        self._check_open()
        self._pending.append(Failed(error))
        self._changed.wake()

    def results(self) -> Results[TreeT_co]:
        """Return an iterator of host trees, which ends after `end()`. Several share the results between them."""
        self._asked = True
        return Results(self)

    def end(self, error: BaseException | None = None) -> None:
        """Say that nothing more will be submitted; `error` is raised behind the last result."""
        if error is not None and not (self._closed or self._ended):
            self._pending.append(Failed(error))
        self._ended = True
        self._changed.wake()

    def synchronize(self) -> None:
        """Wait until everything submitted is on the host. Raises `TransferError` of the first that failed and was not taken."""
        failed: XferError | None = None
        for transfer in self._under_way():
            try:
                transfer.synchronize()
            except XferError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Wait for what is in flight and drop what was not taken; twice is fine. Whoever still takes gets `ClosedError`."""
        if not self._closed:
            self._cut = not self._ended or bool(self._pending)
            self._closed = True
        self._changed.wake()
        for transfer in self._under_way():
            with suppress(XferError):
                transfer.synchronize()
        # Only now: a call that is interrupted in here leaves what is in flight to the next call.
        self._pending.clear()
        self._flying.clear()

    def take(self) -> TreeT_co:
        """Wait for the oldest result and return it, or raise what is in its place. Raises `StopIteration` when there is no more."""
        # One at a time, so that whoever came first gets the oldest.
        with self._taking:
            while True:
                self._taker = threading.get_ident()
                transfer = self._oldest()
                # An interrupt leaves it where it is.
                with suppress(XferError):
                    transfer.synchronize()
                if self._take_out(transfer):
                    break
        return transfer.value

    @property
    def oldest_done(self) -> bool:
        """Whether the oldest result is on the host already."""
        try:
            return self._pending[0].done()
        except (IndexError, XferError):
            return True

    def __enter__(self) -> Drain[TreeT_co]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None and self._writer is not None and not self._closed:
                self.synchronize()
        finally:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ended" if self._ended else f"depth {self.depth}"
        try:
            oldest = self._pending[0]
        except IndexError:
            oldest = None
        first = f", the oldest {oldest!r}" if isinstance(oldest, Transfer) else ""
        return f"<Drain, {self._taken} taken, {len(self._pending)} not taken{first}, {state}>"

    def _pinned(self, tree: Any, stream: object | None) -> Transfer:
        try:
            return self._stager.get(tree, stream=stream)
        except AllocationError as error:
            count = at_a_time(self.depth, self._length)
            error.add_note(
                f"depth={self.depth} has up to {count} results in pinned memory at a time, besides those that "
                "the consumer keeps. Use a smaller depth, raise pinned_limit, give out=, or keep fewer"
            )
            raise

    def _into_out(self, writer: OutputWriter, tree: Any, stream: object | None) -> Transfer:
        out, count = writer.next(tree)
        # Before the copy: if it is begun, and an interrupt loses that fact, nothing else may be written to these rows.
        writer.filled += count
        try:
            return self._stager.get(tree, out=out, stream=stream)
        except REFUSALS:
            writer.filled -= count
            raise

    def _oldest(self) -> Transfer[TreeT_co] | Failed:
        while True:
            # Asked before the queue: then everything that was submitted before the end is in there.
            ended = self._ended
            if self._closed:
                self._refuse_taking()
            with suppress(IndexError):
                return self._pending[0]
            if ended:
                raise StopIteration
            self._changed.wait_for(lambda: self._pending or self._ended or self._closed)

    def _take_out(self, transfer: Transfer | Failed) -> bool:
        """Take the oldest out of the queue. Returns False if it is there no more: closed, or taken by a finalizer."""
        if self._closed:
            self._refuse_taking()
        try:
            self._pending.remove(transfer)
        except ValueError:
            return False
        # Looked for first: in vain, it would be put into the words of an error that nobody reads.
        if isinstance(transfer, Transfer) and transfer in self._flying:
            with suppress(ValueError):
                self._flying.remove(transfer)
        self._taken += 1
        self._changed.wake()
        return True

    def _refuse_taking(self) -> NoReturn:
        if not self._cut:
            raise StopIteration
        raise ClosedError(
            "this drain was closed before it was ended and everything was taken: call end() when everything is submitted"
        )

    def _wait_for_taker(self) -> bool:
        """Wait until fewer than `depth` results are not taken. Returns False where nobody takes, or only this thread."""
        mine = threading.get_ident()
        self._changed.wait_for(lambda: self._closed or len(self._pending) < self.depth or not self._asked or self._taker == mine)
        self._check_open()
        return len(self._pending) < self.depth

    def _land_until(self, count: int) -> None:
        """Wait until no more than so many copies are under way."""
        while len(self._flying) > count:
            # Another thread may close meanwhile, and drop them all. Whoever takes the result is told of its failure.
            with suppress(IndexError, ValueError):
                transfer = self._flying[0]
                with suppress(XferError):
                    transfer.synchronize()
                self._flying.remove(transfer)

    def _under_way(self) -> list[Transfer | Failed]:
        return [*self._flying.copy(), *self._pending.copy()]

    def _check_open(self) -> None:
        if self._closed or self._ended:
            raise ClosedError(f"this drain was {'closed' if self._closed else 'ended'}. Make another Drain")

    def _estimate(self, tree: Any) -> None:
        """Say what the loop costs if all results are like this one. Raises `AllocationError` where so much can never be had."""
        if self.bill is not None:
            return
        trees = trees_of(self._stager.backend)
        nbytes = tree_nbytes(tree, trees)
        count = at_a_time(self.depth, self._length)
        device = Charge("device", count, nbytes, "results")
        if self._writer is not None:
            self.bill = MemoryEstimate((device,))
            return
        if self._stager.when_full != "stage":
            limit = self._stager.stats().pinned_limit_nbytes
            # As they lie in the pool.
            check_room("pinned", self.depth, count, pinned_nbytes(described(tree, trees)), limit, "results", "give out=, ")
        self.bill = MemoryEstimate((Charge("pinned", count, nbytes, "results"), device))


@final
class Results(Generic[TreeT_co]):
    """The results of a `Drain`, in order, once: a new `for` after the last one raises `ClosedError`."""

    def __init__(self, drain: Drain[TreeT_co]) -> None:
        self._drain = drain
        self._spent = False

    def __iter__(self) -> Iterator[TreeT_co]:
        if self._spent:
            raise ClosedError("these results are spent: all were taken, and none comes a second time. Make another Drain for more")
        return steps(self)

    def __next__(self) -> TreeT_co:
        try:
            return self._drain.take()
        except StopIteration:
            self._spent = True
            raise
