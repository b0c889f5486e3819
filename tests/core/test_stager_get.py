"""Getting: after the producer, into pinned memory or memory of the caller's, one failure for all leaves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import xferlib_host

import xferlib
from tests.core.fakes import held, on_thread, tampered, until
from xferlib.byte_reader import Span
from xferlib.d2h import SHARE_UP_TO_NBYTES, SHARED_NBYTES
from xferlib.memory.blocks import ALIGNMENT, WhenFull, round_up
from xferlib.staging.profile import StagingProfile


def d2h(stager: xferlib.Stager) -> Any:
    """Return the host backend's engine of this direction."""
    return stager.backend.d2h  # type: ignore[attr-defined]  # the host backend's


def test_a_get_lands_in_pinned_memory(stager: xferlib.Stager) -> None:
    result = stager.get({"x": np.arange(5), "e": np.empty((0, 2)), "s": np.array(3.0)}).value
    assert result["x"].tolist() == list(range(5))
    assert stager.backend.is_pinned(result["x"].ctypes.data, result["x"].nbytes)
    assert result["e"].shape == (0, 2)
    assert result["s"] == 3
    assert result["s"].shape == ()


def test_a_get_reads_after_what_the_stream_has_enqueued(stager: xferlib.Stager) -> None:
    stream = xferlib_host.Stream()
    array = np.zeros(4)
    with held(stream):
        stream.submit(array.fill, 7)
        transfer = stager.get(array, stream=stream)
        assert not transfer.done()
    assert transfer.result().tolist() == [7] * 4
    stream.close()


def test_a_tree_is_read_after_what_the_stream_has_enqueued_into_memory_of_either_kind(stager: xferlib.Stager) -> None:
    stream = xferlib_host.Stream()
    array = np.zeros(4)
    out = [stager.empty_pinned(4, np.float64), np.empty(4)]
    with held(stream):
        stream.submit(array.fill, 7)
        transfer = stager.get([array, array], out=out, stream=stream)
        copied = on_thread(stager.backend.record_d2h().synchronize)
        with pytest.raises(TimeoutError):
            copied.result(0.1)
        assert not transfer.done()
    assert [part.tolist() for part in transfer.result()] == [[7] * 4] * 2
    stream.close()


def test_a_get_waits_for_the_stream_that_was_named_only(stager: xferlib.Stager) -> None:
    busy, idle = xferlib_host.Stream(), xferlib_host.Stream()
    with held(busy), busy:
        assert stager.get(np.ones(4), stream=idle).result(timeout=10).tolist() == [1] * 4
    busy.close()
    idle.close()


def test_value_of_a_get_waits_on_the_host(stager: xferlib.Stager) -> None:
    with held(d2h(stager)) as gate:
        transfer = stager.get(np.ones(4))
        waiting = on_thread(lambda: transfer.value)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        gate.set()
        assert waiting.result(10).tolist() == [1] * 4


def test_pinned_memory_is_not_handed_out_again_while_a_get_writes_it(stager: xferlib.Stager) -> None:
    with held(d2h(stager)):
        stager.get(np.full(100, 9, np.uint8))
        mine = [stager.empty_pinned(100, np.uint8) for _ in range(20)]
        for array in mine:
            array[:] = 1
        last = stager.get(np.zeros(1))
    last.synchronize()
    assert all((array == 1).all() for array in mine)


def test_room_is_found_in_gets_that_are_done_while_puts_are_held() -> None:
    with xferlib.stager("host", pinned_limit=4 << 20) as stager:
        source = stager.empty_pinned(100, np.uint8)
        with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
            putting = stager.put(source)
            for _ in range(4):
                back = on_thread(lambda: stager.get(np.ones(1 << 20, np.uint8)).result(timeout=10))
                assert back.result(10).all()
                del back
            assert not putting.done()


def test_the_source_is_held_until_it_was_read(stager: xferlib.Stager) -> None:
    device = stager.put(np.full(1000, 3, np.uint8)).result()
    with held(d2h(stager)):
        transfer = stager.get(device)
        del device
        later = [stager.put(np.full(1000, 4, np.uint8)).result() for _ in range(4)]
    assert (transfer.result() == 3).all()
    assert len(later) == 4


