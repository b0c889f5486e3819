"""Debug mode: finding who writes to the source of a put before the transfer is done.

Some sources are read after their put has returned: pinned ones, and all that are borrowed until the put is done. (A source that is
borrowed until it is staged is free before that, and is not watched.) Sums over these sources are taken when the put is called, and
again as soon as anybody finds the transfer done, before a caller is told that it may write again. Only what is found by us counts.
A wait by other means, such as the framework's own, is not seen here: a source that is written to after such a wait, but before
`done()`, is blamed. Two more things are not seen: values that were put back meanwhile, and writes to memory whose array is gone.
Nothing here keeps a source alive, nor waits.
"""

from __future__ import annotations

import itertools
import os
import weakref
import zlib
from _thread import get_native_id
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeVar, final

import numpy as np

from xferlib.callers import user_frame
from xferlib.errors import SourceRewrittenError
from xferlib.memory.arrays import Array
from xferlib.memory.foreign import copy_foreign, is_foreign
from xferlib.tracing.log import LOG
from xferlib.tree import Spec, Trees, path

__all__ = ["VARIABLE", "Check", "SourceWatch", "WatchedPut", "call_site", "resolve_debug", "verify_done", "watch_get"]

VARIABLE = "XFERLIB_DEBUG"
CHECKSUM_PIECE_NBYTES = 4096
"""Bytes that are summed at a time: a difference is found to this precision."""
OF_ANOTHER = (
    "an earlier put is at fault, whose transfer nobody holds any more; the put that tells of it has started nothing. "
    "What is wrong: "
)
"""Before words that come out of a put which they are not about."""
READ_NBYTES = 256 * CHECKSUM_PIECE_NBYTES
"""Bytes of a file that are copied at a time, to be summed."""


T = TypeVar("T")


def resolve_debug(debug: bool | None) -> bool:
    """Return what the argument `debug` says; None: what the environment says. Raises `ValueError` for what cannot be read there."""
    if debug is not None:
        return bool(debug)
    text = os.environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}: expected '1', or '0' for none, got {text!r}")
    return text == "1"


def call_site() -> str:
    """Say where the innermost frame that is not ours stands. On a thread of ours, say for whom it works."""
    frame = user_frame()
    if frame.f_globals.get("__name__") == "threading" and (begun_at := LOG.served.get(get_native_id())) is not None:
        return f"{begun_at}, on the thread of the pipeline that was begun there"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def verify_done() -> None:
    """Look at the sources of every put that is done: from now on they may be written to."""
    for put in list(_unverified.values()):
        if put.reached():
            put.verify()


def watch_get(transfer: T) -> T:
    """Have sources verified when this get is done: often nothing else tells that the puts before it are done, too."""
    watched: Any = transfer
    watched._check = Check(None)
    return transfer


@final
class SourceWatch:
    """Watches the sources of one stager's puts. Any thread.

    Whoever asks the transfer is told of a rewrite. If nobody can ask any more, the stager's next put raises it, or else its
    `close()`.
    """

    def __init__(self, leaf: Callable[[Any], tuple[Array, int | None]], trees: Trees) -> None:
        """`leaf`: see `HostMemory`."""
        self._leaf = leaf
        self._trees = trees
        self._untold: deque[WatchedPut] = deque()

    def look(self, tree: Any, *, borrow: bool) -> WatchedPut | None:
        """Look at the tree that a put is about to be given. None: nothing of it is read after the put has returned.

        Called before anything starts: every write from then on is too early. Raises the rewrites of earlier puts that nobody can
        ask for any more.
        """
        verify_done()
        self._tell(only_dropped=True)
        sources, spec = self._read_later(tree, borrow)
        return WatchedPut(sources, spec, call_site(), borrow, self._untold) if sources else None

    def close(self) -> None:
        """Verify what is left, and raise what nobody was told. Nothing is in flight."""
        for put in list(_unverified.values()):
            if put.untold is self._untold:
                put.end()
        self._tell(only_dropped=False)

    def _read_later(self, tree: Any, borrow: bool) -> tuple[list[_WatchedSource], Spec]:
        """Return those leaves that are read after the put has returned."""
        leaves, spec = self._trees.arrays(tree)
        sources: list[_WatchedSource] = []
        for index, given in enumerate(leaves):
            try:
                array, address = self._leaf(given)
            except (TypeError, ValueError):
                # Refused by the put itself, which says it better.
                return [], spec
            if address or (borrow and address is None):
                sources.append(_WatchedSource(array, index))
        return sources, spec

    def _tell(self, *, only_dropped: bool) -> None:
        """Raise the first rewrite that nobody was told of. `only_dropped`: only those of transfers that nobody can ask any more."""
        error: SourceRewrittenError | None = None
        for put in list(self._untold):
            if only_dropped and not put.told and put.asker() is not None:
                continue
            try:
                self._untold.remove(put)
            except ValueError:
                # Another thread was faster.
                continue
            if put.told:
                continue
            if error is None:
                error = SourceRewrittenError(f"{OF_ANOTHER if only_dropped else ''}{put.words}")
            else:
                error.add_note(f"besides: {put.words}")
        if error is not None:
            raise error


