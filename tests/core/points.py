"""Raises what an interrupt raises, once, at each point of a call where CPython looks for one.

It looks when a function begins, behind a call that has returned, and where a loop jumps back. `interrupted_at` tries all of these
in files of ours, on the main thread alone, as with Ctrl-C; `interrupted_in` all but the last, in whatever is called.
"""

from __future__ import annotations

import dis
import gc
import itertools
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Literal, TypeAlias, final

import pytest

import xferlib
from tests.core.fakes import held
from xferlib.stager import Stager

__all__ = ["Interrupt", "interrupted_at", "interrupted_in", "lost_copies"]

CALLS = frozenset(number for name, number in dis.opmap.items() if name.startswith("CALL"))
BACK = frozenset(number for name, number in dis.opmap.items() if name.startswith("JUMP_BACKWARD") and "NO_INTERRUPT" not in name)

Trace: TypeAlias = "Callable[[FrameType, str, Any], Any]"

_codes: dict[CodeType, bytes] = {}


@final
class _Tracer:
    def __init__(self, point: int, within: tuple[str, ...]) -> None:
        self.left = point
        self._within = within
        self._before: dict[int, int] = {}

    def enter(self, frame: FrameType, event: str, argument: object) -> Trace | None:
        if not frame.f_code.co_filename.endswith(self._within):
            return None
        frame.f_trace_opcodes = True
        self._tick()
        return self.step

    def step(self, frame: FrameType, event: str, argument: object) -> Trace | None:
        if event == "opcode":
            code = _codes.get(frame.f_code)
            if code is None:
                code = _codes[frame.f_code] = frame.f_code.co_code
            now = code[frame.f_lasti]
            before = self._before.get(id(frame))
            self._before[id(frame)] = now
            if before in CALLS or now in BACK:
                self._tick()
        elif event in ("return", "exception"):
            # A call that raises is followed by no look.
            self._before.pop(id(frame), None)
        return self.step

    def _tick(self) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def interrupted_at(point: int, within: tuple[str, ...], call: Callable[[], object]) -> bool:
    """Call, interrupted at such-and-such a point of files that end so; False: there were fewer points."""
    assert threading.current_thread() is threading.main_thread()
    tracer, before, hook = _Tracer(point, within), sys.gettrace(), sys.unraisablehook
    # Held here: CPython does not while it makes the frame that it passes, and a finalizer that is interrupted then drops it.
    enter = tracer.enter
    # Inside a finalizer Python ignores it. Whoever keeps it would keep what is being finalized.
    sys.unraisablehook = lambda told: None
    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        sys.unraisablehook = hook
    # Where it was ignored it came all the same.
    return tracer.left <= 0


class Interrupt(BaseException):
    """What a signal's handler raises."""


def interrupted_in(step: int, call: Callable[[], object]) -> bool:
    """Call, and raise at the entry of the `step`-th function, or behind the `step`-th call, whose result is lost. False: there were
    fewer.
    """
    steps = iter(range(step))

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "return", "c_return") and next(steps, None) is None:
            sys.setprofile(None)
            raise Interrupt

    # What is raised in the collector's callbacks gets no further.
    gc.disable()
    sys.setprofile(profile)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    return False


def lost_copies(
    patch: pytest.MonkeyPatch, method: Literal["put", "get"], engine: Any, within: tuple[str, ...], call: Callable[[], object]
) -> int:
    """Interrupt a call that starts one copy at each of its points, and assert that the copy is done then. Returns how often it had
    begun.

    Nothing is copied before somebody waits for it: there is one copy, so who waits is told by the gate.
    """
    start, synchronize, idle = getattr(Stager, method), xferlib.Transfer.synchronize, Stager.idle
    started: list[Any] = []
    gates: list[threading.Event] = []

    def kept(stager: Stager, tree: Any, **options: Any) -> Any:
        started.append(start(stager, tree, **options))
        return started[-1]

    def waited_for(transfer: xferlib.Transfer) -> None:
        gates[-1].set()
        synchronize(transfer)

    def made_idle(stager: Stager) -> None:
        gates[-1].set()
        idle(stager)

    patch.setattr(Stager, method, kept)
    patch.setattr(xferlib.Transfer, "synchronize", waited_for)
    patch.setattr(Stager, "idle", made_idle)
    begun = 0
    for point in itertools.count(1):
        started.clear()
        with held(engine) as gate:
            gates.append(gate)
            if not interrupted_at(point, within, call):
                break
            assert all(transfer.done() for transfer in started), point
        begun += len(started)
    return begun
