"""Run steps of somebody's loop while its compute, or its copies, are held at a gate, and say whether it overlaps, or why not.

The loop knows nothing of this: calls of CUDA are seen through CUPTI, and held by `hold`. A loop fails only if work was seen not to
be done while other work was held, and the order of its calls says why; see `verdict`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import replace
from typing import Literal, NoReturn, final

from xferlib.checks import whole_number
from xferlib.errors import UndecidedError, add_note
from xferlib.gates import Gate
from xferlib.overlap.callbacks import CallRecording, recorded
from xferlib.overlap.calls import DIRECTIONS, Baseline, CopyDirection, CudaCall, HeldSteps
from xferlib.overlap.hold import ENOUGH, REST_SECONDS, LoopHold, Rehearsal
from xferlib.overlap.libcuda import Driver, DriverError, NoGpuError
from xferlib.overlap.verdict import judge
from xferlib.words import counted

__all__ = ["assert_overlaps"]

MOST_REST_SECONDS = 2.0
STUCK_SECONDS = 0.75
"""How long nothing may happen under a hold before the waiting is ended. Longer for slow steps and long compute, and half of it in a
rehearsal, where nothing is judged. A loop whose host waits, which takes all its waiting five times, is to be told so within five
seconds."""
SLOWEST_SECONDS = 2.0
"""Of a step."""
BASELINE_RESTS = (REST_SECONDS, 0.3)
"""Seconds of rest behind each step of a baseline. The second is run only if the steps of the first were not alike: on busy machines
a thread that runs ahead of the loop may have had no turn for so long, and made its copies a step later. So long is also the rest
behind the last step of all."""
MOST_REHEARSALS = 3
"""Each but the first only because the one before took memory: the next shows whether it was enough."""
MOST_HOLDS = 2
"""Of one kind of work: see `_Watch.hold`."""


def assert_overlaps(
    step: Callable[[], object], *, steps: int = 3, warmup: int = 3, device: int = 0, nbytes: int = 64 << 10
) -> None:
    """Assert that the copies of a loop run beside its compute. Needs an NVIDIA GPU and CUPTI; works for loops of any framework.

    `step` runs one step of the loop and returns without waiting for it, as a training loop does: it launches work and starts the
    copies that belong to it. It is called on this thread, `warmup` times and then `steps` times for a baseline (twice, if these
    copied different amounts), as often again with all work held (up to three times, until pools of memory have grown), with the
    compute held, with the copies to the device held, and with those to the host held: up to 36 times with the defaults, so let its
    source begin anew when it ends. What is compiled, allocated or page-locked in each step after the warm-up counts as part of the
    loop. Steps must copy the same number of bytes. Copies below `nbytes` bytes are looked at as causes, but need not overlap.

    Work on other devices than `device` is not looked at. Nothing else in the process may use CUPTI meanwhile (profilers do), and
    nothing else should use CUDA. A wait of the loop that would never end is ended from outside after some seconds.

    Without a GPU it runs `warmup` and `steps` steps, so that errors of the loop's own show there, too, and then raises
    `BackendUnavailableError`: a CPU has nothing to prove.

    Raises `AssertionError` with the causes, each with the line that is to blame, if it does not overlap; `UndecidedError` if that
    cannot be told, and why; `BackendUnavailableError` without a GPU or CUPTI; what a step raises.
    """
    __tracebackhide__ = True
    if not callable(step):
        called = (
            "Pass it without calling it, assert_overlaps(step)"
            if step is None
            else "If next() runs a step, pass its method __next__"
        )
        raise TypeError(f"step: expected a function that runs one step of the loop, got {type(step).__name__}. {called}")
    steps = whole_number(steps, "steps", least=ENOUGH)
    # What runs for the first time waits for all else.
    warmup = whole_number(warmup, "warmup", least=1)
    nbytes = whole_number(nbytes, "nbytes", least=1)
    device = whole_number(device, "device", least=0)
    loop = _UserLoop(step, warmup + steps * (len(BASELINE_RESTS) + MOST_REHEARSALS + MOST_HOLDS * (1 + len(DIRECTIONS))))
    try:
        driver = Driver(device)
    except NoGpuError as error:
        no_gpu = str(error)
    else:
        no_gpu = ""
    if no_gpu:
        # Not where the lack was caught: what a step raises would be told as a consequence of that.
        _run_unwatched(loop, warmup + steps, no_gpu)
    with recorded(driver) as recording:
        found = _watched(_Watch(recording, driver, loop, steps, nbytes), warmup)
    verdict = judge(*found)
    if verdict.findings:
        raise AssertionError("the loop does not overlap its copies with its compute:\n" + _listed(verdict.findings))
    if verdict.undecided:
        raise UndecidedError("it cannot be told whether the loop overlaps:\n" + _listed(verdict.undecided))


def _watched(watch: _Watch, warmup: int) -> tuple[Baseline, list[HeldSteps], list[CudaCall]]:
    """Return what the steps did, unheld and held. A function of its own: an interrupt in its loops ends the recording."""
    watch.warm_up(warmup)
    baseline = watch.baseline()
    watch.rehearse(baseline)
    held = [watch.hold("compute", baseline)] if baseline.compute else []
    copied = [direction for direction in DIRECTIONS if any(baseline.nbytes[direction])]
    held += [watch.hold(direction, baseline) for direction in copied if held]
    watch.settle()
    return baseline, held, watch.calls


def _run_unwatched(loop: _UserLoop, count: int, no_gpu: str) -> NoReturn:
    """Run steps where nothing can be held, and raise `NoGpuError`, unless a step raises before."""
    __tracebackhide__ = True
    loop.no_gpu = no_gpu
    for _ in range(count):
        loop.run_step()
    raise NoGpuError(f"{no_gpu}. The loop itself ran: {count} steps, without an error")


def _listed(lines: Iterable[object]) -> str:
    return "\n".join(f"- {line}" for line in lines)


@final
class _UserLoop:
    """Somebody's loop, and how many of its steps were run."""

    def __init__(self, step: Callable[[], object], most: int) -> None:
        """`most`: how many steps are run at most, where they can be watched."""
        self.made = 0
        self.no_gpu = ""
        """Why nothing is held; "": there is a GPU."""
        self._step = step
        self._most = most

    def run_step(self) -> None:
        try:
            made = self._step()
        except StopIteration as ended:
            raise UndecidedError(
                f"the loop ended after {counted(self.made, 'step')}, and up to {self._most} are run: compute and copies are held "
                "in turn. Let its source begin anew, as itertools.cycle does"
            ) from ended
        except Exception as error:
            if self.no_gpu:
                add_note(error, f"raised by the loop itself, in step {self.made + 1}. Besides, {self.no_gpu}")
            raise
        if isinstance(made, Generator | Coroutine):
            made.close()
            raise TypeError(
                f"step: to call it runs no step, since it returns a {type(made).__name__}. Of a generator pass the method "
                "__next__; run a coroutine to its end inside the function"
            )
        self.made += 1