@final
class _WatchedSource:
    """One array that is read later, and what was in it."""

    def __init__(self, array: Array, index: int) -> None:
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        self.index = index
        self.nbytes = array.nbytes
        # Not the array itself: often it is a view that only we hold. Not the object below, either: its memory may end before the
        # object does, but not before an array over it.
        self._owner = weakref.ref(owner)
        self._interface = {
            "data": (array.ctypes.data, True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "version": 3,
        }
        self._foreign = is_foreign(array)
        self._before = _sums(array, self._foreign)

    def rewritten(self) -> tuple[int, int] | None:
        """Return the first and the last byte of the first range that differs; None: none does, or nobody can have written."""
        owner = self._owner()
        if owner is None:
            return None
        now = _sums(np.asarray(SimpleNamespace(__array_interface__=self._interface)), self._foreign)
        if self._before is None or now is None:
            # Of a file that was cut off: the put has failed, or had read it by then.
            return None
        differ = np.flatnonzero(self._before != now)
        if not len(differ):
            return None
        last = first = int(differ[0])
        while last + 1 - first < len(differ) and differ[last + 1 - first] == last + 1:
            last += 1
        return first * CHECKSUM_PIECE_NBYTES, min((last + 1) * CHECKSUM_PIECE_NBYTES, self.nbytes) - 1


def _sums(array: Array, foreign: bool) -> np.ndarray[Any, np.dtype[np.uint32]] | None:
    """Return the sum of each piece, as they lie in memory. None: that is a file's, which is shorter by now.

    `foreign`: whether it may be.
    """
    # An array that is not contiguous is copied for this, as a whole.
    if foreign and not array.flags.c_contiguous:
        whole = np.empty(array.nbytes, np.uint8)
        lies = array.transpose(sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis])))
        if not copy_foreign(lies, whole.ctypes.data):
            return None
        array, foreign = whole, False
    flat: Any = np.ravel(array, order="K").view(np.uint8)
    if not foreign:
        return np.array(_summed(flat), np.uint32)
    sums: list[int] = []
    some = np.empty(min(len(flat), READ_NBYTES), np.uint8)
    for start in range(0, len(flat), READ_NBYTES):
        part = flat[start : start + READ_NBYTES]
        if not copy_foreign(part, some.ctypes.data):
            return None
        sums += _summed(some[: len(part)])
    return np.array(sums, np.uint32)


def _summed(flat: Any) -> list[int]:
    data = memoryview(flat)
    return [zlib.crc32(data[start : start + CHECKSUM_PIECE_NBYTES]) for start in range(0, len(data), CHECKSUM_PIECE_NBYTES)]


@final
class WatchedPut:
    """One put whose sources are read after it has returned."""

    asker: Callable[[], Check | None]
    """Returns the check that the transfer asks; None: nobody holds the transfer any more."""
    _event: Any

    def __init__(self, sources: list[_WatchedSource], spec: Spec, where: str, borrow: bool, untold: deque[WatchedPut]) -> None:
        self.untold = untold
        self.told = False
        self._number = next(_numbers)
        self._sources = sources
        self._verdicts: list[str] = []
        """The first one counts: its finder may have told a caller, who may have written to the sources since. Single steps, no
        lock."""
        self._spec = spec
        self._where = where
        self._borrow = borrow

    def watch(self, transfer: T) -> T:
        """Have the sources verified when the transfer, which was started by this put, is done."""
        watched: Any = transfer
        self._event = watched._event
        watched._check = check = Check(self)
        self.asker = weakref.ref(check)
        _unverified[self._number] = self
        return transfer

    @property
    def words(self) -> str:
        """What was found, if anything."""
        return self._verdicts[0] if self._verdicts else ""

    def reached(self) -> bool:
        """Tell whether the copies are done. Never blocks. Forgets a put that has failed: whoever asks the transfer is told."""
        try:
            done: bool = self._event.done()
            return done
        except Exception:
            self._decide("")
            return False

    def verify(self) -> None:
        """Look at the sources, once. The copies are done."""
        if not self._verdicts:
            self._decide(self._compared(self._sources))

    def end(self) -> None:
        """Wait until the copies are done, and verify."""
        with suppress(Exception):
            self._event.synchronize()
        if self.reached():
            self.verify()

    def error(self) -> SourceRewrittenError:
        """Return what is to be raised, a new one each time."""
        return SourceRewrittenError(self.words)

    def _decide(self, words: str) -> None:
        self._verdicts.append(words)
        if words and self._verdicts[0] is words:
            self.untold.append(self)
        self._sources = []
        _unverified.pop(self._number, None)

    def _compared(self, sources: list[_WatchedSource]) -> str:
        for source in sources:
            differs = source.rewritten()
            if differs is None:
                continue
            first, last = differs
            remedy = "leave out borrow=True, or rewrites=False of prefetch" if self._borrow else "fill the slots of a Ring in turn"
            return (
                f"the source of a put was written to before its transfer was done: {path(self._spec, source.index)}, "
                f"bytes {first} to {last} of {source.nbytes}. The put was called at {self._where}. "
                "What has arrived may be the old values, the new, or a mixture. "
                f"Write to it only after done() or synchronize(), or {remedy}"
            )
        return ""


@final
class Check:
    """What a transfer asks when it is done: it verifies the sources of its own put, and those of every other put that is done.

    Raises `SourceRewrittenError`, each time, where a source of its own was written to too early. `put`: None for a get, which has
    no source.
    """

    def __init__(self, put: WatchedPut | None, *, raises: bool = True) -> None:
        self._put = put
        self._raises = raises

    def __call__(self) -> None:
        verify_done()
        put = self._put
        if put is None:
            return
        put.verify()
        if self._raises and put.words:
            put.told = True
            raise put.error()

    @property
    def quiet(self) -> Check:
        """The same, for whoever only waits: verifies and raises nothing."""
        return Check(self._put, raises=False)


_numbers = itertools.count()
_unverified: dict[int, WatchedPut] = {}
"""By number; changed in single steps."""
# In a child nothing of the parent's is ever done.
os.register_at_fork(after_in_child=_unverified.clear)
