"""A device and a host, played by hand, on which loops are run whose calls are then judged.

It knows the rules of CUDA's streams, and nothing of how they are judged: work runs when all that it waits for has run, unless it is
held, and a host that waits for held work stands still until the gate is opened.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal, final

from xferlib.overlap.calls import LEGACY, Baseline, CallKind, CopyDirection, CudaCall, HeldSteps, Site, Stuck

MIB = 1 << 20
COMPUTE, COPIES, BACK = 10, 20, 30
"""Streams that do not wait for the NULL stream."""
BLOCKING, OTHER = 41, 42
"""Streams that do."""

WARMUP = 3

What = Literal["compute", "h2d", "d2h"]


@final
class Machine:
    """Calls are methods; each names the line that makes it. `judged` runs a loop and returns what `judge` takes."""

    def __init__(self) -> None:
        self.calls: list[CudaCall] = []
        self._serials = itertools.count()
        self.step = 0
        self.in_loop = True
        self._executed: set[int] = set()
        self._gate: What | None = None
        self._gates: dict[int, int] = {}
        self._stuck: Stuck | None = None
        self._end: int | None = None
        self._steps = 0
        self._returned = 0
        self._first = self._start = 0
        self._compute: frozenset[int] = frozenset()

    def launch(self, line: int, stream: int = COMPUTE) -> None:
        self._enqueue("launch", line, stream)

    def set(self, line: int, stream: int) -> None:
        self._enqueue("set", line, stream)

    def copy(
        self,
        line: int,
        direction: CopyDirection,
        stream: int,
        *,
        address: int = 0,
        nbytes: int = MIB,
        pageable: bool = False,
        synchronous: bool = False,
    ) -> None:
        call = self._enqueue("copy", line, stream, direction=direction, nbytes=nbytes, address=address, pageable=pageable)
        if pageable or synchronous:
            self._wait(call, [call])

    def record(self, line: int, event: int, stream: int) -> None:
        self._enqueue("record", line, stream, event=event)

    def wait(self, line: int, event: int, stream: int) -> None:
        self._enqueue("wait", line, stream, event=event)

    def sync_event(self, line: int, event: int) -> None:
        record = self._last_record(event, len(self.calls))
        self._wait(self._call("sync event", line, event=event), [] if record is None else [record])

    def sync_stream(self, line: int, stream: int) -> None:
        self._wait(
            self._call("sync stream", line, stream=stream), [call for call in _enqueued(self.calls) if call.stream == stream]
        )

    def free(self, line: int) -> None:
        self._wait(self._call("memory", line), _enqueued(self.calls))

    def stand(self, line: int, for_: Callable[[CudaCall], bool]) -> None:
        """Wait for work without a call of CUDA, as a framework does that is told by another thread."""
        self._wait(None, [call for call in self.calls if for_(call)], Site("loop.py", line, "step"))

    def judged(
        self, step: Callable[[int], object], *, holds: tuple[What, ...], steps: int = 3
    ) -> tuple[Baseline, list[HeldSteps], list[CudaCall]]:
        numbers = itertools.count()
        for _ in range(WARMUP):
            step(next(numbers))
            self._run()
        # What was done by then is nobody's business.
        self.calls.clear()
        for _ in range(steps):
            step(next(numbers))
            self._run()
            self.step += 1
        baseline = self._baseline(steps)
        return baseline, [self._hold(what, step, numbers, steps) for what in ("compute", *holds)], self.calls

    def _baseline(self, steps: int) -> Baseline:
        large = [call for call in self.calls if call.direction is not None and call.nbytes >= MIB // 2]
        launched = [call for call in self.calls if call.kind == "launch"]
        self._compute = frozenset(call.stream for call in launched if call.stream is not None)
        free = self._compute - {call.stream for call in large}
        self._compute = frozenset(free) or self._compute
        slots: dict[CopyDirection, float] = {}
        nbytes: dict[CopyDirection, list[int]] = {}
        directions: tuple[CopyDirection, ...] = ("h2d", "d2h")
        for direction in directions:
            of_step = [[call for call in large if call.direction == direction and call.step == step] for step in range(steps)]
            nbytes[direction] = [sum(call.nbytes for call in calls) for calls in of_step]
            if any(of_step):
                places = {call.address for calls in of_step for call in calls}
                slots[direction] = len(places) / max(len({call.address for call in calls}) for calls in of_step)
        return Baseline(
            steps=steps,
            nbytes=dict(nbytes),
            compute=self._compute,
            launches=min(sum(call.step == step and call.stream in self._compute for call in launched) for step in range(steps)),
            smallest=MIB // 2,
            slots=slots,
        )

    def _hold(self, what: What, step: Callable[[int], object], numbers: itertools.count[int], steps: int) -> HeldSteps:
        self._gate, self._gates, self._stuck, self._end = what, {}, None, None
        self._first, self._start, self._returned = self.step, len(self.calls), 0
        self._computed: frozenset[int] = frozenset()
        self._launched: dict[int, int] = {}
        for _ in range(steps):
            step(next(numbers))
            self.step += 1
            self._returned += 1
        if self._gate is not None:
            self._open()
        assert self._end is not None
        return HeldSteps(
            what=what,
            first_step=self._first,
            start=self.calls[self._start].serial,
            end=self._end,
            gates=self._gates,
            steps=self._steps,
            launched=self._launched,
            computed=self._computed,
            stuck=self._stuck,
        )

    def _call(self, kind: CallKind, line: int, **fields: object) -> CudaCall:
        site = Site("loop.py", line, "step") if self.in_loop else None
        call = CudaCall(
            serial=next(self._serials), step=self.step, in_loop=self.in_loop, kind=kind, function=f"cu{kind}", site=site
        )
        if not self.in_loop:
            call.near = Site("loop.py", line, "step")
        for name, value in fields.items():
            setattr(call, name, value)
        call.blocking = call.stream in (BLOCKING, OTHER)
        self.calls.append(call)
        return call

    def _enqueue(self, kind: CallKind, line: int, stream: int, **fields: object) -> CudaCall:
        call = self._call(kind, line, stream=stream, **fields)
        if self._gate == "compute":
            held = kind == "launch" and stream in self._compute
        else:
            held = kind == "copy" and call.direction == self._gate and call.nbytes >= MIB // 2
        if held:
            self._gates.setdefault(stream, call.serial)
        self._run()
        return call

    def _run(self) -> None:
        """Run all that may run."""
        before = -1
        while before != len(self._executed):
            before = len(self._executed)
            for index, call in enumerate(self.calls):
                if _enqueued([call]) and call.serial not in self._executed and self._may_run(index, call):
                    self._executed.add(call.serial)

    def _may_run(self, index: int, call: CudaCall) -> bool:
        assert call.stream is not None
        if self._gate is not None and call.serial >= self._gates.get(call.stream, call.serial + 1):
            return False
        needed = [
            other
            for other in _enqueued(self.calls[:index])
            if other.stream == call.stream
            or (call.stream == LEGACY and other.blocking)
            or (call.blocking and other.stream == LEGACY)
        ]
        if call.kind == "wait" and (record := self._last_record(call.event, index)) is not None:
            needed.append(record)
        return all(other.serial in self._executed for other in needed)

    def _last_record(self, event: int | None, before: int) -> CudaCall | None:
        records = [call for call in self.calls[:before] if call.kind == "record" and call.event == event]
        return records[-1] if records else None

    def _wait(self, call: CudaCall | None, works: list[CudaCall], site: Site | None = None) -> None:
        if any(work.serial not in self._executed for work in works):
            assert self._gate is not None, "the loop stands still for ever"
            at = site or (call.site if call is not None else None)
            self._stuck = Stuck(self.step, call, at, "wait (framework.py:7)", freed=True)
            self._open()
        if call is not None:
            call.returned = True

    def _open(self) -> None:
        self._run()
        self._steps, self._end = self._returned, self.calls[-1].serial + 1
        launches = [
            call for call in self.calls if call.kind == "launch" and call.stream in self._compute and call.step >= self._first
        ]
        for call in launches:
            self._launched[call.step] = self._launched.get(call.step, 0) + 1
        self._computed = frozenset(
            step for step in self._launched if all(call.serial in self._executed for call in launches if call.step == step)
        )
        for call in self.calls[self._start :]:
            call.done = call.serial in self._executed
        self._gate = None
        self._run()


def _enqueued(calls: list[CudaCall]) -> list[CudaCall]:
    return [call for call in calls if call.kind in ("launch", "copy", "set", "record", "wait")]
