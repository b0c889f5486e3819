"""`assert_overlaps` from end to end, on a device of threads: it holds, watches, opens the gate, and says what it saw."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import xferlib
from tests.overlap.played import COMPUTE, COPIES, Played
from xferlib.gates import gate_table
from xferlib.overlap import loops
from xferlib.overlap.callbacks import CallRecording
from xferlib.overlap.hold import LoopHold
from xferlib.overlap.libcuda import DriverError


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    played = Played()
    monkeypatch.setattr(loops, "Driver", lambda number: played)
    monkeypatch.setattr(loops, "recorded", played.recorded)
    monkeypatch.setattr(loops, "STUCK_SECONDS", 0.25)
    monkeypatch.setattr(loops, "BASELINE_RESTS", (loops.BASELINE_RESTS[0], 0.1))
    free = len(gate_table().free)
    yield played
    assert len(gate_table().free) == free, "a gate was not given back"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("xferlib-overlap")]
    played.close()


def overlapping(device: Played) -> Callable[[], None]:
    """The next batch is copied while this one is computed."""
    state = {"n": 0}

    def step() -> None:
        n = state["n"]
        state["n"] += 1
        device.wait_event(20 + (n + 1) % 2, COPIES)
        device.copy("h2d", address=(n + 1) % 2)
        device.record_event(10 + (n + 1) % 2, COPIES)
        device.wait_event(10 + n % 2, COMPUTE)
        device.launch()
        device.record_event(20 + n % 2, COMPUTE)

    return step


def test_a_loop_that_overlaps_passes(device: Played) -> None:
    xferlib.assert_overlaps(overlapping(device))


def test_a_copy_on_the_compute_stream_fails_with_its_line(device: Played) -> None:
    def step() -> None:
        device.launch()
        device.copy("h2d", COMPUTE)

    with pytest.raises(AssertionError, match=r"same stream: .*test_loops\.py:\d+ in .*step and the compute are on one stream"):
        xferlib.assert_overlaps(step)


def test_a_loop_that_waits_for_its_step_fails_with_the_line_of_the_wait(device: Played) -> None:
    count = itertools.count(1)

    def step() -> None:
        next(count)
        device.copy("h2d")
        device.record_event(1, COPIES)
        device.wait_event(1, COMPUTE)
        device.launch()
        device.sync_stream(COMPUTE)

    with pytest.raises(AssertionError, match=r"host waits: the loop waits for compute in cu sync stream at .*test_loops\.py:\d+"):
        xferlib.assert_overlaps(step)
    # A wait that is a call of CUDA need not be seen twice.
    assert next(count) == 16


def test_a_wait_that_is_no_call_of_cuda_is_found_by_its_line(device: Played) -> None:
    def step() -> None:
        device.copy("h2d")
        device.record_event(1, COPIES)
        device.wait_event(1, COMPUTE)
        ready = threading.Event()
        device.launch(work=ready.set)
        ready.wait(10)

    with pytest.raises(AssertionError, match=r"host waits: the loop waits for compute at .*test_loops\.py:\d+ in .*step, inside"):
        xferlib.assert_overlaps(step)


def test_a_copy_that_keeps_its_caller_fails(device: Played) -> None:
    def step() -> None:
        device.copy("h2d", wait=True)
        device.launch()

    with pytest.raises(AssertionError, match=r"pageable memory: the copy of 1\.0 MiB host to device at"):
        xferlib.assert_overlaps(step)


def test_copies_of_a_thread_that_runs_ahead_count(device: Played) -> None:
    places, batches = threading.Semaphore(2), threading.Semaphore(0)
    ended = threading.Event()

    def source() -> None:
        while True:
            places.acquire()
            if ended.is_set():
                return
            device.copy("h2d")
            batches.release()

    def step() -> None:
        assert batches.acquire(timeout=10)
        device.launch()
        places.release()

    thread = threading.Thread(target=source)
    thread.start()
    try:
        xferlib.assert_overlaps(step)
    finally:
        ended.set()
        places.release()
        thread.join()


def test_a_pool_that_grows_as_the_loop_runs_ahead_has_grown_before_anything_is_judged(device: Played) -> None:
    """New memory is prepared by a copy behind all compute, as a framework does. At rest, two places are enough."""
    preparing, copied = 1003, itertools.count(30)
    places: list[tuple[int, threading.Event]] = []
    batches: list[tuple[int, int]] = []
    numbers = itertools.count()

    def put() -> None:
        free = next((place for place in places if place[1].is_set()), None)
        if free is None:
            address = next(numbers)
            device.record_event(20, COMPUTE)
            device.wait_event(20, preparing)
            device.copy("h2d", preparing, address=address)
            device.record_event(21, preparing)
            device.wait_event(21, COPIES)
        else:
            places.remove(free)
            address = free[0]
        device.copy("h2d", address=address)
        event = next(copied)
        device.record_event(event, COPIES)
        batches.append((address, event))

    put()
    put()
    places.append((batches.pop()[0], threading.Event()))
    places[0][1].set()
    steps = itertools.count()

    def step() -> None:
        if next(steps) < 3:
            # While it warms up, compute is quick.
            assert all(read.wait(10) for _, read in places)
        address, event = batches.pop(0)
        read = threading.Event()
        device.wait_event(event, COMPUTE)
        device.launch(work=read.set)
        put()
        places.append((address, read))

    xferlib.assert_overlaps(step)
    assert next(numbers) > 2


@pytest.mark.parametrize("at", [7, 10])
def test_what_the_step_raises_under_a_hold_is_raised_and_the_gate_is_opened(device: Played, at: int) -> None:
    inner, count = overlapping(device), iter(range(100))

    def step() -> None:
        inner()
        if next(count) == at:
            raise OSError("no more batches")

    with pytest.raises(OSError, match="no more batches"):
        xferlib.assert_overlaps(step)


def test_what_the_step_raises_says_more_than_what_the_device_says_then(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, count, synchronize = overlapping(device), itertools.count(1), device.synchronize

    def fail() -> None:
        synchronize()
        raise DriverError("cuCtxSynchronize", 700)

    def step() -> None:
        inner()
        if next(count) == 10:
            monkeypatch.setattr(device, "synchronize", fail)
            raise OSError("no more batches")

    with pytest.raises(OSError, match="no more batches"):
        xferlib.assert_overlaps(step)


def test_what_is_done_when_the_gate_is_open_was_not_done_under_the_hold(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that was asked while the gate was shut may be answered when it is open."""
    reached = device.reached

    def answered_late(event: int) -> bool:
        if not reached(event):
            for thread in threading.enumerate():
                if thread.name == "xferlib-overlap-referee":
                    thread.join(10)
        return True

    def step() -> None:
        device.launch()
        device.copy("h2d", COMPUTE)

    monkeypatch.setattr(device, "reached", answered_late)
    with pytest.raises(AssertionError, match="same stream"):
        xferlib.assert_overlaps(step)


