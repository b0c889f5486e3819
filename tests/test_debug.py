"""Debug mode: whoever writes to the source of a put too early is told where, and nobody else is told anything."""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream

import xferlib
from tests.core.fakes import Point, held, on_thread, succeeds, tampered
from xferlib import SourceRewrittenError, debug
from xferlib.debug import VARIABLE
from xferlib.stager import open_stagers

PATIENCE = 20.0
SMALL, LARGE = 1 << 12, 3 << 20
"""Bytes. Of a source that is borrowed the smaller is copied at once all the same, the larger by threads."""

Stager = xferlib.Stager


@pytest.fixture
def stager() -> Iterator[Stager]:
    with xferlib.stager("host", pinned_limit=64 << 20, debug=True) as stager:
        yield stager


def pinned(stager: Stager, nbytes: int = 1 << 16, value: int = 1) -> Any:
    array = stager.empty_pinned(nbytes, np.uint8)
    array[:] = value
    return array


def h2d(stager: Stager) -> Any:
    return stager.backend.h2d  # type: ignore[attr-defined]  # The host backend's engine.


def line() -> int:
    """The line that calls this."""
    return sys._getframe(1).f_lineno


def until_done(transfer: xferlib.Transfer) -> None:
    while not transfer.done():
        threading.Event().wait(0.001)


def value_when_done(transfer: xferlib.Transfer) -> None:
    transfer._event.synchronize()
    _ = transfer.value


def value_on_when_done(transfer: xferlib.Transfer) -> None:
    transfer._event.synchronize()
    stream = Stream()
    try:
        transfer.value_on(stream)
    finally:
        stream.close()


ASKING: dict[str, Callable[[xferlib.Transfer], Any]] = {
    "done": until_done,
    "synchronize": xferlib.Transfer.synchronize,
    "result": xferlib.Transfer.result,
    "result in time": lambda transfer: transfer.result(PATIENCE),
    "value": value_when_done,
    "value_on": value_on_when_done,
}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_a_pinned_source_that_is_written_to_too_early_is_told_whoever_asks_and_each_time(
    stager: Stager, ask: Callable[[xferlib.Transfer], Any]
) -> None:
    source = pinned(stager)
    with held(h2d(stager)):
        transfer = stager.put(source)
        source[0] = 2
        assert not transfer.done()
    for _ in range(2):
        with pytest.raises(SourceRewrittenError, match="was written to before its transfer was done"):
            ask(transfer)


def test_the_leaf_the_bytes_and_the_line_of_the_put_are_named(stager: Stager) -> None:
    tree = {"label": pinned(stager, 100), "image": [pinned(stager, 100), pinned(stager, 20_000)]}
    with held(h2d(stager)):
        transfer = stager.put(tree)
        where = line() - 1
        tree["image"][1][5000:9000] = 7
        tree["image"][1][19_000] = 7
    with pytest.raises(SourceRewrittenError) as told:
        transfer.synchronize()
    assert "tree.image[1], bytes 4096 to 12287 of 20000. " in str(told.value)
    assert f"The put was called at {__file__}:{where}. " in str(told.value)
    assert "slots of a Ring" in str(told.value)


def test_a_put_that_is_made_in_a_backend_s_package_is_told_by_the_line_that_called_it(stager: Stager) -> None:
    source = pinned(stager)
    put = eval("lambda stager, array: stager.put(array)", {"__name__": "xferlib_other.sharded"})
    with held(h2d(stager)):
        transfer = put(stager, source)
        where = line() - 1
        source[0] = 2
    with pytest.raises(SourceRewrittenError) as told:
        transfer.synchronize()
    assert f"The put was called at {__file__}:{where}. " in str(told.value)


def test_the_last_bytes_are_looked_at_too(stager: Stager) -> None:
    source = pinned(stager, 5000)
    with held(h2d(stager)):
        transfer = stager.put(source)
        source[-1] = 7
    with pytest.raises(SourceRewrittenError, match="the array itself, bytes 4096 to 4999 of 5000"):
        transfer.synchronize()


