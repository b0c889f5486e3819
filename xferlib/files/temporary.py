"""A file that is whole or not there: written under another name, and renamed when its bytes are on the disk.

What a killed process leaves behind is told from what another process writes by a lock, which goes with its process. It is removed
when the next file of its folder is begun. A forked child has the descriptors of its parent, and would keep the locks: it lets go of
them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import itertools
import mmap
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, final

import numpy as np

__all__ = ["BORDER", "TemporaryFile"]

SUFFIX = ".xferlib-saving"
DESCRIPTORS = "/proc/self/fd"
TMPFS = 0x01021994
"""The first word of the system's `struct statfs`: https://man7.org/linux/man-pages/man2/statfs.2.html"""
STATFS_WORDS = 32
"""More than the struct has."""
BORDER = max(4096, mmap.PAGESIZE)
"""Bytes. Where no page of the cache goes over, and blocks of disks neither, direct writes and others do not meet."""
INDIRECT = (errno.EINVAL, errno.EFAULT, errno.ENOTSUP)
"""What systems say where a file, or memory, is not for direct writes."""
STEP_NANOSECONDS = 1_000_000
"""Between two files: file systems have times to the microsecond at least."""
OWNERS = 0o600
"""What a file's owner may do with it until it has its name: whoever removes what a killed process left opens it for the lock."""


@final
class TemporaryFile:
    """An empty file beside `target`, which is to take its place. One thread; `write` also from several at once.

    Keep it, and begin it then: whatever cuts a method off, `close` leaves nothing.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._number = next(_numbers)
        self._path: Path | None = None
        self._mode: int | None = None
        """Of the earlier file."""
        self._file: io.FileIO | None = None
        self._mapped: mmap.mmap | None = None
        self._direct: io.FileIO | None = None
        self._goes_direct = False

    def begin(self) -> None:
        """Make the file. Raises `OSError`."""
        target = self._target
        # First: whoever forks from here on looks for descriptors.
        _begun[self._number] = None
        _remove_left(target.parent)
        mode = 0o666
        with suppress(OSError):
            self._mode = target.stat().st_mode & 0o777
            # Whoever could not read the earlier file cannot read this one at any time.
            mode = self._mode | OWNERS
        while True:
            # Not the target's name and more: that may be as long as a name can be.
            self._path = target.with_name(f".{secrets.token_hex(8)}{SUFFIX}")
            try:
                # A call in C, which an interrupt does not cut: either nobody has the descriptor, or the object that closes it.
                self._file = io.FileIO(str(self._path), "x+", opener=partial(os.open, mode=mode))
            except OSError as error:
                # The caller knows no other name.
                error.filename = str(target)
                raise
            if _is_locked(self._descriptor) and _is_at(self._descriptor, self._path):
                break
            # Another process takes it for one that was left, since it was not locked yet.
            self._file.close()

    @property
    def _descriptor(self) -> int:
        assert self._file is not None, "it was begun"
        return self._file.fileno()

    def check_room(self, nbytes: int) -> None:
        """Raise `OSError` where so many bytes will not fit, before any is written."""
        found = os.fstatvfs(self._descriptor)
        free = found.f_bavail * found.f_frsize
        # A file system in user space that says nothing of itself has no blocks at all.
        if found.f_blocks and nbytes > free:
            raise OSError(errno.ENOSPC, f"{nbytes} bytes are to be written, and {free} are free", str(self._target))

    def map(self, nbytes: int) -> None:
        """Have `write` go through a mapping of so many bytes, if the file lies in memory. No more may be written then.

        Writes to one file are made one after the other there, and each finds the pages that it needs. Into a mapping many threads
        copy side by side: sixteen write two to three times as much as by calls, two write less.
        """
        # Otherwise it is written by calls.
        with suppress(OSError, ValueError):
            if _lies_in_memory(self._descriptor):
                os.ftruncate(self._descriptor, nbytes)
                mapped = mmap.mmap(self._descriptor, nbytes)
                # A child would keep the memory of a file that is removed.
                mapped.madvise(mmap.MADV_DONTFORK)
                self._mapped = mapped

    def go_direct(self, nbytes: int) -> bool:
        """Have `write` go past the system's cache, where the file system can, and tell whether it can: `nbytes` are to be written.

        A file on a disk is read again when the program is started anew, if at all. In the cache it would take the place of what the
        program reads, and the CPU's time, and it would come to the disk in the pace of the cache: on a virtual machine with two
        cores 1 GiB took 1.6 s and more that way, and 0.9 s directly.
        """
        if self._mapped is not None or _lies_in_memory(self._descriptor):
            return False
        with suppress(OSError):
            self._direct = io.FileIO(str(self._path), "r+", opener=_open_direct)
            # Else each write would make the file longer, which file systems do one after the other.
            os.ftruncate(self._descriptor, nbytes)
            self._goes_direct = True
        return self._goes_direct

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of it at an offset."""
        mapped = self._mapped
        if mapped is not None and data:
            # First: where there is no room for its pages, a mapping does not raise, it ends the process.
            os.posix_fallocate(self._descriptor, offset, data.nbytes)
            np.copyto(np.frombuffer(mapped, np.uint8, data.nbytes, offset), np.frombuffer(data, np.uint8))
            return
        if self._goes_direct and self._direct is not None:
            data, offset = self._written_directly(self._direct, data, offset)
        _write_all(self._descriptor, data, offset)

    def _written_directly(self, direct: io.FileIO, data: memoryview, offset: int) -> tuple[memoryview, int]:
        """Write all but what is left of a block at the end, and return that, and where it belongs."""
        head = -offset % BORDER
        whole = (data.nbytes - head) // BORDER * BORDER
        if whole <= 0 or (np.frombuffer(data, np.uint8).ctypes.data + head) % BORDER:
            return data, offset
        _write_all(self._descriptor, data[:head], offset)
        data, offset = data[head:], offset + head
        try:
            _write_all(direct.fileno(), data[:whole], offset)
        except OSError as error:
            if error.errno not in INDIRECT:
                raise
            # Of this one and of all that follow. Others are perhaps in the middle of such a write: the descriptor stays.
            self._goes_direct = False
            return data, offset
        return data[whole:], offset + whole

    def as_file(self) -> IO[bytes]:
        """Return the file, from its beginning, for a writer that goes from front to back. To be closed before `publish`."""
        return open(self._descriptor, "wb", closefd=False)

    def publish(self) -> None:
        """Wait until the disk has the bytes, and give the file its name: from here on it is there, whatever happens."""
        # It is as new as it is published: series of files are told apart by that.
        _stamp(self._descriptor)
        os.fsync(self._descriptor)
        if self._mode is not None:
            # Whoever could read the earlier file can read this one.
            with suppress(OSError):
                os.fchmod(self._descriptor, self._mode)
        assert self._path is not None
        self._path.replace(self._target)
        # Not every file system can, and the file is there in any case.
        with suppress(OSError):
            _with_open(self._target.parent, os.O_RDONLY | os.O_DIRECTORY, os.fsync)

    def close(self) -> None:
        """Remove the file unless it has its name. Twice is fine, and goes on where the first was cut."""
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
        finally:
            self._mapped = None
            if self._direct is not None:
                self._direct.close()
            if self._file is not None:
                self._file.close()
            _begun.pop(self._number, None)


