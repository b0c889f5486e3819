"""Saving a training state while the loop goes on, beside threads that only write, and beside a get that is written by safetensors.

Question: for how long is a training loop held up by a save, what does the save do to its steps, and how fast is the file there?

Isolated: `xferlib.save`. 300 arrays, 4 GiB together, are on the device. They go to a file in /dev/shm where that has room, so that
no disk is measured (XFERLIB_BENCHMARK_FOLDER names another). Another thread launches a short step, waits for the step before,
and goes on. The limit is what as many threads write to the same folder from memory that is there. The peer takes all of it to the
host and hands it to safetensors, as a loop does that waits.

Method: three rounds of each, from the call until the file has its name. This is `seconds`. Every byte of each file of ours is
compared, as safetensors reads it. `details` has the time of the call itself, for which the loop is held up, the steps of the other
thread, quiet, beside saves and beside the peer, and the pinned memory that the saves took.

Command: python benchmarks/run.py --case saving --backend jax --json
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import xferlib
from benchmarks import ours, records
from benchmarks.bench import Bench, Case
from benchmarks.harness import Timing
from benchmarks.records import Record
from benchmarks.short_steps import ShortSteps, figures
from benchmarks.ways import Corrupted

__all__ = ["CASE"]

NAME = "saving"
LEAVES, QUICK_LEAVES = 300, 6
NBYTES, QUICK_NBYTES = 4 << 30, 12 << 20
ROUNDS, QUICK_ROUNDS = 3, 2
QUIET_SECONDS, QUICK_QUIET_SECONDS = 1.0, 0.05
PINNED = 512 << 20
"""Bytes: more than a save takes."""
SHARED_MEMORY = Path("/dev/shm")
PIECE = 16 << 20


def run(bench: Bench) -> Iterator[Record]:
    """Yield one record."""
    from safetensors.numpy import load_file, save_file

    count, nbytes = (QUICK_LEAVES, QUICK_NBYTES) if bench.quick else (LEAVES, NBYTES)
    size = nbytes // count // 256 * 256
    sources = {f"{index}": np.full(size, 1 + index % 251, np.uint8) for index in range(count)}
    tree = {name: bench.device.upload(source) for name, source in sources.items()}
    mine, peer, limit = Timing(), Timing(), Timing()
    calls: list[float] = []
    beside: dict[str, list[float]] = {"save": [], "peer": []}
    steps = ShortSteps(bench)
    with (
        bench.open_stager(pinned_limit=count * size + PINNED) as stager,
        tempfile.TemporaryDirectory(dir=_folder(2 * nbytes)) as place,
    ):
        path = Path(place, "state.safetensors")

        def save() -> None:
            begin = time.perf_counter()
            saving = xferlib.save(path, tree, stager)
            calls.append(time.perf_counter() - begin)
            saving.result()
            mine.add([time.perf_counter() - begin])

        def wait() -> None:
            begin = time.perf_counter()
            save_file(stager.get(tree).result(), path)
            peer.add([time.perf_counter() - begin])

        quiet = steps.beside(lambda: time.sleep(QUICK_QUIET_SECONDS if bench.quick else QUIET_SECONDS))
        pinned = 0
        for index in range(bench.count(QUICK_ROUNDS, ROUNDS)):
            bench.say(f"{NAME}: {count} arrays, round {index + 1}")
            before = stager.stats().pinned_nbytes
            beside["save"] += steps.beside(save)
            pinned = max(pinned, stager.stats().pinned_nbytes - before)
            _verify(load_file(path), sources)
            path.unlink()
            beside["peer"] += steps.beside(wait)
            path.unlink()
            limit.add([_written(Path(place, "bare"), count * size)])
        details = {
            "call_ms": round(1e3 * statistics.median(calls), 3),
            "pinned_mib": round(pinned / (1 << 20), 1),
            "folder": place.rpartition("/")[0],
            **{f"quiet_step_{name}_us": value for name, value in figures(quiet).items()},
            **{f"step_beside_{kind}_{name}_us": value for kind, found in beside.items() for name, value in figures(found).items()},
        }
        yield records.make(
            bench,
            case=NAME,
            backend=stager.name,
            direction="d2h",
            nbytes=count * size,
            label=f"{count} arrays",
            ours=mine,
            limit=limit,
            peers={"get, then safetensors": peer},
            details=details,
        )


def _folder(nbytes: int) -> str | None:
    """Return where to write: None is the system's folder for temporary files."""
    chosen = os.environ.get("XFERLIB_BENCHMARK_FOLDER")
    if chosen is not None:
        return chosen
    if not SHARED_MEMORY.is_dir():
        return None
    found = os.statvfs(SHARED_MEMORY)
    return str(SHARED_MEMORY) if found.f_bavail * found.f_frsize > nbytes else None


def _written(path: Path, nbytes: int) -> float:
    """Write so many bytes by as many threads as a save has at most, and return the seconds."""
    source = memoryview(bytearray(PIECE))
    starts = iter(range(0, nbytes, PIECE))
    lock = threading.Lock()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)

    def write() -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            os.pwrite(descriptor, source[: min(PIECE, nbytes - start)], start)

    begin = time.perf_counter()
    threads = [threading.Thread(target=write) for _ in range(min(16, max(2, len(os.sched_getaffinity(0)))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.fsync(descriptor)
    seconds = time.perf_counter() - begin
    os.close(descriptor)
    path.unlink()
    return seconds


def _verify(found: dict[str, Any], sources: dict[str, Any]) -> None:
    """Compare every byte."""
    if set(found) != set(sources) or not all(np.array_equal(found[name], source) for name, source in sources.items()):
        raise Corrupted(f"{ours.NAME!r} said it was done, but the d2h target does not hold the source's bytes")


CASE = Case(name=NAME, summary="a save of 4 GiB in 300 arrays beside a loop, and threads that only write", run=run, seconds=35.0)
