"""The engine's library as Python builds and finds it, and bytes that it moves for a backend in Python."""

from __future__ import annotations

import ctypes
import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.core.fakes import WATCHDOG, succeeds, until
from xferlib.engine import building
from xferlib.engine.native import VERSION, Calls, Figures, Piece, Request, library, opened

ENGINE = Path(building.__file__).parent
H2D, D2H, STAGED, ISSUED, FINISHED = 0, 1, 0, 1, 2
OK, NOT_YET, FAILED, WRONG = 1, 0, -1, -6
RELAXED = 2


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in (*building.SOURCES, *building.HEADERS):
        shutil.copy(ENGINE / name, folder)
    return folder


def test_a_library_that_is_there_is_not_written_again(sources: Path, tmp_path: Path) -> None:
    """It may be mapped by somebody."""
    first = building.build(sources, tmp_path)
    before = first.stat().st_ino
    assert building.build(sources, tmp_path) == first
    assert first.stat().st_ino == before
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == [first.name]
    (sources / "copying.h").write_text((sources / "copying.h").read_text() + "\n")
    second = building.build(sources, tmp_path)
    assert second != first
    assert first.stat().st_ino == before
    assert opened(second).xe_version() == opened(first).xe_version()


def test_a_library_that_was_built_otherwise_is_another_one(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = building.library_name(sources)
    monkeypatch.setattr(building, "OPTIONS", (*building.OPTIONS, "-O1"))
    assert building.library_name(sources) != before


def test_a_library_of_something_else_is_refused(sources: Path, tmp_path: Path) -> None:
    (sources / "engine.c").write_text("int xe_version(void) { return 2; }\n")
    with pytest.raises(ImportError, match=r"cannot be loaded.*xe_source_hash.*Rebuild it"):
        opened(building.build(sources, tmp_path))


def test_a_library_of_other_sources_is_refused(sources: Path, tmp_path: Path) -> None:
    other = tmp_path / "libxferlib-0123456789abcdef.so"
    shutil.copy(building.build(sources, tmp_path), other)
    with pytest.raises(ImportError, match=r"was built from other sources.*Rebuild it"):
        opened(other)


def test_a_library_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"cannot be loaded.*Rebuild it"):
        opened(tmp_path / "libxferlib-0123456789abcdef.so")


def test_what_the_compiler_says_is_told(sources: Path, tmp_path: Path) -> None:
    (sources / "copying.c").write_text("this is no C;\n")
    with pytest.raises(RuntimeError, match=r"(?s)could not be built.*copying.c:1"):
        building.build(sources, tmp_path)
    assert [file for file in tmp_path.iterdir() if file.is_file()] == []


def test_without_a_compiler_it_is_said_what_to_install(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"no C compiler.*Install gcc, or: pip install 'ziglang"):
        building.build(sources, tmp_path)


@pytest.mark.parametrize(
    ("command", "zig", "said"),
    [
        ("some-cc", False, ""),
        ("some-cc", True, ""),
        ("", True, "NOT TRIED: AddressSanitizer."),
        ("", False, "NOT TRIED: the engine's own tests. They want a C compiler"),
    ],
)
def test_what_a_compiler_cannot_try_is_told(command: str, zig: bool, said: str) -> None:
    """`.ci/run` says so at its end."""
    told = succeeds(
        f"""
        import importlib.util, os
        os.environ.update(CC={command!r}, PATH="")
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name: {zig} or None if name == "ziglang" else found(name)
        from tests.engine.build import untried
        print(untried())
        """
    )
    assert told.startswith(said)
    assert bool(told.strip()) == bool(said)


def test_a_portable_wheel_with_a_library_that_wants_more_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "some.so"
    library.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.17\0")
    assert building.library_tag(library, portable=True).startswith("manylinux_2_17_")
    library.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.34\0")
    with pytest.raises(RuntimeError, match="wants glibc"):
        building.library_tag(library, portable=True)
    assert building.library_tag(library, portable=False).startswith("linux_")


def test_the_structs_are_those_of_the_library() -> None:
    calls = Calls(version=VERSION, nbytes=ctypes.sizeof(Calls), not_ready=600)
    assert library().xe_open_lane(990, H2D, calls, None) == OK
    assert library().xe_close_lane(990) == OK
    calls.nbytes += 8
    assert library().xe_open_lane(990, H2D, calls, None) == WRONG


