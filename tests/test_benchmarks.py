"""The benchmarks run, leave valid records, and fail when a copy is wrong. How fast anything is belongs to them, not here."""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import xferlib
from tests import children
from tests.core.points import interrupted_at
from xferlib.protocol import HostStager
from xferlib.registry import open_backend

# Last: what is installed comes before the clone.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks import memory, plot, records, states
from benchmarks.arena import Arena, Batch
from benchmarks.cases import CASES
from benchmarks.command import run
from benchmarks.devices import open_device
from benchmarks.harness import Absences, Contender, Timing, able, sample
from benchmarks.ways import Corrupted, Direction, Way

ROOT = Path(__file__).resolve().parent.parent
LABELS = {
    "link": {
        *((kind, direction) for kind in ("pinned", "pageable") for direction in ("h2d", "d2h", "both")),
        ("fresh", "h2d"),
    },
    "overhead": {
        (label + arrays, direction)
        for label, direction in (("put(into=)", "h2d"), ("put()", "h2d"), ("put().value", "h2d"), ("get(out=)", "d2h"))
        for arrays in ("", ", same array")
    },
    "loop": {("in order", "h2d")},
    "drain": {("in order", "d2h")},
    "pageable": {("touched", "h2d"), ("touched", "d2h"), ("untouched", "d2h"), ("batches, in order", "h2d")},
    "sizes": {
        ("call", "h2d"),
        ("call", "d2h"),
        ("call, out=", "d2h"),
        *((f"loop, {how}", "h2d") for how in ("kept by the source", "rewrites=False", "made anew")),
        ("loop", "d2h"),
    },
    "leaves": {("20 leaves", "h2d")},
    "loaders": {
        (f"{regime}, {source}", "h2d")
        for regime in ("transfer-bound", "compute-bound")
        for source in ("pageable", "pinned slots", "2 workers")
    },
    "memory_kinds": {("pinned", "h2d"), ("pageable", "h2d"), ("mapped", "h2d")},
    "locking": {("fresh", "none"), ("touched", "none"), ("random arrays", "none")},
    "first_get": {("6 arrays", "d2h")},
    "saving": {("6 arrays", "d2h")},
    "loading": {("warm", "h2d"), ("first", "h2d"), ("pinned", "h2d"), ("cold", "h2d")},
    "devices": set(),
    "bystander": {
        (f"{kind} step beside staging{how}", "h2d") for kind in ("training", "Python") for how in ("", ", switch interval 1 ms")
    },
}
DIRECTIONS: dict[str, tuple[Direction, ...]] = {
    **dict.fromkeys(CASES, ("h2d", "d2h")),
    "loop": ("h2d",),
    "drain": ("d2h",),
    "leaves": ("h2d",),
    "loaders": ("h2d",),
    "memory_kinds": ("h2d",),
    "locking": (),
    "first_get": ("d2h",),
    "saving": ("d2h",),
    "loading": ("h2d",),
    "devices": (),
    "bystander": ("h2d",),
}
"""What the stager moves in each case."""
ALONE = {("pageable", "both"), ("mapped", "h2d"), *LABELS["locking"], *LABELS["first_get"], *LABELS["bystander"]}
ALONE |= LABELS["loaders"] | {("pinned", "h2d")}
"""Figures that no peer can stand beside."""


class ShortCopies:
    """The host backend, but copies of one direction leave out their last byte."""

    def __init__(self, direction: Direction) -> None:
        self._backend = open_backend("host")
        self._direction = direction

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def copy_h2d(self, dst: int, src: int, nbytes: int) -> None:
        self._backend.copy_h2d(dst, src, nbytes - (self._direction == "h2d"))

    def copy_d2h(self, dst: int, src: int, nbytes: int) -> None:
        self._backend.copy_d2h(dst, src, nbytes - (self._direction == "d2h"))


def open_short(direction: Direction, *, pinned_limit: int | None = None) -> xferlib.Stager:
    return xferlib.stager(cast("HostStager[Any]", ShortCopies(direction)), pinned_limit=pinned_limit)


