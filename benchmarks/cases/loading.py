"""Loading a state onto the device: from the system's cache, for the first time in a process, again and again, and from a disk.

Question: how fast is a model there, and how much memory does that take?

Isolated: `xferlib.load` of one `.safetensors` file of 300 arrays, 4 GiB together; with `--size` other ones, of 2,000 arrays above
4 GiB. "warm" and "first": the file is in /dev/shm where that has room, else in the system's cache (XFERLIB_BENCHMARK_FOLDER names
a folder). "first" is a load in a process of its own, whose pools are empty, after its imports and the device's start. "cold": the
file is on a disk, in the system's folder for temporary files, and the cache has forgotten it; where that is no disk there is no
such row. The limit is what eight threads read into memory that is there: from the cache, and for "cold" past it. The peers put the
same arrays onto the same device: safetensors for the framework or for NumPy, `torch.load`, Orbax, each from a file of its format.

Method: three rounds of each, one above 4 GiB, and one more that is not timed for "warm" and "pinned". Every byte of the first round
is compared. `details` has the anonymous memory that the process took beside what it had, and `anonymous_mib_of_peers` that of the
others.

Command: python benchmarks/run.py --case loading --backend jax --json --size 4GiB
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import final

import xferlib
from benchmarks import ours, records, states
from benchmarks.bench import Bench, Case
from benchmarks.harness import Timing
from benchmarks.peers.state_calls import Loader, loaders, open_format
from benchmarks.records import Record
from benchmarks.states import MIB
from benchmarks.ways import Corrupted
from xferlib import Stager

__all__ = ["CASE"]

NAME = "loading"
NBYTES, BRIEF_NBYTES = 4 << 30, 1 << 30
QUICK_LEAVES, QUICK_NBYTES = 6, 12 << 20
ROUNDS, QUICK_ROUNDS = 3, 2
LABELS = ("warm", "first", "pinned", "cold")
CHILD_SECONDS = 600
ROOT = Path(__file__).resolve().parents[2]


def run(bench: Bench) -> Iterator[Record]:
    """Yield a record for each size and state of the cache."""
    for nbytes in bench.sizes or (QUICK_NBYTES if bench.quick else BRIEF_NBYTES if bench.brief else NBYTES,):
        count = QUICK_LEAVES if bench.quick else states.leaves_of(nbytes)
        size = states.split(nbytes, count)
        for on_disk in (False, True):
            with bench.open_stager() as stager:
                wanted = [
                    label
                    for label in LABELS
                    if (label == "cold") is on_disk and (NAME, stager.name, "h2d", count * size, label) not in bench.done
                ]
                if wanted:
                    yield from _Loads(bench, stager, count, size).measured(wanted, on_disk)


@final
class _Loads:
    """The loads of one state."""

    def __init__(self, bench: Bench, stager: Stager, count: int, size: int) -> None:
        self._bench = bench
        self._stager = stager
        self._count = count
        self._size = size
        self._nbytes = count * size
        self._rounds = bench.count(QUICK_ROUNDS, ROUNDS if self._nbytes <= NBYTES else 1, fewest=1)

    def measured(self, labels: list[str], on_disk: bool) -> Iterator[Record]:
        """Write the files, and yield a record for each label."""
        contenders = [ours.loader(self._stager), *self._peers()]
        kinds = len({one.kind for one in contenders})
        with tempfile.TemporaryDirectory(dir=states.folder_with((kinds + 1) * self._nbytes, on_disk=on_disk)) as place:
            files = self._written(Path(place), contenders)
            for label in labels:
                if label == "cold":
                    try:
                        states.drop_cache(files["safetensors"])
                        states.read_bare(files["safetensors"], direct=True)
                    except OSError as error:
                        self._bench.absences.add(f"{NAME}: cold", error)
                        continue
                if label == "pinned":
                    try:
                        pinned = xferlib.pin_files(files["safetensors"], self._stager)
                    except (xferlib.AllocationError, xferlib.CapabilityError) as error:
                        self._bench.absences.add(f"{NAME}: pinned", error)
                        continue
                    with pinned:
                        yield self._row(label, contenders[:1], files)
                    continue
                yield self._row(label, [one for one in contenders if one.kind in files], files)

    def _row(self, label: str, contenders: list[Loader], files: dict[str, Path]) -> Record:
        timings, limit = {one.name: Timing() for one in contenders}, Timing()
        anonymous = dict.fromkeys(timings, 0.0)
        measure = self._first if label == "first" else partial(self._here, cold=label == "cold")
        for index in range(-1 if label in ("warm", "pinned") else 0, self._rounds):
            for one in list(contenders):
                self._bench.effort.between()
                try:
                    seconds, mib = measure(one, files[one.kind], index)
                except Corrupted:
                    raise
                except Exception as error:
                    if one is contenders[0]:
                        raise
                    self._bench.absences.add(f"{one.name}, {label}", error)
                    contenders.remove(one)
                    del timings[one.name], anonymous[one.name]
                    continue
                if index >= 0:
                    timings[one.name].add([seconds])
                    anonymous[one.name] = max(anonymous[one.name], round(mib, 1))
                    shown = f"{one.name} {seconds:.2f} s, {mib:.0f} MiB"
                    self._bench.say(f"{NAME}: {label}, {self._nbytes / 2**30:.3g} GiB, round {index + 1}: {shown}")
            if index >= 0:
                if label == "cold":
                    states.drop_cache(files["safetensors"])
                limit.add([states.read_bare(files["safetensors"], direct=label == "cold")])
        mine = ours.NAME
        return records.make(
            self._bench,
            case=NAME,
            backend=self._stager.name,
            direction="h2d",
            nbytes=self._nbytes,
            label=label,
            ours=timings[mine],
            limit=limit,
            peers={name: timing for name, timing in timings.items() if name != mine},
            details={
                "arrays": self._count,
                "anonymous_mib": anonymous[mine],
                "anonymous_mib_of_peers": {name: mib for name, mib in anonymous.items() if name != mine},
                "folder": str(files["safetensors"].parent.parent),
            },
        )

    def _here(self, one: Loader, path: Path, index: int, *, cold: bool) -> tuple[float, float]:
        """Load in this process; return the seconds, and MiB of anonymous memory."""
        if cold:
            states.drop_cache(path)
        memory = states.Anonymous()
        with memory.watch():
            begin = perf_counter()
            found = one.load(path)
            seconds = perf_counter() - begin
        if index <= 0:
            states.verify(one.name, "h2d", ((name, one.host(array)) for name, array in found.items()), self._count, self._size)
        return seconds, memory.peak_nbytes / MIB

    def _first(self, one: Loader, path: Path, _: int) -> tuple[float, float]:
        """Load in another process. It compares each time."""
        command = [sys.executable, "-m", "benchmarks.fresh_load", self._stager.name, one.name, str(path)]
        # JAX in this process has taken most of the device's memory.
        environment = {
            **os.environ,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }
        done = subprocess.run(
            [*command, str(self._count), str(self._size)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=CHILD_SECONDS,
            check=False,
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            raise (Corrupted if "Corrupted" in "".join(last) else RuntimeError)("".join(last))
        figures: dict[str, float] = json.loads(done.stdout)
        return figures["seconds"], figures["anonymous_nbytes"] / MIB

    def _peers(self) -> Iterator[Loader]:
        for name, opener in loaders(self._stager.name).items():
            try:
                yield opener()
            except Exception as error:
                self._bench.absences.add(name, error)

    def _written(self, place: Path, contenders: list[Loader]) -> dict[str, Path]:
        """Write a file of each kind that there is a loader for, and return the paths."""
        arrays = {str(index): states.source(index, self._size) for index in range(self._count)}
        files: dict[str, Path] = {}
        for kind in dict.fromkeys(one.kind for one in contenders):
            path = place / f"state.{kind}"
            try:
                written = open_format(kind)
                path = place / f"state{written.suffix}"
                written.write(path, arrays)
            except Exception as error:
                if kind == "safetensors":
                    raise
                self._bench.absences.add(f"files of {kind}", error)
                shutil.rmtree(path, ignore_errors=True)
                continue
            files[kind] = path
        return files


CASE = Case(
    name=NAME,
    summary="a load of 4 GiB (1 where minutes are limited): from the cache, for the first time in a process, pinned, from a disk",
    run=run,
    seconds=50.0,
    resumes=True,
)
