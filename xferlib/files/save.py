"""What is on the device to files, while the program goes on: the call and its arguments, and what it returns."""

from __future__ import annotations

import errno
import os
import reprlib
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from xferlib.byte_reader import ByteReader
from xferlib.checks import positive_nbytes, timeout_seconds, uncopied, whole_number
from xferlib.errors import XferError
from xferlib.files.formats import SUFFIXES
from xferlib.files.outcome import Outcome, refuse_late
from xferlib.files.plan import planned
from xferlib.files.series import is_numbered
from xferlib.files.sharded import ShardedArrays, ShardedReader
from xferlib.files.writing import Writing
from xferlib.forks import unavailable_in_child
from xferlib.latch import Latch
from xferlib.pipeline.host_tree import HostTree
from xferlib.stager import Stager, check_stager
from xferlib.tree import trees_of
from xferlib.uninterrupted import finalizer_timeout
from xferlib.words import in_words

__all__ = ["Save", "save"]

MEMORY = 256 << 20
HOST = "host"
"""The backend whose device arrays are NumPy's."""
OF_NUMPY = f'Arrays of NumPy, such as those of HostTree.tree, are saved by a stager of the host: xferlib.stager("{HOST}")'


def save(
    path: str | os.PathLike[str],
    tree: Any,
    stager: Stager | ShardedArrays,
    *,
    stream: object | None = None,
    metadata: Mapping[str, str] | None = None,
    memory: int = MEMORY,
    rate_limit: float | None = None,
    keep: int | None = None,
    snapshot: bool = False,
) -> Save:
    """Start writing a tree of device arrays to a file and return at once. `load` reads it, and so does whoever reads the format.

    The file has what the arrays hold at this point of `stream` (None: the calling thread's current one). It is written under
    another name and renamed when the disk has all of it: under `path` is the earlier file, or the whole new one, whatever happens.
    What a symbolic link leads to is replaced, and `keep` looks beside that.
    Files whose names differ in their last number alone, if at all, come into their folder in the order of the calls.

    The arrays are read until `Save.wait_read` returns: until then do not overwrite them by work of your own, nor donate or delete
    them. `put(into=)` waits by itself. Dropping them is fine. The program does not end before its saves have. Where no thread can
    be had, as in handlers of `atexit` of Python 3.12, the call itself writes the file.

    - `path` ends in `.safetensors` for a tree of any kind, with names like "params.dense.kernel": dots join the keys, and an array
      alone is "array". Text and numbers that ride along are in the file's metadata, and `load(like=)` brings them back. It ends in
      `.npz` for a tree of arrays, and in `.npy` for one array, where NumPy is to read them.
    - `metadata`: text to store beside the arrays, in a `.safetensors` file.
    - `memory`: bytes of pinned memory that the save may take from the stager's pool where that has room, half of its limit at most.
    - `rate_limit`: bytes per second that are read from the device at most.
    - `keep`: of the files in the folder whose names differ from this one in their last number alone, such as
      "step_100.safetensors", so many stay, the newest. The others are removed when this one is there; a `RuntimeWarning` says which
      could not be.
    - `snapshot`: the framework copies the arrays on the device first, and the copies are read: `Save.wait_read` returns at once.
      What the caller enqueues on `stream` from then on may overwrite the arrays, or take their memory over by donation. The copies
      take as much device memory as the arrays until they are read. Where there is no room for all of them, the arrays themselves
      are read, as without it, and `Save.held_nbytes` says how much that holds up.

    Raises `ValueError` and `TypeError` for arguments, and as `Stager.get` does; `FileNotFoundError` where the folder is not there;
    `ClosedError` in handlers of `atexit` that were registered before xferlib was imported. What goes wrong later, a full disk for
    example, is raised by `Save.result`.
    """
    try:
        handle, writing = _prepared(path, tree, stager, stream, metadata, memory, rate_limit, keep, snapshot=snapshot)
    except BaseException:
        if not isinstance(stager, Stager) and hasattr(stager, "shards"):
            stager.release()
        raise
    # Interrupted from here on, the caller has no handle, and the file is written all the same or not begun.
    writing.start(weakref.ref(handle))
    return handle


