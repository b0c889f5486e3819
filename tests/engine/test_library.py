"""The engine's library as Python builds and finds it, and bytes that it moves for a backend in Python."""

from __future__ import annotations

import ctypes
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.core.fakes import WATCHDOG
from xferlib.engine import building
from xferlib.engine.native import Calls, Piece, Request, library, opened

ENGINE = Path(building.__file__).parent
H2D, D2H, STAGED, ISSUED, FINISHED = 0, 1, 0, 1, 2
OK, NOT_YET, WRONG = 1, 0, -6


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


def test_a_portable_wheel_with_a_library_that_wants_more_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "some.so"
    library.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.17\0")
    assert building.library_tag(library, portable=True).startswith("manylinux_2_17_")
    library.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.34\0")
    with pytest.raises(RuntimeError, match="wants glibc"):
        building.library_tag(library, portable=True)
    assert building.library_tag(library, portable=False).startswith("linux_")


def test_the_structs_are_those_of_the_library() -> None:
    calls = Calls(version=1, nbytes=ctypes.sizeof(Calls), not_ready=600)
    assert library().xe_open_lane(990, H2D, calls, None) == OK
    assert library().xe_close_lane(990) == OK
    calls.nbytes += 8
    assert library().xe_open_lane(990, H2D, calls, None) == WRONG


class Owner:
    """A backend without calls of C: it copies at once, on a thread of its own."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, bool, bool]] = []
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
                    self.rows.append((request.row, bool(request.first), bool(request.last)))
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


@pytest.mark.parametrize("direction", [H2D, D2H])
def test_bytes_cross_for_a_backend_in_python(owner: Owner, direction: int) -> None:
    engine, lane, row = library(), 1000 + direction, 5000 + direction
    assert engine.xe_start(2) >= 2
    assert engine.xe_open_lane(lane, direction, None, None) == OK
    memory = np.zeros((3, 1 << 20), np.uint8)
    for number, chunk in enumerate(memory):
        assert engine.xe_add_chunk(lane, number, chunk.ctypes.data, chunk.nbytes, None) == OK
    sizes = [5, 3 << 20, 700]
    here = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    there = [np.zeros(size, np.uint8) for size in sizes]
    pieces = (Piece * 3)()
    for number, (mine, its) in enumerate(zip(here, there, strict=True)):
        host, device = (mine, its) if direction == H2D else (its, mine)
        pieces[number] = Piece(host.ctypes.data, device.ctypes.data, host.nbytes, number)
    assert engine.xe_submit(row, lane, pieces, 3, None, None) == OK
    assert engine.xe_wait(row, FINISHED, int(WATCHDOG * 1e6)) == OK
    assert all((mine == its).all() for mine, its in zip(here, there, strict=True))
    assert [entry for entry in owner.rows if entry[1]] == [(row, True, owner.rows[0][2])]
    assert [entry[0] for entry in owner.rows if entry[2]] == [row]
    rows = (ctypes.c_uint64 * 8)()
    assert row in rows[: engine.xe_finished(rows, 8)]
    assert engine.xe_forget(row) == OK
    assert engine.xe_close_lane(lane) == OK
