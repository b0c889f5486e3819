"""Run steps of somebody's loop while its compute, or its copies, are held at a gate, and say whether it overlaps, or why not.

The loop knows nothing of this: calls of CUDA are seen through CUPTI, and a wait for the gate is put in front of the first launch,
or copy, on each stream. What is done while the gate is shut does not stand behind it. A clock only ends the waiting for what does
not come, and a loop fails only if the order of its calls says why it did not come; see `verdict`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Literal, final

from xferlib.errors import XferError
from xferlib.gates import Gate
from xferlib.overlap.callbacks import Recording, recorded, site_of
from xferlib.overlap.calls import Call, Direction, Held, Look, Site, Stuck
from xferlib.overlap.driver import Driver, DriverError
from xferlib.overlap.verdict import judge

__all__ = ["UndecidedError", "assert_overlaps"]

POLL_SECONDS = 0.001
REST_SECONDS = 0.03
"""Without a call for so long, threads that run ahead of the loop count as waiting for it."""
MOST_REST_SECONDS = 2.0
PATIENCE_SECONDS = 1.0
"""How long nothing may happen under a hold before the waiting is ended. Longer for slow steps."""
SLOWEST_SECONDS = 2.0
"""Of a step."""
ENOUGH = 2
"""Batches, or steps, that are done under a hold: more say nothing new."""
MOST_REHEARSALS = 3
"""Each but the first only because the one before took memory: the next shows whether it was enough."""
MOST_EVENTS = 1024
"""Copies, and steps, that are looked at under a hold."""
DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h")


class UndecidedError(XferError):
    """Raised by `assert_overlaps` where the evidence is not enough to say that a loop overlaps, or that it does not."""


def assert_overlaps(
    step: Callable[[], object], *, steps: int = 3, warmup: int = 3, device: int = 0, nbytes: int = 64 << 10
) -> None:
    """Assert that the copies of a loop run beside its compute. Needs an NVIDIA GPU and CUPTI; works for loops of any framework.

    `step` runs one step of the loop and returns without waiting for it, as a training loop does: it launches work and starts the
    copies that belong to it. It is called on this thread, `warmup` times and then `steps` times for a look, as often again with all
    work held (up to three times, until pools of memory have grown), with the compute held, with the copies to the device held, and
    with those to the host held. What is compiled, allocated or page-locked in each step after the warm-up counts as part of the
    loop. Steps must copy the same number of bytes. Copies below `nbytes` bytes are looked at as causes, but need not overlap.

    Work on other devices than `device` is not looked at. Nothing else in the process may use CUPTI meanwhile (profilers do), and
    nothing else should use CUDA. A wait of the loop that would never end is ended from outside after some seconds.

    Raises `AssertionError` with the causes, each with the line that is to blame, if it does not overlap; `UndecidedError` if that
    cannot be told, and why; `BackendUnavailableError` without a GPU or CUPTI: a CPU has nothing to prove.
    """
    __tracebackhide__ = True
    if steps < ENOUGH:
        raise ValueError(f"steps={steps!r}: expected at least {ENOUGH}")
    if warmup < 1:
        raise ValueError(f"warmup={warmup!r}: expected at least 1. What runs for the first time waits for all else")
    if nbytes < 1:
        raise ValueError(f"nbytes={nbytes!r}: expected at least 1")
    driver = Driver(device)
    with recorded(driver) as recording:
        found = _watched(_Watch(recording, driver, step, steps, nbytes), warmup)
    verdict = judge(*found)
    if verdict.findings:
        raise AssertionError("the loop does not overlap its copies with its compute:\n" + _listed(verdict.findings))
    if verdict.undecided:
        raise UndecidedError("it cannot be told whether the loop overlaps:\n" + _listed(verdict.undecided))


def _watched(watch: _Watch, warmup: int) -> tuple[Look, list[Held], list[Call]]:
    """Return what the steps did, unheld and held. A function of its own: an interrupt in its loops ends the recording."""
    watch.warm_up(warmup)
    look = watch.look()
    watch.rehearse(look)
    held = [watch.hold("compute", look)] if look.compute else []
    copied = [direction for direction in DIRECTIONS if any(look.nbytes[direction])]
    held += [watch.hold(direction, look) for direction in copied if held]
    return look, held, watch.calls


def _listed(lines: Iterable[object]) -> str:
    return "\n".join(f"- {line}" for line in lines)


@final
class _Watch:
    """Runs the steps. All methods are called by the thread of the loop."""

    def __init__(self, recording: Recording, driver: Driver, step: Callable[[], object], steps: int, smallest: int) -> None:
        self._recording = recording
        self._driver = driver
        self._step = step
        self._steps = steps
        self._smallest = smallest
        self._slowest = 0.0
        self._first = 0

    @property
    def calls(self) -> list[Call]:
        """What was recorded since the warm-up."""
        return self._recording.calls[self._first :]

    def warm_up(self, count: int) -> None:
        for _ in range(count):
            self._step()
        # The first wait for a gate loads what it needs.
        self._rest()
        self._first = len(self._recording.calls)
        self._recording.step = 0

    def look(self) -> Look:
        recording = self._recording
        for _ in range(self._steps):
            began = time.monotonic()
            self._step()
            self._slowest = max(self._slowest, time.monotonic() - began)
            self._check()
            self._rest()
            recording.step += 1
        if self._slowest > SLOWEST_SECONDS:
            raise UndecidedError(
                f"a step takes {self._slowest:.1f} s, so nobody can tell waiting from working. Run the loop on smaller batches, "
                f"with steps of at most {SLOWEST_SECONDS:g} s"
            )
        calls = self.calls
        large = [call for call in calls if call.direction is not None and call.nbytes >= self._smallest]
        compute = _compute_streams(calls, large)
        launches = [
            sum(call.kind == "launch" and call.stream in compute and call.step == n for call in calls) for n in self._numbers()
        ]
        places: dict[Direction, float] = {}
        for direction in DIRECTIONS:
            of_step = [{call.address for call in large if call.direction == direction and call.step == n} for n in self._numbers()]
            if any(of_step):
                places[direction] = len(set().union(*of_step)) / max(map(len, of_step))
        return Look(
            steps=self._steps,
            nbytes={
                direction: [
                    sum(call.nbytes for call in large if call.direction == direction and call.step == n) for n in self._numbers()
                ]
                for direction in DIRECTIONS
            },
            compute=compute,
            launches=min(launches),
            smallest=self._smallest,
            slots=places,
        )

    def rehearse(self, look: Look) -> None:
        """Run steps with all work held, unseen, until they do what they did in the look.

        A loop that runs ahead has more batches at once than it had at rest, and a pool takes memory for them, once. To prepare that
        may take copies, or calls that wait for all work: they would be taken for the loop's own.
        """
        recording = self._recording
        step, start = recording.step, len(recording.calls)
        for _ in range(MOST_REHEARSALS):
            patience = self._patience()
            # Who opens it does not matter here.
            gate = Gate(2 * patience)
            self._run(_Rehearsal(recording, self._driver, gate, self._smallest, patience), gate)
            calls = recording.calls[start:]
            del recording.calls[start:]
            recording.step = step
            if self._is_settled(look, calls, [call for call in recording.calls[self._first :] if call.kind == "memory"]):
                return

    def _is_settled(self, look: Look, calls: list[Call], in_look: list[Call]) -> bool:
        """Tell whether the calls of a rehearsal are those of a loop that prepares no memory, or at least none beyond the look's."""
        known = {call.function for call in in_look}
        if any(call.kind == "memory" and call.function not in known for call in calls):
            return False
        return all(
            sum(call.nbytes for call in calls if call.direction == direction and call.nbytes >= self._smallest)
            <= self._steps * max(look.nbytes[direction])
            for direction in DIRECTIONS
        )

    def hold(self, what: Literal["compute", "h2d", "d2h"], look: Look) -> Held:
        """Run steps while the compute, or the copies of a direction, are held from their first on."""
        held = self._hold(what, look)
        # No call of CUDA says what the loop stood for: it may have been a slow disk, once. Who waits for what is held waits again.
        if held.stuck is not None and held.stuck.call is None and held.stuck.freed:
            held = self._hold(what, look)
        return held

    def _hold(self, what: Literal["compute", "h2d", "d2h"], look: Look) -> Held:
        patience = self._patience()
        recording = self._recording
        first_step, start = recording.step, len(recording.calls)
        gate = Gate(3 * patience + 5)
        hold = _Hold(recording, self._driver, gate, what, look, patience, start)
        self._run(hold, gate)
        serials = [call.serial for call in recording.calls[start : hold.end]]
        return Held(
            what=what,
            first_step=first_step,
            start=serials[0] if serials else 0,
            end=serials[-1] + 1 if serials else 0,
            gates=dict(hold.gates),
            steps=hold.steps,
            launched=dict(hold.launched_then),
            computed=frozenset(hold.computed),
            stuck=hold.stuck,
            overdue=gate.opened_by == "watchdog" or hold.blind,
        )

    def _run(self, hold: _Hold | _Rehearsal, gate: Gate) -> None:
        """Run steps under a hold, and wait until all is at rest again. Raises what a step raises."""
        recording = self._recording
        error: BaseException | None = None
        try:
            recording.listener = hold
            hold.start()
            for _ in range(self._steps):
                self._step()
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

    def _patience(self) -> float:
        return max(PATIENCE_SECONDS, 4 * self._slowest)

    def _numbers(self) -> range:
        return range(self._steps)

    def _check(self) -> None:
        failure = self._recording.failure
        if isinstance(failure, Exception):
            raise RuntimeError("the calls of CUDA could not be recorded") from failure
        if failure is not None:
            # An interrupt that came while a call was recorded.
            raise failure

    def _rest(self) -> None:
        """Wait until the device has nothing to do, and threads that run ahead of the loop have nothing to do either."""
        recording = self._recording
        end = time.monotonic() + MOST_REST_SECONDS
        while True:
            before = len(recording.calls)
            with recording.ours():
                self._driver.synchronize()
            time.sleep(REST_SECONDS)
            if len(recording.calls) == before or time.monotonic() > end:
                return