def reads_past_the_cache() -> bool:
    """Tell whether temporary files are on a disk."""
    with tempfile.NamedTemporaryFile() as file:
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            return False
    return True


def benchmark(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *arguments]
    environment = {**os.environ, **variables}
    return children.run(command, seconds=100, env=environment)


@pytest.fixture(scope="module")
def quick_records(tmp_path_factory: pytest.TempPathFactory) -> list[records.Record]:
    file = tmp_path_factory.mktemp("results") / "host.json"
    done = benchmark("--quick", "--backend", "host", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "link: host on" in done.stdout
    measured: list[records.Record] = json.loads(file.read_text())
    return measured


def test_list_names_every_case() -> None:
    done = benchmark("--list")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(CASES)


def test_an_unknown_backend_is_told_in_one_line() -> None:
    done = benchmark("--quick", "--backend", "hots")
    assert done.returncode == 1
    assert done.stderr.startswith("cannot run: no installed package provides backend 'hots'")
    assert len(done.stderr.splitlines()) == 1


def test_quick_run_leaves_valid_records(quick_records: list[records.Record]) -> None:
    for record in quick_records:
        records.check(record)
        assert record["backend"] == "host"
        assert record["machine"]["cpu"]
        assert {"python", "numpy"} <= set(record["versions"])


@pytest.mark.parametrize("case", LABELS)
def test_quick_run_covers_every_label_and_direction(quick_records: list[records.Record], case: str) -> None:
    found = [record for record in quick_records if record["case"] == case]
    expected = LABELS[case] - (set() if reads_past_the_cache() else {("cold", "h2d")})
    assert {(record["label"], record["direction"]) for record in found} == expected
    # Each figure stands beside a peer, where there can be one.
    assert all(record["peers"] for record in found if (record["label"], record["direction"]) not in ALONE)


@pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
def test_arrays_that_cannot_be_written_to_leave_out_what_would(tmp_path: Path) -> None:
    file = tmp_path / "jax.json"
    cases = [argument for case in ("link", "loop", "drain", "sizes", "leaves") for argument in ("--case", case)]
    done = benchmark("--quick", "--backend", "jax", "--json", str(file), *cases, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    labels = {(record["label"], record["direction"]) for record in json.loads(file.read_text()) if record["case"] == "link"}
    assert labels == {
        ("pinned", "d2h"),
        ("fresh", "h2d"),
        ("fresh", "both"),
        ("pageable", "d2h"),
        ("pageable, new array", "h2d"),
        ("pageable, new array", "both"),
    }


@pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
def test_loaders_stand_beside_ours_or_are_named_as_absent(tmp_path: Path) -> None:
    file = tmp_path / "jax.json"
    done = benchmark("--quick", "--backend", "jax", "--json", str(file), "--case", "loaders", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    measured: list[records.Record] = json.loads(file.read_text())
    assert {(record["label"], record["direction"]) for record in measured} == LABELS["loaders"]
    for name in ("flax", "grain", "torch"):
        installed = find_spec(name) is not None
        assert (f"absent: {name} (not installed)" in done.stdout) is not installed
        assert all(any(peer.startswith(name) for peer in record["peers"]) is installed for record in measured)
    for record in measured:
        beside = {record["details"].get(name) for name in ("best_peer", "best_peer_over_ours")}
        assert (beside == {None}) is not bool(record["peers"])


@pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
def test_all_devices_stand_beside_one(tmp_path: Path) -> None:
    file = tmp_path / "jax.json"
    two = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = benchmark("--quick", "--backend", "jax", "--json", str(file), "--case", "devices", **two)
    assert done.returncode == 0, done.stderr
    measured: list[records.Record] = json.loads(file.read_text())
    assert [record["label"] for record in measured] == ["batches", "load"]
    for record in measured:
        assert record["details"]["devices"] == 2
        assert record["details"]["times_one"] == pytest.approx(2 * record["of_limit"], abs=0.001)
        assert any("jax device_put" in name or "jax.device_put" in name for name in record["peers"])


class ArraysOfTwo:
    """Two devices that are none: arrays stay where they are. What is divided may have a wrong byte; what one has is right."""

    def __init__(self, count: int, *, wrong: str = "", few: bool = False) -> None:
        self.count = count
        self.peers: dict[str, Any] = {}
        self.loaders: dict[str, Any] = {}
        self._wrong, self._few = wrong, few

    def place(self, batch: Any) -> Any:
        return batch.copy()

    @contextmanager
    def prefetched(self, batches: Iterable[Any]) -> Iterator[Iterator[Any]]:
        yield (self._of(batch, "batch") for batch in islice(batches, 1 if self._few else None))

    def load(self, path: Path) -> dict[str, Any]:
        with xferlib.stager("host") as stager:
            return {name: self._of(array, "file") for name, array in xferlib.load(path, stager).items()}

    def differ(self, batch: Any, expected: Any) -> Any:
        return (batch != expected).any()

    def _of(self, array: Any, what: str) -> Any:
        made = array.copy()
        made[-1] ^= self._wrong == what
        return made


class HostOfTwo:
    """The host's device, with what it is divided between."""

    def __init__(self, *both: ArraysOfTwo) -> None:
        self._device = open_device("host")
        self._both = both

    def shards(self) -> tuple[ArraysOfTwo, ...]:
        return self._both

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def measured_on(device: Any, file: Path) -> int:
    return run(partial(xferlib.stager, "host"), device, [CASES["devices"]], quick=True, json_file=str(file))


def test_one_device_divided_by_their_number_is_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    assert measured_on(HostOfTwo(ArraysOfTwo(1), ArraysOfTwo(2)), file) == 0
    found: list[records.Record] = json.loads(file.read_text())
    assert len(found) == 2
    for record in found:
        assert record["details"]["times_one"] == pytest.approx(2 * record["of_limit"], abs=0.001)


@pytest.mark.parametrize("fault", [{"wrong": "batch"}, {"wrong": "file"}, {"few": True}])
def test_devices_that_have_other_bytes_fail_the_run(
    fault: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "host.json"
    assert measured_on(HostOfTwo(ArraysOfTwo(1), ArraysOfTwo(2, **fault)), file) == 1
    assert not file.exists()
    assert "the h2d target does not hold the source's bytes" in capsys.readouterr().err


def test_where_there_is_one_device_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measured_on(HostOfTwo(), tmp_path / "host.json") == 0
    assert "absent: devices (LookupError: one device" in capsys.readouterr().out


def test_a_record_of_steps_says_how_many_were_verified(quick_records: list[records.Record]) -> None:
    for record in quick_records:
        if record["case"] in ("loop", "drain", "loaders"):
            details = record["details"]
            assert details["verified_steps"] == record["batch"] * record["seconds"]["n"]
            assert details["over_bound"] == pytest.approx(1 / record["of_limit"], rel=0.01)


def test_random_arrays_meet_their_limit(quick_records: list[records.Record]) -> None:
    (record,) = [record for record in quick_records if record["label"] == "random arrays"]
    details = record["details"]
    assert details["arrays"] == record["batch"] * record["seconds"]["n"]
    assert details["refused"] > 0
    # Nothing can be page-locked here.
    assert details["pinned_peak_nbytes"] == details["pinned_after_trim"] == 0


def test_every_step_beside_staging_is_in_the_histogram(quick_records: list[records.Record]) -> None:
    found = [record for record in quick_records if record["case"] == "bystander"]
    assert len(found) == 4
    for record in found:
        assert sum(record["details"]["histogram"]["staging"].values()) == record["seconds"]["n"]


@pytest.mark.parametrize(("case", "direction"), [(case, direction) for case in CASES for direction in DIRECTIONS[case]])
def test_a_copy_that_leaves_out_a_byte_fails_the_run(
    case: str, direction: Direction, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "host.json"
    status = run(partial(open_short, direction), open_device("host"), [CASES[case]], quick=True, json_file=str(file))
    assert status == 1
    assert not file.exists()
    assert f"the {direction} target does not hold the source's bytes" in capsys.readouterr().err


@pytest.fixture
def arena() -> Arena:
    return Arena.allocate(open_device("host"), 4 * 64, memory.empty_pageable)


def fresh_way(make: Callable[[Any], Any]) -> Way:
    return Way(
        name="made",
        direction="h2d",
        bind=lambda source, _: partial(make, source),
        synchronize=lambda _: None,
        result=lambda array: array,
        keep=None,
    )


def test_what_a_call_made_is_verified(arena: Arena) -> None:
    batch = Batch(fresh_way(np.copy), arena, nbytes=64, count=4, index=0)
    batch.kept.extend(call() for call in batch.calls)
    batch.verify()
    batch.kept[2] = batch.kept[1]
    with pytest.raises(Corrupted, match="'made' said it was done"):
        batch.verify()


def test_what_an_earlier_sample_left_does_not_pass(arena: Arena) -> None:
    earlier = Batch(fresh_way(np.copy), arena, nbytes=64, count=4, index=0)
    later = Batch(fresh_way(np.copy), arena, nbytes=64, count=4, index=1)
    later.kept.extend(call() for call in earlier.calls)
    with pytest.raises(Corrupted):
        later.verify()


def test_a_warm_sample_is_timed_and_verified_behind_another_of_other_bytes(arena: Arena) -> None:
    seen: list[int] = []

    def make(source: Any) -> Any:
        seen.append(int(source.ctypes.data) - int(arena.source("h2d").ctypes.data))
        return source.copy() if len(seen) <= 8 else ~source

    contender = Contender(name="made", ways=(fresh_way(make),), arena=arena)
    sample(contender, nbytes=64, count=4, index=0, warm=True)
    assert seen == [*range(4096, 4096 + 256, 64), *range(0, 256, 64)]
    seen[:] = [0] * 4
    with pytest.raises(Corrupted):
        sample(contender, nbytes=64, count=4, index=0, warm=True)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_no_byte_of_a_poisoned_target_is_right(arena: Arena, direction: Direction) -> None:
    way = open_device("host").raw(direction)
    batch = Batch(way, arena, nbytes=64, count=4, index=3)
    batch.poison()
    source = arena.source(direction)[3 * 4096 :][: 4 * 64]
    assert not np.any(arena.target(direction) == source)
    for call in batch.calls:
        call()
    batch.verify()


def test_a_peer_that_cannot_run_is_named_and_left_out(arena: Arena) -> None:
    way = open_device("host").raw("h2d")
    absences = Absences()
    contenders = [Contender(name=name, ways=(way,), arena=arena) for name in ("good", "broken")]

    def attempt(contender: Contender) -> None:
        if contender.name == "broken":
            raise RuntimeError("no device")

    assert [contender.name for contender in able(contenders, absences, attempt)] == ["good"]
    assert absences.reasons == {"broken": "RuntimeError: no device"}


@pytest.mark.parametrize(
    ("error", "optional"), [(Corrupted("wrong"), True), (RuntimeError("no device"), False)], ids=["wrong bytes", "required"]
)
def test_wrong_bytes_of_a_peer_and_any_failure_of_ours_end_the_run(arena: Arena, error: Exception, optional: bool) -> None:
    contender = Contender(name="one", ways=(open_device("host").raw("h2d"),), arena=arena, optional=optional)

    def attempt(_: Contender) -> None:
        raise error

    with pytest.raises(type(error)):
        able([contender], Absences(), attempt)


def test_the_share_of_the_limit_is_taken_round_by_round() -> None:
    ours, limit = Timing(), Timing()
    # Both slow down threefold in the second round, together.
    for drift in (1.0, 3.0, 1.0):
        ours.add([2.0 * drift])
        limit.add([1.0 * drift])
    assert ours.share_of(limit) == 0.5


def test_records_go_to_stdout_alone_where_a_dash_is_asked_for() -> None:
    done = benchmark("--quick", "--backend", "host", "--case", "overhead", "--json", "-")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    for record in measured:
        records.check(record)
    assert {(record["label"], record["direction"]) for record in measured} == LABELS["overhead"]
    assert "overhead: host on" in done.stderr
    assert not Path("-").exists()


def test_there_is_nothing_to_resume_on_stdout() -> None:
    done = benchmark("--quick", "--backend", "host", "--case", "sizes", "--resume", "--json", "-")
    assert done.returncode == 2
    assert "--resume goes on with a file" in done.stderr


@pytest.mark.parametrize("where", [["--record"], ["--json", "results"]])
def test_what_was_measured_quickly_is_for_no_page(where: list[str]) -> None:
    # Without that refusal it would run, and must not: there is no such backend.
    done = benchmark("--quick", *where, "--backend", "none", "--case", "sizes")
    assert done.returncode == 2
    assert "--record writes what the pages are made from. Leave one out" in done.stderr


def test_a_later_run_replaces_its_own_records_only(quick_records: list[records.Record], tmp_path: Path) -> None:
    file = tmp_path / "deep" / "host.json"
    records.merge(file, quick_records[:3])
    again = copy.deepcopy(quick_records[1])
    again["gbps"] = 123.0
    records.merge(file, [again])
    written = json.loads(file.read_text())
    assert len(written) == 3
    assert again in written
    assert quick_records[1] not in written
    assert [record for record in quick_records[:3] if record in written] == [quick_records[0], quick_records[2]]


@pytest.mark.parametrize("wrong", ["16", "16MB", "0KiB", "MiB", "-1MiB", "1KiB1"])
def test_a_size_that_is_none_is_refused(wrong: str) -> None:
    done = benchmark("--case", "sizes", f"--size={wrong}")
    assert done.returncode == 2
    assert f"{wrong!r}: expected a size such as 16MiB" in done.stderr


def test_rows_that_are_there_are_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "host.json"

    def said(*sizes: int) -> str:
        opened = partial(xferlib.stager, "host")
        cases = [CASES["sizes"]]
        assert run(opened, open_device("host"), cases, quick=True, json_file=str(file), resume=True, sizes=sizes) == 0
        return capsys.readouterr().err

    assert "sizes: call h2d, 4096 bytes" in said(4096)
    first = json.loads(file.read_text())
    assert {record["nbytes"] for record in first} == {4096}
    assert "4096 bytes" not in said(4096)
    assert json.loads(file.read_text()) == first
    # One row of another machine, and a size that is not there.
    first[0]["machine"]["cpu"] = "another"
    file.write_text(json.dumps(first))
    lines = said(4096, 16384).splitlines()
    assert len([line for line in lines if "4096 bytes" in line]) == 1
    assert len([line for line in lines if "16384 bytes" in line]) == 6


def test_states_of_a_size_are_saved_and_loaded_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "host.json"

    def said(*sizes: int) -> str:
        opened, cases = partial(xferlib.stager, "host"), [CASES["saving"], CASES["loading"]]
        assert run(opened, open_device("host"), cases, quick=True, json_file=str(file), resume=True, sizes=sizes) == 0
        return capsys.readouterr().err

    assert "saving: 6 arrays" in said(6 << 20)
    first = json.loads(file.read_text())
    assert {record["nbytes"] for record in first} == {6 << 20}
    (saved,) = [record for record in first if record["case"] == "saving"]
    assert set(saved["peers"]) == set(saved["details"]["beside_peers"])
    assert all(record["details"]["anonymous_mib"] >= 0 for record in first)
    assert "round" not in said(6 << 20)
    assert json.loads(file.read_text()) == first


def test_where_a_file_cannot_be_page_locked_there_are_the_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: object, stager: object) -> None:
        raise xferlib.AllocationError("no room")

    monkeypatch.setattr(xferlib, "pin_files", refuse)
    file = tmp_path / "host.json"
    opened = partial(xferlib.stager, "host")
    assert run(opened, open_device("host"), [CASES["loading"]], quick=True, json_file=str(file)) == 0
    assert {"warm", "first"} <= {record["label"] for record in json.loads(file.read_text())} <= {"warm", "first", "cold"}
    assert "loading: pinned" in capsys.readouterr().out


def test_a_tiny_state_is_saved_faster_than_a_step_and_still_gives_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(steps: object, work: Callable[[], object]) -> list[float]:
        work()
        return []

    monkeypatch.setattr("benchmarks.short_steps.ShortSteps.beside", beside)
    file = tmp_path / "host.json"
    opened = partial(xferlib.stager, "host")
    assert run(opened, open_device("host"), [CASES["saving"]], quick=True, json_file=str(file), sizes=[1 << 10]) == 0
    (record,) = json.loads(file.read_text())
    assert record["nbytes"] == 6 * 256
    assert not [name for name in record["details"] if "step" in name]


def test_wherever_an_interrupt_comes_nobody_watches_memory_any_more() -> None:
    def watch() -> None:
        with states.Anonymous().watch():
            pass

    for point in itertools.count(1):
        if not interrupted_at(point, ("benchmarks/states.py",), watch):
            break
        for thread in threading.enumerate():
            if thread.name == "benchmark-memory":
                thread.join(10)
                assert not thread.is_alive(), point
    assert point > 3


def test_what_is_compared_must_be_there(tmp_path: Path) -> None:
    missing = tmp_path / "old.json"
    done = benchmark("--compare", str(missing), str(missing))
    assert done.returncode == 2
    assert f"--compare {missing}: there is no such file" in done.stderr
    done = benchmark("--compare", str(tmp_path), str(tmp_path))
    assert done.returncode == 2
    assert f"--compare {tmp_path}: it is a folder. Name a file of records in it" in done.stderr


def test_wrong_bytes_take_back_what_was_written_at_once(quick_records: list[records.Record], tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    records.merge(file, quick_records[:2])
    kept = json.loads(file.read_text())
    status = run(
        partial(open_short, "d2h"),
        open_device("host"),
        [CASES["sizes"]],
        quick=True,
        json_file=str(file),
        resume=True,
        sizes=[8192],
    )
    assert status == 1
    assert json.loads(file.read_text()) == kept


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_sizes_are_drawn(quick_records: list[records.Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "host.json", tmp_path / "sizes.svg"
    records.merge(file, quick_records)
    assert plot.main([str(file), str(picture), "--backend", "host"]) == 0
    assert "<svg" in picture.read_text()
    assert plot.main([str(file), str(picture)]) == 1
    assert "has no such records of the case 'sizes' with backend 'cupy'" in capsys.readouterr().err


def set_to(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda record: record.__setitem__(name, value)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: record.pop("label"),
        set_to("more", 1),
        set_to("direction", "up"),
        set_to("nbytes", 0),
        set_to("gbps", float("nan")),
        set_to("limit_gbps", 0.0),
        set_to("peers", {"other": "fast"}),
        set_to("machine", {"cpu": ""}),
        set_to("seconds", {"median": 2.0, "min": 1.0, "max": 1.5, "n": 3}),
        set_to("seconds", {"median": 1.0, "min": 1.0, "max": 1.5}),
        set_to("details", ["verified_steps"]),
    ],
)
def test_a_spoiled_record_is_refused(quick_records: list[records.Record], spoil: Callable[[Any], None], tmp_path: Path) -> None:
    record = copy.deepcopy(quick_records[0])
    spoil(record)
    with pytest.raises(ValueError, match="field"):
        records.merge(tmp_path / "host.json", [record])
    assert not (tmp_path / "host.json").exists()
