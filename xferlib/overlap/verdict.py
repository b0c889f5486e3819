"""Decide from recorded calls whether a loop overlaps, and if not, why. Pure: the same records always give the same verdict.

Two pieces of work run beside each other if neither is before the other. So each is held once. While the compute of step c is held,
copies up to number i are done: they are not behind it. While copy number t is held, compute up to step j is done. Some copy runs
beside some compute if, and only if, (i - c) + (j - t) >= 0: that does not depend on how copies and steps are numbered, as long as
the numbers are the same in both holds. Bytes stand for numbers: a step's worth of bytes is one.

Who is to blame is read off the order of calls: each piece of work follows the one before it on its stream, what an event made its
stream wait for, and, between the NULL stream and blocking streams, everything before it on the other. A verdict "does not overlap"
needs both: work that was seen not to be done, and a path that says why. One without the other is no verdict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final

from xferlib.overlap.calls import LEGACY, Call, Direction, Held, Look, Site
from xferlib.words import in_words

__all__ = ["Cause", "Finding", "Verdict", "judge"]

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

ROUNDING = 0.02
"""Of a step's worth of bytes: what is too little to count."""
_NAMES = {"h2d": "host to device", "d2h": "device to host"}


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
@dataclass(frozen=True)
class Verdict:
    """`findings`: why it does not overlap. `undecided`: what could not be told, and why. Neither: it overlaps."""

    findings: tuple[Finding, ...] = ()
    undecided: tuple[str, ...] = ()


def judge(look: Look, held: Sequence[Held], calls: Sequence[Call]) -> Verdict:
    """Judge a loop. `held`: one of "compute", and one of each direction that the loop copies in. `calls`: all, from the look on."""
    by_what: dict[str, Held] = {hold.what: hold for hold in held}
    findings: list[Finding] = []
    undecided: list[str] = []
    directions: list[Direction] = [direction for direction in ("h2d", "d2h") if any(look.nbytes.get(direction, ()))]
    if not directions:
        undecided.append(f"the loop makes no copy of {in_words(look.smallest)} or more in a step, so there is nothing to hide")
    if not look.compute:
        undecided.append("the loop launches no work on the device, so there is nothing to hide a copy under")
    if undecided:
        return Verdict((), tuple(undecided))
    for direction in directions:
        found, doubts = _Direction(look, by_what, calls, direction).judge()
        findings += [finding for finding in found if finding not in findings]
        undecided += doubts
    if not undecided and len(directions) == 2:
        findings += [found for found in _both_directions(look, by_what, calls) if found.cause not in [f.cause for f in findings]]
    # What is wrong in one direction is wrong whatever is unknown of the other.
    return Verdict(tuple(findings), () if findings else tuple(undecided))


