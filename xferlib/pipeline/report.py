"""What a loop waited for, in seconds and in words.

The verdict rests on what the host can see: the time of the thread that iterates the source, and whether each copy was done when its
batch was taken. Work that the consumer has enqueued on the device and not waited for is not seen; where that matters, the words say
so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from xferlib.words import counted, doubt

__all__ = ["Bound", "Report", "of_drain", "of_prefetch", "of_stream"]

Bound: TypeAlias = Literal["source", "copy", "compute", "device", "consumer", "nothing yet"]

HARDLY = 0.1
"""Share of the time below which somebody counts as never waiting."""
IDLE = 0.05
"""Share of the time below which a consumer does nothing itself but enqueue."""


@final
@dataclass(frozen=True, kw_only=True)
class Report:
    """The state of a loop at one moment. `str()` of it is for people.

    Attributes:
        batches: Taken by the consumer so far, the first among them.
        seconds: Since the consumer asked for the second: the first pays for what is done once, and tells nothing of the others.
        bound: What the loop would be faster with more of; "device": compute or the copies to the host, which the host cannot tell
            apart.
        parts: Seconds by what was done or waited for; the words name each.
        words: The same in sentences, the verdict first.
    """

    batches: int
    seconds: float
    bound: Bound
    parts: Mapping[str, float]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.words)


def of_prefetch(
    *,
    batches: int,
    late: int,
    taker: Mapping[str, float],
    thread: Mapping[str, float],
    first: float,
    reader_waits: int,
) -> Report:
    """Judge a prefetch. `batches`: taken in all. Everything else, except `first`, is since the second was asked for.

    `late`: batches that waited in the queue and whose copy was not done yet when they were taken. `taker`: seconds in "wait"
    (inside `next`) and "work" (outside). `thread`: in "source", "slot" (the source's wait for one), "start" (putting), "copy"
    (waiting because `depth` copies are under way), "read" (waiting because a copy reads what the source would rewrite) and
    "place". `first`: seconds of the first batch, from when it was asked for. `reader_waits`: puts that had to wait on the device
    for the readers of an older batch.
    """
    seconds = sum(taker.values())
    parts = {**dict.fromkeys(("wait", "work", "source", "slot", "copy", "read", "start", "place"), 0.0), **taker, **thread}
    if batches < 2:
        return _nothing_yet(batches, "batch", parts)
    bound = _bound_of_prefetch(parts, batches - 1, reader_waits)
    advice = _ADVICE[bound]
    if bound == "compute" and not reader_waits and parts["wait"] > HARDLY * seconds:
        advice += _UNEVEN
    words = [f"{bound}-bound: {advice}"]
    words.append(
        f"{counted(batches - 1, 'batch', 'batches')} in {seconds:.3f} s, after a first one that took {first:.3f} s and is "
        f"not counted; the consumer waited {_share(parts['wait'], seconds)} for them; "
        f"{late} came out of the queue before the copy was done"
    )
    total = sum(thread.values())
    words.append(
        f"the source took {_share(parts['source'], total)} of its thread's time, putting {_share(parts['start'], total)}, waiting "
        f"for copies {_share(parts['copy'] + parts['read'] + parts['slot'], total)}, waiting for the consumer "
        f"{_share(parts['place'], total)}"
    )
    if reader_waits:
        words.append(
            f"{counted(reader_waits, 'put')} waited on the device for a reader of an older batch: device_limit was reached"
        )
    elif bound != "compute" and parts["work"] < IDLE * seconds:
        words.append("the consumer never waited for its own work on the device: that may be further behind, unseen here")
    return Report(batches=batches, seconds=seconds, bound=bound, parts=parts, words=(*words, *doubt(seconds, "batches")))


def of_drain(*, batches: int, late: int, taker: Mapping[str, float], first: float) -> Report:
    """Judge a drain. `taker`: seconds in "launch" (asking for results), "wait" (for the device) and "work" (outside).

    The others as for `of_prefetch`.
    """
    seconds = sum(taker.values())
    parts = {"launch": 0.0, "wait": 0.0, "work": 0.0, **taker}
    if batches < 2:
        return _nothing_yet(batches, "result", parts)
    bound: Bound = "device"
    # The device works beside this thread: it is waited for only if it takes longer.
    if parts["wait"] < HARDLY * seconds:
        bound = "source" if parts["launch"] >= parts["work"] else "consumer"
    words = (
        f"{bound}-bound: {_DRAIN_ADVICE[bound]}",
        f"{counted(batches - 1, 'result')} in {seconds:.3f} s, after a first one that took {first:.3f} s and is not counted: "
        f"asking for them took {_share(parts['launch'], seconds)}, waiting for the device {_share(parts['wait'], seconds)}, the "
        f"consumer's own work {_share(parts['work'], seconds)}; not done when it came for it: {counted(late, 'result')}",
        *doubt(seconds, "batches"),
    )
    return Report(batches=batches, seconds=seconds, bound=bound, parts=parts, words=words)


def _nothing_yet(taken: int, what: str, parts: Mapping[str, float]) -> Report:
    words = f"one {what} was taken, and the first tells nothing of the others" if taken else f"no {what} was taken yet"
    return Report(batches=taken, seconds=0.0, bound="nothing yet", parts=dict.fromkeys(parts, 0.0), words=(words,))


def _bound_of_prefetch(parts: Mapping[str, float], batches: int, reader_waits: int) -> Bound:
    # Of the source's thread and the consumer, the one that waits more for the other is not what the loop waits for.
    if parts["place"] > parts["wait"]:
        return "compute"
    # The copies run beside the source's thread, which waits for them only if they take longer than all that it does itself.
    behind = parts["copy"] + parts["slot"]
    # What the thread does itself, or stands still for, adds up: the largest part counts.
    putting = parts["start"] + parts["read"]
    if behind <= HARDLY * (parts["source"] + behind + putting + parts["place"]) and putting <= parts["source"]:
        return "source"
    # A put that waits for memory that is still read waits for the work that reads it.
    return "copy" if 2 * reader_waits < batches else "compute"


def _share(part: float, whole: float) -> str:
    return f"{part:.3f} s ({part / whole:.0%})" if whole > 0 else f"{part:.3f} s"


_ADVICE: Mapping[Bound, str] = {
    "source": "batches come too slowly. More workers, or less work for each batch",
    "copy": "the copies to the device take longest. Fewer bytes, or batches written into pinned memory if they are not",
    "compute": "the source and the copies wait for the consumer",
}
_UNEVEN = ", though it waits for them, too: batches or steps take unequal times, which a greater depth= may even out"
_DRAIN_ADVICE: Mapping[Bound, str] = {
    "device": "results are waited for; whether for compute or for the copies to the host cannot be told from here",
    "source": "asking for results takes longest, that is what launches the work",
    "consumer": "results wait for the consumer's own work",
}


def of_stream(before: Report, after: Report) -> Report:
    """Judge a prefetch, `before`, and the drain `after` it as one."""
    if after.bound == "nothing yet":
        return after
    # Unless the prefetch waits for the consumer, what comes after it does not count.
    bound: Bound = after.bound if before.bound == "compute" else before.bound
    if bound == "source" and before.bound == "compute":
        bound = "compute"
    parts = {
        **{f"in.{phase}": seconds for phase, seconds in before.parts.items()},
        **{f"out.{phase}": seconds for phase, seconds in after.parts.items()},
    }
    words = (f"{bound}-bound", *(f"in: {line}" for line in before.words), *(f"out: {line}" for line in after.words))
    return Report(batches=after.batches, seconds=after.seconds, bound=bound, parts=parts, words=words)
