"""What a loop gives, in full: each batch or what was raised for it, in its place; then the end; and never an end that is none."""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import on_thread
from tests.pipeline.failing import Lost, failing_copies, outcomes
from tests.pipeline.steps import PATIENCE, PutBy, Source, part, thread_of, until
from xferlib.pipeline.drained import Drained

Loop = xferlib.Prefetch | Drained
Maker = Callable[[Any, xferlib.Stager, int], Loop]


class Stumbling(Iterator[np.ndarray]):
    """Batches, some of which it raises an error for; it goes on behind each, as a pass over a `SharedRing` does."""

    def __init__(self, count: int, lost: set[int]) -> None:
        self.count = count
        self.lost = lost
        self.asked = 0

    def __next__(self) -> np.ndarray:
        number = self.asked
        if number == self.count:
            raise StopIteration
        self.asked += 1
        if number in self.lost:
            raise Lost(number)
        return np.full(8, number)


def prefetched(source: Any, stager: xferlib.Stager, depth: int) -> Loop:
    return xferlib.prefetch(source, stager, depth)


def drained(source: Any, stager: xferlib.Stager, depth: int) -> Loop:
    return xferlib.drain(source, stager, depth)


def mapped(source: Any, stager: xferlib.Stager, depth: int) -> Loop:
    return xferlib.stream_map(lambda tree: tree, source, stager, depth)


LOOPS = pytest.mark.parametrize("make", [prefetched, drained, mapped])


@LOOPS
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_source_that_goes_on_after_an_error_loses_that_batch_alone(make: Maker, depth: int, stager: xferlib.Stager) -> None:
    with make(Stumbling(9, {0, 3, 4, 8}), stager, depth) as loop:
        assert outcomes(loop) == ["Lost", 1, 2, "Lost", "Lost", 5, 6, 7, "Lost"]


@LOOPS
@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_that_is_refused_is_told_in_its_place_and_the_others_follow(
    make: Maker, depth: int, stager: xferlib.Stager
) -> None:
    source = [np.zeros(3), "text", np.full(3, 2), None, np.full(3, 4)]
    with make(source, stager, depth) as loop:
        found = outcomes(loop)
    assert found[:3] == [0, "TypeError", 2]
    assert found[-1] == 4


def test_the_note_of_a_refused_batch_counts_those_that_were_lost_as_well(stager: xferlib.Stager) -> None:
    class OneRefused(Stumbling):
        def __next__(self) -> Any:
            array = super().__next__()
            return "text" if array[0] == 2 else array

    with xferlib.prefetch(OneRefused(4, {0}), stager) as loop:
        with pytest.raises(Lost):
            next(loop)
        assert next(loop)[0] == 1
        with pytest.raises(TypeError) as caught:
            next(loop)
    assert "in batch 2 of the source, counted from 0" in caught.value.__notes__


@LOOPS
def test_nothing_is_asked_for_behind_an_error_until_the_consumer_asks(make: Maker, stager: xferlib.Stager) -> None:
    source = Stumbling(9, {2})
    with make(source, stager, 3) as loop:
        assert [next(loop)[0], next(loop)[0]] == [0, 1]
        with pytest.raises(Lost):
            next(loop)
        prefetch = loop if isinstance(loop, xferlib.Prefetch) else loop._prefetched
        if prefetch is not None:
            # It waits, with three places free.
            until(lambda: part(prefetch) == "place" and prefetch._background._shared.inbox.empty())
        assert source.asked == 3
        assert next(loop)[0] == 3


@LOOPS
def test_a_generator_that_raised_has_ended(make: Maker, stager: xferlib.Stager) -> None:
    def source() -> Iterator[np.ndarray]:
        yield np.zeros(3)
        raise Lost

    loop = make(source(), stager, 2)
    assert outcomes(loop) == [0, "Lost"]


def test_a_generator_that_raised_leaves_no_thread_even_if_nobody_asks_again(stager: xferlib.Stager) -> None:
    def source() -> Iterator[np.ndarray]:
        raise Lost
        yield np.zeros(3)

    loop = xferlib.prefetch(source(), stager)
    with pytest.raises(Lost):
        next(loop)
    thread_of(loop).join(PATIENCE)
    assert not thread_of(loop).is_alive()


