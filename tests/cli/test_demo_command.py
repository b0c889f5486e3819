"""The demo from end to end on the host backend: what it writes, and that it never says "verified" of a wrong result."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xferlib_host.workload
from matplotlib.figure import Figure
from PIL import Image

from tests.children import threads
from tests.core.fakes import until
from tests.core.points import interrupted_at
from xferlib.cli import command_error, main
from xferlib.cli.demo import reference, verify
from xferlib.cli.demo.figures import _hidden, hidden_share
from xferlib.cli.demo.loop import Loop, Timings
from xferlib.cli.demo.progress_bar import Bar
from xferlib.cli.demo.result import ResultFile, partial_of
from xferlib.cli.demo.source import FrameSource, open_npy

FRAMES = 40
SHAPE = (FRAMES, 24, 30)


@pytest.fixture
def frames() -> npt.NDArray[np.uint16]:
    return np.random.default_rng(1).integers(0, 60000, SHAPE, np.uint16)


@pytest.fixture
def source(tmp_path: Path, frames: npt.NDArray[np.uint16]) -> Path:
    path = tmp_path / "frames.npy"
    np.save(path, frames)
    return path


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def demo(*arguments: object) -> int:
    """Run the command in this process and return its exit status; no thread may be left."""
    before = threads()
    with pytest.raises(SystemExit) as end:
        main(["demo", "--backend", "host", *map(str, arguments)])
    # One that an executor was interrupted in starting, and that may not even run yet, is told to end, and not waited for.
    assert until(lambda: threads() == before)
    assert isinstance(end.value.code, int)
    return end.value.code


def figures(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_a_dtype_that_the_backend_does_not_have_is_refused_in_a_line(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: object, dtype: object) -> None:
        raise TypeError("this backend has no uint16. Convert it with astype")

    monkeypatch.setattr("xferlib_host._stager.NumpyStager.check_dtype", refuse)
    assert demo(source) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("xferlib: ")
    assert "this backend has no uint16" in line


def test_a_npy_file_goes_through_and_comes_out_verified(
    tmp_path: Path, source: Path, frames: npt.NDArray[np.uint16], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert demo(source, "--out", out, "--json", tmp_path / "figures.json", "--rounds", 2, "--batch-mib", 0.01) == 0
    result = np.load(out / "edges.npy")
    np.testing.assert_array_equal(result, [reference.edges(frame, rounds=2) for frame in frames])
    with Image.open(out / "edges.png") as sheet:
        assert min(sheet.size) > 400
    told = figures(tmp_path / "figures.json")
    assert told["verified"] is True
    assert {0, FRAMES - 1} <= set(told["verified_frames"])
    assert (told["backend"], told["on_gpu"], told["rounds"]) == ("host", False, 2)
    assert (told["h2d_nbytes"], told["d2h_nbytes"]) == (frames.nbytes, result.nbytes)
    assert set(told["stages"]) == {"read", "h2d", "compute", "d2h"}
    assert all(seconds > 0 for seconds in told["stages"].values())
    assert told["hidden"] == pytest.approx(hidden_share(told["stages"], told["total_seconds"]))
    assert sorted(path.name for path in out.iterdir()) == ["edges.npy", "edges.png"]
    shown = capsys.readouterr()
    assert "verified" in shown.out
    assert "all bits equal" in shown.out
    assert shown.err == ""


def test_a_batch_of_any_size_is_all_frames_at_most(tmp_path: Path, source: Path) -> None:
    for size, frames in (("inf", FRAMES), ("1e300", FRAMES), ("0", 1)):
        arguments = ("--batch-mib", size, "--out", tmp_path, "--json", tmp_path / "figures.json", "--no-sheet", "--rounds", 1)
        assert demo(source, *arguments) == 0
        assert figures(tmp_path / "figures.json")["batch_frames"] == frames


def test_a_folder_of_images_goes_through(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    random = np.random.default_rng(4)
    for number in range(9):
        Image.fromarray(random.integers(0, 256, (20, 31, 3), np.uint8)).save(folder / f"{number}.png")
    assert demo(folder, "--out", tmp_path / "out", "--no-sheet", "--rounds", 1) == 0
    assert np.load(tmp_path / "out" / "edges.npy").shape == (9, 20, 31)
    assert not (tmp_path / "out" / "edges.png").exists()


def test_without_a_path_real_pictures_go_through(tmp_path: Path) -> None:
    assert demo("--gib", 0.008, "--out", tmp_path, "--json", tmp_path / "figures.json", "--no-sheet") == 0
    told = figures(tmp_path / "figures.json")
    assert told["verified"] is True
    assert "Matplotlib" in told["source"]
    assert len({frame.tobytes() for frame in np.load(tmp_path / "edges.npy")}) == told["frames"] == 32


def test_one_image_in_one_batch_goes_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "image.npy", np.random.default_rng(2).random((33, 21), np.float32))
    assert demo(tmp_path / "image.npy", "--out", tmp_path / "out") == 0
    assert np.load(tmp_path / "out" / "edges.npy").shape == (1, 33, 21)
    assert "all frames are in one batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"frames": 4}, "nothing can be: all frames are in one batch"),
        ({"total_seconds": 0.004}, "too little to tell: 4.0 ms in total"),
        ({"total_seconds": 5.0, "hidden": -1.0}, "nothing: one after the other, the stages take 3.000 s"),
        ({}, "50.0% of the 1.000 s beside the longest stage"),
        ({"stages": {"read": 0.1, "compute": 2.0}}, "too little to tell: 0.100 s beside a stage of 2.000 s"),
    ],
)
def test_no_share_is_told_where_there_is_none(changed: dict[str, Any], words: str) -> None:
    stages = {"read": 1.0, "compute": 2.0}
    report = {"frames": 8, "batch_frames": 4, "stages": stages, "total_seconds": 2.5, "hidden": 0.5, "on_gpu": True}
    assert _hidden(report | changed) == words


@pytest.mark.parametrize(
    "changed",
    [{"total_seconds": 0.004}, {"total_seconds": 5.0, "hidden": -1.0}, {"stages": {"read": 0.1, "compute": 2.0}}, {"hidden": None}],
)
def test_where_a_cpu_cannot_show_overlap_the_table_says_so(changed: dict[str, Any]) -> None:
    stages = {"read": 1.0, "compute": 2.0}
    report = {"frames": 8, "batch_frames": 4, "stages": stages, "total_seconds": 2.5, "hidden": 0.5, "on_gpu": False}
    assert _hidden(report).startswith("50.0% of")
    assert _hidden(report | changed).startswith("a CPU cannot show it: its cores do all stages (compute 2.000 s, the others ")


@pytest.mark.parametrize("count", [1, 2])
def test_numbers_agree_with_their_nouns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    drawn: list[str] = []
    text = Figure.text

    def noting(self: Figure, x: float, y: float, words: str, **style: Any) -> Any:
        drawn.append(words)
        return text(self, x, y, words, **style)

    monkeypatch.setattr(Figure, "text", noting)
    np.save(tmp_path / "frames.npy", np.random.default_rng(2).integers(0, 256, (count, 9, 9), np.uint8))
    assert demo(tmp_path / "frames.npy", "--out", tmp_path, "--rounds", count) == 0
    shown = capsys.readouterr().out + " ".join(drawn)
    assert ("1 frame and its edges" if count == 1 else "2 frames and their edges") in shown
    assert ("1 round of" if count == 1 else "2 rounds of") in shown
    assert f"yes: {count} frame{'s' if count == 2 else ''} recomputed" in shown
    assert not re.search(r"(?<!\d)1 (frames|rounds)", shown)
    assert shown.count("host on the CPU") == 2
    assert "host memory" not in shown


def test_the_figures_alone_go_to_stdout_when_asked_for(tmp_path: Path, source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo(source, "--out", tmp_path, "--json", "-") == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out)["verified"] is True
    assert "all bits equal" in shown.err
    assert not Path("-").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_figures_that_cannot_be_written_are_one_line(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(source, "--out", tmp_path, "--no-sheet", "--json", "/dev/full") == 1
    assert "xferlib: cannot write '/dev/full': [Errno 28] No space left on device. Name another" in capsys.readouterr().err


def test_what_was_left_out_of_a_folder_is_in_table_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "images"
    for name in ("cats", "dogs"):
        (folder / name).mkdir(parents=True)
    Image.new("L", (20, 10)).save(folder / "a.png")
    for number in range(7):
        (folder / f"{number}.jpg").write_bytes(b"nothing of the kind")
    assert demo(folder, "--out", tmp_path, "--no-sheet", "--json", tmp_path / "figures.json") == 0
    told = figures(tmp_path / "figures.json")
    assert (told["frames"], set(told["skipped"]), told["subfolders"]) == (1, {f"{n}.jpg" for n in range(7)}, ["cats", "dogs"])
    shown = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "7 images that cannot be read: 0.jpg, 1.jpg, 2.jpg, 3.jpg, 4.jpg and 2 more" in shown
    assert "not looked into 2 subfolders: cats, dogs" in shown


def test_a_single_image_goes_through_whatever_its_name(tmp_path: Path) -> None:
    Image.fromarray(np.random.default_rng(4).integers(0, 256, (20, 31), np.uint8)).save(tmp_path / "photo", "png")
    assert demo(tmp_path / "photo", "--out", tmp_path, "--no-sheet", "--rounds", 1) == 0
    assert np.load(tmp_path / "edges.npy").shape == (1, 20, 31)


def test_a_npy_file_goes_through_whatever_its_name(tmp_path: Path, source: Path) -> None:
    assert demo(source.rename(tmp_path / "frames.bin"), "--out", tmp_path, "--no-sheet", "--rounds", 1) == 0


def test_a_jpg_that_cannot_be_read_is_one_line_that_advises_no_pickles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"nothing of the kind")
    assert demo(tmp_path / "photo.jpg", "--out", tmp_path, "--no-sheet") == 1
    told = capsys.readouterr().err
    assert "photo.jpg' as an image" in told
    assert "pickle" not in told


def test_tiling_repeats_a_file_to_the_size_asked_for(tmp_path: Path, source: Path) -> None:
    assert demo(source, "--gib", 0.0005, "--out", tmp_path / "out", "--no-sheet", "--threads", 3) == 0
    assert len(np.load(tmp_path / "out" / "edges.npy")) == int(0.0005 * 2**30) // (24 * 30 * 2)


def test_device_work_that_is_off_by_one_is_never_called_verified(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = xferlib_host.workload.sobel

    def off_by_one(image: Any, result: Any, *sums: Any) -> None:
        right(image, result, *sums)
        result[-1, -1] ^= 1

    monkeypatch.setattr(xferlib_host.workload, "sobel", off_by_one)
    assert demo(source, "--out", tmp_path, "--json", tmp_path / "figures.json", "--no-sheet") == 1
    told = figures(tmp_path / "figures.json")
    assert told["verified"] is False
    assert [mismatch["frame"] for mismatch in told["mismatches"]] == told["verified_frames"]
    assert {mismatch["wrong_pixels"] for mismatch in told["mismatches"]} == {1}
    shown = capsys.readouterr()
    assert "NO: " in shown.out
    assert "the result is wrong" in shown.err


@pytest.mark.parametrize("lost", [0, 20, 36])
def test_frames_that_were_never_written_are_noticed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    right = ResultFile.finish

    def forgetful(self: ResultFile) -> float:
        self.frames[lost : lost + 4] = 0
        return right(self)

    monkeypatch.setattr(ResultFile, "finish", forgetful)
    assert demo(source, "--out", tmp_path, "--json", tmp_path / "figures.json", "--no-sheet") == 1
    assert figures(tmp_path / "figures.json")["verified"] is False


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1), (9, 4), (64, 8)])
def test_less_than_half_of_the_cores_read_and_never_more_than_eight(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, cores: int, expected: int
) -> None:
    monkeypatch.setattr("xferlib.engine.cores.usable_cores", lambda: cores)
    assert demo(source, "--out", tmp_path, "--no-sheet", "--json", tmp_path / "figures.json") == 0
    assert figures(tmp_path / "figures.json")["threads"] == expected


def test_the_result_is_flushed_before_it_has_its_name(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[bool] = []
    monkeypatch.setattr(np.memmap, "flush", lambda self: named.append((tmp_path / "edges.npy").exists()))
    assert demo(source, "--out", tmp_path, "--no-sheet") == 0
    assert named == [False]


def test_every_page_of_the_file_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.cli.demo.result.PIECE", 100)
    with ThreadPoolExecutor(2) as pool, ResultFile(tmp_path / "edges.npy", (7, 10, 11)) as result:
        result.frames[...] = 1
        result.touch(pool)
        assert not result.frames.any()


def test_the_run_finds_an_empty_file_behind_a_rehearsal(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Loop.run
    runs: list[tuple[int, bool, bool]] = []

    def noting(self: Loop, frames: int, *, out: npt.NDArray[np.uint8], **others: Any) -> Timings:
        in_file = isinstance(out, np.memmap)
        runs.append((frames, in_file, in_file and bool(out.any())))
        return right(self, frames, out=out, **others)

    monkeypatch.setattr(Loop, "run", noting)
    assert demo(source, "--out", tmp_path, "--no-sheet", "--batch-mib", 0, "--depth", 2, "--threads", 3) == 0
    # A rehearsal fills every slot.
    assert runs == [(5, False, False), (FRAMES, True, False)]


def test_a_rehearsal_ends_with_a_batch_as_small_as_the_last(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A framework may compile for each size.
    right = xferlib_host.workload.EdgeJob.launch
    launched: list[tuple[int, int]] = []

    def noting(self: Any, frames: Any, slot: int, *, rounds: int) -> Any:
        launched.append((len(frames), rounds))
        return right(self, frames, slot, rounds=rounds)

    monkeypatch.setattr(xferlib_host.workload.EdgeJob, "launch", noting)
    mib = 7 * 24 * 30 * 2 / 2**20
    assert demo(source, "--out", tmp_path, "--no-sheet", "--batch-mib", mib, "--depth", 2, "--threads", 1, "--rounds", 3) == 0
    assert FRAMES % 7 == 5
    batches = [(7, 3)] * 5 + [(5, 3)]
    rehearsal = [(7, 3)] * 3 + [(5, 3)]
    assert launched[-len(batches) - len(rehearsal) :] == rehearsal + batches


def test_as_many_threads_read_as_are_asked_for(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(4)
    calls = itertools.count()

    def meeting(path: Path) -> FrameSource:
        opened = open_npy(path)

        def read(start: int, out: npt.NDArray[Any]) -> None:
            # The first fills a slot to be measured with.
            if 1 <= next(calls) <= 4:
                barrier.wait(30)
            opened.read(start, out)

        return replace(opened, read=read)

    monkeypatch.setattr("xferlib.cli.demo.options.open_npy", meeting)
    assert demo(source, "--out", tmp_path, "--no-sheet", "--threads", 4, "--depth", 2) == 0


def test_stages_are_told_for_all_frames_and_how_they_were_measured(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Loop, "alone", lambda self, rounds: (1, {"h2d": 1.0, "compute": 2.0, "d2h": 3.0}))
    batches = ("--batch-mib", 7 * 24 * 30 * 2 / 2**20)
    assert demo(source, "--out", tmp_path, "--no-sheet", *batches, "--json", tmp_path / "figures.json") == 0
    stages = figures(tmp_path / "figures.json")["stages"]
    assert {name: stages[name] for name in ("h2d", "compute", "d2h")} == {"h2d": 40 / 7, "compute": 80 / 7, "d2h": 120 / 7}
    measured = re.findall(r"(\w+)[^\n│]*│ +[\d.]+ m?s (busy|alone)", capsys.readouterr().out)
    assert measured == [("read", "busy"), ("h2d", "alone"), ("compute", "alone"), ("d2h", "alone")]


def test_ctrl_c_removes_the_unfinished_result(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Bar, "advance", lambda self, frames: signal.raise_signal(signal.SIGINT))
    out = tmp_path / "out"
    assert demo(source, "--out", out, "--no-sheet") == 130
    assert list(out.iterdir()) == []
    assert capsys.readouterr().err == "xferlib: interrupted: nothing was verified, and no unfinished result is left\n"


def test_ctrl_c_while_it_is_verified_leaves_the_finished_result(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "compare", lambda *arguments, **named: signal.raise_signal(signal.SIGINT))
    assert demo(source, "--out", tmp_path / "out", "--no-sheet") == 130
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["edges.npy"]
    assert capsys.readouterr().err == "xferlib: interrupted: nothing was verified, and no unfinished result is left\n"


def test_sigterm_removes_the_unfinished_result_and_is_left_as_it_was(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Bar, "advance", lambda self, frames: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert demo(source, "--out", tmp_path / "out", "--no-sheet") == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list((tmp_path / "out").iterdir()) == []
    assert capsys.readouterr().err == "xferlib: terminated: nothing was verified, and no unfinished result is left\n"


def test_a_source_that_is_cut_off_while_it_streams_ends_in_a_line(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    phase = Bar.phase

    def cut_off(self: Bar, name: str, *of: int) -> None:
        if name == "streaming":
            os.truncate(source, 100)
        phase(self, name, *of)

    monkeypatch.setattr(Bar, "phase", cut_off)
    assert demo(source, "--out", tmp_path / "out", "--no-sheet") == 1
    assert list((tmp_path / "out").iterdir()) == []
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith(f"xferlib: {str(source)!r} was cut off while it was read.")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_interrupted_or_terminated_leaves_no_result_and_no_traceback(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "xferlib", "demo", "--backend", "host", "--gib", "0.5", "--no-sheet", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "edges.partial.npy").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    word = "interrupted" if number == signal.SIGINT else "terminated"
    assert told == f"xferlib: {word}: nothing was verified, and no unfinished result is left\n"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_at_any_point_leaves_no_unfinished_result(tmp_path: Path) -> None:
    def fill() -> None:
        with ResultFile(tmp_path / "edges.npy", (1, 2, 3)) as result:
            result.frames[:] = 1
            result.finish()

    for point in itertools.count(1):
        if not interrupted_at(point, ("demo/result.py", Path(__file__).name), fill):
            break
        assert not partial_of(tmp_path / "edges.npy").exists(), point
    assert np.load(tmp_path / "edges.npy").tolist() == [[[1, 1, 1]] * 2]
    assert point > 10


def test_device_work_that_fails_leaves_no_result(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> None:
        raise ArithmeticError

    monkeypatch.setattr(xferlib_host.workload, "sobel", failing)
    before = threads()
    with pytest.raises(ArithmeticError):
        main(["demo", str(source), "--backend", "host", "--out", str(tmp_path / "out"), "--no-sheet"])
    assert list((tmp_path / "out").iterdir()) == []
    assert threads() == before


def test_an_older_result_survives_a_run_that_fails(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo(source, "--out", tmp_path, "--no-sheet") == 0
    older = (tmp_path / "edges.npy").read_bytes()
    monkeypatch.setattr(ResultFile, "finish", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["demo", str(source), "--backend", "host", "--out", str(tmp_path), "--no-sheet"])
    assert (tmp_path / "edges.npy").read_bytes() == older


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    assert demo(source, "--out", tmp_path / "out", "--no-sheet") == 1
    assert "Choose another folder with --out" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nowhere.npy"], 1, "there is no 'nowhere.npy'"),
        (["--backend", "hots"], 2, "Did you mean 'host'?"),
        (["--device", "7"], 1, "Use device=0"),
        (["--rounds", "many"], 2, "neither a number nor auto"),
        (["--gib", "1e9", "--out", "."], 1, "free"),
        (["--gib", "inf", "--out", "."], 1, "free"),
        (["--json", "nowhere/figures.json"], 1, "there is no folder for"),
        (["--json", "."], 1, "is a folder. Name a file with --json"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_a_status(
    in_tmp_path: None, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: str
) -> None:
    assert demo(*arguments) == status
    told = capsys.readouterr()
    assert words in told.err
    assert "Traceback" not in told.err + told.out


@pytest.mark.parametrize("name", ["edges.npy", "edges.partial.npy"])
def test_a_source_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = tmp_path / name
    np.save(path, np.ones((2, 8, 8), np.uint8))
    assert demo(path, "--out", tmp_path, "--no-sheet") == 1
    assert "would be overwritten" in capsys.readouterr().err
    assert np.load(path).all()


def test_missing_plot_packages_are_named_with_what_to_type(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_error, "find_spec", lambda name: None)
    assert demo(source, "--out", tmp_path / "out") == 1
    assert 'pip install "matplotlib>=3.8" "pillow>=10.3"' in capsys.readouterr().err
    assert demo(source, "--out", tmp_path / "out", "--no-sheet") == 0


def test_an_out_folder_that_cannot_be_made_is_refused(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(source, "--out", source / "below", "--no-sheet") == 1
    assert "cannot make the folder" in capsys.readouterr().err


def test_an_out_folder_that_cannot_be_written_is_refused(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "edges.partial.npy").mkdir()
    assert demo(source, "--out", tmp_path, "--no-sheet") == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_disk_that_fills_up_meanwhile_is_one_line_and_no_file(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert demo(source, "--out", tmp_path / "out", "--no-sheet") == 1
    assert "No space left on device. Choose another folder with --out" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("count", "batch"), [(1, 1), (2, 1), (7, 7), (8, 7), (1000, 16), (1023, 16)])
def test_the_sample_has_both_ends_and_both_sides_of_a_border(count: int, batch: int) -> None:
    chosen = verify.sample(count, batch, work=1)
    assert chosen == sorted(set(chosen))
    assert {0, count - 1} <= set(chosen) <= set(range(count))
    if count > batch:
        assert any(number % batch == 0 and number - 1 in chosen for number in chosen[1:])


def test_frames_that_are_dear_to_check_are_checked_at_both_ends_at_least() -> None:
    assert verify.sample(1000, 10, work=1e12) == [0, 999]


def test_hidden_is_one_behind_the_longest_stage_and_zero_in_a_row() -> None:
    stages = {"read": 1.0, "h2d": 2.0, "compute": 3.0}
    assert hidden_share(stages, 3.0) == 1
    assert hidden_share(stages, 6.0) == 0
    assert hidden_share({"compute": 3.0}, 3.0) is None