def test_a_refused_get_holds_up_no_later_one(stager: xferlib.Stager) -> None:
    stream = xferlib_host.Stream()
    with held(stream):
        with pytest.raises(ValueError, match="wrong shape"):
            stager.get([np.ones(3), np.ones(4)], out=[np.zeros(3), np.zeros(5)], stream=stream)
        with pytest.raises(ValueError, match="share memory"):
            same = np.zeros(3)
            stager.get([np.ones(3), np.ones(3)], out=[same, same], stream=stream)
        assert stager.get(np.ones(4)).result(timeout=5).all()
    stream.close()


def test_views_that_are_not_contiguous_come_in_c_order(stager: xferlib.Stager) -> None:
    device = np.arange(12).reshape(3, 4).T
    assert np.array_equal(stager.get(device).result(), device)


class Broke(Exception):
    """What the backend raises."""


def test_one_leaf_that_cannot_be_started_fails_all_of_them_at_rest() -> None:
    backend = tampered(failures=(Broke,))
    copies: list[int] = []

    def copy(dst: int, src: int, nbytes: int) -> None:
        copies.append(nbytes)
        if len(copies) == 2:
            raise Broke("no more")
        backend.inner.copy_d2h(dst, src, nbytes)

    backend.copy_d2h = copy
    with xferlib.stager(backend) as stager:
        out = [stager.empty_pinned(10, np.uint8) for _ in range(3)]
        with pytest.raises(xferlib.TransferError, match="copy to the host could not be started: no more") as caught:
            stager.get([np.ones(10, np.uint8)] * 3, out=out)
        assert isinstance(caught.value.__cause__, Broke)
        assert (out[0] == 1).all()


def test_a_get_whose_event_cannot_be_made_raises_when_nothing_is_under_way() -> None:
    backend = tampered(failures=(Broke,))
    broken: list[Broke] = []

    def record() -> Any:
        if broken:
            raise broken.pop()
        return backend.inner.record_d2h()

    backend.record_d2h = record
    with xferlib.stager(backend) as stager:
        device, out = np.ones(100, np.uint8), stager.empty_pinned(100, np.uint8)
        with held(backend.inner.d2h) as gate:
            broken.append(Broke("no event"))
            at_rest: list[bool] = []

            def start() -> None:
                try:
                    stager.get(device, out=out)
                finally:
                    at_rest.append(gate.is_set())

            failing = on_thread(start)
            with pytest.raises((TimeoutError, xferlib.TransferError)):
                failing.result(0.2)
            gate.set()
            with pytest.raises(xferlib.TransferError, match="no event"):
                failing.result(10)
        assert at_rest == [True]
        assert out.all()


def test_a_copy_that_breaks_later_fails_the_transfer_and_what_comes_behind_it(stager: xferlib.Stager) -> None:
    before = stager.get(np.ones(3))
    before.synchronize()

    def breaks() -> None:
        raise OSError("the link is down")

    d2h(stager).submit(breaks)
    transfers = [stager.get(np.ones(3)), stager.get(np.ones(3), out=np.zeros(3))]
    for transfer in transfers:
        for _ in range(2):
            with pytest.raises(xferlib.TransferError, match="the link is down"):
                transfer.synchronize()
            with pytest.raises(xferlib.TransferError):
                transfer.done()
            with pytest.raises(xferlib.TransferError):
                _ = transfer.value
    assert before.done()