def _open_direct(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_DIRECT)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _lies_in_memory(descriptor: int) -> bool:
    """Tell whether a file is one of tmpfs."""
    found = (ctypes.c_long * STATFS_WORDS)()
    return not ctypes.CDLL(None).fstatfs(descriptor, found) and found[0] == TMPFS


def _with_open(path: Path, flags: int, use: Callable[[int], object]) -> None:
    """Call with the descriptor of an open file, and close it."""
    held: list[int] = []
    try:
        # One call, which an interrupt does not cut.
        held.extend(map(os.open, (path,), (flags | os.O_CLOEXEC,)))
        use(held[0])
    finally:
        if held:
            os.close(held[0])


def _remove_left(folder: Path) -> None:
    """Remove what killed processes left in a folder."""
    # By names: in a folder of thousands of files, an object for each would keep other threads waiting.
    names: list[str] = []
    # Where one may write, and not look.
    with suppress(OSError):
        names = os.listdir(folder)
    for name in names:
        if not (name.startswith(".") and name.endswith(SUFFIX)):
            continue
        path = folder / name

        def remove(descriptor: int, path: Path = path) -> None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()

        # Somebody else may have removed it, or may own it.
        with suppress(OSError):
            _with_open(path, os.O_RDWR, remove)


def _let_go() -> None:
    """In a forked child: let go of the files that the parent writes, which may be open anywhere."""
    if not _begun:
        return
    _begun.clear()
    with suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for name in os.listdir(DESCRIPTORS):
            # The one of the listing is closed by now.
            with suppress(OSError):
                if os.readlink(f"{DESCRIPTORS}/{name}").removesuffix(" (deleted)").endswith(SUFFIX):
                    # Not closed: objects of the parent's threads have the number, and may yet write to it or close it.
                    os.dup2(nothing, int(name), inheritable=False)
        os.close(nothing)


_numbers = itertools.count()
_begun: dict[int, None] = {}
"""The files of this process that may be open."""
os.register_at_fork(after_in_child=_let_go)
_last = [0]
"""The newest time that a file of this process has."""


def _stamp(descriptor: int) -> None:
    """Make a file newer than all that this process has published."""
    _last[0] = now = max(time.time_ns(), _last[0] + STEP_NANOSECONDS)
    os.utime(descriptor, ns=(now, now))


def _is_locked(descriptor: int) -> bool:
    """Lock a file that is new. False: another process has been faster."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # The file system has no locks. So nobody gets one, and nobody removes the file.
        return True
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)
