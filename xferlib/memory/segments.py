"""Which pinned memory there is, and who has which part of it. Bookkeeping alone: no lock, no limit, and no call of a driver.

A segment is what one call of the driver has page-locked, or will. A row is a part of it that is handed out. The tables of segments
and rows say what is true, and change in one step. Free ranges, sums and the index are derived from them: the pool has them derived
anew after a step that did not come to its end.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter
from typing import NamedTuple, final

from xferlib.memory.blocks import PoolRequest
from xferlib.memory.ranges import Ranges

__all__ = ["PinnedRow", "Segment", "Segments"]


@final
class Segment:
    """A range of memory that is page-locked, or will be.

    Attributes:
        locked: Whether it is page-locked now.
        refused: The driver would not lock it.
        tried_again: The driver was asked once more after a refusal, or will be.
        freeing: It is about to be unlocked, and nothing is handed out of it.
        claimed: A thread is locking or unlocking it.
    """

    __slots__ = ("claimed", "freeing", "locked", "nbytes", "number", "ranges", "refused", "start", "tried_again")

    def __init__(self, number: int, start: int, nbytes: int, ranges: Ranges, *, locked: bool = True) -> None:
        self.number = number
        self.start = start
        self.nbytes = nbytes
        self.ranges = ranges
        self.locked = locked
        self.freeing = self.claimed = self.refused = self.tried_again = False

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.start + self.nbytes

    @property
    def pending(self) -> bool:
        """Whether somebody will lock it, or is at it."""
        return not (self.locked or self.refused or self.freeing)


@final
class PinnedRow(NamedTuple):
    """Memory of a segment that somebody holds: `size` bytes, of which `asked` were asked for."""

    address: int
    size: int
    asked: int
    for_array: bool
    ranges: Ranges
    """The ranges of its segment."""


_NEW = tuple.__new__
"""Takes a third of the time of a named tuple's constructor."""


@final
class Segments:
    """The segments of one pool. Only steps of the pool change anything here, except for `remove`; what takes no lock says so."""

    def __init__(self) -> None:
        self.by_number: dict[int, Segment] = {}
        """Not by address: that may be another segment's as soon as the driver has freed it."""
        self.rows: dict[int, PinnedRow] = {}
        # Derived from these two.
        self.large, self.small, self.write_combined, self.pageable = Ranges(), Ranges(), Ranges(), Ranges()
        """Free ranges of segments that are locked; the last, of segments that are not locked yet."""
        self.used_nbytes = self.asked_nbytes = self.arrays_nbytes = 0
        """Handed out; as it was asked for, without what alignment adds; handed out for arrays."""
        self._index: tuple[list[int], list[int]] = ([], [])
        """Starts and ends of the segments that are locked, in order."""

    def contains(self, address: int, nbytes: int) -> bool:
        """Tell whether the range lies inside one segment that is locked. Takes no lock."""
        starts, ends = self._index
        index = bisect_right(starts, address) - 1
        return index >= 0 and address + nbytes <= ends[index]

    def around(self, address: int, nbytes: int) -> Segment | None:
        """Return the segment, locked or not, that has the range. Takes no lock.

        A segment that is being locked is found at every moment.
        """
        for segment in list(self.by_number.values()):
            if segment.start <= address and address + nbytes <= segment.end and not segment.freeing:
                return segment
        return None

    def add(self, segment: Segment) -> None:
        """Enter a new segment, all of it free."""
        self.by_number[segment.number] = segment
        segment.ranges.add_segment(segment.start, segment.nbytes)
        if segment.locked:
            self._reindex()

    def hand_out(self, address: int, ranges: Ranges, request: PoolRequest, number: int) -> PinnedRow:
        """Enter a row for memory that was taken from these ranges."""
        size, asked, _, _, for_array = request
        row: PinnedRow = _NEW(PinnedRow, (address, size, asked, for_array, ranges))
        self.rows[number] = row
        self.used_nbytes += size
        self.asked_nbytes += asked
        if for_array:
            self.arrays_nbytes += size
        return row

    def take_back(self, number: int) -> bool:
        """Free what a row has. False: there is no row of this number."""
        row = self.rows.pop(number, None)
        if row is None:
            return False
        self.used_nbytes -= row.size
        self.asked_nbytes -= row.asked
        if row.for_array:
            self.arrays_nbytes -= row.size
        row.ranges.give_back(row.address, row.size)
        return True

    def note_locked(self, segment: Segment) -> None:
        """Let everybody find the free parts of a segment that was pageable so far."""
        numbers = [number for number, row in self.rows.items() if segment.start <= row.address < segment.end]
        self.pageable.remove_used_segment(segment.start)
        segment.ranges, segment.locked = self.large, True
        for number in numbers:
            self.rows[number] = self.rows[number]._replace(ranges=self.large)
        used = sorted((self.rows[number].address, self.rows[number].size) for number in numbers)
        self.large.add_segment(segment.start, segment.nbytes, used)
        self._reindex()

    def claim(self) -> Segment | None:
        """Take a segment to lock: the newest of those that wait, since copies come to the oldest first."""
        # A list: whoever has freed a segment takes it out without the lock.
        for segment in reversed(list(self.by_number.values())):
            if segment.pending and not segment.claimed:
                segment.claimed = True
                return segment
        return None

    def evict(self, excess: int | None) -> bool:
        """Have idle segments freed until so many bytes are gone (None: all). False: all would not be enough, and none is freed."""
        segments = {segment.start: segment for segment in list(self.by_number.values()) if not segment.freeing}
        kinds = (self.large, self.small, self.write_combined, self.pageable)
        idle = [(ranges, *whole) for ranges in kinds for whole in ranges.whole() if not segments[whole[0]].claimed]
        if excess is not None and excess > sum([nbytes for _, _, nbytes in idle]):
            return False
        for ranges, start, nbytes in idle:
            if excess is not None:
                if excess <= 0:
                    break
                excess -= nbytes
            segments[start].freeing = True
            ranges.remove_segment(start)
        self._reindex()
        return bool(idle)

    def freeable(self) -> list[Segment]:
        """Return those that are to be freed, and that nobody has claimed. Takes no lock."""
        return [segment for segment in list(self.by_number.values()) if segment.freeing and not segment.claimed]

    def remove(self, segment: Segment) -> None:
        """Take a segment out that was freed. Takes no lock."""
        self.by_number.pop(segment.number, None)

    def derive(self) -> None:
        """Derive anew what follows from the segments and the rows."""
        rows = sorted(self.rows.copy().values())
        self.used_nbytes = sum([row.size for row in rows])
        self.asked_nbytes = sum([row.asked for row in rows])
        self.arrays_nbytes = sum([row.size for row in rows if row.for_array])
        for ranges in (self.large, self.small, self.write_combined, self.pageable):
            ranges.clear()
        for segment in list(self.by_number.values()):
            if not segment.freeing:
                used = [(row.address, row.size) for row in rows if segment.start <= row.address < segment.end]
                segment.ranges.add_segment(segment.start, segment.nbytes, used)
        self._reindex()

    def _reindex(self) -> None:
        segments = [segment for segment in list(self.by_number.values()) if segment.locked and not segment.freeing]
        segments.sort(key=attrgetter("start"))
        # One assignment: `contains` reads without the lock.
        self._index = [segment.start for segment in segments], [segment.end for segment in segments]