@final
class _Hold:
    """Holds work, marks what is enqueued meanwhile, and watches until there is nothing more to come. A `Listener`.

    Two threads: one asks the events, which may have to wait for a call that keeps the driver; the other looks at the time.
    """

    def __init__(
        self,
        recording: Recording,
        driver: Driver,
        gate: Gate,
        what: Literal["compute", "h2d", "d2h"],
        look: Look,
        patience: float,
        start: int,
    ) -> None:
        self._recording = recording
        self._driver = driver
        self._gate = gate
        self._what = what
        self._look = look
        self._patience = patience
        self._start = start
        self._events: list[int] = []
        self._spare: list[int] = []
        self._marks: dict[int, tuple[int, Call]] = {}
        self._steps: dict[tuple[int, int], int] = {}
        self._launched: dict[int, int] = {}
        self._reached: set[tuple[int, int]] = set()
        # Reentrant: a finalizer may call CUDA inside.
        self._marking = threading.RLock()
        self._asker = threading.Thread(target=self._ask, name="xferlib-overlap-events", daemon=True)
        self._referee = threading.Thread(target=self._watch, name="xferlib-overlap-referee", daemon=True)
        self._over = False
        self.gates: dict[int, int] = {}
        self.returned = 0
        self.finished = False
        # What was so when the gate was opened.
        self.end = start
        self.steps = 0
        self.launched_then: dict[int, int] = {}
        self.computed: set[int] = set()
        self.stuck: Stuck | None = None
        self.blind = False

    def start(self) -> None:
        self._driver.enter()
        try:
            for _ in range(MOST_EVENTS):
                self._events.append(self._driver.new_event())
        finally:
            self._driver.leave()
        self._spare.extend(self._events)
        self._asker.start()
        self._referee.start()

    def join(self) -> None:
        # Not all was started if an error, or an interrupt, came before.
        if self._referee.ident is not None:
            self._referee.join()
        self._over = True
        if self._asker.ident is not None:
            self._asker.join()

    def give_back(self) -> None:
        """Destroy the events. Nothing may be under way."""
        for event in self._events:
            self._driver.destroy(event)

    def entered(self, call: Call) -> None:
        if self._over or call.stream is None or call.stream in self.gates or not self._is_to_be_held(call):
            return
        if self._driver.hold(call.stream, self._gate.address):
            self.gates[call.stream] = call.serial
        else:
            self.blind = True

    def left(self, call: Call) -> None:
        if self._over:
            return
        call.returned = True
        if call.stream is None:
            return
        with self._marking:
            self._mark(call, call.stream)

    def _mark(self, call: Call, stream: int) -> None:
        """Record an event behind what the call has enqueued, if it is one that matters."""
        if call.kind == "copy" and call.nbytes >= self._look.smallest and call.direction is not None:
            event = self._new_event()
            if event is not None and self._driver.record(event, stream):
                self._marks[call.serial] = event, call
        elif call.kind == "launch" and stream in self._look.compute:
            # One event for a step and stream: recorded again, it stands behind the last launch.
            key = call.step, stream
            event = self._steps.get(key) or self._new_event()
            if event is not None and self._driver.record(event, stream):
                self._steps[key] = event
                self._reached.discard(key)
                self._launched[call.step] = self._launched.get(call.step, 0) + 1

    def _is_to_be_held(self, call: Call) -> bool:
        if self._what == "compute":
            return call.kind == "launch" and call.stream in self._look.compute
        return call.kind == "copy" and call.direction == self._what and call.nbytes >= self._look.smallest

    def _new_event(self) -> int | None:
        try:
            return self._spare.pop()
        except IndexError:
            # More copies than anybody needs to look at: what has none counts as not done, which is no verdict by itself.
            self.blind = True
            return None

    def _ask(self) -> None:
        """Ask the events until the hold is over."""
        self._driver.enter()
        try:
            self._driver.relax()
            self._ask_on()
        except DriverError:
            self.blind = True
        finally:
            with suppress(DriverError):
                self._driver.leave()

    def _ask_on(self) -> None:
        while not self._over:
            for serial, (event, call) in list(self._marks.items()):
                if self._is_reached(event):
                    call.done = True
                    self._marks.pop(serial, None)
            for key, event in list(self._steps.items()):
                # Recorded again between the two, it would stand for more launches than were asked about.
                with self._marking:
                    if key not in self._reached and self._is_reached(event):
                        self._reached.add(key)
            time.sleep(POLL_SECONDS)

    def _is_reached(self, event: int) -> bool:
        # In this order: what is reached while the gate is shut was not behind it.
        return self._driver.reached(event) and self._gate.shut and not self._over

    def _watch(self) -> None:
        """Wait until enough is done, or nothing happens any more; note how things stand, and open the gate."""
        since, before = time.monotonic(), self._state()
        still = False
        while self._gate.shut and not still and not self._enough():
            time.sleep(POLL_SECONDS)
            state = self._state()
            if state != before:
                since, before = time.monotonic(), state
            still = time.monotonic() - since > self._patience
        self._note(still)
        self._gate.open()
        if self.stuck is not None:
            self._see_whether_freed(self.stuck)

    def _state(self) -> tuple[int, ...]:
        return len(self._recording.calls), len(self._marks), len(self._reached), self.returned, int(self.finished)

    def _enough(self) -> bool:
        if self._what == "compute":
            for direction in DIRECTIONS:
                batch = max(self._look.nbytes[direction])
                done = sum(
                    call.nbytes for call in self._recording.calls[self._start :] if call.direction == direction and call.done
                )
                if batch and done < ENOUGH * batch:
                    return False
            return self.returned >= ENOUGH
        return self.returned >= ENOUGH and len(self._computed()) >= ENOUGH

    def _computed(self) -> set[int]:
        """Return the steps whose launches are all done, as far as they were made."""
        return {step for step, _ in self._steps if all(key in self._reached for key in list(self._steps) if key[0] == step)}

    def _note(self, still: bool) -> None:
        """Note how things stand. `still`: nothing has happened for long."""
        recording = self._recording
        self._over = True
        self.end = len(recording.calls)
        self.steps = self.returned
        self.launched_then = dict(self._launched)
        self.computed = self._computed()
        if not still or self.finished or not self._gate.shut:
            return
        call = recording.open.get(recording.loop)
        frame = sys._current_frames().get(recording.loop)
        inside = (
            "an unknown function" if frame is None else f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
        )
        self.stuck = Stuck(recording.step, None if call is None else call.serial, site_of(frame), inside, freed=False)

    def _see_whether_freed(self, stuck: Stuck) -> None:
        """Note whether the loop went on once the gate was open."""
        recording = self._recording
        end = time.monotonic() + self._patience
        while time.monotonic() < end:
            call = recording.open.get(recording.loop)
            site: Site | None = site_of(sys._current_frames().get(recording.loop))
            left = stuck.call is not None and (call is None or call.serial != stuck.call)
            if left or self.finished or recording.step != stuck.step or (stuck.call is None and site != stuck.site):
                self.stuck = Stuck(stuck.step, stuck.call, stuck.site, stuck.inside, freed=True)
                return
            time.sleep(POLL_SECONDS)


