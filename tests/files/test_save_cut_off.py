"""Whatever ends a save early, Ctrl-C, `cancel`, a fork, the end of its process: the file is the old one or the whole new one."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import xferlib
from tests import children
from tests.children import fork
from tests.core.fakes import Timeout, always_raises, held, run_python, until
from tests.core.points import interrupted_at
from tests.files.saves import MIB, at_rest, bits, only, same, there
from xferlib.byte_reader import ByteReader
from xferlib.files import outcome, writing
from xferlib.files.temporary import SUFFIX, TemporaryFile
from xferlib.stager import Stager

NO_THREADS = always_raises(RuntimeError, "can't start new thread")


def test_a_forked_child_is_refused_and_the_parent_goes_on(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    array = there(stager, bits((MIB,), np.dtype(np.uint8)))
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", array, stager)
        child = fork()
        if child == 0:
            refused = 0
            for call in (save.done, save.result, save.wait_read, save.cancel):
                try:
                    call()
                except xferlib.BackendUnavailableError:
                    refused += 1
            os._exit(0 if refused == 4 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.set()
    same(np.load(save.result(20)), array)


def test_a_child_saves_into_the_series_that_its_parent_saves_to(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    array = there(stager, np.arange(1000))
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "s_1.npy", array, stager)
        child = fork()
        if child == 0:
            with xferlib.stager("host") as own:
                xferlib.save(tmp_path / "s_2.npy", np.arange(3), own).result(10)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.set()
    save.result(20)
    only(tmp_path, "s_1.npy", "s_2.npy")


def test_what_a_killed_process_left_is_removed_by_the_next_save(stager: Stager, tmp_path: Path) -> None:
    left = tmp_path / f".a.npy.00ff{SUFFIX}"
    left.write_bytes(b"half")
    others = TemporaryFile(tmp_path / "b.npy")
    others.begin()
    xferlib.save(tmp_path / "a.npy", there(stager, np.zeros(3)), stager).result(20)
    assert not left.exists()
    # Somebody writes that one now.
    assert len(list(tmp_path.glob(f".*{SUFFIX}"))) == 1
    others.close()
    only(tmp_path, "a.npy")


PROGRAM = """
import sys
import numpy as np
import xferlib

with xferlib.stager("host") as stager:
    for step in range(1, 1000):
        state = {"w": np.full(400_000, step, np.int32), "b": np.full(7, step, np.int32), "step": step}
        xferlib.save(sys.argv[1], stager.put(state, borrow=True).result(), stager, memory=1 << 18).result()
        print(step, flush=True)