@final
class _Direction:
    """One direction of a loop against its compute."""

    def __init__(self, look: Look, held: Mapping[str, Held], calls: Sequence[Call], direction: Direction) -> None:
        self.look = look
        self.calls = calls
        self.direction = direction
        self.compute = held["compute"]
        self.copies = held[direction]

    def judge(self) -> tuple[list[Finding], list[str]]:
        doubts = [*self._doubts()]
        if doubts:
            return [], doubts
        findings = [*_kept(self.compute, self.calls, self.look), *_kept(self.copies, self.calls, self.look)]
        if self._sum() < -ROUNDING:
            # More copies than batches can only make the sum less, never greater: what was done counts on both sides.
            grown = [*self._grown()]
            reasons = [] if grown else self._reasons()
            # What was seen is only a reason if it says why.
            if grown:
                doubts += grown
            elif not reasons:
                doubts.append(
                    f"no copy {_NAMES[self.direction]} was done beside compute, but nothing in the order of the calls says why. "
                    "The machine may be too busy, or the loop waits for something that is not CUDA's"
                )
            findings = [*reasons, *(kept for kept in findings if kept.cause not in [reason.cause for reason in reasons])]
        return findings, doubts

    def _grown(self) -> Iterator[str]:
        """Say what the loop did to prepare memory while work was held: that is done once, and says nothing of the loop."""
        name, batch = _NAMES[self.direction], self.look.nbytes[self.direction][0]
        copied = sum(call.nbytes for call in self._copies() if call.serial < self.copies.start)
        excess = copied - self.copies.first_step * batch
        if excess > ROUNDING * batch:
            yield (
                f"while work was held, the loop copied {in_words(excess)} {name} more than its batches, perhaps to prepare memory "
                "as it ran ahead, and which copies were its batches is not known. More of warmup= may settle it"
            )
        for hold in (self.compute, self.copies):
            stuck = hold.stuck
            call = next((call for call in self.calls if stuck is not None and call.serial == stuck.call), None)
            if stuck is not None and call is not None and call.kind == "memory" and not _is_usual(call, self.calls, self.look):
                yield (
                    f"while work was held, the loop stood in {call.function} at {_where(call, stuck.site)}, which it does not call "
                    "in each step: it took or gave back memory as it ran ahead. More of warmup= may settle it"
                )

    def _doubts(self) -> Iterator[str]:
        name, sizes = _NAMES[self.direction], self.look.nbytes[self.direction]
        if min(sizes) != max(sizes):
            shown = ", ".join(in_words(nbytes) for nbytes in sizes)
            yield f"the steps copy different amounts {name} ({shown}): run the loop on batches of one size"
        for hold in (self.compute, self.copies):
            what = "compute" if hold.what == "compute" else f"copies {name}"
            if hold.overdue:
                yield f"while {what} were held, something kept this process from looking: the gate was opened from outside"
            elif not hold.gates:
                yield f"none of the {what} of the loop came while they were to be held, or on other streams than before"

    def _sum(self) -> float:
        """Return (i - c) + (j - t) as the module's docstring has it."""
        batch = self.look.nbytes[self.direction][0]
        done = sum(call.nbytes for call in self._copies() if call.serial < self.compute.start) + self._prefix(self.compute)
        first_held = min(self.copies.gates.values())
        before = sum(call.nbytes for call in self._copies() if call.serial < first_held)
        held_step = next(call.step for call in self.calls if call.serial == min(self.compute.gates.values()))
        return (done / batch - 1 - held_step) + (_computed(self.copies, self.look) - 1 - before / batch)

    def _copies(self) -> Iterator[Call]:
        return (call for call in self.calls if _is_large(call, self.look) and call.direction == self.direction)

    def _prefix(self, hold: Held) -> int:
        """Return the bytes of copies that were done while held, up to the first that was not."""
        nbytes = 0
        for call in self._copies():
            if hold.start <= call.serial < hold.end:
                if not call.done:
                    break
                nbytes += call.nbytes
        return nbytes

    def _reasons(self) -> list[Finding]:
        if self.direction == "h2d":
            return [*self._late_copy(self.compute)] or [*self._waiting(self.compute)] or [*self._late_compute(self.copies)]
        return [*self._late_compute(self.copies)] or [*self._waiting(self.copies)] or [*self._late_copy(self.compute)]

    def _late_copy(self, hold: Held) -> Iterator[Finding]:
        """Say why the first copy that was not done is behind compute."""
        for call in self._copies():
            if call.done or not hold.start <= call.serial < hold.end:
                continue
            path = _path(call, hold, self.calls)
            if path is not None:
                yield self._blame(call, path)
                yield from self._also_pageable(call)
            return

    def _late_compute(self, hold: Held) -> Iterator[Finding]:
        """Say why compute is behind a copy that it has no use for: by a stream, not by an event."""
        step = _computed(hold, self.look)
        first = min((call for call in self.calls if call.serial in hold.gates.values()), key=lambda call: call.serial)
        for call in self.calls:
            if not hold.start <= call.serial < hold.end or call.step != step:
                continue
            if call.kind != "launch" or call.stream not in self.look.compute:
                continue
            path = _path(call, hold, self.calls)
            if path is not None and not any(edge.kind == "event" for edge in path):
                yield self._stream_blame(first, call, path)
                yield from self._also_pageable(first)
            return

    def _waiting(self, hold: Held) -> Iterator[Finding]:
        """Say what the thread of the loop waited for, so that what should have come was not started."""
        stuck = hold.stuck
        if stuck is None or not stuck.freed:
            return
        held = "compute" if hold.what == "compute" else f"the copy {_NAMES[hold.what]}"
        call = next((call for call in self.calls if call.serial == stuck.call), None)
        if call is None:
            yield Finding("host waits", f"the loop waits for {held} at {stuck.site}, inside {stuck.inside}", stuck.site)
            return
        if call.kind == "launch" or _path(call, hold, self.calls) is None:
            return
        where = _where(call, stuck.site)
        if call.kind == "memory":
            yield _memory_call(call, held, stuck.site)
        elif call.kind == "sync event" and self.look.slots.get(self.direction, 2) <= 1 and self.direction == "h2d":
            yield Finding(
                "too few slots",
                f"every batch is copied to the same memory of the device, so the loop waits for {held}, which reads it, in "
                f"{call.function} at {where}. Give the copies a second place",
                call.site or stuck.site,
            )
        elif call.kind == "copy" and call.nbytes >= self.look.smallest and call.pageable:
            yield _pageable(call, self.look, stuck.site)
            if call.direction == "d2h":
                yield Finding("host waits", f"the loop reads a result at {where} and waits for {held}", call.site or stuck.site)
        elif call.kind == "copy":
            said = "reads a result" if call.direction == "d2h" else "makes a copy"
            yield Finding(
                "host waits", f"the loop {said} by {call.function} at {where} and waits for {held}", call.site or stuck.site
            )
        else:
            yield Finding("host waits", f"the loop waits for {held} in {call.function} at {where}", call.site or stuck.site)

    def _blame(self, copy: Call, path: Sequence[_Edge]) -> Finding:
        """Say which edge on the way from the held compute to a copy is the one that should not be there."""
        between = [edge.before for edge in path]
        other = next(
            (
                call
                for call in between
                if call.kind == "copy" and call.stream == copy.stream and call.direction not in (None, copy.direction)
            ),
            None,
        )
        event = next((edge for edge in path if edge.kind == "event"), None)
        if other is not None and event is not None:
            return Finding(
                "one stream for both directions",
                f"{_copy(copy)} is on the stream of {_copy(other)}, which waits for compute. Use a stream for each direction",
                copy.site or copy.near,
            )
        if event is None:
            return self._stream_blame(copy, copy, path)
        wait = event.after
        if (
            self.look.slots.get(self.direction, 2) <= 1
            and wait.in_loop
            and wait.site is not None
            and copy.site is not None
            and wait.site.line != copy.site.line
        ):
            return Finding(
                "too few slots",
                f"every batch is copied to the same memory of the device, so {_copy(copy)} has to wait for the compute that reads "
                f"it, by {wait.function} at {wait.site}. Give the copies a second place",
                copy.site,
            )
        by = "the call that makes it" if wait.site == copy.site else f"{wait.function} at {_where(wait)}"
        return Finding(
            "waits for compute",
            f"{_copy(copy)} waits on the device for compute that was enqueued before it: {by} makes its stream wait. Enqueue it "
            "before the compute, or a step earlier; if it waits only for the readers of memory that it writes again, give it more",
            copy.site or copy.near,
        )

    def _stream_blame(self, copy: Call, late: Call, path: Sequence[_Edge]) -> Finding:
        """Blame a stream for the order of a copy and compute: `late` is the one of them that came to stand behind the other."""
        first = path[0].before if path else late
        null = next((edge for edge in path if edge.kind == "null"), None)
        if null is not None:
            on_null, on_blocking = (null.before, null.after) if null.before.stream == LEGACY else (null.after, null.before)
            return Finding(
                "NULL stream",
                f"{_copy(copy)} and the compute wait for each other: {_what(on_null)} is on the NULL stream, and "
                f"{_what(on_blocking)} on a blocking stream. Make the streams non-blocking, and use none without a name",
                copy.site or copy.near,
            )
        if copy.stream == late.stream or copy.stream == first.stream:
            stream = "the NULL stream, CUDA's default" if copy.stream == LEGACY else "one stream"
            words = f"{_copy(copy)} and the compute are on {stream}, so they run one after the other"
        else:
            words = f"{_copy(copy)} stands behind compute on its stream"
        return Finding("same stream", f"{words}. Copy on a non-blocking stream of its own", copy.site or copy.near)

    def _also_pageable(self, copy: Call) -> Iterator[Finding]:
        if copy.pageable:
            yield _pageable(copy, self.look, copy.near)


