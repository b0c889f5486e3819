"""`Drain` and `drain`: order, bounds, where results land, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import held, on_thread
from tests.pipeline.steps import PATIENCE, d2h, until

SHAPE = (3, 8)


def frames(count: int, launched: list[int] | None = None) -> Iterator[np.ndarray]:
    for number in range(count):
        if launched is not None:
            launched.append(number)
        yield np.full(SHAPE, number, np.int32)


def numbers(results: Any) -> list[int]:
    return [int(result.ravel()[0]) for result in results if len(set(result.ravel().tolist())) == 1]


def test_results_come_in_order_and_may_be_kept(stager: xferlib.Stager) -> None:
    assert numbers(list(xferlib.drain(frames(20), stager))) == list(range(20))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_results_are_under_way_while_the_consumer_has_one(stager: xferlib.Stager, depth: int) -> None:
    launched: list[int] = []
    results = xferlib.drain(frames(9, launched), stager, depth)
    next(results)
    assert len(launched) == depth + 1
    with held(d2h(stager)) as gate:
        waiting = on_thread(lambda: next(results))
        until(lambda: len(launched) == depth + 2 or waiting.done())
        gate.set()
        waiting.result(PATIENCE)
    assert len(launched) == depth + 2
    results.close()


def failing(after: int) -> Iterator[np.ndarray]:
    yield from frames(after)
    raise KeyError("results")


def test_what_the_results_raise_comes_behind_those_before_it(stager: xferlib.Stager) -> None:
    results = xferlib.drain(failing(4), stager)
    assert numbers([next(results) for _ in range(4)]) == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="results") as caught:
        next(results)
    assert "failing" in [entry.name for entry in caught.traceback]
    assert list(results) == []


def test_what_the_results_raise_comes_out_though_it_may_look_like_memory_that_will_be_there_later(stager: xferlib.Stager) -> None:
    """A loop that waits for its own memory tries again; a generator that raised gives no more, and would seem to be at its end."""

    def source() -> Iterator[np.ndarray]:
        yield np.full(SHAPE, 0, np.int32)
        yield np.full(SHAPE, 1, np.int32)
        raise xferlib.AllocationError("of the source's own")

    results = xferlib.drain(source(), stager, 4)
    assert [int(next(results).flat[0]) for _ in range(2)] == [0, 1]
    with pytest.raises(xferlib.AllocationError, match="of the source's own"):
        next(results)


def test_a_result_that_is_no_array_is_refused_in_its_place(stager: xferlib.Stager) -> None:
    results = xferlib.drain([np.zeros(SHAPE), "text"], stager)
    next(results)
    with pytest.raises(TypeError):
        next(results)


def test_a_copy_that_fails_is_told_in_its_place(stager: xferlib.Stager) -> None:
    def broken() -> None:
        raise OSError("link down")

    results = xferlib.drain(frames(5), stager, 1)
    next(results)
    d2h(stager).submit(broken)
    next(results)
    with pytest.raises(xferlib.TransferError, match="link down"):
        next(results)


def test_results_fill_arrays_from_the_front(stager: xferlib.Stager) -> None:
    out = np.zeros((20, 8), np.int32)
    parts = [*frames(6), np.full((2, 8), 6, np.int32)]
    results = list(xferlib.drain(parts, stager, out=out))
    assert all(np.shares_memory(result, out) for result in results)
    assert out[:, 0].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 + [5] * 3 + [6] * 2


def test_single_frames_fill_rows(stager: xferlib.Stager) -> None:
    out: dict[str, Any] = {"frame": np.zeros((5, *SHAPE), np.int32), "mean": np.zeros(5)}
    source = [{"frame": frame, "mean": np.asarray(frame.mean())} for frame in frames(5)]
    list(xferlib.drain(source, stager, out=out))
    assert out["frame"][:, 0, 0].tolist() == out["mean"].tolist() == [0, 1, 2, 3, 4]


def test_names_ride_along_where_out_has_a_place_for_them(stager: xferlib.Stager) -> None:
    source = [{"frame": frame, "name": f"frame {number}"} for number, frame in enumerate(frames(3))]
    out: Any = {"frame": np.zeros((3, *SHAPE), np.int32), "name": "all"}
    assert [result["name"] for result in xferlib.drain(source, stager, out=out)] == ["frame 0", "frame 1", "frame 2"]
    assert out["name"] == "all"
    assert out["frame"][:, 0, 0].tolist() == [0, 1, 2]
    del out["name"]
    expected = r"expected {'frame': array}, got {'frame': array, 'name': no array}\. Where one has text .* the other needs some"
    with pytest.raises(ValueError, match=expected):
        next(xferlib.drain(source, stager, out=out))


def test_results_fill_a_mapped_file(stager: xferlib.Stager, tmp_path: Path) -> None:
    file = np.lib.format.open_memmap(tmp_path / "frames.npy", mode="w+", dtype=np.int32, shape=(7, *SHAPE))
    with xferlib.Drain(stager, out=file) as drain:
        for frame in frames(7):
            drain.submit(frame)
        drain.synchronize()
    file.flush()
    assert np.load(tmp_path / "frames.npy")[:, 0, 0].tolist() == list(range(7))


def test_results_fill_shared_memory(stager: xferlib.Stager) -> None:
    memory = shared_memory.SharedMemory(create=True, size=4 * 4 * 24)
    try:
        out = np.ndarray((4, *SHAPE), np.int32, memory.buf)
        assert len(list(xferlib.drain(frames(4), stager, out=out))) == 4
        values = out[:, 0, 0].tolist()
        del out
    finally:
        memory.close()
        memory.unlink()
    assert values == [0, 1, 2, 3]


def test_out_that_has_no_room_or_another_shape_is_refused(stager: xferlib.Stager) -> None:
    results = xferlib.drain(frames(3), stager, out=np.zeros((2, *SHAPE), np.int32))
    assert numbers([next(results), next(results)]) == [0, 1]
    with pytest.raises(ValueError, match="out is full: it has 2 rows, and 3"):
        next(results)
    with pytest.raises(ValueError, match="axes"):
        next(xferlib.drain(frames(3), stager, out=np.zeros(9, np.int32)))
    with pytest.raises(ValueError, match="another structure"):
        next(xferlib.drain(frames(3), stager, out={"a": np.zeros((9, 8), np.int32)}))
    with pytest.raises(ValueError, match="dtype"):
        next(xferlib.drain(frames(3), stager, out=np.zeros((9, 8))))
    with pytest.raises(ValueError, match="no array"):
        xferlib.drain(frames(3), stager, out=[])


def test_submit_waits_for_the_taker_on_another_thread(stager: xferlib.Stager) -> None:
    with xferlib.Drain(stager, 2) as drain:
        results = drain.results()
        submitted: list[int] = []

        def produce() -> None:
            for number, frame in enumerate(frames(9)):
                drain.submit(frame)
                submitted.append(number)
            drain.end()

        producer = on_thread(produce)
        until(lambda: len(submitted) == 2)
        assert drain.pending == 2
        taken = numbers([next(results)])
        until(lambda: len(submitted) == 3)
        assert not producer.done()
        taken += numbers(results)
        producer.result(PATIENCE)
    assert taken == list(range(9))


def test_a_wait_that_nobody_could_end_is_refused(stager: xferlib.Stager) -> None:
    with xferlib.Drain(stager, 2) as drain:
        drain.submit(np.zeros(3))
        drain.submit(np.zeros(3))
        with pytest.raises(RuntimeError, match="not taken yet: 2 results, and nobody else takes"):
            drain.submit(np.zeros(3))
        results = drain.results()
        next(results)
        drain.submit(np.zeros(3))
        with pytest.raises(RuntimeError, match="not taken yet: 2 results, and nobody else takes"):
            drain.submit(np.zeros(3))
        drain.end()
        assert len(list(results)) == 2
        with pytest.raises(xferlib.ClosedError):
            drain.submit(np.zeros(3))


def test_with_arrays_given_submit_waits_for_copies_and_nobody_need_take(stager: xferlib.Stager) -> None:
    with xferlib.Drain(stager, 2, out=np.zeros((27, 8), np.int32)) as drain, held(d2h(stager)) as gate:
        submitted: list[int] = []

        def produce() -> None:
            for number, frame in enumerate(frames(9)):
                drain.submit(frame)
                submitted.append(number)

        producer = on_thread(produce)
        until(lambda: len(submitted) == 2)
        assert not producer.done()
        gate.set()
        producer.result(PATIENCE)
        drain.end()
        assert numbers(drain.results()) == list(range(9))


def test_an_end_with_an_error_is_raised_behind_the_last_result(stager: xferlib.Stager) -> None:
    with xferlib.Drain(stager) as drain:
        drain.submit(np.zeros(3))
        drain.end(KeyError("producer"))
        results = drain.results()
        next(results)
        with pytest.raises(KeyError, match="producer"):
            next(results)
        with pytest.raises(StopIteration):
            next(results)


def test_what_is_said_behind_the_end_is_not_heard(stager: xferlib.Stager) -> None:
    """Whoever takes may have been told already that there is no more."""
    with xferlib.Drain(stager) as drain:
        drain.submit(np.zeros(3))
        drain.end()
        drain.end(KeyError("too late"))
        assert numbers(drain.results()) == [0]


def test_what_is_submitted_behind_the_end_is_refused_at_once(stager: xferlib.Stager) -> None:
    """Though as many are under way as may be, and somebody else is to take them."""
    with xferlib.Drain(stager, 1) as drain:
        drain.results()
        drain.submit(np.zeros(3))
        drain.end()
        late = on_thread(lambda: drain.submit(np.zeros(3)))
        with pytest.raises(xferlib.ClosedError, match="ended"):
            late.result(PATIENCE)


def test_close_wakes_both_sides_and_leaves_nothing_in_flight(stager: xferlib.Stager) -> None:
    out = np.zeros((9, *SHAPE), np.int32)
    drain = xferlib.Drain(stager, 2, out=out)
    taker = on_thread(lambda: list(drain.results()))
    until(lambda: drain._taker is not None)
    drain.close()
    with pytest.raises(xferlib.ClosedError, match="before it was ended"):
        taker.result(PATIENCE)
    with held(d2h(stager)) as gate:
        drain = xferlib.Drain(stager, 2, out=out)
        drain.submit(np.full(SHAPE, 5, np.int32))
        closing = on_thread(drain.close)
        assert not closing.done()
        gate.set()
        closing.result(PATIENCE)
    assert set(out[0].ravel().tolist()) == {5}
    blocked = xferlib.Drain(stager, 1)
    blocked.results()
    blocked.submit(np.zeros(3))
    producer = on_thread(lambda: blocked.submit(np.zeros(3)))
    blocked.close()
    with pytest.raises(xferlib.ClosedError):
        producer.result(PATIENCE)


def test_the_memory_of_a_result_comes_back_when_its_last_view_goes(stager: xferlib.Stager) -> None:
    nbytes = 1 << 20
    with xferlib.stager("host", pinned_limit=7 * nbytes) as small:
        source = (np.full(nbytes, number, np.uint8) for number in range(40))
        held_back = []
        for number, result in enumerate(xferlib.drain(source, small, 2)):
            if number < 3:
                held_back.append(result[10:20])
            assert result[0] == number
            del result
        assert number == 39
        assert [set(view.tolist()) for view in held_back] == [{0}, {1}, {2}]
        assert small.stats().pinned_peak_nbytes <= 7 * nbytes


def test_a_depth_that_the_limit_has_no_room_for_is_refused_before_anything_is_copied() -> None:
    nbytes = 1 << 20
    with xferlib.stager("host", pinned_limit=5 * nbytes) as small:
        source = [np.full(nbytes, number, np.uint8) for number in range(9)]
        expected = r"depth=7 needs 9\.0 MiB of pinned memory, 9 x 1\.0 MiB results, more than pinned_limit=5242880 \(5\.0 MiB\)"
        with pytest.raises(xferlib.AllocationError, match=rf"{expected}\. Use depth=3, raise pinned_limit, give out=, or make"):
            next(xferlib.drain(source, small, 7))
        with xferlib.Drain(small, 7) as drain:
            for _ in range(2):
                with pytest.raises(xferlib.AllocationError, match=expected):
                    drain.submit(source[0])
        assert small.stats().pinned_peak_nbytes == small.stats().d2h_nbytes == 0
        # What it advises does.
        assert [int(result[0]) for result in xferlib.drain(source, small, 3)] == list(range(9))
        assert len(list(xferlib.drain(source, small, 7, out=np.empty(9 * nbytes, np.uint8)))) == 9
        with pytest.raises(xferlib.AllocationError, match=r"\)\. Raise pinned_limit, give out="):
            next(xferlib.drain([np.zeros(2 * nbytes, np.uint8)] * 3, small, 1))


@pytest.mark.parametrize("when_full", ["wait", "raise"])
def test_a_depth_is_refused_at_once_where_only_whole_pages_have_no_room(when_full: Any) -> None:
    nbytes, pages = (1 << 20) + 1, (1 << 20) + 4096
    for limit, room in ((4 * nbytes, False), (4 * pages - 1, False), (4 * pages, True)):
        with xferlib.stager("host", pinned_limit=limit, when_full=when_full) as small:
            loop = xferlib.drain((np.full(nbytes, number, np.uint8) for number in range(9)), small)
            if room:
                assert [int(result[0]) for result in loop] == list(range(9))
                continue
            with pytest.raises(xferlib.AllocationError, match=r"depth=2 needs 4\.0 MiB .* Use depth=1"):
                next(loop)
            assert small.stats().d2h_nbytes == 0
            loop.close()


def test_a_result_is_taken_without_a_look_at_its_arrays(stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    # A queue that it is taken from in vain would put it into the words of an error that nobody reads.
    def told(self: xferlib.Transfer[Any]) -> str:
        raise AssertionError

    monkeypatch.setattr(xferlib.Transfer, "__repr__", told)
    results = [stager.put(np.full(3, number)).value for number in range(3)]
    assert [int(result[0]) for result in xferlib.drain(results, stager)] == [0, 1, 2]
    with xferlib.Drain(stager, depth=1, out=np.zeros(9, results[0].dtype)) as drain:
        for result in results:
            # Waits for the copies before it, and knows of them no more.
            drain.submit(result)
        drain.end()
        assert [int(result[0]) for result in drain.results()] == [0, 1, 2]


def test_depth_is_no_more_than_there_are_results_where_that_is_known() -> None:
    nbytes = 1 << 20
    with xferlib.stager("host", pinned_limit=3 * nbytes, device_limit=6 * nbytes) as small:
        source = [np.full(nbytes, number, np.uint8) for number in range(3)]
        for loop in (xferlib.drain(source, small, 50), xferlib.stream_map(lambda batch: batch, source, small, 50)):
            assert [int(result[0]) for result in loop] == [0, 1, 2]
            assert max(charge.count for charge in loop.bill.charges) == 3


def test_a_limit_that_only_stages_refuses_no_depth() -> None:
    nbytes = 1 << 20
    with xferlib.stager("host", pinned_limit=2 * nbytes, when_full="stage") as small:
        assert small.when_full == "stage"
        source = (np.full(nbytes, number, np.uint8) for number in range(9))
        assert [int(result[0]) for result in xferlib.drain(source, small, 7)] == list(range(9))


def test_a_consumer_that_keeps_more_than_the_limit_is_told_in_place() -> None:
    nbytes = 1 << 20
    with xferlib.stager("host", pinned_limit=4 * nbytes) as small:
        kept = []
        with pytest.raises(xferlib.AllocationError, match="pinned memory is full") as raised:
            for result in xferlib.drain((np.full(nbytes, number, np.uint8) for number in range(9)), small, 2):
                kept.append(result)  # noqa: PERF402  # All that came before the error.
        assert any("depth=2 has up to 4 results in pinned memory" in note for note in raised.value.__notes__)
        assert [int(result[0]) for result in kept] == [0, 1, 2, 3]


def test_a_producer_is_told_of_a_taker_that_keeps_everything() -> None:
    nbytes = 1 << 20
    with xferlib.stager("host", pinned_limit=4 * nbytes) as small, xferlib.Drain(small, 2) as drain:
        results = drain.results()
        taker = on_thread(lambda: list(results))
        with pytest.raises(xferlib.AllocationError, match="pinned memory is full"):
            for number in range(9):
                drain.submit(np.full(nbytes, number, np.uint8))
        drain.end()
        assert [int(result[0]) for result in taker.result(PATIENCE)] == [0, 1, 2, 3]


def test_the_bill_says_what_results_cost(stager: xferlib.Stager) -> None:
    results = xferlib.drain([np.zeros(1 << 20, np.uint8)] * 4, stager, 2)
    next(results)
    assert str(results.bill) == "4.0 MiB pinned: 4 x 1.0 MiB results\n4.0 MiB device: 4 x 1.0 MiB results"
    results.close()
