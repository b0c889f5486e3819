"""Time copies beside compute: alone, together, in both orders, xferlib's and the framework's own.

A share is of the time that the copy takes alone: (copy + compute - together) / copy, where compute is made to take longer. It is a
measurement, with a spread; `assert_overlaps` and law 6 decide without a clock. No framework is named here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from xferlib.checks import positive_nbytes, whole_number
from xferlib.errors import AllocationError
from xferlib.memory.limits import available_memory
from xferlib.overlap.overlap_report import OverlapReport, OverlapRow, Spread
from xferlib.registry import workload_of
from xferlib.stager import Stager, check_stager
from xferlib.words import in_words
from xferlib.workload import CopiesItself, EdgeJob, EdgeSpec, FrameworkCopy, NamesStreams, Workload

__all__ = ["measure_overlap"]

GPU_NBYTES, CPU_NBYTES = 256 << 20, 16 << 20
SIDE = 512
"""Pixels. Frames of compute and of copies are squares of this side, of one byte a pixel."""
CPU_FRAMES = 1
"""Frames of compute on a CPU, where it takes hundreds of times as long as a copy of them."""
HOST_COPIES = 3
"""Arrays of the size of a copy that lie in host memory."""
LONGER = 1.3
"""How many times as long as the copy compute is made to take: then all of the copy can be hidden."""
MOST_LAUNCHED = 4000
"""Rounds of blur in one launch, at most."""
CORRECTIONS = 3
ENOUGH_SECONDS, FEWEST = 1.5, 5
"""Of fewer samples one would move a quartile."""
GET_AFTER_LAUNCH = (
    "a get waits for all that was enqueued before it on its stream. Start it before the next launch, as xferlib.drain does, or "
    "name the stream that made the array, as stream="
)


def measure_overlap(stager: Stager, *, device: int = 0, nbytes: int | None = None, rounds: int = 7) -> OverlapReport:
    """Measure how much of a copy is hidden under compute, by xferlib and by the framework's own calls, on this machine, now.

    `device` is the number that the stager was opened with. `nbytes`: bytes of a copy (None: 256 MiB on a GPU, 16 MiB on a CPU),
    rounded to frames of 256 KiB. `rounds`: how often each thing is timed. What is slow is timed less often, from five times on. It
    takes some seconds, pinned memory of twice and device memory of some five times `nbytes`; nobody else should use the device
    meanwhile.

    Raises `CapabilityError` for a backend without a `workload`, `BackendUnavailableError` where that cannot run, `AllocationError`.
    """
    check_stager(stager)
    rounds = whole_number(rounds, "rounds", least=1)
    wanted = positive_nbytes(nbytes, "nbytes") if nbytes is not None else GPU_NBYTES if stager.on_gpu else CPU_NBYTES
    if HOST_COPIES * wanted > available_memory():
        raise AllocationError(
            f"copies of {in_words(wanted)} need {in_words(HOST_COPIES * wanted)} of memory, and {in_words(available_memory())} are "
            "available. Use a smaller nbytes"
        )
    frames = max(1, round(wanted / SIDE**2))
    work = workload_of(stager.name)
    computed = frames if stager.on_gpu else min(frames, CPU_FRAMES)
    spec = EdgeSpec(frames=computed, height=SIDE, width=SIDE, channels=None, dtype=np.dtype(np.uint8), slots=1)
    with work.edge_job(spec, device=device) as job:
        bench = _Bench(stager, job, frames, computed)
        # An array of another device than the stager's is refused here, with the reason.
        stager.get(bench.images).result()
        rows = [_row(bench, copy, rounds, stager.on_gpu) for copy in _copies(bench, work)]
        job.synchronize()
    return OverlapReport(backend=stager.name, device=stager.device, on_gpu=stager.on_gpu, nbytes=frames * SIDE**2, rows=tuple(rows))


@final
class _Bench:
    """The job, the memory, and how long a launch takes."""

    def __init__(self, stager: Stager, job: EdgeJob, frames: int, computed: int) -> None:
        shape = (frames, SIDE, SIDE)
        pattern = np.resize(np.arange(251, dtype=np.uint8), shape)
        self.stager = stager
        self.job = job
        self.pageable: npt.NDArray[np.uint8] = pattern
        self.pinned = stager.empty_pinned(shape, np.uint8)
        self.pinned[...] = pattern
        self.out = stager.empty_pinned(shape, np.uint8)
        self.array = stager.put(self.pinned).result()
        # Compute reads what no copy touches.
        frame = stager.put(self.pinned[:computed]).result()
        self.images = job.launch(frame, 0, rounds=1)
        job.synchronize()
        self._frame = frame

    def launch(self, rounds: int, copy: FrameworkCopy) -> None:
        with copy.launch_on():
            self.job.launch(self._frame, 0, rounds=rounds)

    def wait(self, copy: FrameworkCopy) -> None:
        (copy.synchronize or self.job.synchronize)()

    def rounds_for(self, copy: FrameworkCopy, seconds: float) -> int:
        """Return the rounds of blur that take so long, or a little longer."""
        few, many = 1, 9
        base, more = (min(self.launched(rounds, copy) for _ in range(3)) for rounds in (few, many))
        slope = max((more - base) / (many - few), 1e-7)
        rounds = min(MOST_LAUNCHED, max(1, few + round((seconds - base) / slope)))
        for _ in range(CORRECTIONS):
            # Some rounds take less time than others: a framework may compile several as one.
            took = min(self.launched(rounds, copy) for _ in range(2))
            if took >= seconds:
                break
            rounds = min(MOST_LAUNCHED, max(rounds + 1, math.ceil(rounds * seconds / took)))
        return rounds

    def launched(self, rounds: int, copy: FrameworkCopy) -> float:
        """Return the seconds that so many rounds of blur take."""
        began = time.perf_counter()
        self.launch(rounds, copy)
        self.wait(copy)
        return time.perf_counter() - began


def _copies(bench: _Bench, work: Workload) -> Iterator[FrameworkCopy]:
    """Yield the copies to be measured: xferlib's, described as the framework's own are, and then those."""
    stager = bench.stager

    def put() -> Any:
        return stager.put(bench.pinned)

    def get() -> Any:
        return stager.get(bench.array, out=bench.out)

    def both() -> Any:
        return put(), get()

    def get_of(stream: object) -> Any:
        return stager.get(bench.array, out=bench.out, stream=stream)

    def wait(transfer: Any) -> None:
        transfer.synchronize()

    def wait_for_both(transfers: Any) -> None:
        for transfer in transfers:
            transfer.synchronize()

    # Where arrays carry their own order, a get waits for its array alone.
    why = GET_AFTER_LAUNCH if stager.capabilities.streams else ""
    yield FrameworkCopy(call="xferlib", direction="h2d", why="", start=put, finish=wait)
    yield FrameworkCopy(call="xferlib", direction="d2h", why=why, start=get, finish=wait)
    yield FrameworkCopy(call="xferlib", direction="both", why=why, start=both, finish=wait_for_both)
    if stager.capabilities.streams and hasattr(work, "idle_stream"):
        # What that says can be had: the array was made on a stream that has nothing more to do.
        idle = cast("NamesStreams", work).idle_stream()
        call = "xferlib, get(stream=idle)"
        yield FrameworkCopy(call=call, direction="d2h", why="", start=lambda: get_of(idle), finish=wait)
        yield FrameworkCopy(call=call, direction="both", why="", start=lambda: (put(), get_of(idle)), finish=wait_for_both)
    if hasattr(work, "framework_copies"):
        yield from cast("CopiesItself", work).framework_copies(bench.pageable, bench.pinned, bench.array)


def _row(bench: _Bench, copy: FrameworkCopy, rounds: int, on_gpu: bool) -> OverlapRow:
    _alone(copy)
    blur = bench.rounds_for(copy, LONGER * min(_alone(copy)[0] for _ in range(2)))
    _together(bench, copy, blur, copy_first=True)
    copied: list[float] = []
    computed: list[float] = []
    held: list[float] = []
    first: list[float] = []
    behind: list[float] = []
    began = time.perf_counter()
    while len(copied) < rounds and (len(copied) < FEWEST or time.perf_counter() - began < ENOUGH_SECONDS):
        seconds, call = _alone(copy)
        compute = bench.launched(blur, copy)
        copied.append(seconds)
        computed.append(compute)
        held.append(call)
        first.append((seconds + compute - _together(bench, copy, blur, copy_first=True)) / seconds)
        behind.append((seconds + compute - _together(bench, copy, blur, copy_first=False)) / seconds)
    return OverlapRow(
        call=copy.call,
        direction=copy.direction,
        copy_seconds=Spread.of(copied),
        compute_seconds=Spread.of(computed),
        call_seconds=Spread.of(held),
        copy_first=Spread.of(first),
        compute_first=Spread.of(behind),
        on_gpu=on_gpu,
        why=copy.why,
    )


def _alone(copy: FrameworkCopy) -> tuple[float, float]:
    """Return the seconds of a copy, and how many of them its call kept the caller."""
    began = time.perf_counter()
    started = copy.start()
    returned = time.perf_counter()
    copy.finish(started)
    ended = time.perf_counter()
    copy.renew()
    return ended - began, returned - began


def _together(bench: _Bench, copy: FrameworkCopy, blur: int, *, copy_first: bool) -> float:
    began = time.perf_counter()
    if copy_first:
        started = copy.start()
        bench.launch(blur, copy)
    else:
        bench.launch(blur, copy)
        started = copy.start()
    copy.finish(started)
    bench.wait(copy)
    ended = time.perf_counter()
    copy.renew()
    return ended - began
