"""One stager for each local device: opened when a loop first wants it, shared by all loops of this process, closed after the last.

Invariant: a stager is closed when nobody holds a `Hold` on it, and those that the caller gave are the caller's to close.

A hold that is dropped says so by its ticket, to a thread that does nothing else. Closing waits, and no finalizer may wait.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, TypeAlias, final

import jax
import numpy as np

import xferlib

__all__ = ["Device", "Hold", "given", "hold", "local_stagers"]

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
    for stager in stagers:
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


def hold(devices: Iterable[Device]) -> Hold:
    """Hold this process's stagers for these devices, opening those that are not there. Raises as `xferlib.stager`."""
    return _SHARED.hold(tuple(devices))


@final
class Hold:
    """Stagers by device, in use until `release` or until this is dropped. `number`, `ticket`: their row's, if they are shared."""

    def __init__(self, stagers: Mapping[Device, xferlib.Stager], number: int | None = None, ticket: object = None) -> None:
        self.stagers = stagers
        self._number = number
        self._ticket = ticket

    def release(self) -> None:
        """Close those that nobody uses any more; waits for what is in flight there. Twice is fine."""
        if self._number is not None:
            _SHARED.let_go(self._number)


@final
class _Watch(weakref.ref[Ticket]):
    """A reference that its callback posts when the ticket of a row is gone. No Python runs for that, so no interrupt can end it."""

    __slots__ = ("number",)

    number: int


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
        self._rows: dict[int, dict[Device, xferlib.Stager]] = {}
        self._watches: dict[int, _Watch] = {}
        self._dropped: SimpleQueue[_Watch] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def hold(self, devices: Sequence[Device]) -> Hold:
        self._start()
        number = next(self._numbers)
        # Made before the row is entered, so that the row is let go of whatever happens then.
        ticket: Ticket = np.empty(0, np.uint8)
        watch = _Watch(ticket, self._dropped.put)
        watch.number = number
        self._watches[number] = watch
        row = self._rows[number] = {}
        try:
            self._fill(row, devices)
        except BaseException:
            self.let_go(number)
            raise
        return Hold(row, number, ticket)

    def let_go(self, number: int) -> None:
        """Forget a row, and close the stagers that are in no other. Twice is fine."""
        with self._lock:
            row = self._rows.pop(number, {})
            used = {id(stager) for other in self._rows.values() for stager in other.values()}
        self._watches.pop(number, None)
        _close(stager for stager in row.values() if id(stager) not in used)

    def _fill(self, row: dict[Device, xferlib.Stager], devices: Sequence[Device]) -> None:
        for device in devices:
            if not self._share(row, device):
                row[device] = _open(device)

    def _share(self, row: dict[Device, xferlib.Stager], device: Device) -> bool:
        """Enter a stager on the device that another row has, if there is one."""
        with self._lock:
            other = next((other for other in list(self._rows.values()) if device in other), None)
            if other is not None:
                row[device] = other[device]
        return other is not None

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(
                target=_let_go_dropped, args=(self._dropped, self.let_go), name="xferlib-jax-holds", daemon=True
            )
            # If two threads are started at once, either may get what is dropped.
            thread.start()
            self._thread = thread


def _let_go_dropped(dropped: SimpleQueue[_Watch], let_go: Callable[[int], None]) -> None:
    while True:
        number = dropped.get().number
        try:
            let_go(number)
        except Exception as error:
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread())))


def _open(device: Device, *, pinned_limit: int | None = None, device_limit: int | None = None) -> xferlib.Stager:
    number = jax.local_devices().index(device)
    backend: Any = "jax"
    if device.platform == "cpu" and number > 0:
        # By name there is only the first device, since foreign arrays are imported only there.
        from xferlib_jax._cpu import CpuStager

        backend, number = CpuStager(device), 0
    return xferlib.stager(backend, device=number, pinned_limit=pinned_limit, device_limit=device_limit)


def _close(stagers: Iterable[xferlib.Stager]) -> None:
    for stager in stagers:
        stager.close()


_SHARED = _Shared()
