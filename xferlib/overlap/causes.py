"""What is said of a loop that does not overlap: a cause, the line to blame, and what to do. Pure; that it does not, `verdict` says.

Which line is to blame is read off the order of the calls (`happens_before`): there is a path from what was held to what came late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from xferlib.overlap.calls import LEGACY, Baseline, CopyDirection, CudaCall, HeldSteps, Site
from xferlib.overlap.happens_before import Edge, path
from xferlib.words import in_words

__all__ = ["NAMES", "Cause", "Causes", "Finding", "copy_words", "where"]

Cause: TypeAlias = Literal[
    "pageable memory",
    "NULL stream",
    "same stream",
    "one stream for both directions",
    "waits for compute",
    "too few slots",
    "host waits",
    "memory call",
]
NAMES: dict[str, str] = {"h2d": "host to device", "d2h": "device to host"}


@final
@dataclass(frozen=True)
class Finding:
    """A cause, in words, with the line that is to blame, where it is known."""

    cause: Cause
    words: str
    site: Site | None

    def __str__(self) -> str:
        return f"{self.cause}: {self.words}"


@final
class Causes:
    """Why the copies of one direction, and compute, come one after the other."""

    def __init__(self, baseline: Baseline, calls: Sequence[CudaCall], direction: CopyDirection) -> None:
        self._baseline = baseline
        self._calls = calls
        self._direction = direction

    def late(self, compute: HeldSteps, copies: HeldSteps) -> list[Finding]:
        """Say why a copy, or compute, that should have been done while the other was held was not; empty: nothing says why."""
        if self._direction == "h2d":
            return [*self._late_copy(compute)] or [*self._waiting(compute)] or [*self._late_compute(copies)]
        return [*self._late_compute(copies)] or [*self._waiting(copies)] or [*self._late_copy(compute)]

    def kept(self, hold: HeldSteps) -> Iterator[Finding]:
        """Say what kept the thread of the loop, though it should have only started something."""
        stuck = hold.stuck
        if stuck is None or not stuck.freed or stuck.call is None:
            return
        call = stuck.call
        if call.kind == "memory":
            if self.is_usual(call):
                yield _memory_call(call, _held_words(hold), stuck.site)
        elif call.kind == "copy" and hold.what == call.direction and call.pageable and call.nbytes >= self._baseline.smallest:
            yield _pageable(call, stuck.site)

    def is_usual(self, call: CudaCall) -> bool:
        """Tell whether the loop makes this call when nothing is held, too."""
        return any(other.function == call.function and other.step < self._baseline.steps for other in self._calls)

    def _late_copy(self, hold: HeldSteps) -> Iterator[Finding]:
        """Say why the first copy that was not done is behind compute."""
        for call in self._baseline.copies(self._calls, self._direction):
            if call.done or not hold.start <= call.serial < hold.end:
                continue
            way = path(call, hold, self._calls)
            if way is not None:
                yield self._blame(call, way)
                yield from self._also_pageable(call)
            return

    def _late_compute(self, hold: HeldSteps) -> Iterator[Finding]:
        """Say why compute is behind a copy that it has no use for: by a stream, not by an event."""
        step = hold.step_not_computed(self._baseline.launches)
        first = min((call for call in self._calls if call.serial in hold.gates.values()), key=lambda call: call.serial)
        for call in self._calls:
            if not hold.start <= call.serial < hold.end or call.step != step:
                continue
            if call.kind != "launch" or call.stream not in self._baseline.compute:
                continue
            way = path(call, hold, self._calls)
            if way is not None and not any(edge.kind == "event" for edge in way):
                yield _stream_blame(first, call, way)
                yield from self._also_pageable(first)
            return

    def _waiting(self, hold: HeldSteps) -> Iterator[Finding]:
        """Say what the thread of the loop waited for, so that what should have come was not started."""
        stuck = hold.stuck
        if stuck is None or not stuck.freed:
            return
        held, call = _held_words(hold), stuck.call
        if call is None:
            yield Finding("host waits", f"the loop waits for {held} at {stuck.site}, inside {stuck.inside}", stuck.site)
            return
        if call.kind == "launch" or path(call, hold, self._calls) is None:
            return
        place, site = where(call, stuck.site), call.site or stuck.site
        if call.kind == "memory":
            yield _memory_call(call, held, stuck.site)
        elif call.kind == "sync event" and self._has_one_slot() and self._direction == "h2d":
            yield Finding(
                "too few slots",
                f"every batch is copied to the same memory of the device, so the loop waits for {held}, which reads it, in "
                f"{call.function} at {place}. Give the copies a second place",
                site,
            )
        elif call.kind == "copy" and call.nbytes >= self._baseline.smallest and call.pageable:
            yield _pageable(call, stuck.site)
            if call.direction == "d2h":
                yield Finding("host waits", f"the loop reads a result at {place} and waits for {held}", site)
        elif call.kind == "copy":
            said = "reads a result" if call.direction == "d2h" else "makes a copy"
            yield Finding("host waits", f"the loop {said} by {call.function} at {place} and waits for {held}", site)
        else:
            yield Finding("host waits", f"the loop waits for {held} in {call.function} at {place}", site)

    def _blame(self, copy: CudaCall, way: Sequence[Edge]) -> Finding:
        """Say which edge on the way from the held compute to a copy is the one that should not be there."""
        other = next(
            (
                edge.before
                for edge in way
                if edge.before.kind == "copy"
                and edge.before.stream == copy.stream
                and edge.before.direction not in (None, copy.direction)
            ),
            None,
        )
        event = next((edge for edge in way if edge.kind == "event"), None)
        if other is not None and event is not None:
            return Finding(
                "one stream for both directions",
                f"{copy_words(copy)} is on the stream of {copy_words(other)}, which waits for compute. Use a stream for each "
                "direction",
                copy.site or copy.near,
            )
        if event is None:
            return _stream_blame(copy, copy, way)
        wait = event.after
        if (
            self._has_one_slot()
            and wait.in_loop
            and wait.site is not None
            and copy.site is not None
            and wait.site.line != copy.site.line
        ):
            return Finding(
                "too few slots",
                f"every batch is copied to the same memory of the device, so {copy_words(copy)} has to wait for the compute that "
                f"reads it, by {wait.function} at {wait.site}. Give the copies a second place",
                copy.site,
            )
        by = "the call that makes it" if wait.site == copy.site else f"{wait.function} at {where(wait)}"
        return Finding(
            "waits for compute",
            f"{copy_words(copy)} waits on the device for compute that was enqueued before it: {by} makes its stream wait. Enqueue "
            "it before the compute, or a step earlier; if it waits only for the readers of memory that it writes again, give it "
            "more",
            copy.site or copy.near,
        )

    def _has_one_slot(self) -> bool:
        return self._baseline.slots.get(self._direction, 2) <= 1

    def _also_pageable(self, copy: CudaCall) -> Iterator[Finding]:
        if copy.pageable:
            yield _pageable(copy, copy.near)


def copy_words(call: CudaCall) -> str:
    """Return a copy in words, with its line."""
    direction = "" if call.direction is None else f" {NAMES[call.direction]}"
    return f"the copy of {in_words(call.nbytes)}{direction} at {where(call)}"


def where(call: CudaCall, at: Site | None = None) -> str:
    """Return the line of a call in words; `at`: where the loop was, if the call has no line of its own."""
    if call.site is not None:
        return str(call.site)
    near = at or call.near
    # A thread may get to it late, when the loop has gone on.
    return "an unknown place" if near is None else f"a thread of the framework's own, asked at {near} or earlier"


def _stream_blame(copy: CudaCall, late: CudaCall, way: Sequence[Edge]) -> Finding:
    """Blame a stream for the order of a copy and compute: `late` is the one of them that came to stand behind the other."""
    first = way[0].before if way else late
    null = next((edge for edge in way if edge.kind == "null"), None)
    if null is not None:
        on_null, on_blocking = (null.before, null.after) if null.before.stream == LEGACY else (null.after, null.before)
        return Finding(
            "NULL stream",
            f"{copy_words(copy)} and the compute wait for each other: {_what(on_null)} is on the NULL stream, and "
            f"{_what(on_blocking)} on a blocking stream. Make the streams non-blocking, and use none without a name",
            copy.site or copy.near,
        )
    if copy.stream == late.stream or copy.stream == first.stream:
        stream = "the NULL stream, CUDA's default" if copy.stream == LEGACY else "one stream"
        words = f"{copy_words(copy)} and the compute are on {stream}, so they run one after the other"
    else:
        words = f"{copy_words(copy)} stands behind compute on its stream"
    return Finding("same stream", f"{words}. Copy on a non-blocking stream of its own", copy.site or copy.near)


def _memory_call(call: CudaCall, held: str, at: Site | None) -> Finding:
    return Finding(
        "memory call",
        f"{call.function} at {where(call, at)} waits until the device has nothing to do, and with it the loop, for {held}. "
        "Allocate, free and page-lock before the loop",
        call.site or at,
    )


def _pageable(call: CudaCall, at: Site | None) -> Finding:
    source = "reads" if call.direction == "h2d" else "writes"
    return Finding(
        "pageable memory",
        f"{copy_words(call)} {source} pageable host memory: {call.function} returns only when the driver has copied it, and the "
        "loop launches nothing meanwhile. Use pinned memory",
        call.site or at,
    )


def _held_words(hold: HeldSteps) -> str:
    return "compute" if hold.what == "compute" else f"the copy {NAMES[hold.what]}"


def _what(call: CudaCall) -> str:
    if call.kind == "copy":
        return copy_words(call)
    return f"{'work launched' if call.kind == 'launch' else call.function} at {where(call)}"