@LOOPS
def test_a_source_that_cannot_be_iterated_says_so_once(make: Maker, stager: xferlib.Stager) -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            raise Lost

    if make is drained:
        with pytest.raises(Lost):
            make(Broken(), stager, 2)
        return
    assert outcomes(make(Broken(), stager, 2)) == ["Lost"]


@LOOPS
def test_a_second_epoch_over_an_iterator_is_told_of_once(make: Maker, stager: xferlib.Stager) -> None:
    batches = map(np.copy, [np.ones(3)] * 2)
    assert len(list(make(batches, stager, 2))) == 2
    loop = make(batches, stager, 2)
    name = "results" if make is drained else "batches"
    with pytest.warns(RuntimeWarning, match=f"{name}: this map gave nothing.*for each epoch") as told:
        assert list(loop) == []
    assert next(loop, None) is None
    assert [(one.filename, one.lineno) for one in told] == [(__file__, make.__code__.co_firstlineno + 1)]


@LOOPS
@pytest.mark.parametrize("source", [list, lambda: range(0), lambda: (np.ones(3) for _ in ())], ids=["list", "range", "generator"])
def test_a_source_that_has_no_batches_is_empty(make: Maker, source: Callable[[], Any], stager: xferlib.Stager) -> None:
    assert list(make(source(), stager, 2)) == []


@LOOPS
@pytest.mark.parametrize("inner", [xferlib.prefetch, xferlib.drain])
def test_a_loop_over_a_loop_that_has_no_batches_is_empty(make: Maker, inner: Any, stager: xferlib.Stager) -> None:
    assert list(make(inner((np.ones(3) for _ in ()), stager), stager, 2)) == []
    none: list[np.ndarray] = []
    with pytest.warns(RuntimeWarning, match="this map gave nothing") as told:
        assert list(make(inner(map(np.copy, none), stager), stager, 2)) == []
    assert len(told) == 1


@LOOPS
def test_an_iterator_that_only_raises_has_given_something(make: Maker, stager: xferlib.Stager) -> None:
    def fails(_: object) -> None:
        raise OSError("no disk")

    loop = make(map(fails, [1]), stager, 2)
    with pytest.raises(OSError, match="no disk"):
        next(loop)
    assert list(loop) == []


@LOOPS
@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_second_pass_over_a_loop_that_has_ended_is_refused(make: Maker, count: int, stager: xferlib.Stager) -> None:
    loop = make([np.full(3, number) for number in range(count)], stager, 2)
    assert len(list(loop)) == count
    for _ in range(2):
        with pytest.raises(xferlib.ClosedError, match=r"spent.* Make a new one"):
            list(loop)
    # As of every iterator that has ended.
    assert next(loop, None) is None
    loop.close()
    assert next(loop, None) is None
    with pytest.raises(xferlib.ClosedError, match=r"spent.* Make a new one"):
        iter(loop)


@LOOPS
def test_a_loop_that_was_closed_gives_no_end_but_an_error(make: Maker, stager: xferlib.Stager) -> None:
    loop = make([np.full(3, number) for number in range(7)], stager, 2)
    assert next(loop)[0] == 0
    begun = iter(loop)
    loop.close()
    for _ in range(2):
        with pytest.raises(xferlib.ClosedError, match="closed before its end"):
            next(loop)
        with pytest.raises(xferlib.ClosedError, match="closed before its end"):
            next(begun)
        with pytest.raises(xferlib.ClosedError, match=r"is closed\. Make another"):
            list(loop)
    loop.close()


@LOOPS
def test_a_pass_that_was_left_goes_on_where_it_was(make: Maker, stager: xferlib.Stager) -> None:
    with make([np.full(3, number) for number in range(7)], stager, 2) as loop:
        found: list[int] = []
        for tree in loop:
            found.append(int(tree[0]))
            if len(found) == 2:
                break
        found += [int(tree[0]) for tree in itertools.islice(loop, 2)]
        found += [int(tree[0]) for _, tree in zip(range(2), loop, strict=False)]
        assert [*found, *(int(tree[0]) for tree in loop)] == [0, 1, 2, 3, 4, 5, 6]