def test_the_error_is_a_fault_of_the_program_and_no_failed_copy() -> None:
    assert issubclass(SourceRewrittenError, xferlib.XferError)
    assert issubclass(SourceRewrittenError, RuntimeError)
    assert not issubclass(SourceRewrittenError, xferlib.TransferError)


def test_who_waits_before_writing_is_told_nothing(stager: Stager) -> None:
    source = pinned(stager)
    for value, ask in enumerate(ASKING.values()):
        source[:] = value
        transfer = stager.put(source)
        ask(transfer)
        source[:] = 255
        assert (transfer.result() == value).all()


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_a_source_that_was_borrowed_is_told_whatever_its_size(stager: Stager, nbytes: int) -> None:
    source = np.ones((2, nbytes), np.uint8)[:, ::2]
    with held(h2d(stager)):
        transfer = stager.put({"a": source}, borrow=True)
        source[0, 0] = 2
    with pytest.raises(SourceRewrittenError, match=r"tree\.a, bytes 0 to 4095.*leave out borrow=True"):
        transfer.result()


def test_bytes_are_counted_as_they_lie_in_memory(stager: Stager) -> None:
    source = np.ones((8192, 2), np.uint8).T
    assert source.flags.f_contiguous
    with held(h2d(stager)):
        transfer = stager.put(source, borrow=True)
        source[1, 0] = 2
    with pytest.raises(SourceRewrittenError, match="bytes 0 to 4095 of 16384"):
        transfer.synchronize()


@pytest.mark.parametrize("way", ["x", "x[::2]", "x.reshape(512, -1).T"])
def test_a_source_whose_file_is_cut_off_ends_nothing_and_blames_nobody(tmp_path: Path, way: str) -> None:
    succeeds(f"""
        import os
        import numpy as np
        import xferlib
        path = {str(tmp_path / "source")!r}
        np.arange(1 << 20, dtype=np.float32).tofile(path)
        x = np.memmap(path, np.float32, "r")
        with xferlib.stager("host", debug=True) as stager:
            put = stager.put({way}, borrow=True)
            # The copies are done, and nobody has looked yet.
            put._event.synchronize()
            os.truncate(path, 4096)
            assert put.result().size == {way}.size
            try:
                stager.put({way}, borrow=True).result()
            except xferlib.TransferError as error:
                assert "its file was cut off" in str(error)
            else:
                raise AssertionError("the put has not failed")
    """)


@pytest.mark.parametrize(
    "way", [np.asarray, lambda x: x[::2], lambda x: x.reshape(512, -1).T, lambda x: x.reshape(512, -1)[:, ::2]]
)
def test_a_rewrite_in_a_file_is_told_by_the_bytes_as_they_lie_in_memory(
    stager: Stager, tmp_path: Path, way: Callable[[Any], Any]
) -> None:
    values = way(np.memmap(tmp_path / "source", np.float32, "w+", shape=(1 << 20,)))
    with held(h2d(stager)) as gate:
        transfer = stager.put(values, borrow=True)
        # The item with this number in memory.
        (values.T if values.ndim == 2 and values.strides[0] < values.strides[1] else values).flat[1030] = 7
        gate.set()
    with pytest.raises(SourceRewrittenError, match="bytes 4096 to 8191 of"):
        transfer.result()


def test_pageable_memory_that_is_not_borrowed_is_the_callers_at_once(stager: Stager) -> None:
    source, target = np.ones(LARGE, np.uint8), np.zeros(LARGE, np.uint8)
    for transfer in (stager.put(source), stager.put(source, into=target)):
        source[:] = 2
        assert (transfer.result() == 1).all()
        source[:] = 1


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x]])
def test_a_put_into_an_array_is_looked_at_too(stager: Stager, wrap: Callable[[Any], Any]) -> None:
    source, target = pinned(stager), np.zeros(1 << 16, np.uint8)
    with held(h2d(stager)):
        transfer = stager.put(wrap(source), into=wrap(target))
        source[:] = 2
    with pytest.raises(SourceRewrittenError):
        transfer.synchronize()


