"""What CUPTI tells becomes events, with the line of the program; and what goes wrong is said in words."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import xferlib
from xferlib.engine.native import library
from xferlib.tracing.events import Event
from xferlib.tracing.gpu import Gpus
from xferlib.tracing.log import LOG

PAGEABLE, PINNED = 1, 2
NULL, SIDE = 7, 14


def h2d(cupti: Any, *, memory: int = PINNED, stream: int = SIDE, nbytes: int = 4096, target: int = 0x1000, done: int = 1) -> None:
    cupti.standin_copy(1, 1, target, 0x100, nbytes, 1, memory, stream, done)


def of_kind(trace: xferlib.Trace, kind: str) -> list[Event]:
    return [event for event in trace.recording.events if event.kind == kind]


def line_before() -> str:
    """Return the line before that of the caller, as sites are shown."""
    return f"{Path(__file__).name}:{sys._getframe(1).f_lineno - 1}"


def test_copies_and_kernels_are_recorded(cupti: Any) -> None:
    with xferlib.trace() as trace:
        h2d(cupti, nbytes=1 << 20)
        cupti.standin_kernel(b"some_kernel", SIDE, 5000)
        cupti.standin_copy(1, 2, 0x100, 0x1000, 512, 2, PAGEABLE, NULL, 1)
        cupti.standin_range(b"a step")
    (to_device,), (kernel,), (to_host,), (named,) = (of_kind(trace, kind) for kind in ("h2d", "kernel", "d2h", "range"))
    assert (to_device.nbytes, to_device.memory, to_device.device, to_device.stream) == (1 << 20, "pinned", 0, SIDE)
    assert (kernel.name, kernel.end - kernel.start, kernel.stream) == ("some_kernel", 5000, SIDE)
    assert (to_host.nbytes, to_host.memory, to_host.stream) == (512, "pageable", NULL)
    assert named.name == "a step"
    assert trace.recording.null_streams == {(0, NULL)}
    assert trace.recording.notes == ()
    # One clock.
    assert trace.recording.start < to_device.issued < to_device.start < kernel.start < to_host.start < trace.recording.end


def test_a_copy_names_the_line_that_asked_for_it(cupti: Any) -> None:
    with xferlib.trace() as trace:
        cupti.standin_copy(1, 1, 0x1000, 0x100, 64, 1, PINNED, SIDE, 1)
        here = line_before()
        # The runtime's call of the driver is the same call.
        cupti.standin_copy(2, 1, 0x1000, 0x100, 64, 1, PINNED, SIDE, 1)
    first, second = of_kind(trace, "h2d")
    assert first.site.endswith(here)
    assert second.site.endswith(f":{int(here.partition(':')[2]) + 3}")
    assert len(of_kind(trace, "issue")) == 2


def test_calls_made_with_the_gil_held_name_their_line(cupti: Any) -> None:
    holding = ctypes.PyDLL(cupti._name, handle=cupti._handle)
    with xferlib.trace() as trace:
        holding.standin_call(1, 3)
        here = line_before()
    (wait,) = of_kind(trace, "wait")
    assert wait.site.endswith(here)
    assert trace.recording.threads[wait.stream] == threading.current_thread().name


def test_only_calls_that_say_something_are_recorded(cupti: Any) -> None:
    with xferlib.trace() as trace:
        for function in range(1, 7):
            cupti.standin_call(1, function)
    assert [event.name for event in trace.recording.events] == [
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuStreamSynchronize",
        "cuMemAlloc_v2",
    ]


def test_a_thread_that_runs_no_python_has_no_line(cupti: Any) -> None:
    with xferlib.trace() as trace:
        cupti.standin_native_thread()
    assert [event.site for event in of_kind(trace, "h2d")] == [""] * 3


def test_a_copy_of_a_job_of_ours_names_the_line_of_the_job(cupti: Any) -> None:
    with xferlib.trace() as trace:
        LOG.job("h2d", [(0x100, 0x4000, 0x2000, 0)])
        here = line_before()
        cupti.standin_native_thread()
    assert {event.site.rpartition(os.sep)[2] for event in of_kind(trace, "h2d")} == {here}


def test_many_threads_at_once_lose_nothing(cupti: Any) -> None:
    def call() -> None:
        for _ in range(200):
            cupti.standin_call(1, 3)

    with xferlib.trace() as trace:
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(of_kind(trace, "wait")) == 800
    assert all(event.site for event in of_kind(trace, "wait"))


def test_code_is_let_go_of(cupti: Any) -> None:
    def call() -> None:
        cupti.standin_call(1, 3)

    counts = []
    for _ in range(3):
        with xferlib.trace() as trace:
            for _ in range(50):
                call()
        assert len(of_kind(trace, "wait")) == 50
        gc.collect()
        counts.append(sys.getrefcount(call.__code__))
    # The interpreter itself may keep it for the first time.
    assert counts[0] == counts[1] == counts[2] < 50


def test_code_is_let_go_of_where_nothing_is_read(cupti: Any) -> None:
    def call() -> None:
        cupti.standin_call(1, 3)

    before = sys.getrefcount(call.__code__)
    for _ in range(3):
        gpus = Gpus()
        for _ in range(50):
            call()
        gpus.abandon()
    gc.collect()
    # The interpreter itself may keep it.
    assert sys.getrefcount(call.__code__) < before + 10


def test_a_call_whose_end_is_not_told_hides_none_of_the_next_trace(cupti: Any) -> None:
    with xferlib.trace():
        cupti.standin_begin(1, 3)
    with xferlib.trace() as trace:
        cupti.standin_call(1, 3)
    assert len(of_kind(trace, "wait")) == 1


def test_what_is_not_done_is_said(cupti: Any) -> None:
    with xferlib.trace() as trace:
        h2d(cupti)
        h2d(cupti, done=0)
    assert len(of_kind(trace, "h2d")) == 1
    assert "1 copies and kernels were not done" in trace.recording.notes[0]


def test_a_gpu_that_did_nothing_is_said_to(cupti: Any) -> None:
    with xferlib.trace() as trace:
        cupti.standin_call(1, 3)
    (note,) = trace.recording.notes
    assert "no work of this process ended on a GPU" in note
    with xferlib.trace() as trace:
        h2d(cupti, done=0)
    # Here something was begun.
    (note,) = trace.recording.notes
    assert "1 copies and kernels were not done" in note


def test_what_was_dropped_is_said(cupti: Any) -> None:
    ctypes.c_int64.in_dll(cupti, "dropped").value = 12
    with xferlib.trace() as trace:
        pass
    assert "12 records and 0 buffers or calls found no room" in trace.recording.notes[0]


def test_records_of_an_unknown_size_are_refused_in_words(cupti: Any) -> None:
    ctypes.c_uint32.in_dll(cupti, "kernel_nbytes").value = 256
    with xferlib.trace() as trace:
        h2d(cupti)
        cupti.standin_kernel(b"some_kernel", SIDE, 5000)
    assert of_kind(trace, "h2d") == of_kind(trace, "kernel") == []
    assert "records of 256 bytes for kernels" in str(trace.summary())


def test_an_unknown_version_is_refused(cupti: Any) -> None:
    ctypes.c_uint32.in_dll(cupti, "version").value = 17
    with pytest.raises(xferlib.XferError, match="version 17; known are 18"), xferlib.trace():
        pass


def test_another_tool_is_named_and_left_alone(cupti: Any) -> None:
    subscriber = ctypes.c_void_p()
    assert cupti.cuptiSubscribe(ctypes.byref(subscriber), None, None) == 0
    ctypes.c_int.in_dll(cupti, "registered").value = 0
    with (
        pytest.raises(xferlib.XferError, match="another tool has CUPTI in this process, and it serves one at a time"),
        xferlib.trace(),
    ):
        pass
    assert ctypes.c_int.in_dll(cupti, "registered").value == 0
    assert ctypes.c_int.in_dll(cupti, "subscribers").value == 1
    cupti.cuptiUnsubscribe(subscriber)
    with xferlib.trace():
        pass


def test_what_fails_on_the_way_leaves_nothing_behind(cupti: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("xferlib.tracing.gpu._python", refuse)
        with pytest.raises(MemoryError, match="no room"), xferlib.trace():
            pass
    # The next one runs.
    with xferlib.trace() as trace:
        h2d(cupti)
    assert len(of_kind(trace, "h2d")) == 1


def test_the_environment_is_as_before(cupti: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    before = dict(os.environ)
    with xferlib.trace():
        assert os.environ["NVTX_INJECTION64_PATH"] == cupti._name
    assert dict(os.environ) == before


@pytest.mark.parametrize("raises", [ValueError, KeyboardInterrupt])
def test_a_block_that_raises_is_recorded(cupti: Any, raises: type[BaseException]) -> None:
    trace = xferlib.trace()

    def fail() -> None:
        with trace:
            h2d(cupti)
            raise raises("in the program")

    with pytest.raises(raises, match="in the program"):
        fail()
    assert len(of_kind(trace, "h2d")) == 1


def test_cupti_has_its_own_clock_again(cupti: Any) -> None:
    cupti.standin_clock.restype = ctypes.c_uint64
    with xferlib.trace():
        assert abs(cupti.standin_clock() - time.perf_counter_ns()) < 1e9
    assert abs(cupti.standin_clock() - time.time_ns()) < 60e9


# Python warns of forking a process with threads, and JAX, if another test has loaded it, of any fork.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_a_forked_child_begins_with_nothing_of_its_parents(cupti: Any) -> None:
    with xferlib.trace() as trace:
        cupti.standin_call(1, 3)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                engine = library()
                # The parent's trace runs, and has noted calls: to begin another one would be refused there.
                begun = engine.xe_activity_start(4096, 2, 2, None, None)
                count = ctypes.c_size_t()
                engine.xe_activity_calls(ctypes.byref(count))
                status = int(begun != 1 or count.value != 0)
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        cupti.standin_call(1, 3)
    assert len(of_kind(trace, "wait")) == 2


def test_the_line_of_a_call_is_right_in_a_function_of_many_lines(cupti: Any) -> None:
    lines = ["def long(call):", *(f"    x{number} = {number}" for number in range(300)), "    call(1, 3)", "    return x0"]
    space: dict[str, Any] = {}
    exec(compile("\n".join(lines), "<string>", "exec"), space)
    with xferlib.trace() as trace:
        space["long"](cupti.standin_call)
    assert [event.site for event in of_kind(trace, "wait")] == ["<string>:302"]
