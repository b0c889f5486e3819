"""Where the pinned pool gets its memory from: the backend, or pages of our own.

Our own pages are mapped, touched on the device's NUMA node, and then page-locked in place by the backend. This happens at once, or
later and on another thread if nobody is to wait for it.

A page-lock of pages that are there costs a tenth of one that has to fetch them, and several threads fetch them faster than a driver
does. One call of the driver locks all of an array, since no copy may span two locks. Invariant: pages are unmapped only when they
are unlocked, since a lock on pages that are gone cannot be undone.

The mapping is anonymous and shared, as a driver's own pinned memory is. Private pages are copied at the first write after a fork:
the parent would write to another page than the one that is locked, or, where the kernel prevents that, every child would get a copy
of all pinned memory. Pages hidden from children would end a child that looks at an array it inherited. Shared pages stay where they
are, for everybody. To the kernel such a mapping is a file, whose pages come one at a time. So there are several side by side, and
threads fetch their pages twice as fast.

From Linux 6.1 on these pages can be huge, if somebody asks for each of them: the engine does, where memory is touched or filled.
They must begin at the border of a huge page in memory and in the mapping. On an H200 machine ten threads fetched 4 GiB of them at
39 GB/s, and of small ones at 14; the driver locked them in 0.10 s, not 0.14 to 0.23; they went in 0.02 s, not 0.4 to 0.7.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, NamedTuple, final

from xferlib.engine.native import library
from xferlib.errors import AllocationError
from xferlib.memory.limits import available_memory
from xferlib.memory.numa import node_near
from xferlib.protocol import HostStager
from xferlib.words import in_words

__all__ = ["Allocators", "HostPages", "allocators"]

HUGE = 2 << 20
ROUNDED_FROM_NBYTES = 8 << 20
"""From here on a quarter of a huge page that is left over is a sixteenth at most. It is not locked."""
LEAST_MAPPING_NBYTES, MOST_MAPPING_NBYTES = 4 << 20, 8 << 20
"""Bytes of one mapping of several side by side, at least and at most. Each costs a system call. Twelve threads of an H100 machine
that wrote to 4 GiB of new memory, 2 MiB at a time, wrote 5.3 GB/s to mappings of 64 MiB, 8.8 to such of 14,
15.6 to such of 8 and 16.3 to such of 4."""
MOST_MAPPINGS = 4096
"""Up to so many are as small as that. Those that follow are larger, the more memory of ours the process has: the kernel allows it
65,530 mappings in all (`vm.max_map_count`), and everything else needs some, too. 2 TiB of ours take 22,000."""
MOST_THREADS = 8
"""More of them fetch pages no faster."""
AVAILABLE_SECONDS = 0.1
"""How long the figure of available memory is used again before the system is asked."""
PROT_NONE, MAP_FIXED, MAP_NORESERVE = 0, 0x10, 0x4000
FAILED = ctypes.c_void_p(-1).value

_system = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise = _system.mmap, _system.munmap, _system.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@final
class Allocators(NamedTuple):
    """They raise `AllocationError`, and refer to no stager: the pool must not keep one alive."""

    allocate: Callable[[int], int]
    free: Callable[[int], None]
    allocate_write_combined: Callable[[int], int] | None
    """Write-combined memory; None: the backend has none."""
    unlocked: HostPages | None
    """Where memory comes from that is locked later; None: all of it is there at once."""


def allocators(backend: HostStager[Any]) -> Allocators:
    """Return where pinned memory for this backend comes from."""
    flags = backend.capabilities
    allocate_write_combined = _allocator(backend, "alloc_write_combined") if flags.write_combined else None
    # Pages of our own are faster than what a driver allocates, and on the right node; where nothing is locked nothing is gained.
    if not (flags.pinned and flags.register):
        return Allocators(_allocator(backend, "alloc_pinned"), backend.free_pinned, allocate_write_combined, None)
    pages = HostPages(backend)
    return Allocators(pages.allocate, pages.free, allocate_write_combined, pages)


def _allocator(backend: HostStager[Any], method: Literal["alloc_pinned", "alloc_write_combined"]) -> Callable[[int], int]:
    def allocate(nbytes: int) -> int:
        try:
            address: int = getattr(backend, method)(nbytes)
            return address
        except backend.failures as error:
            raise _refused(nbytes, error) from error

    return allocate


@final
class HostPages:
    """Pinned memory of one backend that can lock memory in place. Any thread. It refers to no stager."""

    def __init__(self, backend: HostStager[Any]) -> None:
        self._backend = backend
        self._failures: tuple[type[Exception], ...] = (OSError, *backend.failures)
        self._mapped: dict[int, int] = {}
        self._locked: dict[int, None] = {}

    def allocate(self, nbytes: int) -> int:
        """Return the address of new pinned memory, a multiple of the page size. Raises `AllocationError`."""
        (address,) = self.map((nbytes,))
        try:
            self.lock(address, MOST_THREADS)
        except BaseException:
            self._unmap(address)
            raise
        return address

    def map(self, sizes: Sequence[int]) -> list[int]:
        """Return the addresses of new memory, likewise, which is pageable until `lock`: all or none. Raises `AllocationError`."""
        total = sum(map(_room, sizes))
        # Some pages of memory that is not locked yet may not be there yet, and still look available.
        taken = sum([_room(nbytes) for address, nbytes in self._mapped.copy().items() if address not in self._locked])
        _check_available(total, taken)
        try:
            addresses = _map(sizes)
        except OSError as error:
            raise _refused(total, error) from error
        _of_process.update(zip(addresses, sizes, strict=True))
        self._mapped.update(zip(addresses, sizes, strict=True))
        return addresses

    def lock(self, address: int, threads: int = 1) -> None:
        """Lock what `map` returned; its contents stay. Raises `AllocationError`: then it is as it was.

        `threads`: how many fetch the pages.
        """
        nbytes = self._mapped[address]
        try:
            near = node_near(self._backend.pci_bus_id)
            _touch(address, nbytes, near and near.cpus, threads)
            self._backend.pin(address, nbytes)
        except self._failures as error:
            raise _refused(nbytes, error) from error
        self._locked[address] = None

    def free(self, address: int) -> None:
        """Unlock and unmap what `allocate` or `map` returned, or free what the backend allocated. May wait for the GPU."""
        if address not in self._mapped:
            self._backend.free_pinned(address)
            return
        if address in self._locked:
            self._backend.unpin(address)
            del self._locked[address]
        self._unmap(address)

    def _unmap(self, address: int) -> None:
        nbytes = self._mapped.pop(address)
        _of_process.pop(address, None)
        # If this raised, it would look as if the memory was still locked and could be given out again.
        with suppress(OSError):
            _unmap(address, _room(nbytes))


def _check_available(nbytes: int, taken: int) -> None:
    """Raise `AllocationError` rather than let the kernel end this process, or another, to make room.

    `taken`: bytes that still look available.
    """
    global _available
    seen, left = _available
    # To ask reads several files of the kernel's, which took 0.7 ms: as much as to lock some megabytes that are there.
    if time.monotonic() - seen > AVAILABLE_SECONDS or nbytes + taken > left // 4:
        seen, left = time.monotonic(), available_memory()
    room = max(0, left - taken)
    if nbytes > room:
        raise AllocationError(
            f"{in_words(nbytes)} of pinned memory could not be had: {in_words(room)} are available on this machine, or in "
            "its control group. Lower pinned_limit or the batch"
        )
    _available = seen, left - nbytes


_of_process: dict[int, int] = {}
"""The bytes that are mapped for all pools, by address."""
_available = (0.0, 0)
"""When the system was asked how much is available, and how much is left of that since. It never grows: what is given back does not
count."""


def _refused(nbytes: int, error: Exception) -> AllocationError:
    return AllocationError(f"{in_words(nbytes)} of pinned memory could not be had: {error}. Lower pinned_limit or the batch")


def _room(nbytes: int) -> int:
    """Return how many bytes are mapped for so many: whole pages, of which the last may be a huge one that is nearly needed."""
    lacking = -nbytes % HUGE
    return nbytes + (lacking if nbytes >= ROUNDED_FROM_NBYTES and lacking <= HUGE // 4 else -nbytes % mmap.PAGESIZE)


def _map(sizes: Sequence[int]) -> list[int]:
    """Map pages of each size, all or none, beginning at the borders of huge pages, and ask for huge ones.

    For them both the address and the offset in the mapping must be multiples of `HUGE`. So these are mappings of their own inside
    one reserved range: to reserve one for each of hundreds of sizes would take longer than all else of a get.
    """
    rooms = [-(-nbytes // HUGE) * HUGE for nbytes in sizes]
    total = sum(rooms)
    reserved = _mapped(None, total + HUGE, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    first = -(-reserved // HUGE) * HUGE
    addresses = [first + offset for offset in itertools.accumulate(rooms[:-1], initial=0)]
    ours = list(zip(addresses, map(_room, sizes), strict=True))
    ends = [reserved, *(address + nbytes for address, nbytes in ours)]
    begins = [*addresses, reserved + total + HUGE]
    holes = [(end, begin - end) for end, begin in zip(ends, begins, strict=True) if begin > end]
    try:
        _fill(ours)
        # Refused where the kernel has no huge pages; then there are none. What is smaller must not get one. What is left over is
        # asked for, too: the kernel splits a mapping that is asked for in part, and puts no huge page over both.
        _ask_for_huge_pages([(first, total)] if min(sizes) >= HUGE else ours)
        _cut_off(holes)
    except BaseException:
        # Not as one: what is cut off already may be another thread's by now.
        for start, size in [*ours, *holes]:
            with suppress(OSError):
                _unmap(start, size)
        raise
    return addresses


# Functions of their own: an interrupt that comes in a loop must come to what is around it.


def _fill(ranges: Sequence[tuple[int, int]]) -> None:
    """Map pages over reserved ranges."""
    total = sum([nbytes for _, nbytes in ranges])
    few = -(-(total + sum(list(_of_process.values()))) // (MOST_MAPPINGS * HUGE)) * HUGE
    step = max(few, _step(total))
    for address, nbytes in ranges:
        for start, size in _ranges(address, nbytes, step):
            _mapped(start, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_FIXED)


def _ask_for_huge_pages(ranges: Iterable[tuple[int, int]]) -> None:
    for address, nbytes in ranges:
        if nbytes >= HUGE:
            _madvise(address, nbytes, mmap.MADV_HUGEPAGE)


def _cut_off(holes: list[tuple[int, int]]) -> None:
    """Unmap ranges, and take them out of the list. If that is refused, the list holds what is left."""
    while holes:
        # Out of it first: after an interrupt addresses may be lost, but nothing that another thread has mapped there meanwhile.
        hole = holes.pop()
        try:
            _unmap(*hole)
        except OSError:
            holes.append(hole)
            raise


def _mapped(at: int | None, nbytes: int, protection: int, flags: int) -> int:
    address: int | None = _mmap(at, nbytes, protection, flags, -1, 0)
    if address is None or address == FAILED:
        raise _error("the system did not map the memory")
    return address


def _unmap(address: int, nbytes: int) -> None:
    if _munmap(address, nbytes):
        raise _error("the system did not unmap the memory")


def _touch(address: int, nbytes: int, cpus: frozenset[int] | None, threads: int) -> None:
    """Fetch every page, on threads that run on these CPUs (None: anywhere): memory is placed where it is first touched."""
    ranges = list(_ranges(address, nbytes, _step(nbytes)))
    threads = min(threads, len(cpus or os.sched_getaffinity(0)), len(ranges))
    if threads < 2 and cpus is None:
        _fetch(address, nbytes)
        return
    try:
        with ThreadPoolExecutor(threads, "xferlib-touch", _run_on, (cpus,)) as pool:
            for _ in pool.map(_fetch, *zip(*ranges, strict=True)):
                pass
    except RuntimeError:
        # There can be no thread, for example because the interpreter ends.
        _fetch(address, nbytes)


def _run_on(cpus: frozenset[int] | None) -> None:
    if cpus is not None:
        # On Linux the calling thread alone.
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)


def _step(nbytes: int) -> int:
    """Return the bytes of one range, some whole huge pages, such that there are as many ranges as there may be threads."""
    return min(MOST_MAPPING_NBYTES, max(LEAST_MAPPING_NBYTES, -(-nbytes // (MOST_THREADS * HUGE)) * HUGE))


def _ranges(address: int, nbytes: int, step: int) -> Iterator[tuple[int, int]]:
    for offset in range(0, nbytes, step):
        yield address + offset, min(step, nbytes - offset)


def _fetch(address: int, nbytes: int) -> None:
    """Let the kernel put pages under the range, without the GIL."""
    code = library().xe_touch(address, nbytes)
    if code:
        raise _error("the system has no pages for the memory", code)


def _error(what: str, code: int | None = None) -> OSError:
    code = ctypes.get_errno() if code is None else code
    return OSError(code, f"{what} ({os.strerror(code)})")