@final
class _Rehearsal:
    """Holds all that may be held, launches and large copies, until the loop has run ahead as far as it does. A `Listener`."""

    def __init__(self, recording: Recording, driver: Driver, gate: Gate, smallest: int, patience: float) -> None:
        self._recording = recording
        self._driver = driver
        self._gate = gate
        self._smallest = smallest
        self._patience = patience
        self._held: set[int] = set()
        self._referee = threading.Thread(target=self._watch, name="xferlib-overlap-rehearsal", daemon=True)
        self.returned = 0
        self.finished = False

    def start(self) -> None:
        self._referee.start()

    def join(self) -> None:
        if self._referee.ident is not None:
            self._referee.join()

    def give_back(self) -> None:
        """It has taken nothing."""

    def entered(self, call: Call) -> None:
        if call.stream is None or call.stream in self._held or not self._gate.shut:
            return
        is_large = call.kind == "copy" and call.direction is not None and call.nbytes >= self._smallest
        if (is_large or call.kind == "launch") and self._driver.hold(call.stream, self._gate.address):
            self._held.add(call.stream)

    def left(self, call: Call) -> None: ...

    def _watch(self) -> None:
        since, before = time.monotonic(), self._state()
        while self._gate.shut and time.monotonic() - since < (REST_SECONDS if self.finished else self._patience):
            time.sleep(POLL_SECONDS)
            state = self._state()
            if state != before:
                since, before = time.monotonic(), state
        self._gate.open()

    def _state(self) -> tuple[int, ...]:
        return len(self._recording.calls), self.returned, int(self.finished)


def _compute_streams(calls: Iterable[Call], large: Iterable[Call]) -> frozenset[int]:
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
