"""Running a program: its steps, and at the end the account: everything is looked at, dropped, and nothing is left."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

import xferlib
from tests.random_programs.content import Wrong
from tests.random_programs.driver import DRIVER
from tests.random_programs.kinds import KINDS
from tests.random_programs.kinds.locks import Locked
from tests.random_programs.kinds.rings import Slots
from tests.random_programs.kinds.stagers import check_figures
from tests.random_programs.kits import Kit
from tests.random_programs.program import Program, Step
from tests.random_programs.world import Device, Host, Named, Opened, Skip, Started, World
from xferlib.memory import pinned_pool
from xferlib.memory.pinned_pool import UNLOCKED_FROM_NBYTES

__all__ = ["Outcome", "finish", "run_program", "run_steps"]

SETTLE_SECONDS = 1.0
"""In which memory of a stager that is closed comes back after its last array went."""
SETTLE_LOOKS = 300
LATE_MICROSECONDS = 200
"""By which streams are late at most, where a program says nothing else."""

running: deque[World] = deque(maxlen=1)
"""That of the program that runs now, or ran last."""
unraised: deque[str] = deque()
"""What was raised where nobody takes it: in finalizers and on threads."""


@final
@dataclass(frozen=True)
class Outcome:
    """What came of a program. `failure` is None if all was well."""

    failure: str | None
    trace: str
    at: str
    """The step, in words."""
    skipped: int
    seconds: float


def run_program(program: Program, kit: Kit, *, tidy: bool = False) -> Outcome:
    """Run a program, whose failure is told and not raised. `tidy`: others will be run here after a failure, too."""
    began = time.perf_counter()
    unraised.clear()
    DRIVER.violations.clear()
    gc.collect()
    threads = set(threading.enumerate())
    allocated = DRIVER.allocated()
    gc.set_threshold(program.options.get("threshold", 700), 10, 10)
    pinned_pool.UNLOCKED_FROM_NBYTES = program.options.get("unlocked_from", UNLOCKED_FROM_NBYTES)
    kit.be_late(program.options.get("late", LATE_MICROSECONDS))
    world = World(kit)
    running.append(world)
    skipped, failure, trace = 0, None, ""
    world.doing = ""
    try:
        skipped = run_steps(world, program.steps)
        world.doing = "the account at the end"
        finish(world)
        account(world, threads, allocated)
    except Exception as error:
        # What the driver saw, or was raised where nobody takes it, comes before what came of it.
        first = next(iter([*DRIVER.violations, *unraised]), None)
        noted = "" if first is None else f"Wrong: {first}; then "
        failure, trace = f"{noted}{type(error).__name__}: {error}", traceback.format_exc()
        error.__traceback__ = None
    gc.set_threshold(700, 10, 10)
    pinned_pool.UNLOCKED_FROM_NBYTES = UNLOCKED_FROM_NBYTES
    if failure is not None and tidy:
        _tidy(world)
    world.end()
    running.clear()
    return Outcome(failure, trace, world.doing, skipped, time.perf_counter() - began)


def run_steps(world: World, steps: Sequence[Step]) -> int:
    """Run steps, and return how many there was nothing to do for."""
    skipped = 0
    for step in steps:
        world.doing = step.lines()[0]
        arguments: dict[str, Any] = {**step.arguments}
        if step.branches:
            arguments["branches"] = step.branches
        try:
            with world.patiently(), _late_refusals(world):
                KINDS[step.kind].run(world, **arguments)
        except Skip:
            skipped += 1
        look(world)
    return skipped


@contextmanager
def _late_refusals(world: World) -> Iterator[None]:
    """Skip where a transfer failed since a stager with limits had no room to stage what was lent to it."""
    try:
        yield
    except xferlib.TransferError as error:
        refused = isinstance(error.__cause__, xferlib.AllocationError)
        if not (refused and any(opened.tight for opened in world.all(Opened))):
            raise
        raise Skip(f"refused: {error}") from None


def look(world: World) -> None:
    """Raise `Wrong` for what was found where nobody could be told."""
    if DRIVER.violations:
        raise Wrong(DRIVER.violations.popleft())
    if unraised:
        raise Wrong(unraised.popleft())


def finish(world: World) -> None:
    """Look at everything that is there, and drop it; stagers stay."""
    if world.parent is None:
        # All of them first: work that one holds may wait for what another does.
        world.release_all()
        for name in list(world.holds):
            world.end_hold(name)
    for name, thing in list(world.things.items()):
        with world.patiently(), suppress(Skip), _late_refusals(world):
            if isinstance(thing, Host) and not thing.lost:
                world.check_host(thing, f"{name} at the end")
            elif isinstance(thing, Device):
                world.check_device(thing, f"{name} at the end")
            elif isinstance(thing, Started):
                thing.transfer.result()
    world.check_canaries()
    look(world)
    for name, thing in list(world.things.items()):
        if isinstance(thing, Host | Device | Started):
            if isinstance(thing, Host) and thing.slot is not None:
                thing.leaves.clear()
                thing.tree = None
                thing.slot[1].release()
            del world.things[name]


def account(world: World, threads: set[threading.Thread], allocated: int) -> None:
    """See that nothing is left of a program whose things are all dropped."""
    world.doing = "closing"
    _close_all(world)
    stagers = world.all(Opened)
    world.things.clear()
    world.readers.clear()
    world.doing = "the account of memory"
    gc.collect()
    opened: Opened | None = None
    for opened in stagers:
        if not opened.closed:
            _flat(world.kit, opened.stager, stagers, "after trim")
    for opened in stagers:
        check_figures(opened.stager)
        opened.stager.close()
        _flat(world.kit, opened.stager, [], "after close")
    opened = None
    stagers.clear()
    gc.collect()
    world.doing = "the account of canaries"
    world.check_canaries()
    for canary, _ in world.canaries.values():
        canary.free()
    world.canaries.clear()
    world.doing = "the account of threads"
    _wait(lambda: not _left(threads), lambda: f"threads are left: {_left(threads)}")
    if not world.kit.on_gpu:

        def allocations() -> int:
            return max(0, DRIVER.allocated() - allocated)

        _wait(
            lambda: not allocations(),
            lambda: f"{allocations()} allocations of device memory are left, {_found_late(world.kit, allocations)}",
        )
        DRIVER.look_at_freed()
    look(world)


def _tidy(world: World) -> None:
    """Give back what a program that failed has left, as far as it goes."""
    world.release_all()
    for hold in list(world.holds.values()):
        with suppress(Exception):
            hold.stack.close()
    with suppress(Exception):
        _close_all(world)
    stagers = world.all(Opened)
    world.things.clear()
    world.readers.clear()
    for opened in stagers:
        with suppress(Exception):
            opened.stager.close()
    for canary, _ in world.canaries.values():
        with suppress(Exception):
            canary.free()


def _close_all(world: World) -> None:
    for locked in world.all(Locked):
        world.quiet_but_for(locked.host, locked.stager)
        locked.pin.close()
    for slots in world.all(Slots):
        slots.ring.close()
    for named in world.all(Named):
        world.kit.end_stream(named.stream)


def _flat(kit: Kit, stager: xferlib.Stager, stagers: list[Opened], when: str) -> None:
    """See that a stager has no memory any more. `stagers`: those that are open, each of which may hold what its copies needed."""

    def left() -> dict[str, int]:
        stats = stager.stats()
        figures = {name: getattr(stats, name) for name in ("pinned_nbytes", "pinned_used_nbytes", "device_nbytes")}
        return {name: value for name, value in figures.items() if value}

    def is_flat() -> bool:
        for opened in stagers:
            if not opened.closed:
                opened.stager.trim()
        if stagers and left():
            # What the framework let go of late is found by asking again.
            gc.collect()
        return not left()

    _wait(is_flat, lambda: f"memory is left {when}: {left()}, {_found_late(kit, left)}")


def _found_late(kit: Kit, left: Callable[[], object]) -> str:
    """Say what it takes to get back what is left too long: so one can tell who has held it."""
    for words, call in (
        ("some more seconds", lambda: time.sleep(3)),
        ("a call of the framework", kit.ask),
        ("a collection of garbage", gc.collect),
    ):
        call()
        # The reaper looks five times a second.
        time.sleep(0.6)
        if not left():
            return f"and nothing any more after {words}"
    return "and whatever is done"


def _left(threads: set[threading.Thread]) -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread not in threads and not thread.name.startswith("random-programs")
    ]


def _wait(reached: Any, words: Any) -> None:
    # By the clock, and by what this process got of it: a machine may stand still for longer than that.
    deadline, looks = time.monotonic() + SETTLE_SECONDS, 0
    while not reached():
        looks += 1
        if time.monotonic() > deadline and looks > SETTLE_LOOKS:
            raise Wrong(words())
        time.sleep(0.001)


def _note_unraisable(unraisable: Any) -> None:
    unraised.append(f"in a finalizer, {unraisable.err_msg or 'an exception'}: {unraisable.exc_value!r}")


def _note_thread(arguments: Any) -> None:
    unraised.append(f"on thread {getattr(arguments.thread, 'name', None)}: {arguments.exc_value!r}")


def listen() -> None:
    """Note from now on what is raised where nobody takes it."""
    sys.unraisablehook = _note_unraisable
    threading.excepthook = _note_thread
