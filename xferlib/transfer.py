"""What `put` and `get` return: the right to wait, and the arrays."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, Generic, TypeAlias, final

from xferlib.checks import refuse_bare_zero, timeout_seconds, uncopied
from xferlib.debug import Check
from xferlib.errors import REFUSALS, BackendUnavailableError, CapabilityError, TransferError, XferError
from xferlib.forks import IN_CHILD, unavailable_in_child
from xferlib.in_flight import Entry, let_go
from xferlib.latch import is_copy_thread
from xferlib.no_array import NoArray
from xferlib.protocol import Event, Stream
from xferlib.sketch import sketched
from xferlib.tracing.log import LOG
from xferlib.typed import TreeT, TreeT_co

__all__ = ["LazyValue", "Transfer"]

NoteStream: TypeAlias = Callable[[int, Stream], None]
"""Notes a stream, by handle, that was told to wait for a put, and so may read its arrays."""


@final
class LazyValue(Generic[TreeT]):
    """Arrays that can be made only when their copies are started. Any thread; all get the same."""

    def __init__(self, make: Callable[[], TreeT]) -> None:
        self._make: Callable[[], TreeT] | None = make
        self._made: dict[None, TreeT] = {}

    @property
    def made(self) -> TreeT | None:
        """The arrays, if they were made."""
        return self._made.get(None)

    def __call__(self) -> TreeT:
        """Return the arrays."""
        make = self._make
        if make is not None:
            # No lock: a finalizer may ask while its thread is in here. If two make arrays at once, the first are kept.
            self._made.setdefault(None, make())
            # This drops what only the making needs, such as the lease: from now on the arrays hold that.
            self._make = None
        return self._made[None]


FIRST_NAP_SECONDS = 20e-6
LONGEST_NAP_SECONDS = 1e-3
SPIN_SECONDS = 200e-6
"""For so long, each turn of the event loop asks whether an awaited transfer is done. Its naps are no shorter than a millisecond."""
LONGEST_AWAITED_NAP_SECONDS = 10e-3


_forks = 0
"""How often this process, and those that it was forked from, became a child."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


