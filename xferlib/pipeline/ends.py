"""Waiting for a transfer without keeping what it moves.

Whoever only waits must not hold the device arrays: their memory could not be used again, although the consumer has dropped them.
"""

from __future__ import annotations

from typing import Any, Protocol

from xferlib.transfer import Transfer

__all__ = ["End", "Started", "end_of"]


class End(Protocol):
    """A point that is reached when a transfer is done. Raises `TransferError` if that failed."""

    def done(self) -> bool: ...

    def synchronize(self) -> None: ...


class Started(End, Protocol):
    """What putting a batch returns: a `Transfer`, or several that look like one."""

    @property
    def value(self) -> Any: ...


def end_of(started: Started) -> End:
    """Return the end of a transfer, which holds no arrays; of anything else that looks like one, the thing itself."""
    if isinstance(started, Transfer):
        return started.end
    return started
