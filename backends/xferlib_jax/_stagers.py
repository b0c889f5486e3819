"""One stager for each local device: opened when a loop first wants it, shared by the loops of this process, kept for later ones.

To open one takes a tenth of a second, and its memory is cold: every epoch would pay for both. So the process owns what a loop has
opened, until `close` or the exit. What files were loaded by is closed when nobody holds a `Hold` on it, since they may have taken
more memory than any loop needs. Those that the caller gave are the caller's to close.

A hold that is dropped says so by its ticket, to a thread that does nothing else. Closing waits, and no finalizer may wait.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar, final

import jax
import numpy as np

import xferlib
from xferlib.errors import XferError
from xferlib.uninterrupted import opening, start_thread, uninterrupted

__all__ = ["Device", "Hold", "at_once", "close", "given", "hold", "local_stagers"]

T = TypeVar("T")

Device = Any
"""`jax.Device`."""
Ticket: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""The cheapest object that can be watched and that the garbage collector does not track."""


def local_stagers(*, pinned_limit: int | None = None, device_limit: int | None = None) -> tuple[xferlib.Stager, ...]:
    """Open a stager on each local device, in the order of `jax.local_devices()`, on the CPU as well. The caller closes each.

    The limits apply to each stager. On GPUs, memory that one of them has pinned is pinned for all.
    Raises as `xferlib.stager`.
    """
    opened: list[xferlib.Stager] = []
    try:
        for device in jax.local_devices():
            opened.append(_open(device, pinned_limit=pinned_limit, device_limit=device_limit))  # noqa: PERF401  # Each is held before the next may fail.
    except BaseException:
        for stager in opened:
            stager.close()
        raise
    return tuple(opened)


def given(stagers: Sequence[xferlib.Stager], devices: Iterable[Device]) -> Hold:
    """Hold the caller's stagers for these devices, without closing them. Raises `TypeError` and `ValueError`."""
    by_device: dict[Device, xferlib.Stager] = {}
    try:
        several = iter(stagers)
    except TypeError:
        words = f"stagers={stagers!r}: expected several, one for each device. Pass a list of them: stagers=[stager]"
        raise TypeError(words) from None
    for stager in several:
        if not isinstance(stager, xferlib.Stager) or stager.name != "jax":
            raise TypeError(f'stagers: expected stagers of backend "jax", got {stager!r}')
        device = stager.backend.jax_device  # type: ignore[attr-defined]  # Of both backends of this package.
        if device in by_device:
            raise ValueError(f"stagers: two of them are on {device}. Give one for each device")
        by_device[device] = stager
    missing = [device for device in devices if device not in by_device]
    if missing:
        raise ValueError(f"stagers: there is none on {missing}, over which the sharding goes. Open them with local_stagers()")
    return Hold({device: by_device[device] for device in devices})


def hold(devices: Iterable[Device], *, keep: bool) -> Hold:
    """Hold this process's stagers for these devices, opening those that are not there. Raises as `xferlib.stager`.

    `keep`: whether what is opened stays open when nobody holds it any more, for whoever comes next.
    """
    with opening():
        return _SHARED.hold(tuple(devices), keep=keep)


def close() -> None:
    """Close the stagers that `prefetch` has opened and keeps for later loops, and give back their memory. Any thread, any number
    of times.

    Those that a loop uses are closed when the last such loop ends. A loop that begins after this opens its stagers anew.
    """
    _SHARED.close()


def at_once(threads: Executor, call: Callable[[T], object], of: Iterable[T]) -> None:
    """Call with each of several things, at the same time, and return when all calls have; then the first error is raised.

    The calling thread takes part: as the program ends, or where the system has no more threads, it calls with those that are left.
    """
    things = list(of)
    left = iter(things)
    errors: list[BaseException] = []
    over: SimpleQueue[None] = SimpleQueue()

    def work() -> None:
        # Each goes to one thread: the next of a list is taken in one step.
        for thing in left:
            try:
                call(thing)
            except BaseException as error:
                errors.append(error)
            over.put(None)

    begun: list[Future[None]] = []
    with suppress(RuntimeError):
        begun.extend(threads.submit(work) for _ in things[1:])
    work()
    wait(begun)
    # What was refused for want of a thread is in the queue all the same, and a thread of an earlier call may have taken it.
    for _ in things:
        over.get()
    try:
        if errors:
            raise errors[0]
    finally:
        # They refer to this frame.
        errors.clear()