def test_a_get_that_ends_tells_that_the_puts_before_it_have(stager: Stager) -> None:
    source, stream = pinned(stager), Stream()
    with xferlib.stager("host", debug=True) as other:
        for through in (stager, other):
            for value in range(3):
                source[:] = value
                with held(h2d(stager)):
                    array = stager.put(source).value_on(stream)
                    coming = through.get(array, stream=stream)
                # What the put returned is asked by nobody.
                assert (coming.result() == value).all()
                source[:] = 99
    stream.close()


def test_a_rewrite_that_nobody_can_ask_for_is_raised_by_the_next_put_once(stager: Stager) -> None:
    source, another = pinned(stager), pinned(stager)
    with held(h2d(stager)):
        stager.put(source)
        stager.put(source)
        source[:] = 2
        end = stager.put(another).completion
    end._event.synchronize()
    where = line() - 5
    with pytest.raises(SourceRewrittenError, match=f"^an earlier put is at fault.*called at {__file__}:{where}") as told:
        stager.put(another)
    assert len(told.value.__notes__) == 1
    assert told.value.__notes__[0].startswith("besides: the source of a put")
    assert (stager.put(another).result() == 1).all()


def test_a_rewrite_that_somebody_can_ask_for_is_not_raised_elsewhere(stager: Stager) -> None:
    source, another = pinned(stager), pinned(stager)
    with held(h2d(stager)):
        transfer = stager.put(source)
        source[:] = 2
    for _ in range(3):
        stager.put(another).synchronize()
    with pytest.raises(SourceRewrittenError, match=r"^the source of a put was written to"):
        transfer.synchronize()


@pytest.mark.parametrize("keeps", [True, False])
def test_close_raises_what_nobody_was_told_when_all_is_closed(keeps: bool) -> None:
    stager = xferlib.stager("host", debug=True)
    source = pinned(stager)
    with held(h2d(stager)) as gate:
        kept = [stager.put(source)]
        if not keeps:
            kept.clear()
        source[:] = 2
        gate.set()
        with pytest.raises(SourceRewrittenError, match=r"^the source of a put was written to"):
            stager.close()
    with pytest.raises(xferlib.ClosedError):
        stager.put(np.zeros(3, np.uint8))
    assert repr(stager).endswith(", debug, closed>")
    stager.close()
    assert stager not in open_stagers()


def test_close_waits_for_the_copies_before_it_looks() -> None:
    stager = xferlib.stager("host", debug=True)
    source = pinned(stager)
    with held(h2d(stager)) as gate:
        stager.put(source)
        source[:] = 2
        closing = on_thread(stager.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)
        gate.set()
        with pytest.raises(SourceRewrittenError):
            closing.result(PATIENCE)