def _prepared(
    path: str | os.PathLike[str],
    tree: Any,
    stager: Stager | ShardedArrays,
    stream: object | None,
    metadata: Mapping[str, str] | None,
    memory: int,
    rate_limit: float | None,
    keep: int | None,
    *,
    snapshot: bool,
) -> tuple[Save, Writing]:
    """Check all that can be refused, and find the arrays. Raises as `save`."""
    refuse_late()
    if not hasattr(stager, "shards"):
        check_stager(stager, tree if isinstance(tree, Stager) else path, comes="third")
    try:
        # The working directory may be another one when somebody asks.
        file = Path(path).absolute()
    except TypeError:
        order = "save(path, tree, stager)" if isinstance(stager, Stager) else "save(path, tree)"
        raise TypeError(f"path={reprlib.repr(path)}: expected a path. The order is {order}") from None
    if file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{str(file)!r}: expected a name that ends in .safetensors, .npz or .npy, which says how to write it")
    _check_folder(file.parent)
    stagers = [stager] if isinstance(stager, Stager) else stager.stagers
    memory = min(positive_nbytes(memory, "memory"), *[one.stats().pinned_limit_nbytes // 2 for one in stagers])
    if rate_limit is not None and not rate_limit > 0:
        raise ValueError(f"rate_limit={rate_limit!r}: expected bytes per second, greater than 0")
    keep = None if keep is None else whole_number(keep, "keep", least=1)
    if keep is not None and not is_numbered(file):
        advice = f"Name it like 'step_100{file.suffix}'"
        raise ValueError(f"keep: {file.name!r} has no number that tells it from earlier files. {advice}")
    reader = _reader(tree, stager, stream, snapshot=snapshot)
    try:
        plan = planned(file, reader.spec, reader.described, reader.sizes, metadata)
        outcome = Outcome(file)
        writing = Writing(outcome, plan, reader, memory, rate_limit, keep)
        return Save(outcome, plan.nbytes, 0 if reader.snapshot else plan.nbytes), writing
    except BaseException:
        reader.close()
        raise


def _reader(tree: Any, stager: Stager | ShardedArrays, stream: object | None, *, snapshot: bool) -> ByteReader | ShardedReader:
    try:
        if isinstance(stager, Stager):
            return stager.reader(tree, stream=stream, snapshot=snapshot)
        return ShardedReader(stager, tree, snapshot=snapshot)
    except TypeError as error:
        leaves = trees_of(stager.backend).arrays(tree)[0]
        if any(isinstance(leaf, HostTree) for leaf in leaves):
            raise TypeError(f"a HostTree is saved by what it holds: save(path, home.tree, host). {OF_NUMPY}") from None
        if stager.backend.name != HOST and any(isinstance(leaf, np.ndarray) for leaf in leaves):
            error.add_note(OF_NUMPY)
        raise


def _check_folder(folder: Path) -> None:
    """Raise `FileNotFoundError` now for what would fail later: a typing error, mostly."""
    if not os.path.lexists(folder):
        advice = "the file's folder is not there. Make it first, or choose another path"
        raise FileNotFoundError(errno.ENOENT, advice, str(folder))


@final
class Save:
    """A file that is being written. `save` returns it; drop it at any time, the file is written all the same.

    Any thread. If the save failed and nobody was told of it, a `RuntimeWarning` says so when the last reference goes.

    Attributes:
        path: Where the file is going to be, absolute.
        nbytes: Bytes of all arrays.
        held_nbytes: Bytes that are read from the arrays themselves, which must stay as they are until `wait_read` has returned: 0
            for a snapshot, else all of them.
    """

    __reduce_ex__ = uncopied("Another process cannot wait for this one's threads")

    def __init__(self, outcome: Outcome, nbytes: int, held_nbytes: int) -> None:
        self._outcome = outcome
        self.path = outcome.file
        self.nbytes = nbytes
        self.held_nbytes = held_nbytes

    @property
    def written(self) -> int:
        """How many of the arrays' bytes are written."""
        return self._outcome.written

    def done(self) -> bool:
        """Tell whether the file is there. Raises what `result` raises if the save has failed. Never blocks."""
        self._refuse_children()
        if not self._outcome.ended.is_open():
            return False
        self._raise_failure()
        return True

    def result(self, timeout: float | None = None) -> Path:
        """Block until the file is there and return its path.

        Raises `TimeoutError` after `timeout` seconds, and why the save failed: `OSError` for what the system refuses, `XferError`
        for the device and after `cancel`. The earlier file is there then. Where warnings are errors it also raises the
        `RuntimeWarning` of `keep`: the file is there then.
        """
        self._refuse_children()
        if not self._come(self._outcome.ended, timeout):
            raise TimeoutError(f"the save to {str(self.path)!r} has not ended after {timeout} seconds")
        self._raise_failure()
        return self.path

    def wait_read(self, timeout: float | None = None) -> None:
        """Block until the arrays have been read, or will not be any more: they may be overwritten and donated then.

        Raises `TimeoutError` after `timeout` seconds. Says nothing of a failure.
        """
        self._refuse_children()
        if not self._come(self._outcome.was_read, timeout):
            raise TimeoutError(f"the arrays have not been read after {timeout} seconds")

    def cancel(self) -> bool:
        """Write no more, and tell whether that is in time: then `result` raises `XferError`, and the earlier file is there.

        False: the file is there or about to be, or the save has failed. Returns at once, and the save ends soon: a copy that has
        begun, and a wait for pinned memory or for what computes the arrays, come to their end first.
        """
        self._refuse_children()
        return self._outcome.cancel()

    def _come(self, latch: Latch, timeout: float | None) -> bool:
        """Wait for the threads that write. Raises `XferError` where a finalizer has waited long, perhaps on such a thread."""
        if timeout is not None:
            return latch.wait(timeout_seconds(timeout))
        if latch.wait(finalizer_timeout()):
            return True
        raise XferError(
            f"a finalizer that the garbage collector runs has waited long for the save to {str(self.path)!r}, whose threads may "
            "wait for what the collector has stopped here. Wait in ordinary code, or pass timeout="
        )

    def _raise_failure(self) -> None:
        error = self._outcome.error or self._outcome.warned
        if error is not None:
            self._outcome.told = True
            # Without the frames of whoever was told before.
            raise error.with_traceback(None)

    def _refuse_children(self) -> None:
        if os.getpid() != self._outcome.process:
            raise unavailable_in_child(
                f"the save to {str(self.path)!r} cannot be waited for", "it was started", "Wait for it in the parent"
            )

    def __repr__(self) -> str:
        outcome = self._outcome
        ended = "done" if outcome.ended.is_open() else "under way"
        state = "cancelled" if outcome.is_cancelled else "failed" if outcome.error is not None else ended
        return f"<Save to {str(self.path)!r}: {in_words(outcome.written)} of {in_words(self.nbytes)} written, {state}>"

    def __del__(self) -> None:
        # It says so, and no more. Of a constructor that was cut off nobody has had the handle.
        outcome = self.__dict__.get("_outcome")
        if outcome is not None:
            outcome.say_failed()