"""


def test_a_killed_process_leaves_the_old_file_or_the_new_one(stager: Stager, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    dice = np.random.default_rng(3)
    for _ in range(6):
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            seen = [int(child.stdout.readline()) for _ in range(int(dice.integers(1, 4)))]
            time.sleep(float(dice.random()) * 0.02)
            child.send_signal(signal.SIGKILL)
        like: Any = {"w": np.zeros(400_000, np.int32), "b": np.zeros(7, np.int32), "step": 0}
        back = xferlib.load(path, stager, like=like)
        step = back["step"]
        assert step >= seen[-1]
        assert (stager.get(back["w"]).result() == step).all()
        assert (stager.get(back["b"]).result() == step).all()
    xferlib.save(path, there(stager, {"w": np.zeros(3)}), stager).result()
    only(tmp_path, path.name)


@pytest.mark.parametrize("started", [-1, 0, 1, 2])
def test_threads_that_the_system_has_not_are_done_without(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    array = there(stager, bits((MIB,), np.dtype(np.uint8)))
    start, left = threading.Thread.start, iter(range(max(0, started)))

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "xferlib-save" and next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr("xferlib.files.writing.usable_cores", lambda: 4)
    if started < 0:
        # Not even the one that starts the others: the call itself writes.
        monkeypatch.setattr(writing, "start_new_thread", NO_THREADS)
    save = xferlib.save(tmp_path / "a.npy", array, stager, memory=256 * 1024)
    assert save.done() or started >= 0
    same(np.load(save.result(20)), array)
    only(tmp_path, "a.npy")
    at_rest(stager)


def test_a_thread_that_is_interrupted_as_it_begins_to_read_reads_no_more(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = ByteReader.join

    def interrupted(self: ByteReader) -> None:
        join(self)
        raise KeyboardInterrupt

    array = there(stager, np.arange(1000))
    monkeypatch.setattr(writing, "start_new_thread", NO_THREADS)
    monkeypatch.setattr(ByteReader, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        xferlib.save(tmp_path / "a.npy", array, stager)
    only(tmp_path)
    at_rest(stager)


def test_an_interrupt_of_a_save_that_the_call_writes_leaves_the_old_file(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: TemporaryFile, data: memoryview, offset: int) -> None:
        raise KeyboardInterrupt

    array = there(stager, np.arange(1000))
    path = tmp_path / "a.npy"
    path.write_bytes(b"old")
    monkeypatch.setattr(writing, "start_new_thread", NO_THREADS)
    monkeypatch.setattr(TemporaryFile, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        xferlib.save(path, array, stager)
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    only(tmp_path, path.name)
    at_rest(stager)
    xferlib.save(path, array, stager).result(20)


def test_an_interrupt_at_any_point_of_the_call_leaves_nothing(stager: Stager, tmp_path: Path) -> None:
    """The file is whole or not there, and nothing is left of a save that did not begin."""
    array = there(stager, bits((200_000,), np.dtype(np.uint8)))
    path = tmp_path / "a.npy"
    within = ("files/save.py", "files/outcome.py", "files/writing.py", "byte_reader.py")

    def ended() -> bool:
        return not [save for save in outcome._under_way.values() if not save.is_dropped]

    for point in itertools.count(1):
        if not interrupted_at(point, within, lambda: xferlib.save(path, array, stager)):
            break
        assert until(ended)
        gc.collect()
        stager.idle()
        stager._ledger.reap()
        assert not stager._ledger.jobs.readings
        if path.exists():
            same(np.load(path), array)
            path.unlink()
        only(tmp_path)
    assert until(ended)
    assert point > 20


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_an_interrupt_at_any_point_of_a_save_that_the_call_writes_leaves_nothing(
    stager: Stager, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No temporary file, no descriptor, nobody who waits; and the file is the old one or the whole new one."""

    def descriptors() -> list[str]:
        """Of the folder, and of what is in it, there or deleted."""
        found = []
        for number in os.listdir("/proc/self/fd"):
            # The one of the listing is closed by now.
            with suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{number}"))
        return [path for path in found if path.startswith(str(tmp_path))]

    monkeypatch.setattr(writing, "start_new_thread", NO_THREADS)
    array = there(stager, np.arange(1000))
    path = tmp_path / f"a.{kind}"
    tree = {"a": array} if kind == "npz" else array
    old = b"old"
    modules = ("save", "outcome", "pace", "writing", "temporary")
    within = (*(f"files/{name}.py" for name in modules), "byte_reader.py")
    for point in itertools.count(1):
        path.write_bytes(old)
        if not interrupted_at(point, within, lambda: xferlib.save(path, tree, stager)):
            break
        gc.collect()
        stager._ledger.reap()
        assert not [save for save in outcome._under_way.values() if not save.is_dropped]
        assert not stager._ledger.jobs.readings
        assert not descriptors()
        only(tmp_path, path.name)
        if path.read_bytes() != old:
            found = xferlib.load(path, stager)
            same(found["a"] if kind == "npz" else found, array)
    assert point > 150
    at_rest(stager)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Timeout])
