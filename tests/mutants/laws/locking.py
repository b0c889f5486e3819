"""The host backend as if it page-locked: an honest one, on which those that lie about it are built.

Copies from and to memory that is not locked do what a driver's do: the start waits until the copy is done.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from xferlib_host.conformance import TestHost

from tests.mutants.laws.broken import BrokenBackend

__all__ = ["LockingBackend", "LockingHost"]


class LockingBackend(BrokenBackend):
    """Keeps a table of what is locked, from start to end: what a driver would know, whoever had it locked."""

    def __init__(self, inner: Any, locked: dict[int, int]) -> None:
        super().__init__(inner)
        self.capabilities = dataclasses.replace(inner.capabilities, pinned=True)
        self.locked = locked

    def knows(self, address: int) -> bool:
        return any(start <= address < end for start, end in self.locked.copy().items())

    def is_pinned(self, address: int, nbytes: int) -> bool:
        return self.knows(address) and self.knows(address + nbytes - 1)

    def alloc_pinned(self, nbytes: int) -> int:
        address: int = self.inner.alloc_pinned(nbytes)
        self.locked[address] = address + nbytes
        return address

    def free_pinned(self, address: int) -> None:
        del self.locked[address]
        self.inner.free_pinned(address)

    def pin(self, address: int, nbytes: int) -> None:
        self.inner.pin(address, nbytes)
        self.locked[address] = address + nbytes

    def unpin(self, address: int) -> None:
        del self.locked[address]
        self.inner.unpin(address)

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.copy_h2d(dst, src, nbytes)
        if not (self.knows(src) and self.knows(src + nbytes - 1)):
            self.inner.record_h2d().synchronize()

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self.inner.copy_d2h(dst, src, nbytes)
        if not (self.knows(dst) and self.knows(dst + nbytes - 1)):
            self.inner.record_d2h().synchronize()


class LockingHost(TestHost):
    """Honest hooks for it."""

    @property
    def locked(self) -> dict[int, int]:
        """What all stagers of a test have locked."""
        table: dict[int, int] = self.__dict__.setdefault("_locked", {})
        return table

    def open(self) -> Any:
        return LockingBackend(super().open(), self.locked)

    def page_locked(self, address: int) -> bool:
        return any(start <= address < end for start, end in self.locked.copy().items())
