"""States for the cases that save and load: their arrays, where their files go, and what threads do that only read or write.

A state is a dict of device arrays of bytes by name. Its bytes follow from the names, so that nothing is kept to compare with.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np

from benchmarks import memory
from benchmarks.ways import Bytes, Corrupted, Device, Direction

__all__ = [
    "MIB",
    "Anonymous",
    "drop_cache",
    "folder_with",
    "leaves_of",
    "read_bare",
    "source",
    "split",
    "uploaded",
    "verify",
    "write_bare",
]

MIB = 1 << 20
PIECE = 16 << 20
THREADS = min(16, max(2, len(os.sched_getaffinity(0))))
READERS = 8
PATTERN_NBYTES = 1_000_003
"""Prime, so that no array's bytes repeat in step with pages or pieces."""
SHARED_MEMORY = Path("/dev/shm")
FOLDER = "XFERLIB_BENCHMARK_FOLDER"
LOOK_SECONDS = 0.02
LARGE = 4 << 30
FEW, MANY = 300, 2000

_pattern: Bytes = np.frombuffer(np.random.default_rng(20_240_229).bytes(2 * PATTERN_NBYTES), np.uint8)


def leaves_of(nbytes: int) -> int:
    """Return how many arrays a state of a size has: a large one has more."""
    return FEW if nbytes <= LARGE else MANY


def split(nbytes: int, count: int) -> int:
    """Return the bytes of each array of a state: whole steps of 256, one at least, so a tiny state is larger than asked for."""
    return max(1, nbytes // count // 256) * 256


def source(index: int, nbytes: int) -> Bytes:
    """Return the bytes of an array."""
    start = index * 977 % PATTERN_NBYTES
    return np.resize(_pattern[start : start + PATTERN_NBYTES], nbytes)


def uploaded(device: Device, count: int, nbytes: int) -> dict[str, Any]:
    """Return a state on the device, of arrays of `nbytes` bytes each."""
    return {str(index): device.upload(source(index, nbytes)) for index in range(count)}


def verify(name: str, direction: Direction, found: Iterable[tuple[str, Any]], count: int, nbytes: int) -> None:
    """Compare every byte of host arrays by name. Raises `Corrupted`."""
    left = {str(index) for index in range(count)}
    for key, array in found:
        raw = np.asarray(array)
        if key not in left or not memory.equal(raw.reshape(-1).view(np.uint8), source(int(key), nbytes)):
            break
        left.remove(key)
        del raw, array
    else:
        if not left:
            return
    raise Corrupted(f"{name!r} said it was done, but the {direction} target does not hold the source's bytes")


def folder_with(nbytes: int, *, on_disk: bool = False) -> str | None:
    """Return where so many bytes can be written; None: the system's folder for temporary files.

    Memory is preferred, so that no disk is measured, unless `on_disk`. An environment variable names another folder.
    """
    chosen = os.environ.get(FOLDER)
    if chosen is not None:
        return chosen
    if on_disk or not SHARED_MEMORY.is_dir():
        return None
    found = os.statvfs(SHARED_MEMORY)
    return str(SHARED_MEMORY) if found.f_bavail * found.f_frsize > nbytes else None


def write_bare(path: Path, nbytes: int) -> float:
    """Write so many bytes by as many threads as a save has at most, from memory that is there, and return the seconds."""
    piece = memoryview(bytearray(PIECE))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    seconds = _together(THREADS, nbytes, lambda: lambda start, size: os.pwrite(descriptor, piece[:size], start))
    begin = time.perf_counter()
    os.fsync(descriptor)
    seconds += time.perf_counter() - begin
    os.close(descriptor)
    path.unlink()
    return seconds


def read_bare(path: Path, *, direct: bool = False) -> float:
    """Read a file by eight threads, each into memory that is there, and return the seconds. `direct`: past the system's cache.

    Raises `OSError` where the file system reads nothing past it.
    """
    nbytes = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))

    def reading() -> Callable[[int, int], object]:
        # Pages: what is read past the cache must be aligned, and so must the end of the last piece.
        room = mmap.mmap(-1, PIECE)
        room.write(bytes(PIECE))
        return lambda start, size: os.preadv(descriptor, [memoryview(room)[: -(-size // 4096) * 4096]], start)

    try:
        return _together(READERS, nbytes, reading)
    finally:
        os.close(descriptor)


def drop_cache(path: Path) -> None:
    """Have the system's cache forget a file, or the files of a folder."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _together(threads: int, nbytes: int, prepare: Callable[[], Callable[[int, int], object]]) -> float:
    """Have threads work on pieces, and return the seconds. Each calls what `prepare` returned for it, with start and size."""
    starts = iter(range(0, nbytes, PIECE))
    lock = threading.Lock()
    failed: list[Exception] = []

    def run(work: Callable[[int, int], object]) -> None:
        try:
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                work(start, min(PIECE, nbytes - start))
        except Exception as error:
            failed.append(error)

    running = [threading.Thread(target=run, args=(prepare(),)) for _ in range(threads)]
    begin = time.perf_counter()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    seconds = time.perf_counter() - begin
    if failed:
        raise failed[0]
    return seconds


@final
class Anonymous:
    """The most anonymous memory that this process had while something ran, beside what it had before."""

    def __init__(self) -> None:
        self.peak_nbytes = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look again and again, on a thread, until the `with` ends."""
        over = threading.Event()
        before = _anonymous_nbytes()

        def look() -> None:
            while not over.wait(LOOK_SECONDS):
                self.peak_nbytes = max(self.peak_nbytes, _anonymous_nbytes() - before)

        thread = threading.Thread(target=look, name="benchmark-memory")
        try:
            # Inside: whatever interrupts this, the thread ends.
            thread.start()
            yield
        finally:
            over.set()
            if thread.ident is not None:
                thread.join()
            self.peak_nbytes = max(self.peak_nbytes, _anonymous_nbytes() - before)


def _anonymous_nbytes() -> int:
    with open("/proc/self/status") as status:
        return next((int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon")), 0)