def test_an_interrupt_while_the_threads_start_leaves_the_save_going_on(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    array = there(stager, np.arange(1000))

    def interrupted(call: Any, arguments: tuple[()]) -> None:
        call()
        raise error

    def too_early(call: Any, arguments: tuple[()]) -> None:
        raise error

    for number, start in enumerate((interrupted, too_early)):
        monkeypatch.setattr(writing, "start_new_thread", start)
        with pytest.raises(error) as raised:
            xferlib.save(tmp_path / f"s_{number}.npy", array, stager)
        monkeypatch.undo()
        # What was raised leads to the save that was not started: it is in nobody's way.
        xferlib.save(tmp_path / "s_9.npy", array, stager).result(20)
        stager.put(np.arange(1000), into=array).result()
        assert (tmp_path / f"s_{number}.npy").exists() == (start is interrupted)
        del raised


def test_a_save_that_is_cancelled_leaves_the_old_file(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    path = tmp_path / "a.npy"
    path.write_bytes(b"old")
    with held(backend.d2h) as gate:
        save = xferlib.save(path, there(stager, np.zeros(MIB, np.uint8)), stager, memory=128 * 1024)
        assert save.cancel()
        assert not save.done() or gate.is_set()
        gate.set()
        with pytest.raises(xferlib.XferError, match="was cancelled"):
            save.result(20)
    save.wait_read(0)
    assert save.cancel()
    with pytest.raises(xferlib.XferError, match="was cancelled"):
        save.done()
    assert "cancelled" in repr(save)
    assert path.read_bytes() == b"old"
    only(tmp_path, path.name)
    at_rest(stager)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_cancelled_save_writes_no_more(stager: Stager, tmp_path: Path, kind: str) -> None:
    """Neither the pieces, nor the members of an archive: the second may be read in an hour."""
    tree = there(stager, [np.zeros(100_000, np.uint8)] * 3)
    save = xferlib.save(tmp_path / f"a.{kind}", tree, stager, memory=64 * 1024, rate_limit=1)
    assert until(lambda: save.written > 0)
    assert save.cancel()
    with pytest.raises(xferlib.XferError, match="was cancelled"):
        save.result(20)
    assert save.written <= 64 * 1024
    only(tmp_path)
    at_rest(stager)


def test_a_save_that_has_ended_is_not_cancelled(stager: Stager, tmp_path: Path) -> None:
    array = there(stager, np.arange(3))
    save = xferlib.save(tmp_path / "a.npy", array, stager)
    save.result(20)
    assert not save.cancel()
    assert save.done()
    (tmp_path / "b.npy").mkdir()
    failed = xferlib.save(tmp_path / "b.npy", array, stager)
    with pytest.raises(IsADirectoryError):
        failed.result(20)
    assert not failed.cancel()


def test_it_is_too_late_to_cancel_when_the_file_gets_its_name(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, publish, publishing = threading.Event(), TemporaryFile.publish, threading.Event()

    def hold(self: TemporaryFile) -> None:
        publishing.set()
        gate.wait(20)
        publish(self)

    monkeypatch.setattr(TemporaryFile, "publish", hold)
    save = xferlib.save(tmp_path / "a.npy", there(stager, np.arange(3)), stager)
    assert publishing.wait(20)
    assert not save.cancel()
    gate.set()
    save.result(20)
    only(tmp_path, "a.npy")


def test_a_cancelled_save_waits_for_none_and_those_behind_it_wait_for_all(stager: Stager, tmp_path: Path) -> None:
    backend: Any = stager.backend
    with xferlib.stager("host") as other, held(backend.d2h) as gate:
        first = xferlib.save(tmp_path / "s_1.npy", there(stager, np.zeros(10, np.uint8)), stager)
        second = xferlib.save(tmp_path / "s_2.npy", there(other, np.ones(10, np.uint8)), other)
        third = xferlib.save(tmp_path / "s_3.npy", there(other, np.ones(10, np.uint8)), other)
        assert until(lambda: second.written == third.written == 10)
        assert second.cancel()
        with pytest.raises(xferlib.XferError, match="was cancelled"):
            second.result(20)
        with pytest.raises(TimeoutError):
            third.result(0.1)
        gate.set()
        third.result(20)
        assert first.done()
    only(tmp_path, "s_1.npy", "s_3.npy")


def test_nobody_is_told_of_a_save_that_was_cancelled_and_dropped(stager: Stager, tmp_path: Path) -> None:
    """Warnings are errors here."""
    backend: Any = stager.backend
    with held(backend.d2h) as gate:
        save = xferlib.save(tmp_path / "a.npy", there(stager, np.arange(3)), stager)
        save.cancel()
        outcome_of = save._outcome
        del save
        gate.set()
    assert outcome_of.ended.wait(20)
    del outcome_of
    only(tmp_path)


FORKING = """
import os
import sys
import threading
import numpy as np
import xferlib
from xferlib.files.temporary import TemporaryFile

begun = threading.Event()

def write(self, data, offset):
    begun.set()
    threading.Event().wait()

TemporaryFile.write = write
TemporaryFile.as_file = lambda self: write(self, b"", os.dup(self._descriptor))
stager = xferlib.stager("host")
xferlib.save(sys.argv[1], {"w": np.zeros(1000)}, stager)
begun.wait()
forked, said = os.pipe()
child = os.fork()
if child == 0:
    os.write(said, b"!")
    # Until whoever reads stdout has seen enough.
    sys.stdin.readline()
    print("alive", flush=True)
    os._exit(0)
# The child has let go of the files before it comes to its own code.
os.read(forked, 1)
print(flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_child_does_not_keep_what_its_killed_parent_left(stager: Stager, tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path / f"a.{kind}")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        parent.stdout.readline()
        parent.wait(20)
        assert len(list(tmp_path.glob(f".*{SUFFIX}"))) == 1
        xferlib.save(tmp_path / "b.npy", there(stager, np.arange(3)), stager).result(20)
        only(tmp_path, "b.npy")
        # It has lived all the while, and what else it had open is open.
        parent.stdin.write("enough\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "alive\n"


def test_a_program_saves_as_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    program = f"""
    import atexit, numpy as np, xferlib
    def handler():
        xferlib.save({str(path)!r}, {{"w": np.arange(300_000)}}, stager, memory=1 << 18)
    stager = xferlib.stager("host")
    atexit.register(handler)
    """
    ended = run_python(program, "-W", "ignore::ResourceWarning")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (safetensors.numpy.load_file(path)["w"] == np.arange(300_000)).all()
    only(tmp_path, path.name)


def test_at_the_end_saves_are_waited_for_before_stagers_are_closed() -> None:
    """What is registered last is called first."""
    program = """
    import atexit
    register, names = atexit.register, []
    atexit.register = lambda call, *arguments: (names.append(call.__qualname__), register(call, *arguments))[1]
    import xferlib
    print(*names)
    """
    names = run_python(program).stdout.split()
    assert names.index("_close_all") < names.index("wait_for_all")


def test_when_everything_has_ended_a_save_is_refused_in_words(tmp_path: Path) -> None:
    """Handlers run in the reverse order of their registration: one from before the import comes last."""
    program = f"""
    import atexit
    def handler():
        try:
            xferlib.save({str(tmp_path / "a.npy")!r}, np.arange(3), stager)
        except xferlib.ClosedError as error:
            print(error)
    atexit.register(handler)
    import numpy as np, xferlib
    stager = xferlib.stager("host")
    """
    ended = run_python(program, "-W", "ignore::ResourceWarning")
    assert "Register the handler that saves after import xferlib" in ended.stdout, ended.stderr
    only(tmp_path)


def test_the_interpreter_waits_for_a_save_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    program = f"""
    import numpy as np, xferlib
    stager = xferlib.stager("host")
    array = stager.put(np.arange(3_000_000), borrow=True).result()
    xferlib.save({str(path)!r}, array, stager, memory=1 << 18)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], check=True, timeout=60)
    assert (np.load(path) == np.arange(3_000_000)).all()


def test_a_program_ends_though_a_daemon_saves_for_ever(tmp_path: Path) -> None:
    """Each save waits for the one before it, so that threads of some are there at every moment. The last of them are waited for."""
    program = f"""
    import threading, time, numpy as np, xferlib
    from xferlib.files.temporary import TemporaryFile
    publish = TemporaryFile.publish
    TemporaryFile.publish = lambda file: (time.sleep(0.1), publish(file))
    stager = xferlib.stager("host")
    array = stager.put(np.arange(30_000), borrow=True).result()
    begun = threading.Event()

    def save_for_ever():
        saves = []
        while True:
            saves.append(xferlib.save({str(tmp_path)!r} + f"/a{{len(saves)}}.npy", array, stager))
            if len(saves) > 3:
                saves[-3].result()
                begun.set()

    threading.Thread(target=save_for_ever, daemon=True).start()
    begun.wait()
    """
    ended = children.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], seconds=10)
    assert ended.returncode == 0, ended.stderr
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"a{number}.npy" for number in range(len(names))}


def test_a_save_that_begins_while_the_program_ends_is_refused(
    stager: Stager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end has looked for saves, and would wait for none that comes behind."""
    hand_over = ByteReader.hand_over

    def late(reader: ByteReader) -> None:
        hand_over(reader)
        monkeypatch.setattr(outcome, "_over", True)

    monkeypatch.setattr(ByteReader, "hand_over", late)
    array = there(stager, np.zeros(MIB, np.uint8))
    with pytest.raises(xferlib.ClosedError, match="this program ends"):
        xferlib.save(tmp_path / "a.npy", array, stager)
    assert not outcome._found()
    only(tmp_path)
    at_rest(stager)