class Tilted(np.ndarray[Any, Any]):
    """A subclass whose views are not shaped as it is told."""

    def reshape(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("kind", [np.matrix, np.memmap, Tilted])
@pytest.mark.parametrize("rows", [3, 1000])
def test_out_may_be_of_a_subclass(rows: int, kind: Any, pinned: bool) -> None:
    device = np.random.default_rng(1).integers(0, 255, (rows, 3000), np.uint8)
    with xferlib.stager("host", staging=StagingProfile(2, 1 << 20, 1 << 19)) as stager:
        out = (stager.empty_pinned(device.shape, np.uint8) if pinned else np.zeros(device.shape, np.uint8)).view(kind)
        assert stager.get(device, out=out).result() is out
    assert type(out) is kind
    assert np.array_equal(out.view(np.ndarray), device)


@pytest.mark.parametrize("rows", [3, 1000])
@pytest.mark.parametrize("pinned", [True, False])
def test_an_out_that_is_made_read_only_meanwhile_is_written_all_the_same(rows: int, pinned: bool) -> None:
    device = np.random.default_rng(1).integers(0, 255, (rows, 3000), np.uint8)
    with xferlib.stager("host", staging=StagingProfile(2, 1 << 20, 1 << 19)) as stager:
        out = stager.empty_pinned(device.shape, np.uint8) if pinned else np.zeros(device.shape, np.uint8)
        with held(d2h(stager)):
            transfer = stager.get(device, out=out)
            out.flags.writeable = False
        assert np.array_equal(transfer.result(), device)


@pytest.mark.parametrize("together", [True, False])
def test_leaves_are_read_together_where_the_backend_does_so(*, together: bool) -> None:
    asked: list[list[Any]] = []
    one_by_one: list[Any] = []

    def as_sources(arrays: list[Any], stream: object | None = None) -> Any:
        asked.append([array.size for array in arrays])
        return [backend.inner.as_source(array, stream) for array in arrays] if together else None

    def as_source(array: Any, stream: object | None = None) -> Any:
        one_by_one.append(array.size)
        return backend.inner.as_source(array, stream)

    backend = tampered(as_sources=as_sources, as_source=as_source)
    with xferlib.stager(backend) as stager:
        tree = stager.get({"a": np.arange(3), "b": np.arange(5.0)}).result()
        assert tree["a"].tolist() == [0, 1, 2]
        assert tree["b"].tolist() == [0, 1, 2, 3, 4]
        assert asked == [[3, 5]]
        assert one_by_one == ([] if together else [3, 5])
        # Of one there is nothing to save.
        assert stager.get(np.arange(2)).result().tolist() == [0, 1]
        assert asked == [[3, 5]]


@pytest.mark.parametrize("together", [True, False])
def test_leaves_are_found_together_where_the_backend_does_so(*, together: bool) -> None:
    asked: list[list[Any]] = []
    one_by_one: list[Any] = []

    def places(arrays: list[Any], stream: object | None = None) -> Any:
        asked.append([array.size for array in arrays])
        return [backend.inner.place(array, stream) for array in arrays] if together else None

    def place(array: Any, stream: object | None = None) -> Any:
        one_by_one.append(array.size)
        return backend.inner.place(array, stream)

    backend = tampered(places=places, place=place)
    with xferlib.stager(backend) as stager:
        tree = {"a": np.arange(3), "b": np.arange(5.0)}
        with stager.reader(tree) as reader:
            memory = reader.empty(64)
            found = reader.read([Span(0, 0, 24), Span(1, 0, 40)], memory).result().tobytes()
        assert found == tree["a"].tobytes() + tree["b"].tobytes()
        assert asked == [[3, 5]]
        assert one_by_one == ([] if together else [3, 5])


def test_a_leaf_that_cannot_be_read_together_is_refused_by_its_place() -> None:
    backend = tampered(as_sources=lambda arrays, stream=None: None)
    with xferlib.stager(backend) as stager, pytest.raises(TypeError) as caught:
        stager.get({"a": np.arange(3), "b": [np.ma.masked_array([1.0])]})
    assert caught.value.__notes__ == ["at tree.b[0]"]


def used(stager: xferlib.Stager) -> int:
    """Return the pinned bytes of arrays that can be reached."""
    stager.trim()
    return stager._pool.usage().used


def asked(stager: xferlib.Stager) -> int:
    stats = stager.stats()
    return stats.pool_hits + stats.pool_misses


@pytest.mark.parametrize("when_full", ["wait", "raise"])
def test_small_results_for_which_there_is_no_room_together_have_their_own(when_full: WhenFull) -> None:
    with xferlib.stager("host", pinned_limit=4 * SHARE_UP_TO_NBYTES, when_full=when_full) as stager:
        stager.empty_pinned(4 * SHARE_UP_TO_NBYTES, np.uint8)
        pieces = [stager.empty_pinned(SHARE_UP_TO_NBYTES, np.uint8) for _ in range(4)]
        del pieces[2], pieces[0]
        result = stager.get([np.full(SHARE_UP_TO_NBYTES, n, np.uint8) for n in range(2)]).result()
        for n, array in enumerate(result):
            assert (array == n).all()
            assert stager._pool.contains(array.ctypes.data, array.nbytes)


def test_small_results_of_one_get_share_memory_and_large_ones_have_their_own() -> None:
    shapes = [(3,), (0,), (SHARE_UP_TO_NBYTES // 8,), (SHARE_UP_TO_NBYTES // 8 + 1,), (), (5, 7)]
    with xferlib.stager("host") as stager:
        sources = [np.arange(math.prod(shape), dtype=np.float64).reshape(shape) + number for number, shape in enumerate(shapes)]
        device = stager.put(sources).value
        assert used(stager) == 0
        before = asked(stager)
        results = stager.get(device).result()
        assert asked(stager) - before == 2
        assert used(stager) == sum(round_up(n, ALIGNMENT) for n in (24, SHARE_UP_TO_NBYTES, SHARE_UP_TO_NBYTES + 8, 8, 280))
        for source, result in zip(sources, results, strict=True):
            assert result.shape == source.shape
            assert np.array_equal(result, source)
        large = results[3]
        del result, results
        assert until(lambda: used(stager) == round_up(large.nbytes, ALIGNMENT))


def test_one_small_result_that_is_kept_keeps_no_more_than_a_mebibyte() -> None:
    with xferlib.stager("host") as stager:
        device = stager.put(
            [np.full(SHARE_UP_TO_NBYTES, number, np.uint8) for number in range(3 * SHARED_NBYTES // SHARE_UP_TO_NBYTES)]
        ).value
        results = stager.get(device).result()
        kept = results[-1]
        del results
        assert until(lambda: 0 < used(stager) <= SHARED_NBYTES)
        assert (kept == len(device) - 1).all()


def test_small_results_for_which_there_is_no_pinned_memory_lie_in_pageable() -> None:
    with xferlib.stager("host", pinned_limit=8192, when_full="stage") as stager:
        device = stager.put([np.arange(700, dtype=np.uint8) for _ in range(30)]).value
        results = stager.get(device).result()
        assert stager.stats().pool_fallbacks == 1
        assert all(np.array_equal(result, np.arange(700, dtype=np.uint8)) for result in results)


def test_what_numpy_gives_for_a_sum_is_got_as_other_libraries_arrays_are(stager: xferlib.Stager) -> None:
    batch = np.arange(6, dtype=np.float32)
    got = stager.get({"loss": batch.mean(), "count": 6}).result()
    assert got["loss"].shape == ()
    assert got["loss"].dtype == np.float32
    assert (got["loss"], got["count"]) == (2.5, 6)
    assert stager.get(batch.sum()).result() == 15


def test_a_transfer_is_no_array_and_the_refusal_says_what_is(stager: xferlib.Stager) -> None:
    transfer = stager.put(np.zeros(3))
    for tree in (transfer, {"a": transfer}):
        with pytest.raises(TypeError, match="Pass its value"):
            stager.get(tree)


def test_trees_by_turns_that_are_alike_in_part_come_as_they_are(stager: xferlib.Stager) -> None:
    trees: list[list[np.ndarray[Any, Any]]] = [
        [np.arange(6).reshape(2, 3), np.arange(4.0)],
        [np.arange(6), np.arange(4.0)],
        [np.arange(6), np.arange(4, dtype=np.float32)],
        [np.arange(6), np.arange(4.0), np.zeros((0, 3))],
        [np.arange(5000), np.arange(4.0)],
    ]
    for tree in [*trees, *trees, *reversed(trees)]:
        for got, want in zip(stager.get(tree).result(), tree, strict=True):
            assert got.dtype == want.dtype
            assert got.shape == want.shape
            assert np.array_equal(got, want)


@pytest.mark.parametrize("tree", [lambda array: [array], lambda array: {"x": array, "name": "text"}, lambda array: ([array], 3)])
@pytest.mark.parametrize("nbytes", [0, 10, 100_000, 3 << 20])
def test_a_tree_with_one_array_is_one_all_the_same(stager: xferlib.Stager, tree: Any, nbytes: int) -> None:
    values = np.arange(nbytes) % 251
    for _ in range(2):
        put = stager.put(tree(values.astype(np.uint8))).result()
        got = stager.get(put).result()
        expected = tree(values.astype(np.uint8))
        assert type(got) is type(expected)
        assert str(got) == str(expected)
