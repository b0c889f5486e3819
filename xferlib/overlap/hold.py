"""Hold work of a loop at a gate, mark what is enqueued meanwhile, and watch until nothing more is to come.

A wait for the gate is put in front of the first launch, or copy, on each stream. What is done while the gate is shut does not stand
behind it. A clock only ends the waiting for what does not come.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Literal, final

from xferlib.callers import frame_of
from xferlib.gates import Gate
from xferlib.overlap.callbacks import CallRecording, site_of
from xferlib.overlap.calls import DIRECTIONS, Baseline, CudaCall, HeldSteps, Site, Stuck
from xferlib.overlap.libcuda import Driver, DriverError

__all__ = ["ENOUGH", "REST_SECONDS", "LoopHold", "Rehearsal"]

POLL_SECONDS = 0.001
REST_SECONDS = 0.03
"""Without a call for so long, threads that run ahead of the loop count as waiting for it."""
ENOUGH = 2
"""Batches, or steps, that are done under a hold: more say nothing new."""
MOST_EVENTS = 1024
"""Copies, and steps, that are looked at under a hold."""


@final
class LoopHold:
    """Holds work, marks what is enqueued meanwhile, and watches until there is nothing more to come. A `Listener`.

    Two threads: one asks the events, which may have to wait for a call that keeps the driver; the other looks at the time.
    """

    def __init__(
        self,
        recording: CallRecording,
        driver: Driver,
        gate: Gate,
        what: Literal["compute", "h2d", "d2h"],
        baseline: Baseline,
        timeout: float,
    ) -> None:
        self._recording = recording
        self._driver = driver
        self._gate = gate
        self._what = what
        self._baseline = baseline
        self._timeout = timeout
        self._start = len(recording.calls)
        self._events: list[int] = []
        self._spare: list[int] = []
        self._marks: dict[int, tuple[int, CudaCall]] = {}
        self._steps: dict[tuple[int, int], int] = {}
        self._launched: dict[int, int] = {}
        self._reached: set[tuple[int, int]] = set()
        # Reentrant: a finalizer may call CUDA inside.
        self._marking = threading.RLock()
        self._asker = threading.Thread(target=self._ask, name="xferlib-overlap-events", daemon=True)
        self._referee = threading.Thread(target=self._watch, name="xferlib-overlap-referee", daemon=True)
        self._over = False
        self._gates: dict[int, int] = {}
        self.returned = 0
        self.finished = False
        self.blind = False
        """Whether something could not be held, or not be looked at."""
        self.held = HeldSteps(
            what=what,
            first_step=recording.step,
            start=0,
            end=0,
            gates=self._gates,
            steps=0,
            launched={},
            computed=frozenset(),
            stuck=None,
            overdue=True,
        )
        """What was so when the gate was opened."""

    def start(self) -> None:
        with self._driver.current():
            for _ in range(MOST_EVENTS):
                self._events.append(self._driver.new_event())
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

    def entered(self, call: CudaCall) -> None:
        if self._over or call.stream is None or call.stream in self._gates or not self._is_to_be_held(call):
            return
        if self._driver.hold(call.stream, self._gate.address):
            self._gates[call.stream] = call.serial
        else:
            self.blind = True

    def left(self, call: CudaCall) -> None:
        if self._over:
            return
        call.returned = True
        if call.stream is None:
            return
        with self._marking:
            self._mark(call, call.stream)

    def _mark(self, call: CudaCall, stream: int) -> None:
        """Record an event behind what the call has enqueued, if it is one that matters."""
        if self._baseline.is_large(call):
            event = self._new_event()
            if event is not None and self._driver.record(event, stream):
                self._marks[call.serial] = event, call
        elif call.kind == "launch" and stream in self._baseline.compute:
            # One event for a step and stream: recorded again, it stands behind the last launch.
            key = call.step, stream
            event = self._steps.get(key) or self._new_event()
            if event is not None and self._driver.record(event, stream):
                self._steps[key] = event
                self._reached.discard(key)
                self._launched[call.step] = self._launched.get(call.step, 0) + 1

    def _is_to_be_held(self, call: CudaCall) -> bool:
        if self._what == "compute":
            return call.kind == "launch" and call.stream in self._baseline.compute
        return call.direction == self._what and self._baseline.is_large(call)

    def _new_event(self) -> int | None:
        try:
            return self._spare.pop()
        except IndexError:
            # More copies than anybody needs to look at: what has none counts as not done, which is no verdict by itself.
            self.blind = True
            return None

    def _ask(self) -> None:
        """Ask the events until the hold is over."""
        try:
            with self._driver.current():
                self._driver.relax()
                self._ask_on()
        except DriverError:
            self.blind = True

    def _ask_on(self) -> None:
        while not self._over:
            for serial, (event, call) in self._marks.copy().items():
                if self._is_reached(event):
                    call.done = True
                    self._marks.pop(serial, None)
            for key, event in self._steps.copy().items():
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
            still = time.monotonic() - since > self._timeout
        self.held = held = self._noted(still)
        self._gate.open()
        if held.stuck is not None and self._is_freed(held.stuck):
            self.held = replace(held, stuck=replace(held.stuck, freed=True))

    def _state(self) -> tuple[int, ...]:
        return len(self._recording.calls), len(self._marks), len(self._reached), self.returned, int(self.finished)

    def _enough(self) -> bool:
        if not self._gates:
            # A thread that makes the copies may be late on a busy machine.
            return False
        if self._what == "compute":
            for direction in DIRECTIONS:
                batch = max(self._baseline.nbytes[direction])
                done = sum(
                    call.nbytes for call in self._recording.calls[self._start :] if call.direction == direction and call.done
                )
                if batch and done < ENOUGH * batch:
                    return False
            return self.returned >= ENOUGH
        return self.returned >= ENOUGH and len(self._computed()) >= ENOUGH

    def _computed(self) -> frozenset[int]:
        """Return the steps whose launches are all done, as far as they were made."""
        return frozenset(
            step for step, _ in self._steps if all(key in self._reached for key in list(self._steps) if key[0] == step)
        )

    def _noted(self, still: bool) -> HeldSteps:
        """Return how things stand. `still`: nothing has happened for long."""
        self._over = True
        calls = self._recording.calls[self._start :]
        return replace(
            self.held,
            start=calls[0].serial if calls else 0,
            end=calls[-1].serial + 1 if calls else 0,
            steps=self.returned,
            launched=dict(self._launched),
            computed=self._computed(),
            stuck=self._stood() if still and not self.finished and self._gate.shut else None,
            overdue=False,
        )

    def _stood(self) -> Stuck:
        """Return where the loop stands."""
        recording = self._recording
        call = recording.open.get(recording.loop)
        frame = frame_of(recording.loop)
        inside = (
            "an unknown function" if frame is None else f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
        )
        return Stuck(recording.step, call, site_of(frame), inside, freed=False)

    def _is_freed(self, stuck: Stuck) -> bool:
        """Tell whether the loop goes on now that the gate is open."""
        recording = self._recording
        end = time.monotonic() + self._timeout
        while time.monotonic() < end:
            call = recording.open.get(recording.loop)
            site: Site | None = site_of(frame_of(recording.loop))
            left = stuck.call is not None and call is not stuck.call
            if left or self.finished or recording.step != stuck.step or (stuck.call is None and site != stuck.site):
                return True
            time.sleep(POLL_SECONDS)
        return False


@final
class Rehearsal:
    """Holds all that may be held, launches and large copies, until the loop has run ahead as far as it does. A `Listener`."""

    def __init__(self, recording: CallRecording, driver: Driver, gate: Gate, baseline: Baseline, timeout: float) -> None:
        self._recording = recording
        self._driver = driver
        self._gate = gate
        self._baseline = baseline
        self._timeout = timeout
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

    def entered(self, call: CudaCall) -> None:
        if call.stream is None or call.stream in self._held or not self._gate.shut:
            return
        if (call.kind == "launch" or self._baseline.is_large(call)) and self._driver.hold(call.stream, self._gate.address):
            self._held.add(call.stream)

    def left(self, call: CudaCall) -> None: ...

    def _watch(self) -> None:
        since, before = time.monotonic(), self._state()
        while self._gate.shut and time.monotonic() - since < (REST_SECONDS if self.finished else self._timeout):
            time.sleep(POLL_SECONDS)
            state = self._state()
            if state != before:
                since, before = time.monotonic(), state
        self._gate.open()

    def _state(self) -> tuple[int, ...]:
        return len(self._recording.calls), self.returned, int(self.finished)
