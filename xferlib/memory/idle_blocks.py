"""Blocks of device memory: what is true of each, and idle ones of one size, in the order in which they may be used again.

Bookkeeping alone: no lock, and no call of a backend. Blocks come in size classes, an eighth apart, so at most an eighth of a block
is unused and batches of near sizes share blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import TypeAlias, final

from xferlib.protocol import DeviceBlock, Stream

__all__ = ["NOBODY", "BlockRow", "IdleBlocks", "Streams", "size_class"]

Streams: TypeAlias = dict[int, Stream]
"""By handle: the streams that were told to wait for a transfer, and so may read its arrays."""

NOBODY: tuple[int, ...] = ()


@final
class BlockRow:
    """A block: leased, or idle, or about to be freed."""

    __slots__ = ("address", "block", "doomed", "fence", "freed", "key", "lease", "nbytes", "readers", "since", "streams")

    def __init__(self, key: int, block: DeviceBlock) -> None:
        self.key = key
        self.block = block
        self.address, self.nbytes = block.address, block.nbytes
        self.fence = block.ready
        """The event before which the block may not be written. None: it may be written at once."""
        self.lease: int | None = None
        self.streams: Streams = {}
        self.readers = NOBODY
        """The handles of the streams that the fence stands for."""
        self.since = 0
        """When it became idle: less is longer ago. While it is idle, this, its fence and its readers stay as they are."""
        self.doomed = self.freed = False


_SINCE = attrgetter("since")


@final
class IdleBlocks:
    """Idle blocks of one size."""

    __slots__ = ("behind", "free")

    def __init__(self) -> None:
        self.free: deque[BlockRow] = deque()
        """Those that may be written at once, the oldest first."""
        self.behind: dict[tuple[int, ...], deque[BlockRow]] = {}
        """The others, by their readers. Of those that the same streams read, the oldest comes first and answers for all."""

    def __bool__(self) -> bool:
        return bool(self.free) or any(self.behind.values())

    def __len__(self) -> int:
        return len(self.free) + sum(map(len, self.behind.values()))

    def __iter__(self) -> Iterator[BlockRow]:
        return chain(self.free, *self.behind.values())

    def append(self, row: BlockRow) -> None:
        if row.fence is None:
            self.free.append(row)
            return
        group = self.behind.get(row.readers)
        if group is None:
            # Empty groups are removed here, because streams may come and go. Mostly an empty one stays, for the next block that the
            # same streams read.
            for readers in [readers for readers, rows in self.behind.items() if not rows]:
                del self.behind[readers]
            self.behind[row.readers] = deque((row,))
        else:
            group.append(row)

    def remove(self, row: BlockRow) -> None:
        (self.free if row.fence is None else self.behind[row.readers]).remove(row)

    def oldest(self) -> BlockRow:
        return self.free[0] if self.free else min([group[0] for group in self.behind.values() if group], key=_SINCE)


@lru_cache
def size_class(nbytes: int) -> int:
    """Round up to a multiple of an eighth of the power of two below, at least 256."""
    power = nbytes.bit_length() - 4
    step = 1 << power if power > 8 else 256
    return -(-nbytes // step) * step or step
