"""Waiting for a transfer without keeping what it moves.

Whoever only waits must not hold the device arrays: their memory could not be used again, although the consumer has dropped them.
"""

from __future__ import annotations

from typing import Protocol

from xferlib.transfer import Transfer

__all__ = ["Completion", "completion_of"]


class Completion(Protocol):
    """Tells when a transfer is done, and holds no arrays of it. Raises `TransferError` if that failed."""

    def done(self) -> bool: ...

    def synchronize(self) -> None: ...

    def wait_staged(self) -> None:
        """Block until pageable sources are free. Says nothing of a failure."""


def completion_of(transfer: Completion) -> Completion:
    """Return the completion of a transfer, which holds no arrays; of anything else that looks like one, the thing itself."""
    return transfer.completion if isinstance(transfer, Transfer) else transfer