@final
class _Watch:
    """Watches the steps. All methods are called by the thread of the loop."""

    def __init__(self, recording: CallRecording, driver: Driver, loop: _UserLoop, steps: int, smallest: int) -> None:
        self._recording = recording
        self._driver = driver
        self._loop = loop
        self._steps = steps
        self._smallest = smallest
        self._slowest = 0.0
        self._longest = 0.0
        self._first = 0

    @property
    def calls(self) -> list[CudaCall]:
        """What was recorded since the warm-up."""
        return self._recording.calls[self._first :]

    def warm_up(self, count: int) -> None:
        for _ in range(count):
            self._loop.run_step()
        # What nobody looks at may be missed: libraries that are loaded keep the GIL for long.
        self._recording.forgive()
        # The first wait for a gate loads what it needs.
        self._rest()

    def settle(self) -> None:
        """Wait until threads that run ahead of the loop have made the copies of its last steps: all are counted."""
        self._rest(BASELINE_RESTS[1])

    def baseline(self) -> Baseline:
        """Return what steps do when nothing is held, looked at again if they copied different amounts."""
        short, long = BASELINE_RESTS
        first = self._baseline(short)
        if all(min(nbytes) == max(nbytes) for nbytes in first.nbytes.values()):
            return first
        again = self._baseline(long)
        # A direction that only some step copies in is not one without copies.
        seen = {
            direction: again.nbytes[direction] if any(again.nbytes[direction]) else [*nbytes, *again.nbytes[direction]]
            for direction, nbytes in first.nbytes.items()
        }
        return replace(again, nbytes=seen)

    def _baseline(self, rest: float) -> Baseline:
        recording = self._recording
        self._first, recording.step = len(recording.calls), 0
        for _ in range(self._steps):
            began = time.monotonic()
            self._loop.run_step()
            self._slowest = max(self._slowest, time.monotonic() - began)
            self._check()
            self._finish()
            self._longest = max(self._longest, time.monotonic() - began)
            self._rest(rest)
            recording.step += 1
        if self._slowest > SLOWEST_SECONDS:
            raise UndecidedError(
                f"a step takes {self._slowest:.1f} s, so nobody can tell waiting from working. Run the loop on smaller batches, "
                f"with steps of at most {SLOWEST_SECONDS:g} s"
            )
        calls = self.calls
        large = [call for call in calls if call.direction is not None and call.nbytes >= self._smallest]
        compute = _compute_streams(calls, large)
        steps = range(self._steps)
        copies = {
            direction: [[call for call in large if call.direction == direction and call.step == step] for step in steps]
            for direction in DIRECTIONS
        }
        slots: dict[CopyDirection, float] = {}
        for direction, of_steps in copies.items():
            addresses = [{call.address for call in of_step} for of_step in of_steps]
            if any(addresses):
                slots[direction] = len(set().union(*addresses)) / max(map(len, addresses))
        return Baseline(
            steps=self._steps,
            nbytes={direction: [sum(call.nbytes for call in of_step) for of_step in copies[direction]] for direction in DIRECTIONS},
            compute=compute,
            launches=min(
                sum(call.kind == "launch" and call.stream in compute and call.step == step for call in calls) for step in steps
            ),
            smallest=self._smallest,
            slots=slots,
        )

    def rehearse(self, baseline: Baseline) -> None:
        """Run steps with all work held, unseen, until they do what they did in the baseline.

        A loop that runs ahead has more batches at once than it had at rest, and a pool takes memory for them, once. To prepare that
        may take copies, or calls that wait for all work: they would be taken for the loop's own.
        """
        recording = self._recording
        step, start = recording.step, len(recording.calls)
        for _ in range(MOST_REHEARSALS):
            timeout = self._timeout() / 2
            # Whether the rehearsal opens it or its watchdog does not matter.
            gate = Gate(4 * timeout)
            self._run(Rehearsal(recording, self._driver, gate, baseline, timeout), gate)
            calls = recording.calls[start:]
            del recording.calls[start:]
            recording.step = step
            if self._is_settled(baseline, calls, [call for call in recording.calls[self._first :] if call.kind == "memory"]):
                return

    def _is_settled(self, baseline: Baseline, calls: list[CudaCall], in_baseline: list[CudaCall]) -> bool:
        """Tell whether the calls of a rehearsal are those of a loop that prepares no memory, or none beyond the baseline's."""
        known = {call.function for call in in_baseline}
        if any(call.kind == "memory" and call.function not in known for call in calls):
            return False
        return all(
            sum(call.nbytes for call in baseline.copies(calls, direction)) <= self._steps * max(baseline.nbytes[direction])
            for direction in DIRECTIONS
        )

    def hold(self, what: Literal["compute", "h2d", "d2h"], baseline: Baseline) -> HeldSteps:
        """Run steps while the compute, or the copies of a direction, are held from their first on."""
        held = self._hold(what, baseline)
        # No call of CUDA says what the loop waited for: it may have been a slow disk, once. A wait for held work comes again.
        if held.stuck is not None and held.stuck.call is None and held.stuck.freed:
            held = self._hold(what, baseline)
        return held

    def _hold(self, what: Literal["compute", "h2d", "d2h"], baseline: Baseline) -> HeldSteps:
        timeout = self._timeout()
        gate = Gate(3 * timeout + 5)
        hold = LoopHold(self._recording, self._driver, gate, what, baseline, timeout)
        self._run(hold, gate)
        return replace(hold.held, overdue=hold.held.overdue or hold.blind or gate.opened_by == "watchdog")

    def _run(self, hold: LoopHold | Rehearsal, gate: Gate) -> None:
        """Run steps under a hold, and wait until all is at rest again. Raises what a step raises."""
        recording = self._recording
        error: BaseException | None = None
        try:
            recording.listener = hold
            hold.start()
            for _ in range(self._steps):
                self._loop.run_step()
                self._check()
                recording.step += 1
                hold.returned += 1
        except BaseException as raised:
            error = raised
            gate.open()
        hold.finished = True
        try:
            hold.join()
        finally:
            gate.open()
            recording.listener = None
        try:
            self._rest()
        except DriverError as failed:
            # An error of the step's own says more.
            error = error or failed
        hold.give_back()
        gate.give_back()
        if error is not None:
            raise error
        self._check()

    def _timeout(self) -> float:
        # Compute that is not held ends as late as it does, and until then nothing happens.
        return max(STUCK_SECONDS, 4 * self._slowest, 2 * self._longest)

    def _check(self) -> None:
        failure = self._recording.failure
        if isinstance(failure, Exception):
            raise RuntimeError("the calls of CUDA could not be recorded") from failure
        if failure is not None:
            # An interrupt that came while a call was recorded.
            raise failure
        if self._recording.missed:
            raise UndecidedError(f"it cannot be told whether the loop overlaps:\n- {self._recording.missed}")

    def _rest(self, seconds: float = REST_SECONDS) -> None:
        """Wait until the device has nothing to do, and nobody has called it for so many seconds.

        Then threads that run ahead of the loop have nothing to do either.
        """
        recording = self._recording
        end = time.monotonic() + MOST_REST_SECONDS
        while True:
            before = len(recording.calls)
            self._finish()
            time.sleep(seconds)
            if len(recording.calls) == before or time.monotonic() > end:
                return

    def _finish(self) -> None:
        """Wait until the device has nothing to do."""
        with self._recording.ours():
            self._driver.synchronize()


def _compute_streams(calls: Iterable[CudaCall], large: Iterable[CudaCall]) -> frozenset[int]:
    """Return the streams of the compute: those that copy nothing large, else the one on which most is launched.

    A stream that copies may also convert what it has copied: that is part of the copy.
    """
    launches: dict[int, int] = {}
    for call in calls:
        if call.kind == "launch" and call.stream is not None:
            launches[call.stream] = launches.get(call.stream, 0) + 1
    free = launches.keys() - {call.stream for call in large}
    if free or not launches:
        return frozenset(free)
    return frozenset({max(launches, key=launches.__getitem__)})