class Late:
    """An event that says no until it is waited for."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self._waited = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)

    def done(self) -> bool:
        return self._waited

    def synchronize(self) -> None:
        self._event.synchronize()
        self._waited = True


def test_close_looks_also_where_events_are_late() -> None:
    def record() -> Any:
        return Late(backend.inner.record_h2d())

    backend: Any = tampered(record_h2d=record)
    stager = xferlib.stager(backend, debug=True)
    source = pinned(stager)
    stager.put(source)
    source[:] = 2
    # The last event of the direction is waited for, whatever those before it say.
    stager.put(pinned(stager))
    with pytest.raises(SourceRewrittenError):
        stager.close()


class Later(Late):
    """An event that says no though it was waited for."""

    def synchronize(self) -> None:
        self._event.synchronize()


@pytest.mark.parametrize("of", [lambda transfer: transfer, lambda transfer: transfer.completion], ids=["transfer", "end"])
def test_who_has_waited_may_write_also_where_events_are_late(of: Callable[[xferlib.Transfer], Any]) -> None:
    def record() -> Any:
        return Later(backend.inner.record_h2d())

    backend: Any = tampered(record_h2d=record)
    with xferlib.stager(backend, debug=True) as stager:
        source = pinned(stager)
        transfer = stager.put(source)
        of(transfer).synchronize()
        source[:] = 2
        transfer.synchronize()


def test_memory_may_be_written_to_when_its_pin_has_ended(stager: Stager) -> None:
    array = np.ones(1 << 16, np.uint8)
    with stager.pin(array):
        transfer = stager.put(array)
    array[:] = 2
    assert (transfer.result() == 1).all()


def test_a_source_that_is_dropped_is_given_back_while_nobody_asks(stager: Stager) -> None:
    transfer = stager.put(pinned(stager)[:-1])
    transfer._event.synchronize()
    stager.trim()
    assert stager._pool.usage().used == 0
    transfer.synchronize()


def test_a_view_that_only_the_copy_held_is_looked_at_through_the_array_that_it_is_of(stager: Stager) -> None:
    source = pinned(stager)
    with held(h2d(stager)):
        transfer = stager.put(source[8192:].reshape(-1, 4096)[1:])
        source[12288 + 5000] = 2
    transfer._event.synchronize()
    stager.trim()
    with pytest.raises(SourceRewrittenError, match="bytes 4096 to 8191 of 53248"):
        transfer.synchronize()


def test_a_source_may_be_written_to_when_its_copy_has_failed() -> None:
    def copy(dst: int, src: int, nbytes: int) -> None:
        engine.submit(fail)

    def fail() -> None:
        gate.wait(PATIENCE)
        raise backend.failures[0]("on purpose")

    gate = threading.Event()
    backend = tampered(copy_h2d=copy)
    engine = backend.inner.h2d
    with xferlib.stager(backend, debug=True) as stager:
        source = pinned(stager)
        transfer = stager.put(source)
        gate.set()
        with pytest.raises(xferlib.TransferError, match="on purpose"):
            transfer.synchronize()
        source[:] = 2
        debug.verify_done()


def failed_put() -> tuple[debug.WatchedPut, Any]:
    """Return a put whose copy has failed, and its transfer."""
    put = debug.WatchedPut([], None, "here", False, deque())
    transfer: Any = SimpleNamespace(_event=Point(error=OSError("broken")), _check=None)
    put.watch(transfer)
    assert put in debug._unverified.values()
    return put, transfer


def test_a_put_whose_copy_has_failed_is_not_called_done_and_is_forgotten() -> None:
    put, transfer = failed_put()
    assert not put.reached()
    assert put not in debug._unverified.values()
    # Its check tells nobody anything: the transfer says that it has failed.
    transfer._check()


def test_a_put_whose_copy_has_failed_is_forgotten_by_who_waits_for_its_end() -> None:
    put, transfer = failed_put()
    put.end()
    assert transfer._event.synchronized == 1
    assert put not in debug._unverified.values()


def test_who_looks_late_blames_nobody_for_what_was_written_after_the_first_look(
    stager: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pinned(stager)
    with held(h2d(stager)):
        transfer = stager.put(source)
    transfer._event.synchronize()
    entered, gate = threading.Event(), threading.Event()
    sums = debug._sums

    def slow(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            assert gate.wait(PATIENCE)
        return sums(*arguments)

    monkeypatch.setattr(debug, "_sums", slow)
    late = on_thread(transfer.synchronize)
    assert entered.wait(PATIENCE)
    assert transfer.done()
    source[:] = 2
    gate.set()
    late.result(PATIENCE)
    assert (transfer.result() == 1).all()


def test_a_refused_put_is_refused_as_without(stager: Stager) -> None:
    source = pinned(stager)
    with pytest.raises(TypeError, match=r"expected a NumPy array, got builtins\.set") as told:
        stager.put([source, {3}])
    assert told.value.__notes__ == ["at tree[1]"]
    source[:] = 2


class Repeating:
    """A source that writes to one array again and again."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.rewrote = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        for value in range(20):
            self._array[:] = value
            if value:
                self.rewrote.set()
            yield {"x": self._array}


@pytest.mark.parametrize("nbytes", [0, SMALL, LARGE], ids=["pinned", "small", "large"])
def test_a_source_that_is_said_not_to_rewrite_and_does_is_told_by_the_line_that_began_the_loop(stager: Stager, nbytes: int) -> None:
    source = Repeating(np.ones(nbytes, np.uint8) if nbytes else pinned(stager))
    with held(h2d(stager)) as gate:
        loop = xferlib.prefetch(source, stager, rewrites=False)
        where = line() - 1
        assert source.rewrote.wait(PATIENCE)
        gate.set()
        with pytest.raises(SourceRewrittenError, match=r"tree\.x, bytes 0 to .*rewrites=False") as told:
            for batch in loop:
                stager.get(batch).result()
    assert f"{__file__}:{where}, on the thread of the pipeline" in str(told.value)
    loop.close()
    # It had begun others besides.
    with suppress(SourceRewrittenError):
        stager.close()


