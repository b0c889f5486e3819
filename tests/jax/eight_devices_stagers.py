"""Who owns the stagers that loops over devices share. Not collected by itself: `test_jax_sharded.py` starts a child for it."""

# ruff: noqa: F811  # A fixture that is imported stands in the parameters of tests.

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np
import pytest
import xferlib_jax
from xferlib_jax import _stagers

import xferlib
from tests import children
from tests.core.fakes import always_raises, on_thread
from tests.jax.eight_devices import MESH, assert_is, assert_nothing_is_held, nothing_left, over, random, stagers  # noqa: F401
from tests.jax.garbage import Cycle, eventually
from xferlib import uninterrupted
from xferlib.stager import Stager

SECONDS = 60
LARGE = (64, 5 << 12)
"""Of 5 MiB: a part for each device that threads of ours copy."""


class Opened(list[Stager]):
    """The stagers that loops have opened since this was made; `before` is called before each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        really = _stagers._open

        def noted(device: Any) -> Stager:
            before()
            self.append(really(device))
            return self[-1]

        monkeypatch.setattr(_stagers, "_open", noted)


@functools.cache
def large(seed: int) -> Any:
    return random(LARGE, seed=seed)


def calls(loop: Any) -> list[int]:
    """Return how often each stager's memory was allocated, freed, pinned or unpinned."""
    return [stager.backend.memory.calls for stager in loop.stagers]


def epoch(spec: tuple[Any, ...] = ("a",), count: int = 3) -> Any:
    """Check a loop to its end, one batch at a time: each is dropped before the next is put. Return the loop."""
    asked: SimpleQueue[None] = SimpleQueue()

    def batches() -> Iterator[Any]:
        for number in range(count):
            asked.get()
            yield large(number)

    loop = xferlib_jax.prefetch(batches(), over(*spec))
    for number in range(count):
        asked.put(None)
        assert_is(next(loop), large(number), over(*spec))
    assert next(loop, None) is None
    return loop


@pytest.mark.parametrize("spec", [("a",), (("a", "b"),), ()], ids=str)
def test_a_second_epoch_opens_nothing_and_takes_no_memory(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(monkeypatch)
    loop = epoch(spec)
    before = calls(loop)
    again = epoch(spec)
    assert again.stagers == loop.stagers
    assert calls(again) == before
    assert len(opened) == len(set(opened)) == 8


def test_all_stagers_of_a_loop_are_opened_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(8, timeout=SECONDS)
    Opened(monkeypatch, together.wait)
    epoch()


def test_two_loops_that_begin_at_once_share_one_stager_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=SECONDS)
    opened = Opened(monkeypatch, together.wait)
    sharding, batch = jax.sharding.SingleDeviceSharding(jax.devices()[3]), random((16, 4))
    begun = [on_thread(lambda: xferlib_jax.prefetch([batch] * 3, sharding)) for _ in range(2)]
    loops = [future.result(SECONDS) for future in begun]
    (used,) = {loop.stagers[0] for loop in loops}
    assert [stager.closed for stager in opened if stager is not used] == [True]
    for loop in loops:
        for found in loop:
            assert_is(found, batch, sharding)
    assert not used.closed


def test_close_takes_those_that_no_loop_uses_now_and_the_others_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(monkeypatch)
    one, batch = jax.sharding.SingleDeviceSharding(jax.devices()[3]), random((16, 4))
    epoch()
    with xferlib_jax.prefetch([batch] * 3, one) as loop:
        (used,) = loop.stagers
        xferlib_jax.close()
        assert [stager for stager in opened if not stager.closed] == [used]
        for found in loop:
            assert_is(found, batch, one)
        assert used.closed
    xferlib_jax.close()
    assert len(opened) == 8
    epoch()
    assert len(opened) == 16


def test_a_stager_that_somebody_closes_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(monkeypatch)
    loop = epoch()
    loop.stagers[5].close()
    again = epoch()
    assert len(opened) == 9
    assert [one is other for one, other in zip(loop.stagers, again.stagers, strict=True)] == [number != 5 for number in range(8)]


