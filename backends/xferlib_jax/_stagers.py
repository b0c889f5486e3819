"""One stager for each local device: opened when a loop first wants it, shared by all loops of this process, closed after the last.

Invariant: a stager is closed when nobody holds a `Hold` on it, and those that the caller gave are the caller's to close.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import jax

import xferlib

__all__ = ["Device", "Hold", "given", "hold", "local_stagers"]

Device = Any
"""`jax.Device`."""


def local_stagers(*, pinned_limit: int | None = None, device_limit: int | None = None) -> tuple[xferlib.Stager, ...]:
    """Open a stager on each local device, in the order of `jax.local_devices()`, on the CPU as well. Close each of them.

    The limits are those of each stager. Memory that one of them has pinned is pinned for all on GPUs.
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
    """Hold stagers of the caller's for these devices, without closing them. Raises `TypeError` and `ValueError`."""
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
    return Hold({device: by_device[device] for device in devices}, None)


def hold(devices: Iterable[Device]) -> Hold:
    """Hold this process's stagers for these devices, opening those that are not there. Raises as `xferlib.stager`."""
    return _SHARED.hold(tuple(devices))


@final
class Hold:
    """Stagers by device, in use until `release` or until this is dropped."""

    def __init__(self, stagers: Mapping[Device, xferlib.Stager], shared: _Shared | None) -> None:
        self.stagers = stagers
        self._shared = shared

    def release(self) -> None:
        """Close those that nobody uses any more; waits for what is in flight there. Twice is fine."""
        shared, self._shared = self._shared, None
        if shared is not None:
            _close(shared.let_go(self.stagers))

    def __del__(self) -> None:
        shared, self._shared = getattr(self, "_shared", None), None
        if shared is None or sys.is_finalizing():
            return
        unused = shared.let_go(self.stagers)
        if unused:
            # The collector may run on the very thread that has to finish what is in flight.
            threading.Thread(target=_close, args=(unused,), name="xferlib-close").start()


@final
class _Shared:
    """The stagers of this process's loops, and how many use each. Any thread."""

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begin with none: also in a forked child, where the lock may be held by a thread that is not there."""
        # Reentrant: a finalizer may let go while its thread is in here.
        self._lock = threading.RLock()
        self._users: dict[Device, tuple[xferlib.Stager, int]] = {}

    def hold(self, devices: Sequence[Device]) -> Hold:
        held: dict[Device, xferlib.Stager] = {}
        with self._lock:
            try:
                for device in devices:
                    stager, users = self._users.get(device) or (_open(device), 0)
                    self._users[device] = (stager, users + 1)
                    held[device] = stager
            except BaseException:
                _close(self.let_go(held))
                raise
        return Hold(held, self)

    def let_go(self, devices: Iterable[Device]) -> list[xferlib.Stager]:
        """Count one user less, and return the stagers that have none left."""
        unused = []
        with self._lock:
            for device in devices:
                found = self._users.pop(device, None)
                if found is None:
                    continue
                stager, users = found
                if users == 1:
                    unused.append(stager)
                else:
                    self._users[device] = (stager, users - 1)
        return unused


def _open(device: Device, *, pinned_limit: int | None = None, device_limit: int | None = None) -> xferlib.Stager:
    number = jax.local_devices().index(device)
    backend: Any = "jax"
    if device.platform == "cpu" and number > 0:
        # By name there is only the first, since arrays of strangers are imported only there.
        from xferlib_jax._cpu import CpuStager

        backend, number = CpuStager(device), 0
    return xferlib.stager(backend, device=number, pinned_limit=pinned_limit, device_limit=device_limit)


def _close(stagers: Iterable[xferlib.Stager]) -> None:
    for stager in stagers:
        stager.close()


_SHARED = _Shared()