def test_a_device_is_called_by_its_struct() -> None:
    """Each function stands where the library looks for it."""
    engine, lane, job = library(), 991, 4000
    said: list[str] = []

    def function(name: str, arguments: list[Any], does: Callable[..., object]) -> Any:
        def call(*given: Any) -> int:
            said.append(name)
            does(*given)
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(call)

    pointer, n = ctypes.c_void_p, ctypes.c_size_t
    modes: list[int] = []
    mode = ctypes.POINTER(ctypes.c_int)
    functions = {
        "enter": function("enter", [pointer], lambda context: None),
        "current": function("current", [ctypes.POINTER(pointer)], lambda context: None),
        "capture_mode": function("capture_mode", [mode], lambda mode: modes.append(mode[0])),
        "copy_h2d": function(
            "copy_h2d", [pointer, pointer, n, pointer], lambda dst, src, nbytes, _: ctypes.memmove(dst, src, nbytes)
        ),
        "record": function("record", [pointer, pointer], lambda event, stream: None),
        "query": function("query", [pointer], lambda event: None),
        "wait": function("wait", [pointer, pointer, ctypes.c_uint], lambda stream, event, flags: None),
    }
    addresses = {name: ctypes.cast(each, pointer).value for name, each in functions.items()}
    calls = Calls(version=VERSION, nbytes=ctypes.sizeof(Calls), not_ready=600, relaxed=RELAXED, **addresses)
    assert engine.xe_start(1) >= 1
    assert engine.xe_open_lane(lane, H2D, calls, None) == OK
    memory, here, there = (np.full(4096, value, np.uint8) for value in (0, 7, 0))
    assert engine.xe_add_chunk(lane, 1, memory.ctypes.data, memory.nbytes, 1, None) == OK
    assert engine.xe_submit(job, lane, Piece(here.ctypes.data, there.ctypes.data, here.nbytes, 0), 1, None, 1, 2) == OK
    # Asked: whoever waits calls the device as well, and has a context of its own to go back to.
    assert until(lambda: engine.xe_wait(job, FINISHED, 0) == OK)
    assert (there == 7).all()
    # Which thread asks for the chunk's event is open, and so how often one enters.
    assert [name for name in said if name in ("wait", "copy_h2d", "record")] == ["wait", "copy_h2d", "record", "record"]
    assert {"enter", "query"} <= set(said)
    assert "current" not in said
    assert set(modes) == {RELAXED}
    _forget(job)
    assert engine.xe_close_lane(lane) == OK


def test_a_job_without_chunks_is_abandoned() -> None:
    engine, lane, job = library(), 992, 4001
    assert engine.xe_open_lane(lane, D2H, None, None) == OK
    there = np.zeros(100, np.uint8)
    assert engine.xe_submit(job, lane, Piece(there.ctypes.data, 1, there.nbytes, 0), 1, None, None, None) == OK
    assert engine.xe_wait(job, STAGED, 0) == NOT_YET
    assert engine.xe_abandon(job) == OK
    assert engine.xe_wait(job, STAGED, 0) == FAILED
    status, at, lost = ctypes.c_int32(), ctypes.c_char_p(), ctypes.c_int()
    assert engine.xe_error(job, status, at, lost) == OK
    assert (status.value, at.value, lost.value) == (errno.ECANCELED, b"abandoned", 0)
    _forget(job)
    assert engine.xe_close_lane(lane) == OK


def _forget(job: int) -> None:
    ids = (ctypes.c_uint64 * 8)()
    assert job in ids[: library().xe_finished(ids, 8)]
    assert library().xe_forget(job) == OK


class Owner:
    """A backend without calls of C: it copies at once, on a thread of its own."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, bool, bool]] = []
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        requests = (Request * 1024)()
        while not self._over:
            for request in requests[: library().xe_requests(requests, len(requests), 2000)]:
                here, there = request.memory, request.device
                ctypes.memmove(*((there, here) if request.lane % 2 == H2D else (here, there)), request.nbytes)
                if request.first or request.last:
                    self.taken.append((request.id, bool(request.first), bool(request.last)))
                if request.record:
                    assert library().xe_answer(request.lane, request.chunk, 0, 1) == OK
                    assert library().xe_reached(request.lane, request.chunk, 0) == OK

    def close(self) -> None:
        self._over = True
        self._thread.join(WATCHDOG)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


def figures() -> Figures:
    found = Figures()
    library().xe_read_figures(found)
    return found


@pytest.mark.parametrize("direction", [H2D, D2H])
def test_bytes_cross_for_a_backend_in_python(owner: Owner, direction: int) -> None:
    engine, lane, job = library(), 1000 + direction, 5000 + direction
    assert engine.xe_start(2) >= 2
    assert engine.xe_open_lane(lane, direction, None, None) == OK
    memory = np.zeros((3, 1 << 20), np.uint8)
    for number, chunk in enumerate(memory):
        assert engine.xe_add_chunk(lane, number, chunk.ctypes.data, chunk.nbytes, number, None) == OK
    sizes = [5, 3 << 20, 700]
    here = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    there = [np.zeros(size, np.uint8) for size in sizes]
    pieces = (Piece * 3)()
    for number, (mine, its) in enumerate(zip(here, there, strict=True)):
        host, device = (mine, its) if direction == H2D else (its, mine)
        pieces[number] = Piece(host.ctypes.data, device.ctypes.data, host.nbytes, number)
    before = figures()
    assert engine.xe_submit(job, lane, pieces, 3, None, None, None) == OK
    assert engine.xe_wait(job, FINISHED, int(WATCHDOG * 1e6)) == OK
    assert all((mine == its).all() for mine, its in zip(here, there, strict=True))
    assert [entry for entry in owner.taken if entry[1]] == [(job, True, owner.taken[0][2])]
    assert [entry[0] for entry in owner.taken if entry[2]] == [job]
    after = figures()
    assert after.threads >= 2
    assert after.jobs == before.jobs + 1
    # With what lies between the pieces.
    assert 0 <= after.copied_nbytes - before.copied_nbytes - sum(sizes) < 2 * 256
    _forget(job)
    assert engine.xe_close_lane(lane) == OK
