"""Results on their way to the host while later ones are computed.

The copy of each result is started on the thread that made it, right behind the work, and waited for on the thread that takes it.
Results come out in the order in which they were submitted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, final

from xferlib.checks import uncopied
from xferlib.errors import AllocationError, ClosedError, XferError
from xferlib.pipeline.bill import Bill, Charge, in_words, tree_nbytes
from xferlib.pipeline.rows import Rows
from xferlib.stager import Stager, check_stager
from xferlib.transfer import Transfer

__all__ = ["Drain", "Results"]


@final
class Drain:
    """Takes results on one side and gives them out on the other, on two threads or on one.

    `submit(tree)` starts the copy to the host and returns; it waits while `depth` results are under way. `results()` iterates them
    as host trees. `end()` says that no more come.

    Without `out` each result is in pinned memory of the stager's pool, which comes back when the last view of it is gone: keep few.
    `depth` then counts what is submitted and not taken, so that somebody must take: on another thread, or on this one before there
    are more. `out`: a tree of arrays that results fill from the front, along the first axis (`numpy.lib.format.open_memmap` makes
    one of a file): results are views of it, and `depth` counts what is not yet copied, so nobody need take them.

    A context manager; `close()` waits for what is in flight. One thread submits at a time, any number may take.
    """

    __reduce_ex__ = uncopied("Make another one")

    def __init__(self, stager: Stager, depth: int = 2, *, out: Any = None) -> None:
        check_stager(stager)
        if depth < 1:
            raise ValueError(f"depth={depth!r}: expected 1 or more")
        self.depth = depth
        self.bill: Bill | None = None
        """Known from the first result on."""
        self.lowered: str | None = None
        """Why `depth` is less than asked, in words."""
        self._stager = stager
        self._rows = None if out is None else Rows(out)
        self._changed = threading.Condition()
        self._taking = threading.RLock()
        self._pending: deque[Transfer] = deque()
        self._flying: deque[Transfer] = deque()
        self._taken = 0
        self._taker: int | None = None
        self._asked = self._ended = self._closed = self._hungry = False
        self._error: BaseException | None = None

    @property
    def pending(self) -> int:
        """How many results are submitted and not taken."""
        return len(self._pending)

    def submit(self, tree: Any, *, stream: object | None = None) -> None:
        """Start copying a tree of device arrays to the host, after what `stream` (None: this thread's current one) has enqueued.

        Waits while `depth` results are under way. Raises `RuntimeError` where the wait could not end, because whoever takes is this
        thread or nobody; `ValueError` where `out` has no room; else as `Stager.get`.
        """
        self._check_open()
        self._price(tree)
        last = False
        while True:
            taken = self._taken
            if self._rows is not None:
                self._land_until(self.depth - 1)
            elif not self._wait_taken(lambda: len(self._pending) < self.depth):
                raise RuntimeError(
                    f"{len(self._pending)} results wait to be taken, and nobody else takes them: call results() first and iterate "
                    "it on another thread, use drain(...), or give out="
                )
            try:
                self.start(tree, stream)
                return
            except AllocationError:
                if last or not self._wait_taken(lambda taken=taken: self._taken > taken or self._starving):  # type: ignore[misc]
                    raise
                # Whoever takes one may let go of another; whoever waits for one has let go of all that it will.
                last = self._starving

    def start(self, tree: Any, stream: object | None = None) -> None:
        """Submit without waiting for anything. Raises `AllocationError` where there is no memory for the result now."""
        self._check_open()
        self._price(tree)
        if self._rows is None:
            transfer = self._stager.get(tree, stream=stream)
        else:
            out, count = self._rows.next(tree)
            transfer = self._stager.get(tree, out=out, stream=stream)
            self._rows.filled += count
            self._flying.append(transfer)
        with self._changed:
            late = self._closed
            if not late:
                self._pending.append(transfer)
                self._changed.notify_all()
        if late:
            # Closed meanwhile, by another thread, which knew nothing of it: nobody is to take it behind a gap.
            with suppress(XferError):
                transfer.synchronize()
            self._check_open()

    def results(self) -> Results:
        """Return an iterator of host trees, which ends after `end()`. Several share the results between them."""
        self._asked = True
        return Results(self)

    def end(self, error: BaseException | None = None) -> None:
        """Say that nothing more will be submitted; `error` is raised behind the last result."""
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
            self._changed.notify_all()

    def synchronize(self) -> None:
        """Wait until everything submitted is on the host. Raises `TransferError`."""
        for transfer in self._under_way():
            transfer.synchronize()

    def close(self) -> None:
        """Wait for what is in flight and drop what was not taken; twice is fine. Whoever still takes gets `ClosedError`."""
        with self._changed:
            self._closed = True
            left = self._under_way()
            self._pending.clear()
            self._flying.clear()
            self._changed.notify_all()
        for transfer in left:
            with suppress(XferError):
                transfer.synchronize()

    def take(self) -> Any:
        """Wait for the oldest result and return it. Raises `StopIteration` when there is no more, and what `end` was given."""
        # One at a time, so that whoever came first gets the oldest.
        with self._taking:
            self._taker = threading.get_ident()
            transfer = self._oldest()
            # An interrupt leaves it where it is.
            with suppress(XferError):
                transfer.synchronize()
            with self._changed:
                if self._pending and self._pending[0] is transfer:
                    self._pending.popleft()
                self._taken += 1
                self._changed.notify_all()
        return transfer.value

    @property
    def oldest_done(self) -> bool:
        """Whether the oldest result is on the host already."""
        try:
            return self._pending[0].done()
        except (IndexError, XferError):
            return True

    def __enter__(self) -> Drain:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _oldest(self) -> Transfer:
        with self._changed:
            while not self._pending:
                if self._closed:
                    raise ClosedError("this drain was closed before it was ended: call end() when everything is submitted")
                if self._ended:
                    error, self._error = self._error, None
                    if error is not None:
                        raise error
                    raise StopIteration
                self._hungry = True
                self._changed.notify_all()
                try:
                    self._changed.wait()
                finally:
                    self._hungry = False
            return self._pending[0]

    def _wait_taken(self, reached: Callable[[], bool]) -> bool:
        """Wait for whoever takes. Returns False where that is nobody, or this thread."""
        with self._changed:
            while not reached():
                if not self._asked or self._taker == threading.get_ident():
                    return False
                self._changed.wait()
                self._check_open()
        return True

    def _land_until(self, count: int) -> None:
        """Wait until no more than so many copies are under way."""
        while len(self._flying) > count:
            with suppress(IndexError):
                # Another thread may close meanwhile, and drop them all.
                self._flying[0].synchronize()
                self._flying.popleft()

    @property
    def _starving(self) -> bool:
        """Whether somebody waits for a result and there is none."""
        return self._hungry and not self._pending

    def _under_way(self) -> list[Transfer]:
        return [*self._flying, *self._pending]

    def _check_open(self) -> None:
        if self._closed or self._ended:
            raise ClosedError(f"this drain was {'closed' if self._closed else 'ended'}. Make another Drain")

    def _price(self, tree: Any) -> None:
        """Learn from the first result what the loop costs, and have fewer under way where pinned_limit forbids so many."""
        if self.bill is not None:
            return
        nbytes = tree_nbytes(tree)
        if self._rows is None and nbytes:
            limit = self._stager.stats().pinned_limit_nbytes
            # One is with the consumer.
            fit = limit // nbytes - 1
            if fit < 1:
                raise AllocationError(
                    f"two results of {in_words(nbytes)}, one under way and one with the consumer, are more than "
                    f"pinned_limit={limit} ({in_words(limit)}). Raise pinned_limit, give out=, or make smaller results"
                )
            if fit < self.depth:
                self.lowered = f"{fit} results are under way instead of {self.depth}: pinned_limit={limit} has no room for more"
                self.depth = fit
        device = Charge("device", self.depth + 1, nbytes, "results")
        own = () if self._rows is not None else (Charge("pinned", self.depth + 1, nbytes, "results"),)
        self.bill = Bill((*own, device))


@final
class Results:
    """The results of a `Drain`, in order."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._drain.take()