@final
class Transfer(NoArray, Generic[TreeT_co]):
    """A transfer that has been started. Any thread; drop it at any time, the copy is safe.

    Holds the arrays. In a task of asyncio `await transfer` is `result()` without a thread that waits.

    If a copy failed, `done`, `synchronize`, `result`, `value`, `value_on` and `await` raise `TransferError` each time. If it was
    the framework that could not make the arrays, those that return them do, and they can be asked again. In debug mode all raise
    `SourceRewrittenError`, each time, for sources that were written to before the transfer was done. In a child that was forked
    meanwhile they raise `BackendUnavailableError` where they would wait.
    """

    _error: Exception | None = None
    _check: Check | None = None
    """In debug mode."""
    _finished = False
    _in_place = False
    """Whether copies of a put read sources where they are, in pinned memory. Set after it is made, where they do."""
    _born = 0
    """How many forks there had been. Not set on each transfer, since every small one would pay for it."""

    __reduce_ex__ = uncopied("Copy its arrays, which value and result() return")

    def __init__(
        self,
        value: Any,
        event: Event,
        failures: tuple[type[Exception], ...],
        on_host: bool,
        note_stream: NoteStream | None = None,
        table: dict[int, Entry] | None = None,
    ) -> None:
        """`note_stream`: None where nobody is to be told. `table`: where the event's entry is, if it is in one."""
        self._value = value
        self._event = event
        self._failures = failures
        self._on_host = on_host
        self._note_stream = note_stream
        self._table = table
        if _forks:
            self._born = _forks

    @property
    def value(self) -> TreeT_co:
        """The arrays, safe to use.

        After a put, the calling thread's current stream waits for the copy, but the host does not. If the framework has no such
        stream and its arrays do not order themselves, the host waits. If sources were borrowed, the host waits until their copies
        are started. After a get, the host waits.
        """
        if self._on_host:
            self.synchronize()
        else:
            self.stream_wait()
        return self._arrays()

    def value_on(self, stream: object) -> TreeT_co:
        """Return the arrays of a put, safe to use on `stream`, which is made to wait for the copy; nothing else is.

        For a consumer whose stream is not the current one. Otherwise as `stream_wait`. Raises `CapabilityError` for every get.
        """
        if self._on_host:
            raise CapabilityError("the arrays of a get are read by the host, which no stream makes wait. Use value or result()")
        self.stream_wait(stream)
        return self._arrays()

    @property
    def _staged(self) -> bool:
        """Whether the CPU had copied all pageable sources when the put returned."""
        return not hasattr(self._event, "wait_staged")

    @property
    def completion(self) -> Transfer[None]:
        """The same transfer without its arrays, for whoever waits but must not keep them: memory is used again when they are
        gone."""
        completion: Transfer[None] = Transfer(None, self._event, self._failures, self._on_host, table=self._table)
        completion._born = self._born
        if self._check is not None:
            completion._check = self._check.quiet
        return completion

    @property
    def end(self) -> Transfer[None]:
        """`completion`, by the name that it had once. Issues a `DeprecationWarning`."""
        warnings.warn("Transfer.end is called completion now", DeprecationWarning, 2)
        return self.completion

    def result(self, timeout: float | None = None) -> TreeT_co:
        """Block until the transfer is done and return the arrays. Raises `TimeoutError` after `timeout` seconds."""
        if timeout is None:
            self.synchronize()
        else:
            self._poll(timeout)
        # A get is over now, and its arrays are the host's.
        return self._arrays() if self._on_host else self.value

    def __await__(self) -> Generator[Any, None, TreeT_co]:
        """Let other tasks of asyncio run until the transfer is done, and return its arrays as `result()` does: `await transfer`.

        No thread waits for it, and the stream of a put is the current one of the event loop's thread: with `result` in an executor
        it is that of the executor's thread. A task that is cancelled meanwhile leaves the transfer as it is. Raises as `result()`.
        """
        return self._awaited().__await__()

    def done(self) -> bool:
        """Tell whether the transfer is done: the arrays hold the data and the sources are free. Late at times, never early."""
        if self._finished:
            return True
        if self._error is not None:
            raise self._failed(self._error)
        if _forks and self._born != _forks:
            raise _forked()
        try:
            finished = self._event.done()
        except self._failures as error:
            raise self._failed(error) from error
        if finished:
            self._note_done()
        return finished

    def synchronize(self) -> None:
        """Block the host, without the GIL, until the transfer is done."""
        if self._finished:
            return
        if self._error is not None:
            raise self._failed(self._error)
        if _forks and self._born != _forks:
            raise _forked()
        if is_copy_thread():
            self._refuse_to_wait()
        started = perf_counter_ns() if LOG.on else 0
        try:
            self._event.synchronize()
        except self._failures as error:
            raise self._failed(error) from error
        if started:
            LOG.call("wait", "Transfer.synchronize", started)
        self._note_done()

    def wait_staged(self) -> None:
        """Block the host until pageable sources are free: the CPU has copied them. Returns at once if `put` has waited for that.

        Pinned sources are free when the transfer is done. Does not tell of a failure.
        """
        wait = getattr(self._event, "wait_staged", None)
        if wait is None or self._finished:
            return
        if _forks and self._born != _forks:
            raise _forked()
        if is_copy_thread():
            # One that has failed is at rest.
            with suppress(TransferError):
                self._refuse_to_wait()
        wait()

    def stream_wait(self, stream: object | None = None) -> None:
        """Make later work on `stream` (None: the calling thread's current one) wait for the transfer; the host does not.

        It also notes that the stream will read the arrays: their memory is not written again before what is on the stream then is
        done.
        A stream given as a bare handle must stay valid until the stager is closed.
        If a stream was never named (here, by `value`, by `result` or by `stream=`), the caller must wait for readers on it.
        Raises `CapabilityError` for a get whose bytes pass through a CPU copy: no stream can wait for that.
        """
        if stream is not None:
            refuse_bare_zero(stream)
        if self._error is not None:
            raise self._failed(self._error)
        if _forks and self._born != _forks:
            raise _forked()
        if is_copy_thread():
            self._refuse_to_wait()
        try:
            waiting = self._event.stream_wait(stream)
        except REFUSALS:
            # A refusal leaves the copy as it was. But a borrowed copy may have failed by the same class of error: so ask.
            self.done()
            raise
        except self._failures as error:
            raise self._failed(error) from error
        if waiting is not None and self._note_stream is not None:
            self._note_stream(waiting.handle, waiting)

    def __repr__(self) -> str:
        value = self._value.made if isinstance(self._value, LazyValue) else self._value
        arrays = "" if value is None else f": {sketched(value)}"
        return f"<Transfer {'D2H' if self._on_host else 'H2D'}{arrays}, {self._state()}>"

    def _note_done(self) -> None:
        """Note that it is done."""
        table, self._table = self._table, None
        if table is not None:
            let_go(table, self._event)
        if self._check is not None:
            self._check()
        self._finished = True

    def _state(self) -> str:
        """Say what was last learned. A repr may be asked for anywhere, in a debugger or a finalizer, so it asks nobody itself.

        So it may say "in flight" of a transfer that is over, until `done`, or whatever waits, has found that out.
        """
        if self._finished:
            return "done"
        if self._error is not None:
            return "failed"
        return "of another process" if _forks and self._born != _forks else "in flight"

    def _arrays(self) -> TreeT_co:
        value: TreeT_co | LazyValue[TreeT_co] = self._value
        if isinstance(value, LazyValue):
            try:
                value = value()
            except (CapabilityError, TransferError):
                # Refused here and now, and the copy is as sound as before.
                raise
            except self._failures as error:
                # If the copy itself has failed, that says more. Otherwise the arrays can be asked for again.
                self.done()
                raise TransferError(f"the arrays could not be made: {error}. Mend that, and ask again") from error
        if self._check is not None:
            self.done()
        return value

    def _make_ahead(self) -> None:
        """Make the arrays on this thread, not on the one that will ask for them, if that need not wait for anything."""
        if self._staged and isinstance(self._value, LazyValue):
            # Whoever asks for them is told.
            with suppress(Exception):
                self._value()

    def _refuse_to_wait(self) -> None:
        if not self.done():
            raise XferError(
                "a finalizer would wait for a transfer on a thread that makes the copies, and so for itself: the garbage collector "
                "runs finalizers on any thread. Wait in ordinary code, or ask done()"
            )

    def _poll(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout_seconds(timeout)
        nap = FIRST_NAP_SECONDS
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the transfer is not done after {timeout} seconds")
            time.sleep(min(nap, left))
            nap = min(2 * nap, LONGEST_NAP_SECONDS)

    async def _awaited(self) -> TreeT_co:
        # Not at the top: it takes as long to import as half of xferlib, and few programs need it.
        import asyncio

        began = time.monotonic()
        while not self.done():
            waited = time.monotonic() - began
            await asyncio.sleep(0 if waited < SPIN_SECONDS else min(waited / 4, LONGEST_AWAITED_NAP_SECONDS))
        return self.value

    def _failed(self, cause: Exception) -> TransferError:
        # Without its traceback, whose frames lead back here.
        self._error = cause.with_traceback(None)
        error = TransferError(f"the copy failed: {cause}")
        error.__cause__ = cause
        return error


def _forked() -> BackendUnavailableError:
    return unavailable_in_child(
        "this transfer cannot be waited for", "the transfer was started", f"Wait for it in the parent. {IN_CHILD}"
    )
