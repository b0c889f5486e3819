"""Saving a training state while the loop goes on, beside threads that only write, and beside what others do.

Question: for how long is a training loop held up by a save, what does the save do to its steps, how fast is the file there, and how
much memory does it take?

Isolated: `xferlib.save`. 300 arrays, 4 GiB together, are on the device; with `--size` other states, of 2,000 arrays above 4 GiB.
They go to a file in /dev/shm where that has room for two, so that no disk is measured (XFERLIB_BENCHMARK_FOLDER names another).
Another thread launches a short step, waits for the step before, and goes on. The limit is what as many threads write by calls to
the same folder from memory that is there. The peers are what a loop does otherwise: `get` of all, handed to safetensors; the
framework's own copies to the host, handed to safetensors; Orbax, which goes on in the background as a save does; `torch.save` of
the same memory.

Method: three rounds of each, one above 4 GiB, from the call until the file has its name. This is `seconds`. Every byte of the first
file of each is compared, and of each of ours. `details` has the time of the call itself, for which the loop is held up, also for a
snapshot; the steps of the other thread, quiet, beside saves and beside the first peer; the pinned memory that the saves took, and
the anonymous memory that the process took beside what it had, pinned memory in it or not as the driver has it. `beside_peers` has
the same figures of the others.

Command: python benchmarks/run.py --case saving --backend jax --json --size 4GiB --size 20GiB
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import xferlib
from benchmarks import ours, records, states
from benchmarks.bench import Bench, Case
from benchmarks.harness import Timing
from benchmarks.peers.state_calls import Finish, Saver, State, read_safetensors, savers
from benchmarks.records import Record
from benchmarks.short_steps import ShortSteps, figures
from benchmarks.states import MIB
from benchmarks.ways import Corrupted
from xferlib import Stager

__all__ = ["CASE"]

NAME = "saving"
NBYTES = 4 << 30
QUICK_LEAVES, QUICK_NBYTES = 6, 12 << 20
ROUNDS, QUICK_ROUNDS = 3, 2
QUIET_SECONDS, QUICK_QUIET_SECONDS = 1.0, 0.05
PINNED = 512 << 20
"""Bytes: more than a save takes."""
WAITS = "get, then safetensors"


def run(bench: Bench) -> Iterator[Record]:
    """Yield a record for each size."""
    for nbytes in bench.sizes or (QUICK_NBYTES if bench.quick else NBYTES,):
        count = QUICK_LEAVES if bench.quick else states.leaves_of(nbytes)
        size = states.split(nbytes, count)
        label = f"{count} arrays"
        with bench.open_stager(pinned_limit=count * size + PINNED) as stager:
            if (NAME, stager.name, "d2h", count * size, label) not in bench.done:
                yield _measured(bench, stager, count, size, label)


def _measured(bench: Bench, stager: Stager, count: int, size: int, label: str) -> Record:
    state = states.uploaded(bench.device, count, size)
    rounds = bench.count(QUICK_ROUNDS, ROUNDS if count * size <= NBYTES else 1, fewest=1)
    limit, steps = Timing(), ShortSteps(bench)
    quiet = steps.beside(lambda: time.sleep(QUICK_QUIET_SECONDS if bench.quick else QUIET_SECONDS))
    folder = states.folder_with(2 * count * size)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place, "state.safetensors")
        runs = [_Run(saver, Path(place, "state")) for saver in _able(bench, stager)]
        mine, pinned = runs[0], 0
        for index in range(rounds):
            for run in list(runs):
                bench.effort.between()
                before = stager.stats().pinned_nbytes
                try:
                    run.measure(state, steps, index, count, size)
                except Corrupted:
                    raise
                except Exception as error:
                    if run is mine:
                        raise
                    bench.absences.add(run.name, error)
                    runs.remove(run)
                    continue
                if run is mine:
                    pinned = max(pinned, stager.stats().pinned_nbytes - before)
                bench.say(f"{NAME}: {label}, {count * size / 2**30:.3g} GiB, round {index + 1}: {run}")
            limit.add([states.write_bare(Path(place, "bare"), count * size)])
        snapshots = _snapshot_calls(stager, state, path, rounds)
    of_mine = mine.figures()
    details: dict[str, Any] = {
        "call_ms": of_mine["call_ms"],
        **({"snapshot_call_ms": round(1e3 * statistics.median(snapshots), 3)} if snapshots else {}),
        "pinned_mib": round(pinned / MIB, 1),
        "anonymous_mib": of_mine["anonymous_mib"],
        "folder": place.rpartition("/")[0],
        **{f"quiet_step_{name}_us": value for name, value in figures(quiet).items()},
        **{f"step_beside_save_{name}_us": value for name, value in figures(mine.beside).items()},
        **{
            f"step_beside_peer_{name}_us": value for run in runs if run.name == WAITS for name, value in figures(run.beside).items()
        },
        "beside_peers": {run.name: run.figures() for run in runs[1:]},
    }
    return records.make(
        bench,
        case=NAME,
        backend=stager.name,
        direction="d2h",
        nbytes=count * size,
        label=label,
        ours=mine.timing,
        limit=limit,
        peers={run.name: run.timing for run in runs[1:]},
        details=details,
    )


@final
class _Run:
    """What is measured of one way to save."""

    def __init__(self, saver: Saver, stem: Path) -> None:
        self.name = saver.name
        self.timing = Timing()
        self.beside: list[float] = []
        self._saver = saver
        self._stem = stem
        self._calls: list[float] = []
        self._anonymous = 0

    def measure(self, state: State, steps: ShortSteps, index: int, count: int, size: int) -> None:
        """Save once, beside steps, and verify. The file is gone afterwards."""
        path = self._stem.with_suffix(".safetensors" if self._saver.read is read_safetensors else "")
        memory = states.Anonymous()

        def save() -> None:
            begin = time.perf_counter()
            finish = self._saver.save(path, state)
            self._calls.append(time.perf_counter() - begin)
            finish()
            self.timing.add([time.perf_counter() - begin])

        with memory.watch():
            self.beside += steps.beside(save)
        self._anonymous = max(self._anonymous, memory.peak_nbytes)
        try:
            if index == 0 or self.name == ours.NAME:
                states.verify(self.name, "d2h", self._saver.read(path), count, size)
        finally:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def figures(self) -> dict[str, float]:
        """Return what was measured beside the time."""
        found = {f"step_beside_{name}_us": value for name, value in figures(self.beside).items()}
        return {
            "call_ms": round(1e3 * statistics.median(self._calls), 3),
            "anonymous_mib": round(self._anonymous / MIB, 1),
            **found,
        }

    def __str__(self) -> str:
        shown = self.figures()
        steps = f", steps {shown['step_beside_median_us']:.0f} us, p99 {shown['step_beside_p99_us']:.0f}" if self.beside else ""
        return f"{self.name} {self.timing.median:.2f} s, call {shown['call_ms']:.1f} ms, {shown['anonymous_mib']:.0f} MiB{steps}"


def _able(bench: Bench, stager: Stager) -> list[Saver]:
    """Return ours, a get that is written by safetensors, and the others that can be opened."""
    from safetensors.numpy import save_file

    def save(path: Path, state: State) -> Finish:
        return xferlib.save(path, state, stager).result

    def wait(path: Path, state: State) -> Finish:
        save_file(stager.get(dict(state)).result(), path)
        return lambda: None

    found = [Saver(name=name, save=call, read=read_safetensors) for name, call in ((ours.NAME, save), (WAITS, wait))]
    for name, opener in savers(stager.name).items():
        try:
            found.append(opener())
        except Exception as error:
            bench.absences.add(name, error)
    return found


def _snapshot_calls(stager: Stager, state: State, path: Path, rounds: int) -> list[float]:
    """Return the seconds that the call of a save takes, and `wait_read`, where the arrays are copied on the device first."""
    found: list[float] = []
    # What is compiled for it is, by the second.
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        try:
            save = xferlib.save(path, state, stager, snapshot=True)
        except xferlib.CapabilityError:
            return []
        save.wait_read()
        found.append(time.perf_counter() - begin)
        save.result()
    return found[1:]


CASE = Case(
    name=NAME,
    summary="a save of 4 GiB in 300 arrays beside a loop, threads that only write, and what others do",
    run=run,
    seconds=50.0,
    resumes=True,
)