def test_what_files_were_loaded_by_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts may be as large as the model, and no loop needs so much."""
    path, array = tmp_path / "a.npy", random((512, 1024))
    np.save(path, array)
    opened = Opened(monkeypatch)
    assert_is(xferlib_jax.load(path, over()), array, over())
    assert [stager.closed for stager in opened] == [True] * 8
    loop = xferlib_jax.prefetch([array] * 3, over("a"))
    assert_is(xferlib_jax.load(path, over()), array, over())
    assert len(opened) == 16
    assert not any(stager.closed for stager in loop.stagers)
    for found in loop:
        assert_is(found, array, over("a"))
    assert all(stager.closed for stager in loop.stagers)


def test_an_error_of_the_source_an_interrupt_and_a_loop_left_early_leave_the_stagers(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(error: BaseException) -> Iterator[Any]:
        yield large(0)
        raise error

    opened = Opened(monkeypatch)
    for error in (ArithmeticError("on purpose"), KeyboardInterrupt()):
        with xferlib_jax.prefetch(broken(error), over("a")) as loop:
            assert_is(next(loop), large(0), over("a"))
            with pytest.raises(type(error)):
                next(loop)
        epoch()
    for array in xferlib_jax.prefetch((large(0) for _ in range(9)), over("a")):
        assert_is(array, large(0), over("a"))
        break
    epoch()
    assert len(opened) == 8


def test_a_loop_dropped_in_a_cycle_with_copies_in_flight_lets_go_of_its_sources() -> None:
    """Nobody puts any more: otherwise the next put would let go of them."""
    one, gate = jax.sharding.SingleDeviceSharding(jax.devices()[3]), threading.Event()
    with xferlib_jax.prefetch([random((16, 4))], one) as loop:
        (stager,) = loop.stagers
        next(loop)

    class Pinned(Iterator[Any]):
        rewrites = False

        def __next__(self) -> Any:
            return stager.empty_pinned((16, 4), np.float32)

    stager.backend.h2d.submit(gate.wait)  # type: ignore[attr-defined]  # Of the backend on the CPU, for tests.
    try:
        loop = xferlib_jax.prefetch(Pinned(), one)
        eventually(lambda: stager.stats().h2d_nbytes == 3 * 16 * 4 * 4)
        Cycle(lambda: None, loop)
        del loop
        gc.collect()
    finally:
        gate.set()
    assert_nothing_is_held()
    eventually(lambda: not stager._ledger.busy)
    (found,) = xferlib_jax.prefetch([random((16, 4))], one)
    assert_is(found, random((16, 4)), one)
    assert not stager.closed


def test_copies_to_one_device_do_not_wait_for_those_to_another(stagers: tuple[Stager, ...]) -> None:
    """Of the same batch, and of the next one."""
    gate, others = threading.Event(), [stager for number, stager in enumerate(stagers) if number != 3]
    batches = [large(seed) for seed in range(2)]
    stagers[3].backend.h2d.submit(gate.wait)  # type: ignore[attr-defined]  # Of the backend on the CPU, for tests.
    with xferlib_jax.prefetch([], over(("a", "b")), stagers=stagers) as loop:
        transfers = [loop._puts.put(batch, unshared=True) for batch in batches]
        try:
            for stager in others:
                on_thread(stager.idle).result(SECONDS)
            assert not any(transfer.done() for transfer in transfers)
        finally:
            gate.set()
        for transfer, batch in zip(transfers, batches, strict=True):
            assert_is(transfer.value, batch, over(("a", "b")))


def test_an_interrupt_while_a_stager_is_opened_leaves_none_that_nobody_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, gate = threading.Event(), threading.Event()

    def hold_up() -> None:
        inside.set()
        assert gate.wait(SECONDS)

    opened = Opened(monkeypatch, hold_up)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        assert inside.wait(SECONDS)
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = on_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        xferlib_jax.prefetch([random((16, 4))], over("a"))
    interrupting.result(SECONDS)
    assert _stagers._SHARED._rows == {}
    gate.set()
    eventually(lambda: len(opened) == 8 and all(stager.closed for stager in opened))
    epoch()
    assert len(opened) == 16


def test_what_an_interrupt_leaves_open_of_a_close_is_closed_by_the_next_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, really, errors = Opened(monkeypatch), Stager.close, [KeyboardInterrupt(), None, xferlib.XferError("on purpose")]

    def close(stager: Stager) -> None:
        error = errors.pop() if errors else None
        if not isinstance(error, KeyboardInterrupt):
            really(stager)
        if error is not None:
            raise error

    epoch()
    first = opened.copy()
    monkeypatch.setattr(Stager, "close", close)
    with pytest.raises(KeyboardInterrupt):
        xferlib_jax.close()
    assert [stager.closed for stager in first].count(False) == 1
    loop = epoch()
    eventually(lambda: all(stager.closed for stager in first))
    assert not set(loop.stagers) & set(first)
    assert len(opened) == 16


def test_where_one_stager_cannot_be_opened_the_others_serve_the_next_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = itertools.count()

    def fail_once() -> None:
        if next(begun) == 2:
            raise ArithmeticError("on purpose")

    opened = Opened(monkeypatch, fail_once)
    with pytest.raises(ArithmeticError, match="on purpose"):
        xferlib_jax.prefetch([], over("a"))
    assert _stagers._SHARED._rows == {}
    assert len(opened) == 7
    epoch()
    assert len(opened) == 8


def test_where_python_starts_no_threads_since_the_program_ends_no_loop_opens_stagers(monkeypatch: pytest.MonkeyPatch) -> None:
    xferlib_jax.close()
    refuse = always_raises(RuntimeError, "can't create new thread at interpreter shutdown")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(uninterrupted, "start_new_thread", refuse)
        patch.setattr(_stagers._SHARED, "_thread", None)
        with pytest.raises(xferlib.BackendUnavailableError, match="begin the first loop or save, before the end"):
            xferlib_jax.prefetch([], over("a"))
    assert_nothing_is_held()


def test_devices_that_jax_has_made_anew_get_stagers_of_their_own() -> None:
    program = (
        "import jax, numpy as np, xferlib_jax\n"
        "from jax.extend import backend\n"
        "from xferlib.stager import open_stagers\n"
        "def epoch():\n"
        "    sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ('x',)), jax.sharding.PartitionSpec('x'))\n"
        "    batches = [np.full((8, 1 << 17), seed, 'f4') for seed in range(4)]\n"
        "    loop = xferlib_jax.prefetch(batches, sharding)\n"
        "    for found, batch in zip(loop, batches, strict=True):\n"
        "        assert all((shard.data == batch[shard.index]).all() for shard in found.addressable_shards)\n"
        "    return loop.stagers\n"
        "before = epoch()\n"
        "assert epoch() == before\n"
        "backend.clear_backends()\n"
        "after = epoch()\n"
        "assert not set(before) & set(after)\n"
        "assert all(stager.closed for stager in before)\n"
        "assert set(open_stagers()) == set(after)\n"
    )
    # Those that are kept at the end of a process are no leak of the program's.
    child = children.run([sys.executable, "-X", "dev", "-c", program], seconds=SECONDS)
    assert (child.returncode, child.stderr) == (0, "")


def test_a_forked_child_has_none_of_them() -> None:
    loop = epoch()
    pid = children.fork()
    if pid == 0:
        code = 1
        try:
            xferlib_jax.close()
            # The parent's: whoever asks for one is refused, and nothing was closed.
            code = 0 if not _stagers._SHARED._kept and not any(stager.closed for stager in loop.stagers) else 1
        finally:
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        time.sleep(0.001)
    assert os.waitstatus_to_exitcode(status) == 0
    assert epoch().stagers == loop.stagers


def test_a_thread_of_an_earlier_call_that_takes_part_unasked_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(thing: str) -> None:
        if threading.current_thread() is threading.main_thread():
            # The thread of the earlier call is free now, and finds what was refused for want of a thread.
            earlier.set()
            assert taken.wait(SECONDS)
        else:
            taken.set()
            # Long enough for the other one to return, which it must not.
            returned.wait(0.2)
        done.append(thing)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    earlier, taken, returned = threading.Event(), threading.Event(), threading.Event()
    done: list[str] = []
    with ThreadPoolExecutor(2) as threads:
        threads.submit(earlier.wait, SECONDS)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        _stagers.at_once(threads, call, ["one", "two"])
        found = sorted(done)
        returned.set()
        monkeypatch.undo()
    assert found == ["one", "two"]


def test_an_error_of_one_of_several_things_keeps_none_of_them() -> None:
    class Thing:
        pass

    def call(thing: Thing) -> None:
        raise ValueError("broken on purpose")

    def attempt() -> list[weakref.ref[Thing]]:
        things = [Thing(), Thing()]
        with ThreadPoolExecutor(1) as threads, pytest.raises(ValueError, match="on purpose"):
            _stagers.at_once(threads, call, things)
        return [weakref.ref(thing) for thing in things]

    gc.collect()
    gc.disable()
    try:
        assert [thing() for thing in attempt()] == [None, None]
    finally:
        gc.enable()
