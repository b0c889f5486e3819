"""Traces of the host backend: what is recorded, what is written, and what is refused."""

from __future__ import annotations

import _thread
import errno
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from typing import Any, get_args

import numpy as np
import pytest
import xferlib_host

import xferlib
from tests.core.fakes import run_python, succeeds
from tests.core.points import interrupted_at
from tests.pipeline.steps import until
from xferlib.pipeline.source_thread import SourceThread
from xferlib.tracing import chrome, picture
from xferlib.tracing.atomic import atomic_text
from xferlib.tracing.events import CPU, HOST, Event, EventKind, Recording
from xferlib.tracing.log import LOG, is_program

NBYTES = 1 << 20
HERE = Path(__file__).name


@pytest.fixture
def stager() -> Iterator[xferlib.Stager]:
    with xferlib.stager("host") as opened:
        yield opened


def of_kind(trace: xferlib.Trace, kind: str) -> list[Event]:
    return [event for event in trace.recording.events if event.kind == kind]


def line_before() -> str:
    return f"{HERE}:{sys._getframe(1).f_lineno - 1}"


def trace() -> xferlib.Trace:
    return xferlib.trace(gpu=False)


def test_copies_of_pinned_memory_have_bytes_and_line(stager: xferlib.Stager) -> None:
    source = stager.empty_pinned(NBYTES, np.uint8)
    with trace() as traced:
        array = stager.put(source).result()
        put = line_before()
        stager.get(array).result()
        get = line_before()
    (to_device,), (to_host,) = of_kind(traced, "h2d"), of_kind(traced, "d2h")
    assert (to_device.nbytes, to_host.nbytes) == (NBYTES, NBYTES)
    assert to_device.site.endswith(put)
    assert to_host.site.endswith(get)
    assert to_device.device == to_host.device == CPU
    assert to_device.stream != to_host.stream
    recording = traced.recording
    assert recording.start <= to_device.issued <= to_device.start <= to_device.end <= to_host.start <= to_host.end <= recording.end
    assert [event.site for event in of_kind(traced, "put")] == [to_device.site]
    assert {event.site for event in of_kind(traced, "wait")} == {to_device.site, to_host.site}


def test_pieces_of_pageable_memory_name_the_line_of_the_put(stager: xferlib.Stager) -> None:
    source = np.ones(5 * NBYTES, np.uint8)
    with trace() as traced:
        stager.put(source, borrow=True).result()
        here = line_before()
    pieces = of_kind(traced, "h2d")
    assert len(pieces) > 1
    assert sum(piece.nbytes for piece in pieces) == source.nbytes
    assert {piece.site.rpartition(os.sep)[2] for piece in pieces} == {here}


def test_where_the_device_is_the_cpu_no_copy_is_said_to_be_of_pinned_memory(stager: xferlib.Stager) -> None:
    pinned, pageable = stager.empty_pinned(NBYTES, np.uint8), np.ones(NBYTES, np.uint8)
    with trace() as traced:
        for source in (pinned, pageable):
            stager.get(stager.put(source, borrow=True).value, out=source).result()
    copies = [*of_kind(traced, "h2d"), *of_kind(traced, "d2h")]
    assert sum(copy.nbytes for copy in copies) == 4 * NBYTES
    assert {copy.memory for copy in copies} == {""}


def test_a_put_that_stages_says_so_and_one_that_borrows_does_not(stager: xferlib.Stager) -> None:
    source, pinned = np.ones(2 * NBYTES, np.uint8), stager.empty_pinned(NBYTES, np.uint8)
    with trace() as traced:
        stager.put({"a": source, "b": 3}).result()
        stager.put(source, borrow=True).result()
        stager.put([pinned, pinned]).result()
    assert [(event.memory, event.nbytes) for event in of_kind(traced, "put")] == [
        ("pageable", 2 * NBYTES),
        ("", 2 * NBYTES),
        ("", 2 * NBYTES),
    ]