@LOOPS
@pytest.mark.parametrize("count", [6, 7])
def test_batches_can_be_taken_in_groups(make: Maker, count: int, stager: xferlib.Stager) -> None:
    batches = iter(make([np.full(3, number) for number in range(count)], stager, 2))
    groups = []
    while group := [int(tree[0]) for tree in itertools.islice(batches, 3)]:
        groups.append(group)
    assert groups == [[0, 1, 2], [3, 4, 5], [6]][: -(-count // 3)]


@LOOPS
def test_an_interrupted_loop_is_closed_and_says_so(make: Maker, stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make([np.full(3, number) for number in range(7)], stager, 2)
    assert next(loop)[0] == 0

    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_next", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    monkeypatch.undo()
    with pytest.raises(xferlib.ClosedError):
        next(loop)
    if isinstance(loop, xferlib.Prefetch):
        assert not thread_of(loop).is_alive()


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("rewrites", [True, False])
def test_a_copy_to_the_device_that_fails_costs_its_batch_alone(depth: int, rewrites: bool) -> None:
    with xferlib.stager(failing_copies("h2d", {0, 2, 3})) as stager:
        batches = [stager.empty_pinned(8, np.int64) for _ in range(7)]
        for number, array in enumerate(batches):
            array[:] = number
        with xferlib.prefetch(batches, stager, depth, rewrites=rewrites) as loop:
            assert outcomes(loop) == ["TransferError", 1, "TransferError", "TransferError", 4, 5, 6]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("into_arrays", [True, False])
@pytest.mark.filterwarnings("ignore::xferlib.SynchronousTransferWarning")
def test_a_copy_to_the_host_that_fails_costs_its_result_alone(depth: int, into_arrays: bool) -> None:
    with xferlib.stager(failing_copies("d2h", {0, 2, 3})) as stager:
        out = stager.empty_pinned((7, 8), np.int64) if into_arrays else None
        with xferlib.drain((np.full(8, number) for number in range(7)), stager, depth, out=out) as loop:
            assert outcomes(loop) == ["TransferError", 1, "TransferError", "TransferError", 4, 5, 6]


def test_a_batch_that_cannot_be_taken_costs_itself_alone_and_nothing_is_begun_meanwhile(stager: xferlib.Stager) -> None:
    def take(transfer: Any) -> Any:
        value = transfer.value
        if value[0] == 1:
            raise Lost
        return value

    begun: list[int] = []

    def put(tree: Any) -> xferlib.Transfer:
        begun.append(int(tree[0]))
        return stager.put(tree)

    loop = xferlib.Prefetch([np.full(3, number) for number in range(9)], PutBy(put, take))
    assert next(loop)[0] == 0
    until(lambda: begun == [0, 1, 2])
    with pytest.raises(Lost):
        next(loop)
    seen = begun.copy()
    # The source has given the next one, perhaps, which is not put.
    until(lambda: part(loop) == "place" and loop._background._shared.inbox.empty())
    assert begun == seen
    assert outcomes(loop) == [2, 3, 4, 5, 6, 7, 8]


def test_a_batch_that_the_source_gives_after_a_take_failed_is_put_when_it_is_asked_for(stager: xferlib.Stager) -> None:
    source = Source(3, stop_at=1)
    put: list[int] = []

    def take(transfer: Any) -> Any:
        if not failed:
            failed.append(True)
            assert source.stopped.wait(PATIENCE)
            raise Lost
        return transfer.value

    def noted(tree: Any) -> xferlib.Transfer:
        put.append(int(tree["label"][0]))
        return stager.put(tree)

    failed: list[bool] = []
    with xferlib.Prefetch(source, PutBy(noted, take)) as loop:
        with pytest.raises(Lost):
            next(loop)
        source.gate.set()
        # It has the batch, and waits with it.
        until(lambda: part(loop) == "place" and loop._background._shared.inbox.empty())
        assert (source.asked, put) == (2, [0])
        assert [int(tree["label"][0]) for tree in loop] == [1, 2]


def test_a_consumer_whose_take_failed_is_told_when_nobody_is_inside_a_put(stager: xferlib.Stager) -> None:
    """Many a consumer goes no further, and closes the stager."""
    inside, gate = threading.Event(), threading.Event()

    def put(tree: Any) -> xferlib.Transfer:
        if tree[0] == 1:
            inside.set()
            assert gate.wait(PATIENCE)
        return stager.put(tree)

    def take(transfer: Any) -> Any:
        assert inside.wait(PATIENCE)
        raise Lost

    with xferlib.Prefetch([np.full(3, number) for number in range(3)], PutBy(put, take)) as loop:
        taker = on_thread(lambda: next(loop))
        shared = loop._background._shared
        until(lambda: shared.paused and (shared.changed._sleepers or taker.done()))
        assert not taker.done()
        gate.set()
        with pytest.raises(Lost):
            taker.result(PATIENCE)


def test_a_result_that_fn_fails_for_is_told_in_its_place(stager: xferlib.Stager) -> None:
    def fn(tree: Any) -> Any:
        if tree[0] in (0, 3, 4):
            raise Lost
        return tree

    source = [np.full(3, number) for number in range(6)]
    out = np.zeros((18,), np.int64)
    with xferlib.stream_map(fn, source, stager, out=out) as loop:
        assert outcomes(loop) == ["Lost", 1, 2, "Lost", "Lost", 5]
    assert out[::3].tolist() == [1, 2, 5, 0, 0, 0]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_memory_that_fn_has_none_of_is_told_in_its_place(stager: xferlib.Stager, number: int) -> None:
    """There the loop has nothing that it could start later."""

    def fn(tree: Any) -> Any:
        if tree[0] == number:
            raise xferlib.AllocationError("none for fn")
        return tree

    source = [np.full(3, number) for number in range(4)]
    expected: list[Any] = [0, 1, 2, 3]
    expected[number] = "AllocationError"
    assert outcomes(xferlib.stream_map(fn, source, stager)) == expected


def test_an_error_that_looks_like_the_end_is_none(stager: xferlib.Stager) -> None:
    def fn(tree: Any) -> Any:
        if tree[0] == 1:
            raise StopIteration
        return tree

    source = [np.full(3, number) for number in range(3)]
    assert outcomes(xferlib.stream_map(fn, source, stager)) == [0, "RuntimeError", 2]
    assert outcomes(xferlib.Prefetch(source, PutBy(lambda tree: stager.put(fn(tree))))) == [0, "RuntimeError", 2]


def test_slots_of_batches_that_are_refused_go_back_to_their_ring(stager: xferlib.Stager) -> None:
    with xferlib.Ring(stager, ((3,), np.float64), 2) as ring:

        def source() -> Iterator[Any]:
            for number in range(6):
                slot = ring.acquire()
                slot.tree[:] = number
                yield slot

        with xferlib.stager("host") as other, xferlib.prefetch(source(), other) as loop:
            kept: list[BaseException] = []
            for _ in range(6):
                with pytest.raises(ValueError, match="ring of another stager") as caught:
                    next(loop)
                kept.append(caught.value)
            assert next(loop, None) is None


def test_two_loops_over_one_iterator_share_its_batches(stager: xferlib.Stager) -> None:
    source = iter([np.full(3, number) for number in range(40)])
    loops = [xferlib.prefetch(source, stager) for _ in range(2)]
    takers = [on_thread(lambda loop=loop: outcomes(loop)) for loop in loops]  # type: ignore[misc]
    found = [number for taker in takers for number in taker.result(PATIENCE)]
    assert sorted(map(int, found)) == list(range(40))


def test_a_generator_that_another_loop_is_inside_of_is_asked_again(stager: xferlib.Stager) -> None:
    source = Source(3, stop_at=1)
    generator = iter(source)
    first = xferlib.prefetch(generator, stager)
    assert source.stopped.wait(PATIENCE)
    second = xferlib.prefetch(generator, stager)
    with pytest.raises(ValueError, match="generator already executing") as caught:
        next(second)
    assert "make one for each loop" in caught.value.__notes__[-1]
    source.gate.set()
    found = [*outcomes(tree["label"][:1] for tree in first), *outcomes(tree["label"][:1] for tree in second)]
    assert sorted(map(int, found)) == [0, 1, 2]


class Loader:
    """Gives so many batches, as loaders do that say how many."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return (np.full(3, number) for number in range(self.count))


class Streaming(Loader):
    def __len__(self) -> int:
        raise NotImplementedError("it streams")


def lengthy(kind: str, source: Any, stager: xferlib.Stager) -> Loop:
    if kind == "drain":
        return xferlib.drain(source, stager)
    return xferlib.prefetch(source, stager) if kind == "prefetch" else xferlib.stream_map(lambda batch: batch, source, stager)


@pytest.mark.parametrize("kind", ["prefetch", "stream_map", "drain"])
def test_a_loop_is_as_long_as_its_source_says_whatever_was_taken(kind: str, stager: xferlib.Stager) -> None:
    source: Any = Loader(4)
    if kind == "drain":
        source = [stager.put(batch).result() for batch in source]
    with lengthy(kind, source, stager) as loop:
        assert len(loop) == 4
        next(loop)
        assert len(loop) == 4
        assert len(list(loop)) == 3
    assert len(loop) == 4


@pytest.mark.parametrize("kind", ["prefetch", "stream_map", "drain"])
@pytest.mark.parametrize("has_len", [False, True], ids=["generator", "len raises"])
def test_a_loop_whose_source_tells_no_length_has_none_and_can_be_listed(kind: str, has_len: bool, stager: xferlib.Stager) -> None:
    source: Any = Streaming(3) if has_len else iter(Loader(3))
    if kind == "drain" and not has_len:
        source = (stager.put(batch).result() for batch in source)
    with lengthy(kind, source, stager) as loop:
        with pytest.raises(TypeError, match=r"this loop has no length, as len\(\) of its source tells none"):
            len(loop)
        assert operator.length_hint(loop, 7) == 7
        assert len(list(loop)) == 3


class Understated(Loader):
    """Gives more batches than it says."""

    def __iter__(self) -> Iterator[Any]:
        return (np.full(3, number) for number in range(5))


@pytest.mark.parametrize("said", [0, 1])
def test_a_source_that_gives_more_batches_than_it_said_is_taken_whole_and_told_where_that_lowers_the_depth(
    said: int, stager: xferlib.Stager
) -> None:
    with xferlib.prefetch(Understated(said), stager) as loop:
        for number in range(said):
            assert int(next(loop)[0]) == number
        with pytest.warns(RuntimeWarning, match=rf"said {said}, and it gives more batches: the loop is 1 ahead, not 2") as told:
            found = [int(batch[0]) for batch in loop]
    assert found == list(range(said, 5))
    assert len(told) == 1
    assert told[0].filename == __file__
    # Also where no line of the program asks for the batches.
    with pytest.warns(RuntimeWarning, match="gives more batches") as told:
        list(xferlib.prefetch(xferlib.prefetch(Understated(said), stager), stager))
    assert [told[0].filename] == [__file__]
    # It is as far ahead as was asked.
    with xferlib.prefetch(Understated(2), stager) as loop:
        assert len(list(loop)) == 5


def test_a_prefetch_is_made_by_the_function_of_that_name(stager: xferlib.Stager) -> None:
    with pytest.raises(TypeError, match=r"got <Stager.*call xferlib.prefetch\(batches, stager\)"):
        xferlib.Prefetch([np.zeros(3)], stager)  # type: ignore[arg-type]  # On purpose.


@pytest.mark.parametrize("kind", ["prefetch", "stream_map", "drain"])
@pytest.mark.parametrize("source", [[], iter(())], ids=["empty", "no length"])
def test_a_loop_is_true_as_iterators_are(kind: str, source: Any, stager: xferlib.Stager) -> None:
    with lengthy(kind, source, stager) as loop:
        assert loop


@pytest.mark.parametrize("kind", ["prefetch", "stream_map", "drain"])
def test_a_source_is_asked_once_how_long_it_is_and_before_it_is_iterated(kind: str, stager: xferlib.Stager) -> None:
    """What it says later may be how many are left, and the thread that iterates it may be inside of it then."""
    asked: list[bool] = []
    iterated = False

    class Once(Loader):
        def __len__(self) -> int:
            asked.append(iterated)
            return super().__len__()

        def __iter__(self) -> Iterator[Any]:
            nonlocal iterated
            iterated = True
            return super().__iter__()

    source: Any = Once(4)
    with lengthy(kind, source, stager) as loop:
        assert len(loop) == 4
        assert asked == [False]