class _Edge(NamedTuple):
    """`after` may not start before `before` has ended, for this reason."""

    kind: Literal["stream", "event", "null"]
    before: Call
    after: Call


def _kept(hold: Held, calls: Sequence[Call], look: Look) -> Iterator[Finding]:
    """Say what kept the thread of the loop, though it should have only started something."""
    stuck = hold.stuck
    if stuck is None or not stuck.freed or stuck.call is None:
        return
    call = next(call for call in calls if call.serial == stuck.call)
    held = "compute" if hold.what == "compute" else f"the copy {_NAMES[hold.what]}"
    if call.kind == "memory":
        if _is_usual(call, calls, look):
            yield _memory_call(call, held, stuck.site)
    elif call.kind == "copy" and hold.what == call.direction and call.pageable and call.nbytes >= look.smallest:
        yield _pageable(call, look, stuck.site)


def _is_usual(call: Call, calls: Sequence[Call], look: Look) -> bool:
    """Tell whether the loop makes this call when nothing is held, too."""
    return any(other.function == call.function and other.step < look.steps for other in calls)


def _both_directions(look: Look, held: Mapping[str, Held], calls: Sequence[Call]) -> Iterator[Finding]:
    """Say that the directions wait for each other, where both are on one stream and nothing of one was done beside the other."""
    streams: dict[Direction, set[int | None]] = {
        direction: {call.stream for call in calls if _is_large(call, look) and call.direction == direction}
        for direction in ("h2d", "d2h")
    }
    if not streams["h2d"] & streams["d2h"]:
        return
    total = 0.0
    for holding, other in (("h2d", "d2h"), ("d2h", "h2d")):
        hold = held[holding]
        batch = look.nbytes[other][0]  # type: ignore[index]  # Both are directions.
        done = 0
        for call in calls:
            if not _is_large(call, look) or call.direction != other:
                continue
            if call.serial >= hold.end or (call.serial >= hold.start and not call.done):
                break
            done += call.nbytes
        first = min(hold.gates.values())
        before = sum(call.nbytes for call in calls if _is_large(call, look) and call.direction == holding and call.serial < first)
        total += done / batch - 1 - before / look.nbytes[holding][0]  # type: ignore[index]  # As above.
    if total < -ROUNDING:
        one = next(call for call in calls if _is_large(call, look) and call.direction == "h2d" and call.stream in streams["d2h"])
        two = next(call for call in calls if _is_large(call, look) and call.direction == "d2h" and call.stream == one.stream)
        yield Finding(
            "one stream for both directions",
            f"{_copy(one)} and {_copy(two)} are on one stream, so neither runs beside the other. Use a stream for each direction",
            one.site or one.near,
        )


