"""What stands in a queue in place of an item for which an error was raised instead."""

from __future__ import annotations

from typing import NoReturn, final

__all__ = ["STAGER_CLOSED", "Failed"]

STAGER_CLOSED = (
    "the stager of this loop was closed, with stager.close() or at the end of its with block, and the loop was not over. Take what "
    "you want before that"
)
"""A note: the error itself, which comes out where the consumer asks for its next item, speaks of a stager and of no loop."""


@final
class Failed:
    """An error on its way to whoever takes it. It looks like a transfer that is done, whose value raises, once."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    @property
    def value(self) -> NoReturn:
        """Raise the error."""
        try:
            if isinstance(self._error, StopIteration):
                # An iterator that raised this would say that it has ended.
                raise RuntimeError("StopIteration was raised where a batch or a result was expected") from self._error
            raise self._error
        finally:
            # Its traceback leads to this frame.
            del self._error

    def done(self) -> bool:
        """See `Transfer.done`."""
        return True

    def synchronize(self) -> None:
        """See `Transfer.synchronize`."""
