"""`stream_map`: all three at once, in order, whatever fails and whenever."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream

import xferlib
from tests.core.fakes import held, on_thread
from tests.pipeline.steps import PATIENCE, Source, batch, d2h, h2d, number_of, thread_of, until


def doubled(tree: Any) -> Any:
    return {"x": tree["x"] * 2, "label": tree["label"] * 2}


def test_results_come_in_order_the_last_one_smaller(stager: xferlib.Stager) -> None:
    source = [*(batch(number) for number in range(9)), batch(9, rows=1)]
    results = list(xferlib.stream_map(doubled, source, stager))
    assert [number_of(result) for result in results] == [2 * number for number in range(10)]
    assert results[-1]["x"].shape == (1, 8)


def test_later_batches_are_put_and_computed_while_a_result_is_held(stager: xferlib.Stager) -> None:
    calls: list[int] = []

    def fn(tree: Any) -> Any:
        calls.append(number_of(tree))
        return doubled(tree)

    source = Source(20)
    results = xferlib.stream_map(fn, source, stager, 2)
    with held(d2h(stager)) as gate:
        first = on_thread(lambda: next(results))
        until(lambda: calls == [0, 1, 2] and source.asked == 5)
        assert not first.done()
        gate.set()
        assert number_of(first.result(PATIENCE)) == 0
    assert [number_of(result) for result in results] == [2 * number for number in range(1, 20)]


def test_fn_runs_on_the_consumers_thread_and_its_stream(stager: xferlib.Stager) -> None:
    threads = set()

    def fn(tree: Any) -> Any:
        threads.add(threading.current_thread())
        return doubled(tree)

    list(xferlib.stream_map(fn, Source(4), stager))
    assert threads == {threading.current_thread()}


def test_the_copy_back_waits_for_work_that_fn_enqueued(stager: xferlib.Stager) -> None:
    def fn(tree: Any) -> Any:
        out = np.empty_like(tree)
        stream.submit(np.multiply, tree, 3, out)
        return out

    with Stream() as stream:
        source: list[Any] = [np.full(100, number) for number in range(8)]
        assert [set(result.tolist()) for result in xferlib.stream_map(fn, source, stager)] == [{3 * n} for n in range(8)]
    stream.close()


def test_data_larger_than_the_device_streams_through() -> None:
    nbytes = 64 << 10
    with xferlib.stager("host", device_limit=6 * nbytes, pinned_limit=64 << 20) as stager:
        source = (np.full(nbytes, number, np.uint8) for number in range(100))

        def inverse(tree: Any) -> Any:
            return 255 - tree

        results = xferlib.stream_map(inverse, source, stager, 2, rewrites=False)
        assert [int(result[-1]) for result in results] == [255 - number for number in range(100)]
        assert stager.stats().device_peak_nbytes <= 6 * nbytes


def head(tree: Any) -> Any:
    return tree[:10]


def test_the_bill_adds_up(stager: xferlib.Stager) -> None:
    results = xferlib.stream_map(head, [np.zeros(1000, np.uint8)] * 4, stager)
    next(results)
    assert results.bill.device_nbytes == 4 * 1000 + 4 * 10
    assert results.bill.pinned_nbytes == 4 * 10
    results.close()


def test_results_fill_arrays(stager: xferlib.Stager) -> None:
    out: dict[str, Any] = {"x": np.zeros((36, 8), np.float32), "label": np.zeros(36, np.int64)}
    for _ in xferlib.stream_map(doubled, Source(9), stager, out=out):
        pass
    assert out["x"][:, 0].tolist() == [2.0 * (row // 4) for row in range(36)]


def test_leaving_early_leaves_no_thread(stager: xferlib.Stager) -> None:
    source = Source(1000)
    for result in xferlib.stream_map(doubled, iter(source), stager):
        if number_of(result) == 6:
            break
    assert source.thread is not None
    source.thread.join(PATIENCE)
    assert not source.thread.is_alive()
    assert source.closed.is_set()


def test_a_bad_argument_leaves_no_thread(stager: xferlib.Stager) -> None:
    source = Source(1000)
    with pytest.raises(ValueError, match="no array") as caught:
        xferlib.stream_map(doubled, iter(source), stager, out=[])
    # Though the traceback keeps what was made.
    assert caught.tb is not None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("xferlib-prefetch")]


class Boom(Exception):
    pass


class Scenario:
    """A run that fails at a random moment in one of its parts, or is left early."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = self.random.randint(1, 25)
        self.where = self.random.choice(["source", "fn", "sink", "h2d", "d2h", "break", "put", "none"])
        self.when = self.random.randrange(self.count)
        self.depth = self.random.randint(1, 4)
        self.use_ring = self.random.random() < 0.5
        self.out = np.zeros(25, np.int64) if self.random.random() < 0.3 else None

    def source(self, ring: xferlib.Ring) -> Iterator[Any]:
        for number in range(self.count):
            if self.where == "source" and number == self.when:
                raise Boom
            if self.where == "put" and number == self.when:
                yield np.array(["text"])
            if self.use_ring:
                slot = ring.acquire()
                slot.tree[:] = number
                yield slot
            else:
                yield np.full(1, number)

    def fn(self, stager: xferlib.Stager, tree: Any) -> Any:
        number = int(tree[0])
        if number == self.when:
            if self.where == "fn":
                raise Boom
            if self.where in ("h2d", "d2h"):
                (h2d if self.where == "h2d" else d2h)(stager).submit(self.fail)
        return tree * 10

    def fail(self) -> None:
        raise Boom

    def run(self) -> tuple[list[int], BaseException | None, xferlib.Prefetch | None]:
        taken: list[int] = []
        with xferlib.stager("host", pinned_limit=16 << 20) as stager, xferlib.Ring(stager, ((1,), np.int64), 2) as ring:
            results = xferlib.stream_map(lambda tree: self.fn(stager, tree), self.source(ring), stager, self.depth, out=self.out)
            source = results._prefetched
            try:
                with results:
                    for result in results:
                        taken.append(int(result[0]))
                        if len(taken) > self.when and self.where == "sink":
                            raise Boom
                        if len(taken) > self.when and self.where == "break":
                            break
            except (Boom, TypeError, xferlib.TransferError) as error:
                return taken, error, source
            finally:
                assert source is not None
                assert not thread_of(source).is_alive()
                assert results._drain._under_way() == []
        return taken, None, source


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_whatever_fails_at_whatever_moment_nothing_is_lost_and_nothing_hangs(start: int) -> None:
    before = threading.active_count()
    for seed in range(start, start + 50):
        scenario = Scenario(seed)
        taken, error, _ = on_thread(scenario.run).result(PATIENCE)
        where = (seed, scenario.where, scenario.when, scenario.count)
        assert taken == [10 * number for number in range(len(taken))], where
        expected = {"source": Boom, "fn": Boom, "sink": Boom, "put": TypeError}.get(scenario.where)
        if expected is not None:
            assert type(error) is expected, where
            assert len(taken) == scenario.when + (scenario.where == "sink"), where
        elif scenario.where in ("none", "break"):
            assert error is None, where
            assert len(taken) == (scenario.count if scenario.where == "none" else scenario.when + 1), where
        elif error is None:
            # What was broken behind the last copy is nobody's.
            assert len(taken) == scenario.count, where
        else:
            assert type(error) is xferlib.TransferError, where
    until(lambda: threading.active_count() <= before + 1)


