"""Copies that fail, and a look at what comes out of a loop then."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tests.core.fakes import tampered


class Lost(Exception):
    """What these sources raise."""


def outcomes(loop: Any) -> list[int | str]:
    """Take all there is, going on behind every error; say its class, or the number that a batch is full of."""
    found: list[int | str] = []
    while len(found) < 99:
        try:
            taken = next(loop)
        except StopIteration:
            return found
        except Exception as error:
            found.append(type(error).__name__)
        else:
            assert len(set(np.asarray(taken).ravel().tolist())) == 1
            found.append(int(np.asarray(taken).ravel()[0]))
    raise AssertionError(f"it does not end: {found}")


class FailedCopy:
    """The event of a copy that failed, in all else like the one that it stands for."""

    def __init__(self, event: Any, error: Exception) -> None:
        self.event = event
        self.error = error

    def done(self) -> bool:
        if self.event.done():
            raise self.error
        return False

    def synchronize(self) -> None:
        self.event.synchronize()
        raise self.error

    def stream_wait(self, stream: object | None = None) -> None:
        self.synchronize()


def failing_copies(direction: str, failing: set[int]) -> Any:
    """Return a host backend of whose copies in a direction some fail, by number, and nothing else."""
    record = f"record_{direction}"
    numbers = itertools.count()

    def recorded() -> Any:
        event, number = getattr(backend.inner, record)(), next(numbers)
        return FailedCopy(event, backend.inner.failures[0](f"copy {number} is lost")) if number in failing else event

    backend = tampered(**{record: recorded})
    return backend