def test_a_pipeline_names_the_line_where_it_was_begun(stager: xferlib.Stager) -> None:
    with trace() as traced:
        loop = xferlib.prefetch((np.full(2 * NBYTES, step, np.uint8) for step in range(3)), stager)
        here = line_before()
        assert [int(batch[0]) for batch in loop] == [0, 1, 2]
    copies = of_kind(traced, "h2d")
    assert sum(copy.nbytes for copy in copies) == 6 * NBYTES
    assert {copy.site.rpartition(os.sep)[2] for copy in copies} == {here}


def test_of_a_pipeline_it_is_told_when_its_consumer_waited_for_the_source(stager: xferlib.Stager) -> None:
    wanted, waits = threading.Event(), threading.Event()

    def batches() -> Iterator[np.ndarray[Any, Any]]:
        yield np.ones(NBYTES, np.uint8)
        # Nobody waits for this one: what its source does meanwhile keeps nobody.
        yield np.ones(NBYTES, np.uint8)
        assert wanted.wait(60)
        until(lambda: loop._background._shared.starving)
        waits.set()
        yield np.ones(NBYTES, np.uint8)
        until(lambda: loop._background._shared.starving)

    with trace() as traced:
        loop = xferlib.prefetch(batches(), stager)
        here = line_before()
        until(lambda: loop._background.ahead == 2)
        next(loop)
        next(loop)
        until(lambda: loop._background.clock.phase == "source")
        before = time.perf_counter_ns()
        wanted.set()
        next(loop)
        assert waits.is_set()
        with pytest.raises(StopIteration):
            next(loop)
    awaited = of_kind(traced, "source")
    # And the source that ended, too: what comes behind the loop waits for that.
    assert len(awaited) == 2
    assert awaited[0].start >= before
    assert {event.site.rpartition(os.sep)[2] for event in awaited} == {here}
    assert {traced.recording.name_of(HOST, event.stream) for event in awaited} == {loop._background._thread.name}


def test_a_source_is_awaited_from_when_it_was_asked_and_somebody_waited() -> None:
    shared: SourceThread[Any] = SourceThread(1, ([], lambda box, clock: box, lambda clock: None), begun_at="train.py:3")
    with trace() as traced:
        shared.note_source(5)
        shared.takers = {"one": 7, "another": 9}
        for asked in (5, 8):
            shared.note_source(asked)
        # What there is, is about to be taken.
        shared.items.append(None)
        shared.note_source(5)
    assert [event.start for event in of_kind(traced, "source")] == [7, 8]