def _path(call: Call, hold: Held, calls: Sequence[Call]) -> list[_Edge] | None:
    """Return why a call waits for what is held: edges from something held to the call, a shortest way. None: it does not."""
    before = _Order(hold, calls)
    if before.is_held(call):
        return []
    ways: deque[tuple[Call, list[_Edge]]] = deque([(call, [])])
    seen = {call.serial}
    while ways:
        at, way = ways.popleft()
        for edge in before.edges(at):
            if edge.before.serial in seen:
                continue
            seen.add(edge.before.serial)
            longer = [edge, *way]
            if before.is_held(edge.before):
                return longer
            ways.append((edge.before, longer))
    return None


@final
class _Order:
    """What each call since the start of a hold waits for."""

    def __init__(self, hold: Held, calls: Sequence[Call]) -> None:
        self._gates = hold.gates
        self._calls = [call for call in calls if hold.start <= call.serial < hold.end]

    def is_held(self, call: Call) -> bool:
        """Tell whether the call enqueued something on a stream that is held, behind the gate."""
        return _enqueues(call) and call.stream in self._gates and call.serial >= self._gates[call.stream]

    def edges(self, call: Call) -> Iterator[_Edge]:
        if call.kind == "memory" or call.kind == "sync device":
            yield from (_Edge("stream", last, call) for last in self._last_of_each(call, lambda _: True))
            return
        if call.kind in ("wait", "sync event"):
            record = self._last(call, lambda other: other.kind == "record" and other.event == call.event)
            if record is not None:
                yield _Edge("event", record, call)
            if call.kind == "sync event":
                return
        last = self._last(call, lambda other: other.stream == call.stream)
        if last is not None:
            yield _Edge("stream", last, call)
        if call.stream == LEGACY:
            yield from (_Edge("null", last, call) for last in self._last_of_each(call, lambda other: other.blocking))
        elif call.blocking:
            null = self._last(call, lambda other: other.stream == LEGACY)
            if null is not None:
                yield _Edge("null", null, call)

    def _last(self, call: Call, suits: Callable[[Call], bool]) -> Call | None:
        found = None
        for other in self._calls:
            if other.serial >= call.serial:
                break
            if _enqueues(other) and suits(other):
                found = other
        return found

    def _last_of_each(self, call: Call, suits: Callable[[Call], bool]) -> Iterator[Call]:
        last = {
            other.stream: other
            for other in self._calls
            if other.serial < call.serial and _enqueues(other) and other.stream != LEGACY and suits(other)
        }
        if call.stream != LEGACY:
            last |= {other.stream: other for other in self._calls if other.serial < call.serial and other.stream == LEGACY}
        yield from last.values()


