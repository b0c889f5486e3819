"""What becomes of a save: whether there will be a file, who is told, and which saves a later one waits for.

Whoever comes first says how a save ends, in one step: its threads, `cancel`, or an interrupt of the call. How the bytes come to the
disk is not in here.
"""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from pathlib import Path
from typing import Literal, final

from xferlib.errors import ClosedError, XferError, said
from xferlib.files.series import series_of
from xferlib.latch import WAIT_SECONDS, Latch

__all__ = ["Outcome", "is_saved_to", "refuse_late", "wait_for_all"]


@final
class Outcome:
    """How far one save is, and how it ends. Any thread. The handle and the threads hold it; it refers to neither.

    Attributes:
        file: Where the file is going to be, as the caller named it.
        target: The same place with no symbolic link on the way: what a link leads to is replaced.
        process: Which process has the threads.
        written: How many of the arrays' bytes are written. Changed by one thread at a time.
        told: Whether somebody knows of the failure.
        warned: What was to be said of older files, where warnings are errors. The file is there.
        was_read: Open when no array is read any more.
        ended: Open when nothing is left of the save but its file.
        stop: Open when no more is to be written.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        # Now: the working directory may be another one when the threads come to it.
        self.target = Path(os.path.realpath(file))
        self.process = os.getpid()
        self.written = 0
        self.told = False
        self.warned: Warning | None = None
        self.was_read, self.ended, self.stop = Latch(), Latch(), Latch()
        self._series = f"{self.target.parent}/{series_of(self.target.name)}"
        self._number = next(_numbers)
        self._cancelled = XferError(f"the save to {str(file)!r} was cancelled. What was there before is there")
        self._fate: dict[None, Literal["started", "dropped"]] = {}
        """Whether somebody writes, or the caller was interrupted before that: who comes first says it, in one step."""
        self._verdict: dict[None, Exception | None] = {}
        """None: the file is getting its name. Else why it does not. Who comes first says it."""

    @property
    def error(self) -> Exception | None:
        """Why there will be no file; None: there is, or there may be."""
        return self._verdict.get(None)

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` is why there will be no file."""
        return self.error is self._cancelled

    @property
    def is_dropped(self) -> bool:
        """Whether the caller was interrupted before anybody began."""
        return self._fate.get(None) == "dropped"

    def enter(self) -> None:
        """Count the save as under way. Raises `ClosedError` where the end of the program does not find it any more."""
        _under_way[self._number] = self
        # Again: either the end of the program finds this one, or it is refused.
        refuse_late()

    def begin(self) -> bool:
        """Say that somebody writes. False: the caller was interrupted before, and nobody is to."""
        return self._fate.setdefault(None, "started") == "started"

    def drop(self) -> bool:
        """Say that nobody is to write, since the caller was interrupted. False: somebody writes already."""
        if self._fate.setdefault(None, "dropped") != "dropped":
            return False
        self._leave()
        return True

    def cancel(self) -> bool:
        """Write no more; tell whether that is why there will be no file."""
        self._verdict.setdefault(None, self._cancelled)
        if self.is_cancelled:
            self.told = True
            self.stop.open()
        return self.is_cancelled

    def fail(self, error: BaseException) -> None:
        """Say that there will be no file, and why, unless something else was said before."""
        known = error if isinstance(error, Exception) else RuntimeError(f"the save was cut off: {said(error)}")
        # First: whatever follows, no file that lacks something gets its name.
        self._verdict.setdefault(None, known)
        self.stop.open()
        if isinstance(known, OSError) and known.errno is not None and known.filename is None:
            # The system says of no write to which file it was.
            known.filename = str(self.file)
        # Their frames would hold memory for as long as the handle.
        for one in _chain(known):
            # Errors may be anybody's, and refuse that an attribute is set: those of a frozen dataclass do.
            BaseException.with_traceback(one, None)

    def commit(self) -> bool:
        """Say that the file is getting its name: from here on nobody cancels it. False: something else was said before."""
        return self._verdict.setdefault(None, None) is None

    def roll_back(self) -> None:
        """Take back what `commit` said: the file did not get its name, and `fail` is to say why."""
        del self._verdict[None]

    def end(self) -> None:
        """Let whoever waits pass. Twice is fine."""
        self._leave()
        self.ended.open()

    def say_failed(self) -> None:
        """Warn of a failure that nobody has asked about."""
        if self.told or (self.error is None and self.warned is None):
            return
        # The handle may go while the last thread leaves, and both say it.
        self.told = True
        failed = f"the save to {str(self.file)!r} failed, and nobody has asked for its result: {self.error}"
        warnings.warn(str(self.warned) if self.error is None else failed, RuntimeWarning, 2)

    def wait_for_older(self) -> None:
        """Wait for the saves of the same series that were called for before this one: their files must be there first."""
        older = [outcome._number for outcome in _found() if outcome._is_before(self)]
        # For the last of them first, which waits for those before it: if all waited for the first, each end would wake them all.
        for number in sorted(older, reverse=True):
            while self.error is None and _goes_on(number):
                pass

    def _is_before(self, other: Outcome) -> bool:
        return self._series == other._series and self._number < other._number

    def _leave(self) -> None:
        _under_way.pop(self._number, None)


def refuse_late() -> None:
    """Raise `ClosedError` in a program that has ended but for handlers of `atexit` from before the import."""
    if _over:
        raise ClosedError("this program ends, and nothing is saved any more. Register the handler that saves after import xferlib")


def is_saved_to(file: Path) -> bool:
    """Tell whether a save of this process is under way that will give its file this name."""
    target = Path(os.path.realpath(file))
    return any(outcome.target == target and outcome.error is None and not outcome.is_dropped for outcome in _found())


_numbers = itertools.count()
_under_way: weakref.WeakValueDictionary[int, Outcome] = weakref.WeakValueDictionary()
"""By their numbers, which are those of the calls. The threads of each hold it."""
_over = False
"""Whether the interpreter ends, and waits for no more saves."""


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and those behind it: what it was raised from, and what was handled then."""
    found = [error]
    for one in found:
        for behind in (one.__cause__, one.__context__):
            # Not `in`: to compare two errors is code of their class.
            if behind is not None and all(behind is not other for other in found):
                found.append(behind)
    return found


def _found() -> list[Outcome]:
    """Return the saves that may be under way. Its references are listed in one step: other threads add meanwhile."""
    return [outcome for outcome in [reference() for reference in _under_way.valuerefs()] if outcome is not None]


def _goes_on(number: int) -> bool:
    """Wait a moment for a save, and tell whether it goes on.

    Not for good: one whose start was interrupted never ends, and is gone when nobody has it.
    """
    outcome = _under_way.get(number)
    return outcome is not None and not outcome.is_dropped and not outcome.ended.wait(WAIT_SECONDS)


def wait_for_all() -> None:
    """Wait for all saves, and refuse later ones: the interpreter ends, and waits only for threads that are started already."""
    global _over
    _over = True
    for number in [outcome._number for outcome in _found()]:
        while _goes_on(number):
            pass


def _forget() -> None:
    """In a forked child: the threads stayed with the parent."""
    global _under_way
    _under_way = weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_forget)