@pytest.mark.parametrize("make", [pinned, lambda stager: np.ones(LARGE, np.uint8)], ids=["pinned", "pageable"])
def test_a_source_that_is_not_said_to_keep_its_arrays_may_rewrite_them(stager: Stager, make: Callable[[Stager], Any]) -> None:
    source = Repeating(make(stager))
    with xferlib.prefetch(source, stager) as loop:
        # Before anybody has asked for the first batch.
        assert source.rewrote.wait(PATIENCE)
        for value, batch in enumerate(loop):
            assert (np.asarray(stager.get(batch["x"]).result()) == value).all()


def test_slots_go_round_and_nobody_is_told_anything(stager: Stager) -> None:
    with xferlib.Ring(stager, (64, np.uint8), slots=2) as ring:

        def slots() -> Iterator[xferlib.Slot]:
            for value in range(50):
                slot = ring.acquire()
                slot.tree[:] = value
                yield slot

        for value, batch in enumerate(xferlib.prefetch(slots(), stager)):
            assert (np.asarray(batch) == value).all()
        for value in range(50):
            slot = ring.acquire()
            slot.tree[:] = value
            slot.put()


def test_a_slot_that_is_written_to_after_its_put_is_told_and_comes_back(stager: Stager) -> None:
    with xferlib.Ring(stager, (64, np.uint8), slots=1) as ring:
        slot = ring.acquire()
        view = slot.tree[:]
        with held(h2d(stager)):
            slot.put()
            view[:] = 2
        ring.acquire().release()
        with pytest.raises(SourceRewrittenError):
            stager.put(np.zeros(3, np.uint8))


def test_a_slot_that_was_put_by_the_stager_may_be_written_to_by_its_next_holder(stager: Stager) -> None:
    with xferlib.Ring(stager, (64, np.uint8), slots=1) as ring:
        slot = ring.acquire()
        held_array = slot.tree
        held_array[:] = 1
        transfer = stager.put(held_array)
        slot.release()
        ring.acquire().tree[:] = 2
        assert (transfer.result() == 1).all()


def test_debug_is_off_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not _finds(None)
    for text, found in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(VARIABLE, text)
        assert _finds(None) is found
        assert _finds(not found) is not found
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match="XFERLIB_DEBUG: expected '1', or '0' for none, got 'yes'"):
        xferlib.stager("no backend of that name")
    assert _finds(True)


def _finds(argument: bool | None) -> bool:
    with xferlib.stager("host", debug=argument) as stager:
        source = pinned(stager)
        with held(h2d(stager)):
            transfer = stager.put(source)
            source[:] = 2
        try:
            transfer.synchronize()
        except SourceRewrittenError:
            assert ", debug" in repr(stager)
            return True
        assert "debug" not in repr(stager)
        return False


def test_a_forked_child_looks_at_nothing_of_its_parents() -> None:
    succeeds(
        """
        import os, threading, numpy as np, xferlib
        from xferlib import debug
        stager = xferlib.stager("host", debug=True)
        source = stager.empty_pinned(1000, np.uint8)
        source[:] = 1
        gate = threading.Event()
        stager.backend.h2d.submit(lambda: gate.wait(5))
        transfer = stager.put(source)
        child = os.fork()
        if child == 0:
            source[:] = 2
            assert not debug._unverified
            with xferlib.stager("host", debug=True) as own:
                assert (own.put(own.empty_pinned(10, np.uint8)).result().shape) == (10,)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.set()
        assert (transfer.result() == 1).all()
        stager.close()
        """
    )


def test_nothing_is_kept_of_what_is_done(stager: Stager) -> None:
    source = pinned(stager)
    for _ in range(100):
        stager.put(source).synchronize()
    gc.collect()
    assert not [put for put in debug._unverified.values() if put.untold is stager._source_watch._untold]  # type: ignore[union-attr]  # It is on.
