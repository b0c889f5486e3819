"""The guard of a test run: what hangs is ended and shown, wherever it hangs and whatever has failed before."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import psutil
import pytest

from tests.children import run
from tests.core.fakes import until
from tests.side_by_side import side_by_side
from xferlib.conformance import guard, guard_process

Ended: TypeAlias = subprocess.CompletedProcess[str]

HANG = """
import ctypes, subprocess, sys, time, multiprocessing, pytest

def stuck_here():
    time.sleep(1000)

@pytest.fixture
def around():
    {before}
    yield
    {after}

def test_it(around):
    {call}

def test_the_next():
    print("the next one ran")
"""
CHILD = "def stuck_there(): import time; time.sleep(1000)\nstuck_there()"

MANY = 6

DEAF = "import signal; signal.signal(signal.SIGABRT, signal.SIG_IGN); signal.pause()"


def pytest_run(folder: Path, source: str, *, seconds: float = 6) -> Ended:
    """Run a module with the guard, which gives each phase so long."""
    module = folder / "test_hanging.py"
    module.write_text(source)
    plugins = ["-p", "no:cacheprovider", "-p", "xferlib.conformance.guard"]
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", *plugins, "-o", f"hang_seconds={seconds}", "-rA", str(module)]
    return run(command, seconds=60, env=os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))})


def refusing(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> list[int]:
    """Have the system refuse the guard's process so many times. Returns where each refusal is noted."""
    refused: list[int] = []
    spawn = os.posix_spawn

    def start(*arguments: Any, **options: Any) -> int:
        if len(refused) < times:
            refused.append(number)
            raise OSError(number, os.strerror(number))
        return spawn(*arguments, **options)

    monkeypatch.setattr(os, "posix_spawn", start)
    monkeypatch.setattr(guard, "PAUSES_SECONDS", (0.0, 0.0))
    return refused


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EFAULT, errno.ENOMEM])
def test_a_guard_that_the_system_refuses_once_is_started_by_the_next_try(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    refused = refusing(monkeypatch, number, 1)
    started = guard._Guard(1000)
    started.restart("a test")
    assert refused == [number]
    # Between its fork and its program it has no command line.
    assert until(lambda: "guard_process.py" in " ".join(psutil.Process(started.pid).cmdline()))
    os.close(started._orders)
    # It ends with the run.
    assert os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1]) == 0


@pytest.mark.parametrize(("number", "tries"), [(errno.EAGAIN, 3), (errno.ENOENT, 1)])
def test_a_guard_that_cannot_be_started_is_an_error_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, number: int, tries: int
) -> None:
    before = descriptors()
    refused = refusing(monkeypatch, number, 100)
    with pytest.raises(OSError, match=os.strerror(number)):
        guard._Guard(1000)
    assert len(refused) == tries
    assert descriptors() == before