def test_without_a_trace_nothing_is_noted_of_a_source(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(SourceThread, "note_source", lambda shared, since: asked.append(since))
    assert len(list(xferlib.prefetch([np.ones(3)] * 3, stager))) == 3
    assert not asked


def test_every_kind_of_event_has_a_colour_and_a_name() -> None:
    kinds = set(get_args(EventKind))
    assert kinds <= set(picture.COLORS)
    page = (Path(xferlib.__file__).parent / "tracing" / "page.html").read_text()
    (named,) = [line for line in page.splitlines() if line.startswith("const KINDS")]
    assert {kind for kind in kinds if f" {kind}: [" in named} == kinds


def test_compute_of_streams_is_recorded_and_waits_in_them_are_not(stager: xferlib.Stager) -> None:
    out = np.empty(NBYTES, np.uint8)
    with xferlib_host.Stream() as stream, trace() as traced:
        array = stager.put(stager.empty_pinned(NBYTES, np.uint8)).value
        stream.submit(np.multiply, array, 2, out)
        here = line_before()
        stream.synchronize()
    stream.close()
    (kernel,) = of_kind(traced, "kernel")
    assert (kernel.name, kernel.stream, kernel.device) == ("multiply", stream.handle, CPU)
    assert kernel.site.endswith(here)


def test_a_copy_under_held_compute_is_hidden(stager: xferlib.Stager) -> None:
    source = stager.empty_pinned(NBYTES, np.uint8)
    gate, entered = threading.Event(), threading.Event()

    def held() -> None:
        entered.set()
        assert gate.wait(60)

    with xferlib_host.Stream() as stream, trace() as traced:
        stream.submit(held)
        assert entered.wait(60)
        stager.put(source).result(timeout=60)
        gate.set()
        stream.synchronize()
    stream.close()
    (device,) = traced.summary().devices
    assert (device.h2d.copies, device.h2d.hidden) == (1, 1.0)


def test_nothing_is_noted_without_a_trace(stager: xferlib.Stager) -> None:
    with trace():
        pass
    stager.put(stager.empty_pinned(NBYTES, np.uint8)).result()
    assert (LOG.events, LOG.jobs) == ([], [])


def test_what_a_trace_has_noted_is_kept_by_it_alone(stager: xferlib.Stager) -> None:
    with trace() as traced:
        stager.put(stager.empty_pinned(NBYTES, np.uint8)).result()
    assert of_kind(traced, "h2d")
    assert (LOG.events, LOG.jobs) == ([], [])


def test_what_finds_no_room_is_counted(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.tracing.log.MOST_EVENTS", 1)
    with trace() as traced:
        for _ in range(2):
            stager.put(np.ones(5 * NBYTES, np.uint8), borrow=True).result()
        assert len(LOG.events) == len(LOG.jobs) == 1
    (note,) = traced.recording.notes
    assert "found no room" in note


def test_what_ended_before_the_trace_is_not_in_it() -> None:
    with trace() as traced:
        # A copy that an earlier trace has seen begin tells the one that runs when it ends.
        LOG.work(Event("h2d", "memmove", 1, 2, CPU, 1), "a lane", "a device")
    assert traced.recording.events == ()


def test_the_events_are_written_for_perfetto(stager: xferlib.Stager, tmp_path: Path) -> None:
    with xferlib.trace(tmp_path / "run.json", gpu=False) as traced:
        stager.put(stager.empty_pinned(NBYTES, np.uint8)).result()
    written = json.loads((tmp_path / "run.json").read_text())
    entries: list[dict[str, Any]] = written["traceEvents"]
    complete = [entry for entry in entries if entry["ph"] == "X"]
    names = {(entry["pid"], entry.get("tid")): entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    assert len(complete) == len(traced.recording.events)
    (copy,) = [entry for entry in complete if entry["cat"] == "h2d"]
    (event,) = of_kind(traced, "h2d")
    assert copy["ts"] == (event.start - traced.recording.start) / 1e3
    assert copy["dur"] == (event.end - event.start) / 1e3
    assert copy["args"]["bytes"] == NBYTES
    assert copy["args"]["site"] == event.site
    assert [entry["cat"] for entry in complete if "GB/s" in entry.get("args", {})] == ["h2d"]
    assert names[copy["pid"], 0] == "the CPU (host backend)"
    assert names[copy["pid"], copy["tid"]] == "xferlib-host-h2d"
    # Every row that is written to has a name.
    assert {(entry["pid"], entry["tid"]) for entry in complete} <= set(names)


def test_ranges_that_overlap_in_part_are_written_as_such(tmp_path: Path) -> None:
    ranges = (Event("range", "one", 1000, 3000), Event("range", "other", 2000, 4000))
    chrome.write(Recording(events=ranges, start=0, end=5000), tmp_path / "run.json")
    entries = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert [entry["args"]["name"] for entry in entries if entry["ph"] == "M"] == ["host", "named ranges"]
    found = {(entry["name"], entry["ph"], entry["ts"]) for entry in entries if entry["ph"] != "M"}
    assert found == {("one", "b", 1.0), ("one", "e", 3.0), ("other", "b", 2.0), ("other", "e", 4.0)}
    assert len({(entry["name"], entry["id"]) for entry in entries if entry["ph"] != "M"}) == 2


def test_a_picture_is_drawn(stager: xferlib.Stager, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with trace() as traced:
        stager.put(stager.empty_pinned(NBYTES, np.uint8)).result()
    traced.png(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    traced.png(tmp_path / "run.svg")
    assert "no kernel was recorded" in (tmp_path / "run.svg").read_text()


@pytest.mark.parametrize("name", ["", "."])
def test_a_folder_is_no_file_for_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with trace() as traced:
        pass
    with pytest.raises(IsADirectoryError, match=r"'\.' is a folder\. Name a file in it, such as 'run\.png'"):
        traced.png(name)
    assert not list(tmp_path.iterdir())


def test_a_picture_shows_what_is_narrower_than_a_pixel(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    second, count = 1_000_000_000, 37
    starts = [second * number // count for number in range(count)]
    # A few hundredths to a third of a pixel.
    ranges = tuple(Event("range", "step", start, start + 20_000 + 5_000 * number) for number, start in enumerate(starts))
    picture.write(Recording(events=ranges, start=0, end=second), tmp_path / "run.png")
    pixels = image.imread(tmp_path / "run.png")[:, :, :3]
    colour = np.array([int(picture.COLORS["range"][digit : digit + 2], 16) for digit in (1, 3, 5)]) / 255
    near = np.abs(pixels - colour).max(axis=2) < 0.1
    row = near[np.argmax([np.count_nonzero(np.diff(line.astype(int)) == 1) for line in near])]
    assert np.count_nonzero(np.diff(row.astype(int)) == 1) == count


def test_a_picture_without_matplotlib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trace() as traced:
        pass
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(xferlib.XferError, match="pip install matplotlib"):
        traced.png(tmp_path / "run.png")


def test_there_is_one_trace_at_a_time() -> None:
    with trace(), pytest.raises(xferlib.XferError, match="a trace runs in this process already"), trace():
        pass
    with trace():
        pass


def test_an_interrupt_while_it_begins_leaves_none_running(monkeypatch: pytest.MonkeyPatch) -> None:
    caught = threading.Event()
    at_work: list[threading.Thread] = []

    def interrupted() -> bool:
        at_work.append(threading.current_thread())
        _thread.interrupt_main()
        assert caught.wait(60)
        return False

    monkeypatch.setattr("xferlib.tracing.trace.has_gpu", interrupted)
    with pytest.raises(KeyboardInterrupt), xferlib.trace():
        pass
    caught.set()
    at_work[0].join(60)
    assert not LOG.on
    with trace():
        pass


def test_one_thread_alone_gives_back_what_an_interrupt_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both, the one that begins it and the one that has left it, find that it was left when it had begun."""
    left = threading.Event()
    at_work: list[threading.Thread] = []
    given_back: list[threading.Thread] = []
    give_back, put = xferlib.Trace._abandon, object.__setattr__

    def interrupted() -> bool:
        at_work.append(threading.current_thread())
        _thread.interrupt_main()
        assert left.wait(60)
        return False

    def set_and_wait(self: xferlib.Trace, name: str, value: object) -> None:
        put(self, name, value)
        if name == "_left" and value:
            left.set()
            at_work[0].join(60)

    def counted(self: xferlib.Trace) -> None:
        given_back.append(threading.current_thread())
        give_back(self)

    monkeypatch.setattr("xferlib.tracing.trace.has_gpu", interrupted)
    monkeypatch.setattr(xferlib.Trace, "__setattr__", set_and_wait)
    monkeypatch.setattr(xferlib.Trace, "_abandon", counted)
    with pytest.raises(KeyboardInterrupt), xferlib.trace():
        pass
    assert given_back == at_work
    assert xferlib.Trace.running() is None
    with trace():
        pass


def test_wherever_an_interrupt_comes_no_trace_is_left_running(tmp_path: Path) -> None:
    made: list[xferlib.Trace] = []
    leave = xferlib.Trace.__exit__.__code__

    def block() -> None:
        made.append(xferlib.trace(tmp_path / "run.json", gpu=False))
        try:
            with made[-1]:
                pass
        except KeyboardInterrupt as error:
            for frame, line in walk_tb(error.__traceback__):
                if frame.f_code is leave and line == leave.co_firstlineno:
                    # It came before the first instruction, where nothing can be done: the program may leave it again.
                    made[-1].__exit__(None, None, None)
            raise

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        for point in itertools.count(1):
            if not interrupted_at(point, ("xferlib/tracing/trace.py",), block):
                break
            # No interrupt ends these.
            for thread in threading.enumerate():
                if thread.name == "xferlib-memory":
                    thread.join(60)
            assert not LOG.on, point
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, point
    finally:
        signal.signal(signal.SIGTERM, before)
    # The newest interpreters let an interrupt in at fewer points.
    assert point > 10
    with trace():
        pass


def test_what_an_interrupt_kept_running_is_written_when_the_program_ends(tmp_path: Path) -> None:
    """It comes before the first instruction of `__exit__`, where no code of ours runs."""
    told = run_python(f"""
        import sys
        import numpy as np
        import xferlib
        code = xferlib.Trace.__exit__.__code__
        def strike(frame, event, argument):
            if frame.f_code is code:
                sys.setprofile(None)
                raise KeyboardInterrupt
        with xferlib.stager("host") as stager:
            with xferlib.trace({str(tmp_path / "run.json")!r}, gpu=False):
                stager.put(stager.empty_pinned(1000, np.uint8)).result()
                sys.setprofile(strike)
    """)
    assert told.stderr.splitlines()[-1] == "KeyboardInterrupt"
    found = json.loads((tmp_path / "run.json").read_text())
    assert [event for event in found["traceEvents"] if event.get("cat") == "h2d"]


def test_a_signal_as_it_is_written_when_the_program_ends_lets_it_be_written(tmp_path: Path) -> None:
    run_python(f"""
        import os, signal, sys
        import xferlib
        from xferlib.tracing import chrome
        write = chrome.write
        def struck(*arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            write(*arguments)
        chrome.write = struck
        # Nobody has ended it.
        xferlib.trace({str(tmp_path / "run.json")!r}, gpu=False).__enter__()
    """)
    assert "traceEvents" in json.loads((tmp_path / "run.json").read_text())


def test_the_interpreter_waits_for_the_thread_that_ends_a_trace() -> None:
    """The wait for it was interrupted."""
    told = run_python("""
        import atexit, os, signal, threading
        import xferlib
        from xferlib.tracing import trace as module
        ending, goes_down, is_down = threading.Event(), threading.Event(), threading.Event()
        recording = module._recording
        def held(*arguments):
            os.kill(os.getpid(), signal.SIGINT)
            assert goes_down.wait(20)
            # What comes last has to wait for this.
            print("left alone" if is_down.wait(0.2) else "waited for", flush=True)
            return recording(*arguments)
        module._recording = held
        atexit.register(is_down.set)
        with xferlib.trace(gpu=False):
            # What is registered last is called first.
            atexit.register(goes_down.set)
    """)
    assert told.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert told.stdout == "waited for\n"


def test_a_trace_in_a_thread_that_nobody_waits_for_is_written_when_the_program_ends(tmp_path: Path) -> None:
    succeeds(f"""
        import threading
        import xferlib
        entered = threading.Event()
        def hold():
            with xferlib.trace({str(tmp_path / "run.json")!r}, gpu=False):
                entered.set()
                threading.Event().wait()
        threading.Thread(target=hold, daemon=True).start()
        entered.wait()
    """)
    assert "traceEvents" in json.loads((tmp_path / "run.json").read_text())


def test_a_trace_that_goes_on_can_be_ended_and_ended_again(stager: xferlib.Stager) -> None:
    first = trace().__enter__()
    with pytest.raises(xferlib.XferError, match=r"__exit__\(None, None, None\)"), trace():
        pass
    stager.put(stager.empty_pinned(NBYTES, np.uint8)).result()
    for _ in range(2):
        first.__exit__(None, None, None)
        assert of_kind(first, "h2d")
    with trace():
        pass


def test_a_trace_without_a_name_that_goes_on_can_be_ended(stager: xferlib.Stager) -> None:
    assert xferlib.Trace.running() is None
    trace().__enter__()
    with pytest.raises(xferlib.XferError, match=r"Trace\.running\(\)\.__exit__\(None, None, None\)"), trace():
        pass
    found = xferlib.Trace.running()
    assert found is not None
    stager.put(stager.empty_pinned(NBYTES, np.uint8)).result()
    found.__exit__(None, None, None)
    assert of_kind(found, "h2d")
    assert xferlib.Trace.running() is None


def test_an_empty_trace_says_why_and_what_to_do(stager: xferlib.Stager) -> None:
    with trace() as traced:
        (np.ones(1000) * 2).sum()
    (note,) = traced.recording.notes
    assert "not what NumPy or a framework does by itself. Bring the arrays by a stager" in note
    assert str(traced.summary()).splitlines()[1:] == [note]


def test_a_trace_of_copies_alone_says_which_compute_is_recorded(stager: xferlib.Stager) -> None:
    with trace() as traced:
        array = stager.put(stager.empty_pinned(NBYTES, np.uint8)).result()
        (array * 2).sum()
    (note,) = traced.recording.notes
    assert "not what NumPy or a framework does by itself. So nothing is known of overlap" in note
    assert str(traced.summary()).splitlines()[-1] == note
    with xferlib_host.Stream() as stream, trace() as traced:
        stream.submit(np.multiply, stager.put(stager.empty_pinned(NBYTES, np.uint8)).value, 2)
        stream.synchronize()
    assert traced.recording.notes == ()


def test_a_trace_is_used_once() -> None:
    traced = trace()
    with traced:
        pass
    with pytest.raises(xferlib.XferError, match="used already"), traced:
        pass


def test_it_says_nothing_before_its_end() -> None:
    with trace() as traced:
        for ask in (traced.summary, lambda: traced.html("x.html"), lambda: traced.recording):
            with pytest.raises(xferlib.XferError, match="has not ended"):
                ask()
    assert isinstance(traced.recording, Recording)


def test_a_folder_that_is_not_there_is_refused_before_the_block(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not there"), xferlib.trace(tmp_path / "missing" / "run.json"):
        pass
    with trace():
        pass


def test_a_file_is_written_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with xferlib.trace("run.json", gpu=False):
        os.chdir("elsewhere")
    assert (tmp_path / "run.json").exists()


def test_a_file_that_cannot_be_written_to_its_end_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("an earlier one")
    recording = Recording(events=(Event("kernel", b"no text", 1, 2, 0, 7),), start=0, end=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not JSON serializable"):
        chrome.write(recording, tmp_path / "run.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert (tmp_path / "run.json").read_text() == "an earlier one"


def test_wherever_an_interrupt_comes_no_file_is_left(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_text(tmp_path / "run.json") as file:
            file.write("{}")

    for point in itertools.count(1):
        if not interrupted_at(point, ("tracing/atomic.py", "files/temporary.py"), write):
            break
        assert [path.name for path in tmp_path.iterdir()] in ([], ["run.json"]), point
    assert point > 10


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"run\.json"), atomic_text(tmp_path / "run.json"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_pipe_can_be_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        chrome.write(Recording(events=(), start=0, end=3), tmp_path / "pipe")
        assert json.loads(os.read(reader, 1 << 16))["traceEvents"] == []
    finally:
        os.close(reader)


def test_a_block_that_raises_is_written(stager: xferlib.Stager, tmp_path: Path) -> None:
    def fail() -> None:
        with xferlib.trace(tmp_path / "run.json", gpu=False):
            stager.put(stager.empty_pinned(NBYTES, np.uint8)).result()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert '"cat":"h2d"' in (tmp_path / "run.json").read_text()


def test_what_cannot_be_written_does_not_hide_why_the_block_ended(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with pytest.raises(ValueError, match="in the program") as caught, xferlib.trace(folder / "run.json", gpu=False):
        folder.rmdir()
        raise ValueError("in the program")
    assert [note for note in caught.value.__notes__ if "the trace was not written: FileNotFoundError" in note]
    folder.mkdir()
    with pytest.raises(FileNotFoundError), xferlib.trace(folder / "run.json", gpu=False):
        folder.rmdir()
    with trace():
        pass


def test_a_program_that_is_terminated_leaves_its_trace(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as caught, xferlib.trace(tmp_path / "run.json", gpu=False):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        assert caught.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"] == []


def test_a_trace_that_another_thread_has_ended_takes_nothing_from_the_next(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        left = xferlib.trace(tmp_path / "left.json", gpu=False).__enter__()
        ending = threading.Thread(target=left.__exit__, args=(None, None, None))
        ending.start()
        ending.join()
        with xferlib.trace(tmp_path / "next.json", gpu=False):
            pass
        # Its own handler was set, and taken back.
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(SystemExit), xferlib.trace(tmp_path / "run.json", gpu=False):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "run.json").exists()


def test_a_file_that_is_being_written_is_finished_before_the_program_is_terminated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = chrome.write

    def terminated(recording: Recording, path: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write(recording, path)

    monkeypatch.setattr(chrome, "write", terminated)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit), xferlib.trace(tmp_path / "run.json", gpu=False):
            pass
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "run.json").exists()


def test_a_handler_of_the_programs_own_is_left_alone(tmp_path: Path) -> None:
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        came.append(number)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        with xferlib.trace(tmp_path / "run.json", gpu=False):
            os.kill(os.getpid(), signal.SIGTERM)
        # One that is set in the block stays after it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with xferlib.trace(tmp_path / "run.json", gpu=False):
            signal.signal(signal.SIGTERM, handle)
        assert signal.getsignal(signal.SIGTERM) is handle
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]


# Python warns of forking a process with threads, and JAX, if another test has loaded it, of any fork.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_a_forked_child_writes_nothing_and_may_trace_itself(tmp_path: Path) -> None:
    with xferlib.trace(tmp_path / "run.json", gpu=False) as traced:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                noted = LOG.on
                traced.__exit__(None, None, None)
                with trace():
                    pass
                status = int(noted or LOG.on or (tmp_path / "run.json").exists())
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert LOG.on
    assert (tmp_path / "run.json").exists()


def test_threads_of_the_host_have_their_names(stager: xferlib.Stager) -> None:
    def put() -> None:
        stager.put(stager.empty_pinned(NBYTES, np.uint8)).result()

    with trace() as traced:
        thread = threading.Thread(target=put, name="a loader")
        thread.start()
        thread.join()
    assert {traced.recording.name_of(HOST, event.stream) for event in of_kind(traced, "put")} == {"a loader"}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/home/me/train.py", True),
        ("<stdin>", True),
        ("<string>", True),
        ("<ipython-input-3-abc>", True),
        ("<frozen importlib._bootstrap>", False),
        (threading.__file__, False),
        (xferlib.__file__, False),
        ("/home/me/xferlib_mine/_stager.py", False),
        ("/home/me/.local/lib/python3.12/site-packages/framework/core.py", False),
        ("/usr/lib/python3/dist-packages/framework.py", False),
    ],
)
def test_what_is_installed_anywhere_is_not_the_program(file: str, expected: bool) -> None:
    assert is_program(file) is expected


def test_a_gpu_that_is_asked_for_and_is_not_there_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.tracing.trace.has_gpu", lambda: False)
    with pytest.raises(xferlib.XferError, match=r"gpu=True, and this process has no NVIDIA GPU.* Leave gpu out"):
        xferlib.trace(gpu=True).__enter__()
    assert xferlib.Trace.running() is None