def test_what_fails_before_a_hold_has_begun_is_raised_and_leaves_nothing(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    made = itertools.count()
    destroyed: list[int] = []

    def new_event() -> int:
        if next(made) == 7:
            raise DriverError("cuEventCreate", 2)
        return 1

    monkeypatch.setattr(device, "new_event", new_event)
    monkeypatch.setattr(device, "destroy", destroyed.append)
    with pytest.raises(DriverError, match="cuEventCreate failed with CUDA error 2"):
        xferlib.assert_overlaps(overlapping(device))
    assert len(destroyed) == 7


def test_a_slow_source_is_no_verdict(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop stands still, but not for what is held."""
    monkeypatch.setattr(loops, "STUCK_SECONDS", 0.05)
    count = iter(range(100))

    def step() -> None:
        if next(count) == 9:
            # Under the first hold that counts: longer than the gate is shut, and than anybody looks afterwards.
            for thread in threading.enumerate():
                if thread.name == "xferlib-overlap-referee":
                    thread.join(10)
        device.copy("h2d", COPIES)
        device.record_event(1, COPIES)
        device.wait_event(1, COMPUTE)
        device.launch()

    with pytest.raises(xferlib.UndecidedError, match="cannot be told"):
        xferlib.assert_overlaps(step)


def test_a_source_that_is_slow_once_is_no_finding(device: Played) -> None:
    """It delivers as the gate is opened, as if it had waited for that."""
    count, opened = itertools.count(), threading.Event()

    def step() -> None:
        n = next(count)
        device.wait_event(10 + n % 2, COMPUTE)
        device.launch(work=opened.set if n == 9 else lambda: None)
        device.record_event(20 + n % 2, COMPUTE)
        if n == 9:
            # Under the first hold that counts.
            assert opened.wait(60)
        device.wait_event(20 + (n + 1) % 2, COPIES)
        device.copy("h2d", address=(n + 1) % 2)
        device.record_event(10 + (n + 1) % 2, COPIES)

    xferlib.assert_overlaps(step)


def test_a_source_that_is_slow_once_where_the_loop_also_waits_for_compute_is_no_finding(device: Played) -> None:
    """It never has more than one step ahead, and its results are copied beside the compute of the next step."""
    count, opened = itertools.count(1), threading.Event()
    ready = [threading.Event() for _ in range(60)]
    ready[0].set()

    def step() -> None:
        n = next(count)
        device.wait_event(n - 1, COPIES)
        device.copy("d2h", address=n % 2)
        # Three each of warm-up, baseline, rehearsal, and two holds of compute.
        slow = n == 16
        if slow:
            device.streams[COPIES].submit(opened.set)
        # On one line. Under the hold of the copies the source delivers as the gate is opened.
        (opened if slow else ready[n - 1]).wait(60)
        device.launch(work=ready[n].set)
        device.record_event(n, COMPUTE)

    xferlib.assert_overlaps(step)
    assert opened.is_set()


def test_a_copy_of_the_warm_up_that_comes_late_is_no_verdict(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a thread that runs ahead of the loop had no turn: the first step of the baseline copies more than the others."""
    inner, count = overlapping(device), itertools.count(1)

    def step() -> None:
        if next(count) == 4:
            device.copy("h2d", address=7)
        inner()

    slept, sleep = [], time.sleep

    def noted(seconds: float) -> None:
        slept.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", noted)
    xferlib.assert_overlaps(step)
    # Three each of warm-up, two baselines, rehearsal, and holds of compute and of copies.
    assert next(count) == 19
    # The second time, others get a longer turn behind each step.
    assert slept.count(loops.BASELINE_RESTS[1]) >= 3


def test_a_thread_that_makes_its_copies_late_under_their_hold_is_waited_for(
    device: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is two batches ahead, so that two steps are computed before its first copy comes."""
    # Much longer than it is late.
    monkeypatch.setattr(loops, "STUCK_SECONDS", 1.5)
    wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    issued = [threading.Event() for _ in range(60)]
    late: list[int] = []

    def copies() -> None:
        for n in iter(wanted.get, None):
            hold = device.recording.listener
            if isinstance(hold, LoopHold) and hold.held.what == "h2d" and not late:
                late.append(n)
                end = time.monotonic() + 0.1
                while hold._gate.shut and time.monotonic() < end:
                    time.sleep(1e-3)
            device.wait_event(100 + n % 3, COPIES)
            device.copy("h2d", address=n % 3)
            device.record_event(200 + n, COPIES)
            issued[n].set()

    count = itertools.count()
    thread = threading.Thread(target=copies)
    thread.start()
    for n in range(2):
        wanted.put(n)

    def step() -> None:
        n = next(count)
        wanted.put(n + 2)
        assert issued[n].wait(10)
        device.wait_event(200 + n, COMPUTE)
        device.launch()
        device.record_event(100 + n % 3, COMPUTE)

    try:
        xferlib.assert_overlaps(step)
    finally:
        wanted.put(None)
        thread.join(10)
    assert late


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (0, r"the steps copy different amounts host to device \(1\.0 MiB, 0 bytes, 1\.0 MiB\)"),
        (1, "some steps copied less host to device than in the baseline: .* one in each step"),
        (2, "some steps copied less host to device than in the baseline: .* one in each step"),
    ],
)
def test_a_loop_that_does_not_overlap_and_copies_nothing_in_some_steps_does_not_pass(
    device: Played, first: int, words: str
) -> None:
    """Where the steps of a baseline are alike by luck, a step without a batch under a hold is not one whose batch came in time."""
    numbers = itertools.count(first)

    def step() -> None:
        device.launch()
        if next(numbers) % 4 != 3:
            device.copy("h2d", COMPUTE)

    with pytest.raises(xferlib.UndecidedError, match=words):
        xferlib.assert_overlaps(step)


def test_a_direction_that_only_some_step_copies_in_is_not_taken_for_one_without_copies(device: Played) -> None:
    """The second baseline has none of them."""
    inner, count = overlapping(device), itertools.count(1)

    def step() -> None:
        inner()
        if next(count) % 30 == 4:
            device.copy("d2h", COMPUTE)

    amounts = r"different amounts device to host \(1\.0 MiB, 0 bytes, 0 bytes, 0 bytes, 0 bytes, 0 bytes\)"
    with pytest.raises(xferlib.UndecidedError, match=amounts):
        xferlib.assert_overlaps(step)


def test_the_last_copy_of_a_thread_that_had_no_turn_counts(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made in the rest behind the last step of all."""
    steps, source = itertools.count(1), overlapping(device)
    late, sleep = threading.Event(), time.sleep

    def step() -> None:
        if next(steps) != 15:
            source()
        else:
            device.launch()
            late.set()

    def rest(seconds: float) -> None:
        if seconds == loops.BASELINE_RESTS[1] and late.is_set():
            late.clear()
            device.copy("h2d")
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", rest)
    xferlib.assert_overlaps(step)
    assert next(steps) == 16


def test_compute_that_takes_longer_than_nothing_may_happen_is_waited_for(device: Played) -> None:
    """Under the hold of the copies only its end says that anything happens."""
    state = itertools.count()

    def step() -> None:
        n = next(state)
        device.wait_event(20 + (n + 1) % 2, COPIES)
        device.copy("h2d", address=(n + 1) % 2)
        device.record_event(10 + (n + 1) % 2, COPIES)
        device.wait_event(10 + n % 2, COMPUTE)
        device.launch(work=lambda: time.sleep(1.6 * loops.STUCK_SECONDS))
        device.record_event(20 + n % 2, COMPUTE)

    xferlib.assert_overlaps(step, steps=2, warmup=1)


def test_a_step_that_is_too_slow_is_told_so(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "SLOWEST_SECONDS", 0.0)
    with pytest.raises(xferlib.UndecidedError, match=r"a step takes \d\.\d s, so nobody can tell waiting from working"):
        xferlib.assert_overlaps(overlapping(device))


def test_a_rehearsal_holds_as_long_as_the_loop_goes_on(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "STUCK_SECONDS", 2.0)
    inner, count, seen = overlapping(device), itertools.count(1), []

    def step() -> None:
        inner()
        if next(count) in (7, 8, 9):
            (referee,) = (thread for thread in threading.enumerate() if thread.name == "xferlib-overlap-rehearsal")
            referee.join(0.05)
            seen.append(referee.is_alive())

    xferlib.assert_overlaps(step)
    assert seen == [True, True, True]


def test_copies_beyond_the_batches_under_a_hold_are_no_verdict(device: Played) -> None:
    """What a rehearsal copied counts on neither side."""
    count = itertools.count(1)

    def step() -> None:
        device.launch()
        device.copy("h2d", COMPUTE)
        if next(count) == 11:
            device.copy("h2d", COMPUTE)

    with pytest.raises(xferlib.UndecidedError, match=r"the loop copied 1\.0 MiB host to device more than its batches"):
        xferlib.assert_overlaps(step)


def test_what_cannot_be_held_is_no_verdict(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "hold", lambda stream, gate: False)
    with pytest.raises(xferlib.UndecidedError, match="while compute were held, something kept this process from looking"):
        xferlib.assert_overlaps(overlapping(device))


class Missed:
    """Calls that were not seen, as a recording tells of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.words = ""
        monkeypatch.setattr(CallRecording, "missed", property(lambda _: self.words))
        monkeypatch.setattr(CallRecording, "forgive", lambda _: self.forgive())

    def forgive(self) -> None:
        self.words = ""


@pytest.mark.parametrize("at", [4, 7, 10, 15], ids=["baseline", "rehearsal", "compute held", "copies held"])
@pytest.mark.parametrize("stream", [COPIES, COMPUTE], ids=["overlaps", "does not"])
def test_a_call_that_was_missed_is_no_verdict(device: Played, monkeypatch: pytest.MonkeyPatch, at: int, stream: int) -> None:
    missed, steps = Missed(monkeypatch), itertools.count(1)

    def step() -> None:
        number = next(steps)
        assert number <= at, "a step was run for nothing"
        if number == at:
            missed.words = "calls were not seen"
        device.copy("h2d", stream)
        device.launch()

    with pytest.raises(xferlib.UndecidedError, match="cannot be told whether the loop overlaps:\n- calls were not seen"):
        xferlib.assert_overlaps(step)


def test_a_call_that_was_missed_after_the_last_step_is_no_verdict(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    missed, steps, loop = Missed(monkeypatch), itertools.count(1), overlapping(device)
    synchronize = device.synchronize

    def step() -> None:
        loop()
        if next(steps) == 15:
            monkeypatch.setattr(device, "synchronize", miss)

    def miss() -> None:
        synchronize()
        missed.words = "calls were not seen"

    with pytest.raises(xferlib.UndecidedError, match="calls were not seen"):
        xferlib.assert_overlaps(step)


def test_a_call_that_was_missed_in_the_warm_up_does_not_matter(device: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    missed, steps, loop = Missed(monkeypatch), itertools.count(1), overlapping(device)

    def step() -> None:
        loop()
        if next(steps) == 3:
            missed.words = "calls were not seen"

    xferlib.assert_overlaps(step)


def test_a_loop_that_copies_nothing_is_no_verdict(device: Played) -> None:
    with pytest.raises(xferlib.UndecidedError, match=r"makes no copy of 64\.0 KiB or more"):
        xferlib.assert_overlaps(device.launch)


@pytest.mark.parametrize(
    ("options", "named"), [({"steps": 1}, "steps=1"), ({"warmup": 0}, "warmup=0"), ({"nbytes": 0}, "nbytes=0")]
)
def test_options_that_prove_nothing_are_refused(options: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        xferlib.assert_overlaps(lambda: None, **options)


def test_what_is_no_function_is_refused_before_anything_else() -> None:
    with pytest.raises(TypeError, match=r"got list_iterator\. If next\(\) runs a step, pass its method __next__"):
        xferlib.assert_overlaps(iter([]))  # type: ignore[arg-type]


def test_a_generator_s_next_is_a_step_and_its_function_is_refused(device: Played) -> None:
    inner = overlapping(device)

    def loop() -> Iterator[None]:
        while True:
            inner()
            yield

    xferlib.assert_overlaps(loop().__next__)
    with pytest.raises(TypeError, match=r"to call it runs no step, since it returns a generator\. .* pass the method __next__"):
        xferlib.assert_overlaps(loop)


def test_a_coroutine_is_refused_and_closed(device: Played) -> None:
    async def step() -> None: ...

    with pytest.raises(TypeError, match=r"returns a coroutine\. .* run a coroutine to its end inside the function"):
        xferlib.assert_overlaps(step)


@pytest.mark.parametrize("count", [0, 4, 8, 11])
def test_a_loop_that_ends_is_no_verdict_and_it_says_how_many_steps_are_needed(device: Played, count: int) -> None:
    inner, batches = overlapping(device), iter(range(count))

    def step() -> None:
        next(batches)
        inner()

    with pytest.raises(xferlib.UndecidedError, match=rf"ended after {count} steps, and up to 36 are run: .* itertools\.cycle"):
        xferlib.assert_overlaps(step)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xferlib.overlap.libcuda.LIBRARY", "libxferlib-there-is-none.so")


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_steps_are_run_and_it_says_that_a_cpu_has_nothing_to_prove() -> None:
    ran: list[int] = []
    with pytest.raises(xferlib.BackendUnavailableError, match=r"cannot be tested here.*nothing to prove.*ran: 6 steps") as refused:
        xferlib.assert_overlaps(lambda: ran.append(1), warmup=4, steps=2)
    assert len(ran) == 6
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_an_error_of_the_loop_is_raised_as_it_is() -> None:
    def step() -> None:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights") as raised:
        xferlib.assert_overlaps(step)
    assert raised.value.__context__ is None
    assert "raised by the loop itself, in step 1" in raised.value.__notes__[0]


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_a_loop_that_runs_no_step_or_ends_is_told_so() -> None:
    def loop() -> Iterator[None]:
        yield

    with pytest.raises(TypeError, match="to call it runs no step") as refused:
        xferlib.assert_overlaps(loop)
    with pytest.raises(xferlib.UndecidedError, match="ended after 1 step, and up to 36 are run") as ended:
        xferlib.assert_overlaps(loop().__next__)
    # Neither is the loop's own.
    assert not hasattr(refused.value, "__notes__")
    assert not hasattr(ended.value, "__notes__")
