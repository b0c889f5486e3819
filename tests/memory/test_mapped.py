"""Views of host memory, in the core: who holds the memory, until when, and what is refused."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream

import xferlib
from tests.core.fakes import WATCHDOG, Point, on_thread, succeeds, tampered, until
from xferlib.errors import CapabilityError, ClosedError, TransferError
from xferlib.ledger import all_views
from xferlib.memory.mapped import Views
from xferlib.protocol import Capabilities
from xferlib.protocol import Stream as Found
from xferlib.reaper import ClosedTable, watch
from xferlib.stager import Stager


class Retiring:
    """A backend that says when work on streams is done, as the test says it."""

    failures = (OSError,)

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.asked: list[int] = []
        self.error: Exception | None = None

    def retire(self, streams: Any) -> Point:
        if self.error is not None:
            raise self.error
        self.asked += [stream.handle for stream in streams]
        self.points.append(Point())
        return self.points[-1]


class Memory(np.ndarray[Any, np.dtype[np.uint8]]):
    """Host memory of which one sees when it is let go."""

    gone: list[str]
    name: str

    def __del__(self) -> None:
        self.gone.append(self.name)


def memory(gone: list[str], name: str = "memory") -> Any:
    array: Any = np.zeros(8, np.uint8).view(Memory)
    array.gone, array.name = gone, name
    return array


@pytest.fixture
def backend() -> Retiring:
    return Retiring()


@pytest.fixture
def views(backend: Retiring) -> Views:
    return Views(backend)  # type: ignore[arg-type]  # As much of a backend as is asked for.


@pytest.fixture
def gone() -> list[str]:
    return []


@pytest.fixture
def stager() -> Iterator[Stager]:
    with xferlib.stager("host") as stager:
        yield stager


def end_lease(views: Views, memory: Any, *, keepalive: object = "the stream", handle: int = 7) -> None:
    row, ticket = views.lease(memory)
    row.stream = Found(handle, keepalive)
    del row, ticket


def test_memory_is_held_until_the_work_enqueued_before_the_end_is_done(views: Views, backend: Retiring, gone: list[str]) -> None:
    end_lease(views, memory(gone))
    assert views.busy
    assert not views.reap()
    assert (backend.asked, gone) == ([7], [])
    backend.points[0].reached = True
    assert views.reap()
    assert gone == ["memory"]
    assert not views.busy


def test_what_is_done_does_not_wait_for_what_is_not(views: Views, backend: Retiring, gone: list[str]) -> None:
    for name in ("first", "second"):
        end_lease(views, memory(gone, name))
    views.reap()
    backend.points[1].reached = True
    assert views.reap()
    assert gone == ["second"]


def test_the_end_of_a_view_asks_nothing_and_the_next_look_does(views: Views, backend: Retiring, gone: list[str]) -> None:
    end_lease(views, memory(gone), keepalive=None)
    assert (backend.asked, gone) == ([], [])
    assert not views.reap()
    assert (backend.asked, gone) == ([7], [])


def test_a_view_that_was_never_made_waits_for_nothing(views: Views, backend: Retiring, gone: list[str]) -> None:
    views.lease(memory(gone))
    assert not views.reap()
    assert (backend.asked, gone, views.busy) == ([], ["memory"], False)


def test_memory_stays_if_nobody_can_say_when_the_work_ends(views: Views, backend: Retiring, gone: list[str]) -> None:
    backend.error = OSError("the device is lost")
    end_lease(views, memory(gone))
    assert not views.reap()
    assert (gone, views.busy) == ([], False)


def test_whoever_needs_memory_can_wait_for_it(views: Views, backend: Retiring, gone: list[str]) -> None:
    assert not views.wait_oldest()
    end_lease(views, memory(gone))
    assert views.wait_oldest()
    assert gone == ["memory"]


def test_waiting_for_everything_includes_views_that_are_still_there(views: Views, backend: Retiring, gone: list[str]) -> None:
    row, lease = views.lease(memory(gone))
    row.stream = Found(3, "the stream")
    end_lease(views, memory(gone, "other"), handle=4)
    views.wait_all()
    assert sorted(backend.asked) == [3, 4]
    assert all(point.synchronized for point in backend.points)
    assert gone == ["other"]
    del lease


def test_waiting_for_everything_includes_all_that_views_have_left(views: Views, backend: Retiring, gone: list[str]) -> None:
    for name in ("first", "second", "third"):
        end_lease(views, memory(gone, name))
    views.wait_all()
    assert [point.synchronized for point in backend.points] == [1, 1, 1]
    assert sorted(gone) == ["first", "second", "third"]


def test_work_is_waited_for_while_another_thread_asks_for_its_event(views: Views, backend: Retiring, gone: list[str]) -> None:
    asking, gate, retire = threading.Event(), threading.Event(), backend.retire

    def retire_slowly(streams: Any) -> Point:
        backend.retire = retire  # type: ignore[method-assign]  # Whoever comes next is not held.
        asking.set()
        assert gate.wait(WATCHDOG)
        return retire(streams)

    end_lease(views, memory(gone))
    backend.retire = retire_slowly  # type: ignore[method-assign]  # One look is held while it asks.
    looking = on_thread(views.reap)
    assert asking.wait(WATCHDOG)
    assert views.busy
    views.wait_all()
    assert [point.synchronized for point in backend.points] == [1]
    gate.set()
    looking.result(WATCHDOG)
    views.wait_all()
    assert gone == ["memory"]
    assert not views.busy


def test_work_is_waited_for_while_another_thread_asks_whether_it_is_done(views: Views, backend: Retiring, gone: list[str]) -> None:
    asking, gate = threading.Event(), threading.Event()
    end_lease(views, memory(gone))
    views.reap()
    (point,) = backend.points
    done = point.done

    def done_slowly() -> bool:
        point.done = done  # type: ignore[method-assign]  # Whoever comes next is not held.
        asking.set()
        assert gate.wait(WATCHDOG)
        return done()

    point.done = done_slowly  # type: ignore[method-assign]  # One look is held while it asks.
    looking = on_thread(views.reap)
    assert asking.wait(WATCHDOG)
    assert views.busy
    views.wait_all()
    assert point.synchronized == 1
    gate.set()
    looking.result(WATCHDOG)
    assert gone == ["memory"]


def test_after_the_end_the_backend_is_asked_nothing(views: Views, backend: Retiring, gone: list[str]) -> None:
    views.close()
    end_lease(views, memory(gone, "kept"))
    end_lease(views, memory(gone, "by handle"), keepalive=None)
    assert not views.settle()
    assert (backend.asked, gone) == ([], ["kept", "by handle"])


def test_a_full_pool_waits_for_work_on_views_that_are_gone() -> None:
    gate = threading.Event()
    with xferlib.stager("host", pinned_limit=4 << 20) as stager, Stream() as stream:
        array = stager.empty_pinned(3 << 20, np.uint8)
        view = stager.mapped(array, stream=stream)
        stream.submit(gate.wait, WATCHDOG)
        stream.submit(ctypes.memset, view.ctypes.data, 5, view.nbytes)
        del array, view
        taken = on_thread(lambda: stager.empty_pinned(3 << 20, np.uint8))
        gate.set()
        again = taken.result(WATCHDOG)
        again[...] = 1
        stream.close()
        assert (again == 1).all()


def test_a_view_is_of_the_current_stream_unless_another_is_named(stager: Stager) -> None:
    array = stager.empty_pinned(8, np.int32)
    with Stream() as stream:
        view = stager.mapped(array)
        assert view.ctypes.data == array.ctypes.data
        (row,) = stager._ledger.views._rows.values()
        assert row.stream is not None
        assert row.stream.handle == stream.handle
        stream.close()


def test_what_is_mapped_must_be_numbers_in_an_array(stager: Stager) -> None:
    with pytest.raises(TypeError, match="expected a NumPy array"):
        stager.mapped([1, 2])  # type: ignore[arg-type]  # On purpose.
    with pytest.raises(TypeError, match="byte order"):
        stager.mapped(stager.empty_pinned(3, np.int32).view(">i4"))
    with pytest.raises(ValueError, match=r"not in pinned memory.*empty_pinned"):
        stager.mapped(np.zeros(3))
    with pytest.raises(ValueError, match="ambiguous"):
        stager.mapped(stager.empty_pinned(3, np.int32), stream=0)


def test_memory_that_is_pinned_in_place_can_be_mapped(stager: Stager) -> None:
    mine = np.arange(1000)
    with stager.pin(mine):
        view = stager.mapped(mine[10:])
        view[0] = -1
    assert mine[10] == -1


def test_a_failure_of_the_backend_is_translated() -> None:
    def fail(*what: Any, **rest: Any) -> Any:
        raise OSError("no such thing")

    with (
        xferlib.stager(tampered(as_mapped=fail, failures=(OSError,))) as stager,
        pytest.raises(TransferError, match="no such thing"),
    ):
        stager.mapped(stager.empty_pinned(3, np.int32))


def test_a_refusal_is_in_the_words_of_the_backend_where_it_has_some() -> None:
    bare = Capabilities(register=True)
    with xferlib.stager(tampered(capabilities=bare, refusals={"mapped": "cannot, since the moon is full"})) as stager:
        with pytest.raises(CapabilityError, match=r"^backend 'host' cannot, since the moon is full$"):
            stager.mapped(stager.empty_pinned(3, np.int32))
        with pytest.raises(CapabilityError, match=r"^backend 'host' has no write-combined memory. Leave write_combined out$"):
            stager.empty_pinned(3, np.int32, write_combined=True)
    with xferlib.stager("host") as stager, pytest.raises(CapabilityError, match="page-locks nothing"):
        stager.empty_pinned(3, np.int32, write_combined=True)


def test_a_closed_stager_maps_nothing_and_its_views_live_on() -> None:
    with xferlib.stager("host") as stager:
        view = stager.mapped(stager.empty_pinned(1 << 20, np.uint8))
    view[...] = 7
    gc.collect()
    assert (view == 7).all()
    with pytest.raises(ClosedError):
        stager.mapped(np.zeros(3))
    assert stager.backend.memory.calls().pinned_frees == 0  # type: ignore[attr-defined]  # the host backend's own
    del view
    assert until(lambda: stager.backend.memory.calls().pinned_frees == 1)  # type: ignore[attr-defined]


def test_views_of_a_stager_that_closes_are_known_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[bool] = []
    stager = xferlib.stager("host")
    view, views = stager.mapped(stager.empty_pinned(100, np.uint8)), stager._ledger.views

    def watched(remains: ClosedTable) -> None:
        # Neither with the reaper yet, nor away from its ledger.
        known.append(views in all_views())
        watch(remains)

    monkeypatch.setattr("xferlib.ledger.watch", watched)
    stager.close()
    assert known == [True]
    assert views in all_views()
    del view
    assert until(lambda: views not in all_views())


def test_a_forked_child_waits_for_nothing() -> None:
    succeeds("""
        import os
        import numpy as np
        import xferlib
        from xferlib_host import Stream

        stager = xferlib.stager("host")
        stream = Stream()
        view = stager.mapped(stager.empty_pinned(100, np.uint8), stream=stream)
        child = os.fork()
        if child == 0:
            del view
            stager._ledger.views.wait_all()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        del view
        stager.close()
        stream.close()
    """)