@pytest.mark.parametrize(("went_on", "judged"), [(True, []), (False, ["a test"])], ids=["it went on", "it hangs"])
def test_a_guard_that_was_kept_from_running_looks_where_the_run_is_now(
    monkeypatch: pytest.MonkeyPatch, went_on: bool, judged: list[str]
) -> None:
    theirs, orders = os.pipe()
    now, found = [0.0], list[str]()
    os.write(orders, b"5 a test\n")
    read = os.read

    def read_late(*asked: int) -> bytes:
        """Have more time than the test had gone by, and the run perhaps gone on, before it looks again."""
        said = read(*asked)
        if said == b"5 a test\n":
            now[0] = 10.0
            if went_on:
                os.write(orders, b"15 the next test\n")
        elif said:
            os.close(orders)
        return said

    def end(run: int, what: str) -> None:
        found.append(what)
        os.close(orders)

    with os.fdopen(theirs) as stdin, monkeypatch.context() as patched:
        patched.setattr(guard_process, "time", SimpleNamespace(monotonic=lambda: now[0]))
        patched.setattr(guard_process, "_end", end)
        patched.setattr(sys, "stdin", stdin)
        patched.setattr(sys, "argv", ["guard_process.py", str(os.getppid())])
        patched.setattr(os, "read", read_late)
        guard_process.main()
    assert found == judged


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ended]]:
    """What came of a module that hangs. They run side by side, since they are asleep for seconds."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    sources = [item.callspec.params["ended"] for item in items if "ended" in item.fixturenames]

    def run_it(source: str) -> Ended:
        return pytest_run(tmp_path_factory.mktemp("hanging"), source)

    with side_by_side(run_it, sources) as outcome:
        yield outcome


@pytest.fixture
def ended(request: pytest.FixtureRequest, outcome: Callable[[str], Ended]) -> Ended:
    return outcome(request.param)


def hanging(*, before: str = "pass", call: str = "pass", after: str = "pass") -> str:
    return HANG.format(before=before, call=call, after=after)


def of_module(source: str) -> pytest.MarkDecorator:
    """Have the test judge what came of this module."""
    return pytest.mark.parametrize("ended", [source], ids=["alone"], indirect=True)


@pytest.mark.parametrize(
    ("phase", "ended"),
    [
        ("setup", hanging(before="stuck_here()")),
        ("call", hanging(call="stuck_here()")),
        ("teardown", hanging(call="assert False", after="stuck_here()")),
    ],
    ids=["setup", "call", "teardown after a failure"],
    indirect=["ended"],
)
def test_a_phase_that_hangs_ends_the_run_with_its_traceback(phase: str, ended: Ended) -> None:
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    assert f"It hangs: test_hanging.py::test_it ({phase})." in ended.stderr
    assert "in stuck_here" in ended.stderr


@of_module(hanging(call="ctypes.PyDLL(None).pause()"))
def test_a_test_that_blocks_with_the_gil_held_is_ended(ended: Ended) -> None:
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    assert "in test_it" in ended.stderr


@of_module(hanging(call="import threading; threading.Thread(target=stuck_here).start()"))
def test_threads_that_hold_up_the_end_of_the_process_are_ended(ended: Ended) -> None:
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    assert "It hangs: the end of the process." in ended.stderr
    assert "in stuck_here" in ended.stderr


@of_module(hanging(call=f"print(subprocess.run([sys.executable, '-c', {CHILD!r}], stderr=subprocess.PIPE, text=True).stderr)"))
def test_a_child_that_hangs_is_ended_with_its_traceback_and_the_run_goes_on(ended: Ended) -> None:
    assert ended.returncode == 0, ended.stderr
    assert "Its children are ended: " in ended.stderr
    assert "in stuck_there" in ended.stdout
    assert "the next one ran" in ended.stdout


@of_module(
    hanging(
        call="context = multiprocessing.get_context('spawn'); worker = context.Process(target=time.sleep, args=(1000,)); "
        "worker.start(); worker.join(); assert worker.exitcode == -6; stuck_here()"
    )
)
def test_a_worker_that_hangs_is_ended_with_its_traceback(ended: Ended) -> None:
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    assert "in stuck_here" in ended.stderr
    # What was said into pytest's file is shown before it is lost.
    assert "multiprocessing/process.py" in ended.stderr


@of_module(
    hanging(
        call=f"child = subprocess.Popen([sys.executable, '-c', {DEAF!r}]); "
        "print('child', child.pid, 'end', file=sys.stderr, flush=True); stuck_here()"
    )
)
def test_a_child_that_is_deaf_is_ended_and_does_not_save_a_test_that_hangs_itself(ended: Ended) -> None:
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    # What nobody has waited for may still stand in the table.
    number = int(ended.stderr.partition("child ")[2].split()[0])
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


RECORDING = """
import pytest
from xferlib.conformance import guard, guard_process

class Recorder:
    def __init__(self):
        self.heard = []

    def restart(self, what=None, *, seconds=None):
        self.heard.append((what, seconds))

@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(guard, "_running", [recorder])
    yield recorder
    print("heard", recorder.heard)

def test_it(recorder):
    guard.allow(7)
"""


def test_each_phase_has_time_of_its_own_and_may_ask_for_more(tmp_path: Path) -> None:
    ended = pytest_run(tmp_path, RECORDING, seconds=60)
    assert ended.returncode == 0, ended.stderr
    name = "test_hanging.py::test_it"
    assert f"heard [('{name} (call)', None), (None, 7), ('{name} (teardown)', None)]" in ended.stdout


def test_the_guard_ends_with_the_run_that_it_watches(tmp_path: Path) -> None:
    ended = pytest_run(
        tmp_path,
        hanging(call="from xferlib.conformance import guard; print('guard', guard._running[0].pid, 'end')"),
        seconds=60,
    )
    assert ended.returncode == 0, ended.stderr
    number = int(ended.stdout.partition("guard ")[2].split()[0])
    deadline = time.monotonic() + 20
    while Path(f"/proc/{number}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_that_hangs_with_its_children_is_ended_with_their_tracebacks() -> None:
    program = f"import subprocess, sys\ndef outer(): subprocess.run([sys.executable, '-c', {CHILD!r}])\nouter()"
    ended = run([sys.executable, "-c", program], seconds=5)
    assert ended.returncode == -signal.SIGABRT
    assert "in outer" in ended.stderr
    assert "in stuck_there" in ended.stderr


def test_a_program_that_is_deaf_is_ended_too() -> None:
    ended = run([sys.executable, "-c", DEAF], seconds=1)
    assert ended.returncode == -signal.SIGKILL


def test_what_many_children_show_can_be_read() -> None:
    program = f"import subprocess, sys\nchildren = [subprocess.Popen([sys.executable, '-c', {CHILD!r}]) for _ in range({MANY})]"
    ended = run([sys.executable, "-c", f"{program}\nfor child in children: child.wait()"], seconds=5)
    assert ended.stderr.count('File "<string>", line 1 in stuck_there\n') == MANY
    assert "in wait\n" in ended.stderr
