"""What a consumer is told when a worker process could not do its part."""

from __future__ import annotations

from xferlib.errors import XferError

__all__ = ["WorkerDiedError", "WorkerError", "WorkerTraceback"]


class WorkerError(XferError):
    """Raised where `fill` raised something in a worker that cannot be raised here as itself. The text is the worker's."""


class WorkerDiedError(XferError):
    """Raised in place of a batch whose worker process died, and when workers cannot start at all."""


class WorkerTraceback(Exception):
    """The cause of an exception that came from a worker: the traceback there, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"