@final
class Hold:
    """Stagers by device, in use until `release` or until this is dropped. `number`, `ticket`: their row's, if they are shared."""

    def __init__(self, stagers: Mapping[Device, xferlib.Stager], number: int | None = None, ticket: object = None) -> None:
        self.stagers = stagers
        self._number = number
        self._ticket = ticket

    def release(self) -> None:
        """Let them go. Those that are not kept and that nobody else holds are closed, which waits for what is in flight there.
        Twice is fine."""
        if self._number is not None:
            _SHARED.let_go(self._number)


@final
class _Watch(weakref.ref[Ticket]):
    """A reference that its callback posts when the ticket of a row is gone. No Python runs for that, so no interrupt can end it."""

    __slots__ = ("number",)

    number: int


@final
@dataclass
class _Row:
    """What one hold uses. `keeps`: whether a stager that is opened for it is kept afterwards."""

    keeps: bool
    stagers: dict[Device, xferlib.Stager] = field(default_factory=dict)


@final
class _Shared:
    """The stagers of this process's loops. Each hold has a row with the stagers that it uses. Any thread."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begin with none. Called in a forked child, too, where the lock may be held by a thread that does not exist there."""
        # Reentrant: a finalizer may let go while its thread is in here. Nothing is opened or closed while it is held.
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._rows: dict[int, _Row] = {}
        self._kept: dict[Device, xferlib.Stager] = {}
        """Those that stay open without a row."""
        self._leaving: dict[int, xferlib.Stager] = {}
        """Those that are being closed, which may take long, or that an interrupt of that has left."""
        self._watches: dict[int, _Watch] = {}
        self._dropped: SimpleQueue[_Watch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def hold(self, devices: Sequence[Device], *, keep: bool) -> Hold:
        self._start()
        if self._leaving:
            # Not here: who begins a loop need not wait for what another thread closes.
            self._dropped.put(None)
        # JAX has made its devices anew if somebody had it forget its backends.
        local = jax.local_devices()
        self._let_go_of_kept(lambda device: device not in local)
        number = next(self._numbers)
        # Made before the row is entered, so that the row is let go of whatever happens then.
        ticket: Ticket = np.empty(0, np.uint8)
        watch = _Watch(ticket, self._dropped.put)
        watch.number = number
        self._watches[number] = watch
        # As the program ends nobody comes next, and if this module was imported only then, nobody closes what is kept.
        row = self._rows[number] = _Row(keep and threading.main_thread().is_alive())
        try:
            # An interrupt would lose a stager between its opening and its entry.
            uninterrupted(self._fill, number, row, devices)
        except BaseException:
            self.let_go(number)
            raise
        return Hold({device: row.stagers[device] for device in devices}, number, ticket)

    def let_go(self, number: int) -> list[xferlib.Stager]:
        """Forget a row, and close its stagers that are neither kept nor in another row. Return those that are kept, and in none.
        Twice is fine."""
        with self._lock:
            row = self._rows.get(number, _Row(keeps=True))
            kept = self._kept_of(row)
            unused = self._unused(list(row.stagers.values()), but=number)
            # What does not keep may have taken much more memory than any loop needs.
            idle = list(filter(list(kept.values()).__contains__, unused)) if row.keeps else []
            left = self._leave(stager for stager in unused if stager not in idle)
            self._rows.pop(number, None)
            if not row.keeps:
                self._forget(kept)
        self._watches.pop(number, None)
        if len(left) > 1:
            # All at once, as they were opened: to give pinned memory back takes the driver a while.
            uninterrupted(self._close_at_once, left)
        else:
            self._close(left)
        return idle

    def close(self) -> None:
        self._let_go_of_kept(lambda _: True)
        self.close_left()

    def close_left(self) -> None:
        """Close what interrupted closings have left, and wait for those that other threads are at."""
        self._close(self._leaving.copy())

    def _let_go_of_kept(self, gone: Callable[[Device], bool]) -> None:
        """Keep the stagers on some devices no longer, and close those of them that are in no row."""
        with self._lock:
            found = dict(filter(lambda entry: gone(entry[0]), self._kept.copy().items()))
            left = self._leave(self._unused(found.values()))
            self._forget(found)
        self._close(left)

    def _kept_of(self, row: _Row) -> dict[Device, xferlib.Stager]:
        """Return those of a row that are kept. With the lock."""
        return {device: stager for device, stager in row.stagers.copy().items() if self._kept.get(device) is stager}

    def _forget(self, found: Mapping[Device, xferlib.Stager]) -> None:
        """Keep these no longer. With the lock, but a finalizer on this thread may have come before."""
        for device, stager in found.items():
            if self._kept.get(device) is stager:
                self._kept.pop(device, None)

    def _unused(self, stagers: Iterable[xferlib.Stager], *, but: int | None = None) -> list[xferlib.Stager]:
        """Return those that are in no row but this one. With the lock."""
        rows = [row for number, row in self._rows.copy().items() if number != but]
        used = {id(stager) for row in rows for stager in list(row.stagers.values())}
        return [stager for stager in stagers if id(stager) not in used]

    def _leave(self, stagers: Iterable[xferlib.Stager]) -> dict[int, xferlib.Stager]:
        """Enter those that are to be closed now, by the caller, without the lock."""
        left = {next(self._numbers): stager for stager in stagers}
        self._leaving.update(left)
        return left

    def _close(self, left: Mapping[int, xferlib.Stager]) -> None:
        with ExitStack() as steps:
            # Each whatever the others raise.
            for number, stager in left.items():
                steps.callback(self._close_one, number, stager)

    def _close_at_once(self, left: Mapping[int, xferlib.Stager]) -> None:
        with ThreadPoolExecutor(len(left), "xferlib-jax-close") as threads:
            at_once(threads, lambda entry: self._close_one(*entry), left.items())

    def _close_one(self, number: int, stager: xferlib.Stager) -> None:
        try:
            stager.close()
        except XferError:
            # It is closed all the same. What a signal's handler raises may come before it is.
            self._leaving.pop(number, None)
            raise
        self._leaving.pop(number, None)

    def _fill(self, number: int, row: _Row, devices: Sequence[Device]) -> None:
        missing = [device for device in devices if not self._share(row, device)]
        if len(missing) == 1:
            self._open(number, row, missing[0])
        elif missing:
            # All at once: most of the time of an opening is waiting for the device.
            with ThreadPoolExecutor(len(missing), "xferlib-jax-open") as threads:
                at_once(threads, lambda device: self._open(number, row, device), missing)

    def _share(self, row: _Row, device: Device) -> bool:
        """Enter a stager on the device that is kept, or in another row, if there is one that nobody has closed."""
        with self._lock:
            found = [self._kept.get(device), *(other.stagers.get(device) for other in list(self._rows.values()))]
            leaving = list(self._leaving.values())
            usable = (stager for stager in found if stager is not None and stager not in leaving and not stager.closed)
            stager = next(usable, None)
            if stager is not None:
                row.stagers[device] = stager
        return stager is not None

    def _open(self, number: int, row: _Row, device: Device) -> None:
        """Open a stager on the device and enter it. Any thread, also when the row was let go of meanwhile."""
        stager = _open(device)
        with self._lock:
            if number in self._rows and not self._share(row, device):
                row.stagers[device] = stager
                if row.keeps:
                    self._kept[device] = stager
            left = self._leave([] if row.stagers.get(device) is stager else [stager])
        self._close(left)

    def _start(self) -> None:
        # One that is only about to run counts for none: if two are started, either may get what is dropped.
        if self._thread is None or not self._thread.is_alive():
            self._thread = thread = threading.Thread(
                target=_let_go_dropped, args=(self._dropped, self), name="xferlib-jax-holds", daemon=True
            )
            # If the system has no more threads now, the next hold asks again.
            start_thread(thread, lambda _: None)


def _let_go_dropped(dropped: SimpleQueue[_Watch | None], shared: _Shared) -> None:
    while True:
        watch = dropped.get()
        try:
            if watch is None:
                shared.close_left()
            else:
                _settle(shared.let_go(watch.number))
        except Exception as error:
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread())))


def _settle(stagers: Iterable[xferlib.Stager]) -> None:
    """Wait for what a dropped loop left in flight: it keeps memory until somebody looks, and perhaps nobody puts any more."""
    for stager in stagers:
        with suppress(XferError):
            stager.idle()


def _open(device: Device, *, pinned_limit: int | None = None, device_limit: int | None = None) -> xferlib.Stager:
    number = jax.local_devices().index(device)
    backend: Any = "jax"
    if device.platform == "cpu" and number > 0:
        # By name there is only the first device, since foreign arrays are imported only there.
        from xferlib_jax._cpu import CpuStager

        backend, number = CpuStager(device), 0
    return xferlib.stager(backend, device=number, pinned_limit=pinned_limit, device_limit=device_limit)


_SHARED = _Shared()
# Behind the end of the loops, since that is registered later, and before stagers are closed as forgotten.
atexit.register(_SHARED.close)