def _enqueues(call: Call) -> bool:
    return call.kind in ("launch", "copy", "set", "record", "wait") and call.stream is not None


def _computed(hold: Held, look: Look) -> int:
    """Return how many steps' compute was done, counted from the look on, up to the first that was not."""
    step = hold.first_step
    while step in hold.computed and (step < hold.first_step + hold.steps or hold.launched.get(step, 0) >= look.launches):
        step += 1
    return step


def _is_large(call: Call, look: Look) -> bool:
    return call.kind == "copy" and call.direction is not None and call.nbytes >= look.smallest


def _memory_call(call: Call, held: str, at: Site | None) -> Finding:
    return Finding(
        "memory call",
        f"{call.function} at {_where(call, at)} waits until the device has nothing to do, and with it the loop, for {held}. "
        "Allocate, free and page-lock before the loop",
        call.site or at,
    )


def _pageable(call: Call, look: Look, at: Site | None) -> Finding:
    source = "reads" if call.direction == "h2d" else "writes"
    return Finding(
        "pageable memory",
        f"{_copy(call)} {source} pageable host memory: {call.function} returns only when the driver has copied it, and the loop "
        "launches nothing meanwhile. Use pinned memory",
        call.site or at,
    )


def _copy(call: Call) -> str:
    direction = "" if call.direction is None else f" {_NAMES[call.direction]}"
    return f"the copy of {in_words(call.nbytes)}{direction} at {_where(call)}"


def _what(call: Call) -> str:
    if call.kind == "copy":
        return _copy(call)
    return f"{'work launched' if call.kind == 'launch' else call.function} at {_where(call)}"


def _where(call: Call, at: Site | None = None) -> str:
    if call.site is not None:
        return str(call.site)
    near = at or call.near
    # A thread may get to it late, when the loop has gone on.
    return "an unknown place" if near is None else f"a thread of the framework's own, asked at {near} or earlier"
