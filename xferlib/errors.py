"""Every error that xferlib raises on its own account.

One root, one class per situation. Wrong arguments are plain `TypeError` and `ValueError`; a timeout is `TimeoutError`.
What a framework raises is translated in one place (`Stager`), always with the framework's own error as the cause.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

__all__ = [
    "REFUSALS",
    "AllocationError",
    "BackendUnavailableError",
    "CapabilityError",
    "ClosedError",
    "SourceRewrittenError",
    "SynchronousTransferWarning",
    "TransferError",
    "UndecidedError",
    "UnknownBackendError",
    "WorkerDiedError",
    "WorkerError",
    "XferError",
    "add_note",
    "anew",
    "said",
]

ErrorT = TypeVar("ErrorT", bound=Exception)


class XferError(Exception):
    """The root: catch it to catch all of ours and nothing else."""


REFUSALS = (XferError, TypeError, ValueError)
"""What is raised where a transfer is refused: nothing of it is under way. Whatever else is raised, an interrupt or by a signal's
handler, may have come between its start and the line that keeps it."""


class UnknownBackendError(XferError, LookupError):
    """Raised by `stager(name)` when no installed package provides that name."""


class BackendUnavailableError(XferError):
    """Raised when a backend is installed but cannot run here: package, driver or device missing, a forked child, or the
    end of the program."""


class CapabilityError(XferError):
    """Raised when the backend, or the state of the stream it was given, does not allow what was asked."""


class ClosedError(XferError):
    """Raised when a stager, a ring or a pipeline is used after `close()`, or a pipeline once more after its end."""


class AllocationError(XferError, MemoryError):
    """Raised when pinned or device memory could not be had, or the limit forbids it."""


class TransferError(XferError):
    """Raised when a copy failed, at once or from every later `synchronize`, `result` and `done` of its transfer."""


class SourceRewrittenError(XferError, RuntimeError):
    """Raised in debug mode where the source of a put was written to before its transfer was done: a fault of the program.

    This is no `TransferError`. The copy was made, so trying again, as after a `TransferError`, would only hide the fault.
    """


class UndecidedError(XferError):
    """Raised by `assert_overlaps` where the evidence is not enough to say that a loop overlaps, or that it does not."""


class WorkerError(XferError):
    """Raised where `fill` raised something in a worker that cannot be raised here as itself. The text is the worker's."""


class WorkerDiedError(XferError):
    """Raised in place of a batch whose worker process died, and when workers cannot start at all."""


class SynchronousTransferWarning(RuntimeWarning):
    """Issued where the caller has to wait for a transfer that was to be asynchronous, with the reason and the remedy.

    Shown once for each line that starts such transfers, as Python shows warnings. `stager(..., strict=True)` raises instead.
    """


def anew(error: ErrorT) -> ErrorT:
    """Return a new error like one that is kept: several threads may be refused at once, and an exception carries one traceback."""
    return type(error)(*error.args)


def said(error: BaseException) -> str:
    """Return the `repr` of any error. Its class may be anybody's: where that raises, the name of the class."""
    try:
        return repr(error)
    except BaseException:
        return type(error).__name__


def add_note(error: BaseException, words: str) -> None:
    """Add a note to any error. One that has notes of its own kind, or lets nothing be set, is told without it."""
    with suppress(Exception):
        error.add_note(words)
