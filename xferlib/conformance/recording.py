"""A proxy in front of a backend, which records the memory that the core took and gave back. For the law about ownership.

Memory that is taken is recorded when the call has returned, and memory that is given back when the call begins. So a block that is
given back too early is seen, whatever waits in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from xferlib.protocol import DeviceBlock

__all__ = ["RecordingBackend"]


@final
class RecordingBackend:
    """Passes everything on. Any thread.

    `inner` is for hooks that replace parts of the backend.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.wrong: list[str] = []
        """What was given back without having been taken, in words."""
        self.written: int | None = None
        """The address of the block to which the last copy to the device goes; None: it goes to memory that is not the core's."""
        self.closed = False
        self.sizes: set[int] = set()
        """The sizes of all device blocks that there were."""
        self.before_release: Callable[[], object] = bool
        """Called before anything is given back, by the thread that does it."""
        # Changed, and listed, in single steps: other threads take and give back meanwhile.
        self._had: dict[str, dict[int, int]] = {"device": {}, "pinned": {}, "pin": {}}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def blocks(self) -> set[int]:
        """The addresses of the device memory that is not given back."""
        return set(self._had["device"])

    @property
    def left(self) -> dict[str, int]:
        """How many of each kind are not given back: device blocks, pinned memory, pins. Empty: everything is given back."""
        return {kind: count for kind, had in self._had.items() if (count := len(had))}

    def block_of(self, array: Any) -> int | None:
        """Return the address of the device block that this array is in."""
        return self._block_at(self.inner.as_source(array).address)

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self.written = self._block_at(dst)
        self.inner.copy_h2d(dst, src, nbytes)

    def alloc_device(self, nbytes: int) -> DeviceBlock:
        block: DeviceBlock = self.inner.alloc_device(nbytes)
        self._take("device", block.address, block.nbytes)
        self.sizes.add(block.nbytes)
        return block

    def free_device(self, block: DeviceBlock) -> None:
        self._give_back("device", block.address)
        self.inner.free_device(block)

    def alloc_pinned(self, nbytes: int) -> int:
        address: int = self.inner.alloc_pinned(nbytes)
        self._take("pinned", address, nbytes)
        return address

    def alloc_write_combined(self, nbytes: int) -> int:
        address: int = self.inner.alloc_write_combined(nbytes)
        self._take("pinned", address, nbytes)
        return address

    def free_pinned(self, address: int) -> None:
        self._give_back("pinned", address)
        self.inner.free_pinned(address)

    def pin(self, address: int, nbytes: int) -> None:
        self.inner.pin(address, nbytes)
        self._take("pin", address, nbytes)

    def unpin(self, address: int) -> None:
        self._give_back("pin", address)
        self.inner.unpin(address)

    def close(self) -> None:
        self.inner.close()
        self.closed = True

    def _block_at(self, address: int) -> int | None:
        # Not a list of the items: Python 3.11 may collect garbage between two of them, and finalizers give back here.
        blocks = self._had["device"].copy()
        return next((start for start, nbytes in blocks.items() if start <= address < start + nbytes), None)

    def _take(self, kind: str, address: int, nbytes: int) -> None:
        self._had[kind][address] = nbytes

    def _give_back(self, kind: str, address: int) -> None:
        if self._had[kind].pop(address, None) is None:
            self.wrong.append(f"{kind} memory at {address:#x} was given back, and was not had: perhaps it was given back twice")
        self.before_release()