def test_batches_and_results_are_ordered_by_the_stream_that_is_named(stager: xferlib.Stager) -> None:
    with closing(Stream()) as stream, closing(Stream()) as other:

        def fn(tree: Any) -> Any:
            out = np.empty_like(tree)
            stream.submit(np.multiply, tree, 3, out)
            return out

        source = [np.full(1000, number, np.int64) for number in range(8)]
        # What is not named is held all the time: nothing may depend on it.
        held = threading.Event()
        other.submit(held.wait, PATIENCE)
        results = xferlib.stream_map(fn, source, stager, stream=stream)
        assert [set(result.tolist()) for result in results] == [{3 * number} for number in range(8)]
        held.set()


def test_work_on_the_stream_that_is_named_waits_for_a_batch_that_is_still_copied(stager: xferlib.Stager) -> None:
    values = np.arange(1, 4096)
    with closing(Stream()) as stream:
        seen = np.zeros_like(values)
        with held(h2d(stager)) as gate, xferlib.prefetch([values], stager, stream=stream) as batches:
            stream.submit(np.copyto, seen, next(batches))
            read = stream.record()
            assert not read.done()
            assert not seen.any()
            gate.set()
        stream.synchronize()
        np.testing.assert_array_equal(seen, values)


def test_what_is_no_stream_is_refused_before_anything_starts(stager: xferlib.Stager) -> None:
    source = Source(3)
    with pytest.raises(ValueError, match="stream=0 is ambiguous"):
        xferlib.prefetch(source, stager, stream=0)
    with pytest.raises(TypeError, match="stream"):
        xferlib.stream_map(lambda tree: tree, source, stager, stream="main")
    with pytest.raises(TypeError, match="stream"):
        xferlib.drain([], stager, stream="main")
    assert source.asked == 0


def test_run_goes_on_to_the_end_and_gives_the_report(stager: xferlib.Stager) -> None:
    frames = np.zeros((6, 3), np.float32)
    report = xferlib.drain((np.full((2, 3), number, np.float32) for number in range(3)), stager, out=frames).run()
    assert frames[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert report.batches == 3
    batches = [np.full((2, 3), number, np.float32) for number in range(3)]
    with xferlib.stream_map(lambda batch: batch + 1, batches, stager, out=frames) as loop:
        next(loop)
        assert loop.run().batches == 3
        with pytest.raises(xferlib.ClosedError, match="spent"):
            loop.run()
    assert frames[:, 0].tolist() == [1, 1, 2, 2, 3, 3]


def test_run_raises_for_a_result_and_goes_on_when_it_is_called_again(stager: xferlib.Stager) -> None:
    def odd(batch: Any) -> Any:
        if batch[0] == 1:
            raise KeyError("one")
        return batch

    frames = np.zeros(6, np.float32)
    batches = [np.full(2, number, np.float32) for number in range(4)]
    with xferlib.stream_map(odd, batches, stager, out=frames) as loop:
        with pytest.raises(KeyError, match="one"):
            loop.run()
        loop.run()
    assert frames.tolist() == [0, 0, 2, 2, 3, 3]


def test_run_is_refused_where_nobody_would_have_the_results(stager: xferlib.Stager) -> None:
    with xferlib.drain([np.zeros(3)], stager) as loop:
        with pytest.raises(ValueError, match="give out=, or iterate"):
            loop.run()
        # Nothing is lost by it.
        assert len(list(loop)) == 1


def test_a_loop_says_how_far_it_is(stager: xferlib.Stager) -> None:
    with xferlib.drain([np.zeros(3)] * 5, stager) as loop:
        next(loop)
        assert repr(loop) == "<Drained, 1 taken, 2 ahead of 2>"
    assert repr(loop) == "<Drained, 1 taken, closed>"
    done = xferlib.drain([np.zeros(3)], stager)
    list(done)
    assert repr(done) == "<Drained, 1 taken, spent>"
