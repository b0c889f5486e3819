"""Trees of many small arrays: one packing for a structure, one copy for many leaves, the right bytes in each."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import xferlib
from tests.core.fakes import WATCHDOG, held, on_thread, succeeds, tampered
from xferlib.memory.host import ASSUMED_OF_FEW_NBYTES, FEW_LEAVES
from xferlib.packing import KEPT_PACKINGS, Packing, Packings
from xferlib.staging.pageable import Staging

DTYPES = [np.bool_, np.int8, np.uint16, np.float32, np.complex64, np.int64, ml_dtypes.bfloat16, np.dtype(ml_dtypes.float8_e5m2)]

pytestmark = pytest.mark.filterwarnings("ignore::xferlib.SynchronousTransferWarning")


def tree(count: int, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    shapes = [(), (0,), (1,), (3, 5), (64,), (255,), (7, 0, 2), (1000,), (64, 64)]
    return [rng.integers(0, 100, shapes[index % len(shapes)]).astype(DTYPES[index % len(DTYPES)]) for index in range(count)]


def asking() -> tuple[Any, list[int]]:
    """Return a backend, and the addresses about which it is asked whether they are pinned."""
    asked: list[int] = []
    backend = tampered()

    def is_pinned(address: int, nbytes: int) -> bool:
        asked.append(address)
        return bool(backend.inner.is_pinned(address, nbytes))

    backend.is_pinned = is_pinned
    return backend, asked


@pytest.mark.parametrize("count", [2, 15, 16, 200])
def test_leaves_of_all_sizes_and_dtypes_arrive(stager: xferlib.Stager, count: int) -> None:
    leaves = tree(count)
    for got, want in zip(stager.put(leaves).result(), leaves, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert got.tobytes() == want.tobytes()


def test_many_small_leaves_cross_in_one_copy() -> None:
    copies: list[int] = []
    backend = tampered()

    def copy(dst: int, src: int, nbytes: int) -> None:
        copies.append(nbytes)
        backend.inner.copy_h2d(dst, src, nbytes)

    backend.copy_h2d = copy
    with xferlib.stager(backend) as stager:
        leaves = {str(index): np.full(300, index, np.int16) for index in range(100)}
        got = stager.put(leaves).result()
        assert all((got[str(index)] == index).all() for index in range(100))
    # Each starts at a multiple of 256.
    assert copies == [99 * 768 + 600]


@pytest.mark.parametrize("view", [np.s_[::2], np.s_[::-1], np.s_[:, 3], np.s_[1:3, ::3]])
def test_small_leaves_that_are_not_contiguous_arrive(stager: xferlib.Stager, view: Any) -> None:
    leaves = [(np.arange(600) + index).reshape(20, 30)[view] for index in range(40)]
    for got, want in zip(stager.put(leaves).result(), leaves, strict=True):
        assert np.array_equal(got, want)


def test_pinned_leaves_among_many_are_sent_from_where_they_are(stager: xferlib.Stager) -> None:
    leaves: list[Any] = [stager.empty_pinned(100, np.int32) if index % 2 else np.zeros(100, np.int32) for index in range(40)]
    for index, leaf in enumerate(leaves):
        leaf[:] = index
    got = stager.put(leaves).result()
    assert [int(array[0]) for array in got] == list(range(40))
    assert stager.stats().synchronous == 20


def test_many_small_leaves_in_memory_of_the_caller_s_that_is_pinned_are_sent_from_where_they_are(stager: xferlib.Stager) -> None:
    memory = np.arange(4000)
    # The second time: leaves of a dtype that is new are looked at one by one.
    with stager.pin(memory):
        for _ in range(2):
            got = stager.put(np.split(memory, 40)).result()
    assert np.array_equal(np.concatenate(got), memory)
    assert stager.stats().synchronous == 0


def test_a_large_pinned_leaf_of_the_caller_s_is_sent_from_where_it_is_beside_many_small_ones(stager: xferlib.Stager) -> None:
    small, large = [np.full(100, index) for index in range(20)], np.arange(1 << 15)
    leaves = [*small[:10], large, *small[10:]]
    # The second time: leaves of a dtype that is new are looked at one by one.
    with stager.pin(large):
        for turn in (1, 2):
            got = stager.put(leaves).result()
            assert all(np.array_equal(array, leaf) for array, leaf in zip(got, leaves, strict=True))
            assert stager.stats().synchronous == turn * len(small)


def test_of_many_small_leaves_in_ordinary_memory_the_driver_is_asked_about_one() -> None:
    backend, asked = asking()
    memory = np.arange(4000)
    with xferlib.stager(backend) as stager:
        leaves = np.split(memory, 40)
        stager.put(leaves).synchronize()
        asked.clear()
        stager.put(leaves).synchronize()
        assert asked == [leaves[0].ctypes.data]


def test_of_a_few_leaves_that_are_very_small_too() -> None:
    backend, asked = asking()
    small: list[np.ndarray[Any, Any]] = [np.arange(10), np.arange(20)]
    larger: list[np.ndarray[Any, Any]] = [np.arange(10), np.zeros(ASSUMED_OF_FEW_NBYTES + 1, np.uint8)]
    with xferlib.stager(backend) as stager:
        for leaves, addresses in ((small, small[:1]), (larger, larger)):
            stager.put(leaves).synchronize()
            asked.clear()
            for got, want in zip(stager.put(leaves).result(), leaves, strict=True):
                assert np.array_equal(got, want)
            assert asked == [leaf.ctypes.data for leaf in addresses]


@pytest.mark.parametrize("count", [2, FEW_LEAVES - 1, FEW_LEAVES])
@pytest.mark.parametrize("nbytes", [8, ASSUMED_OF_FEW_NBYTES, ASSUMED_OF_FEW_NBYTES + 8])
def test_of_small_arrays_that_a_get_is_to_fill_the_driver_is_asked_about_the_first(count: int, nbytes: int) -> None:
    backend, asked = asking()
    with xferlib.stager(backend) as stager:
        arrays = stager.put([np.full(nbytes // 8, number) for number in range(count)]).value
        out: list[np.ndarray[Any, Any]] = [np.empty(nbytes // 8, np.int64) for _ in range(count)]
        asked.clear()
        stager.get(arrays, out=out).synchronize()
        assert [int(array[-1]) for array in out] == list(range(count))
        small = nbytes <= ASSUMED_OF_FEW_NBYTES or count >= FEW_LEAVES
        assert asked == [array.ctypes.data for array in (out[:1] if small else out)]


def test_small_arrays_that_a_get_is_to_fill_may_lie_in_memory_of_all_kinds(stager: xferlib.Stager) -> None:
    memory = np.empty((4, 100), np.int64)
    arrays = stager.put([np.full(100, number) for number in range(12)]).value
    with stager.pin(memory):
        for first in ([], [memory[3]], [stager.empty_pinned(100, np.int64)]):
            others = [np.empty(100, np.int64), *memory[:3], stager.empty_pinned(100, np.int64)]
            out = [*first, *others]
            stager.get(arrays[: len(out)], out=out).synchronize()
            assert [array.tolist() for array in out] == [[number] * 100 for number in range(len(out))]


def test_a_put_of_many_small_leaves_that_fails_behind_its_copies_waits_until_they_are_done(
    stager: xferlib.Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else others would have the memory that is still written."""
    issued, wait_issued = threading.Event(), Staging.wait_issued

    def fails(staging: Staging, job: Any) -> None:
        wait_issued(staging, job)
        issued.set()
        raise RuntimeError("broken")

    leaves = [np.full(16 << 10, number, np.uint8) for number in range(100)]
    # Before: leaves of a dtype that is new are looked at one by one.
    stager.put(leaves).synchronize()
    monkeypatch.setattr(Staging, "wait_issued", fails)
    with held(stager.backend.h2d):  # type: ignore[attr-defined]  # the host backend's
        putting = on_thread(lambda: stager.put(leaves))
        assert issued.wait(WATCHDOG)
        with pytest.raises(TimeoutError):
            putting.result(0.1)
    with pytest.raises(RuntimeError, match="broken"):
        putting.result(WATCHDOG)


@pytest.mark.parametrize("count", [3, 100, 3000])
@pytest.mark.parametrize("kind", ["read-only", "strided", "mixed", "bfloat16", "empty"])
def test_leaves_that_are_like_none_of_numpy_s_own_arrive_by_caller_and_by_engine(
    stager: xferlib.Stager, kind: str, count: int
) -> None:
    leaves: list[np.ndarray[Any, Any]] = []
    for number in range(count):
        leaf = (np.arange(150) + number).astype(ml_dtypes.bfloat16 if kind == "bfloat16" else np.int32).reshape(10, 15)
        if kind == "read-only":
            leaf.flags.writeable = False
        elif kind == "strided":
            leaf = leaf.T if number % 2 else leaf[::2]
        elif kind == "mixed" and number % 2:
            leaf = leaf.astype(np.uint8)
        elif kind == "empty" and number % 7 == 1:
            leaf = leaf[:0]
        leaves.append(leaf)
    # The second time it is a tree like the last one.
    for _ in range(2):
        for got, want in zip(stager.put(leaves).result(), leaves, strict=True):
            assert got.dtype == want.dtype
            assert np.array_equal(got, want)


def test_a_small_pinned_leaf_that_is_not_the_first_is_found_where_it_is_the_pool_s(stager: xferlib.Stager) -> None:
    pinned = stager.empty_pinned(100, np.uint8)
    pinned[:] = 7
    for leaf in (pinned, pinned[10:20], pinned.reshape(10, 10)):
        before = stager.stats().synchronous
        first, second = stager.put([np.zeros(5, np.uint8), leaf]).result()
        assert (first == 0).all()
        assert (second == 7).all()
        assert stager.stats().synchronous == before + 1


@pytest.mark.parametrize("borrow", [False, True])
def test_a_put_of_many_leaves_into_a_failing_device_raises_and_holds_nothing(borrow: bool) -> None:  # A parameter of pytest's.
    class Broke(Exception):
        pass

    def breaks(*_: object) -> None:
        raise Broke("no copy to be had")

    with xferlib.stager(tampered(copy_h2d=breaks, failures=(Broke,))) as stager:
        for leaves in ([np.zeros(5)] * 20, [np.zeros(500)] * 500):
            with pytest.raises(xferlib.TransferError, match="no copy to be had"):
                stager.put(leaves, borrow=borrow).synchronize()
        stager.trim()
        assert stager._pool.usage().used == 0


def test_arrays_of_the_callers_side_by_side_are_overwritten_exactly(stager: xferlib.Stager) -> None:
    """What lies between them is not ours: no pad may be written there."""
    memory = np.full(10_000, 9, np.uint8)
    targets = [memory[start : start + 100] for start in range(0, 10_000, 200)]
    stager.put([np.full(100, 1, np.uint8)] * len(targets), into=targets).synchronize()
    assert (memory.reshape(-1, 200)[:, :100] == 1).all()
    assert (memory.reshape(-1, 200)[:, 100:] == 9).all()


def test_a_layout_is_planned_once_for_the_same_shapes() -> None:
    packings = Packings()
    one = packings.of([(array, None) for array in tree(50)])
    assert packings.of([(array, None) for array in tree(50, seed=1)]) is one
    assert packings.of([(array, None) for array in tree(51)]) is not one


def test_layouts_that_were_not_used_for_long_are_forgotten() -> None:
    packings = Packings()
    first = packings.of([(np.zeros(1), None)])
    for size in range(2, KEPT_PACKINGS + 2):
        packings.of([(np.zeros(size), None)])
    assert packings.of([(np.zeros(1), None)]) is not first


def test_a_layout_is_kept_while_no_more_than_so_many_are() -> None:
    packings = Packings()
    first = packings.of([(np.zeros(1), None)])
    for size in range(2, KEPT_PACKINGS + 1):
        packings.of([(np.zeros(size), None)])
    assert packings.of([(np.zeros(1), None)]) is first


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_trees_that_differ_in_one_dtype_are_not_taken_for_each_other(stager: xferlib.Stager, odd: int) -> None:
    for dtypes in ([np.float32] * 3, [np.int64 if index == odd else np.float32 for index in range(3)]):
        leaves = [np.full(5, index + 1, dtype) for index, dtype in enumerate(dtypes)]
        for got, want in zip(stager.put(leaves).result(), leaves, strict=True):
            assert got.dtype == want.dtype
            assert np.array_equal(got, want)


def test_trees_that_differ_in_where_a_dtype_begins_are_not_taken_for_each_other(stager: xferlib.Stager) -> None:
    for dtypes in (["f4", "f4", "f8"], ["f4", "f8", "f8"]):
        leaves = [np.full(5, index + 1, dtype) for index, dtype in enumerate(dtypes)]
        for got, want in zip(stager.put(leaves).result(), leaves, strict=True):
            assert got.dtype == want.dtype
            assert np.array_equal(got, want)


def test_trees_that_differ_in_their_shapes_alone_are_not_taken_for_each_other(stager: xferlib.Stager) -> None:
    for shapes in ([(6,), (4,)], [(2, 3), (4,)], [(4,), (6,)]):
        leaves = [np.full(shape, index + 1) for index, shape in enumerate(shapes)]
        for got, want in zip(stager.put(leaves).result(), leaves, strict=True):
            assert got.shape == want.shape
            assert np.array_equal(got, want)


def test_leaves_of_64_kib_share_a_block_and_larger_ones_have_their_own() -> None:
    with xferlib.stager("host") as stager:
        kept = stager.put([np.full(64 << 10, 1, np.uint8), np.full(64 << 10, 2, np.uint8)]).result()
        assert stager.backend.memory.calls().device_allocations == 1  # type: ignore[attr-defined]  # the host backend's own
        more = stager.put([np.full((64 << 10) + 1, 3, np.uint8), np.full((64 << 10) + 1, 4, np.uint8)]).result()
        assert stager.backend.memory.calls().device_allocations == 3  # type: ignore[attr-defined]
        assert [int(array[-1]) for array in (*kept, *more)] == [1, 2, 3, 4]


def test_an_empty_leaf_has_a_unit_of_its_own_too() -> None:
    """Who takes a block apart reads whole units, also of the last leaf."""
    empty, some = ((0,), np.dtype(np.float32)), ((3,), np.dtype(np.float32))
    packing = Packing([empty, some, empty])
    assert packing.addresses([1 << 20]) == [1 << 20, (1 << 20) + 256, (1 << 20) + 512]
    assert packing.sizes == [768]


def test_large_and_small_leaves_by_turns_arrive(stager: xferlib.Stager) -> None:
    sizes = [10, 70_000, 0, 300, 65_536, 65_537, 1]
    leaves = [np.full(size, index + 1, np.uint8) for index, size in enumerate(sizes)]
    for _ in range(2):
        for got, want in zip(stager.put(leaves).result(), leaves, strict=True):
            assert np.array_equal(got, want)


def test_a_wrong_leaf_among_many_is_named(stager: xferlib.Stager) -> None:
    leaves: list[Any] = tree(40)
    leaves[30] = np.array(["text"])
    with pytest.raises(TypeError, match="cannot be transferred") as told:
        stager.put(leaves)
    assert told.value.__notes__ == ["at tree[30]"]


def test_a_fork_while_another_thread_plans_a_layout_leaves_the_child_nothing_to_wait_for() -> None:
    succeeds("""
        import os, sys, threading, warnings
        import numpy as np
        import xferlib
        warnings.simplefilter("ignore")
        planning, go_on = threading.Event(), threading.Event()
        def trace(frame, event, arg):
            if frame.f_code.co_filename.endswith("packing.py") and frame.f_code.co_name == "_packed":
                planning.set()
                go_on.wait(8)
        def put():
            sys.settrace(trace)
            stager.put([np.zeros(3), np.zeros(4)])
        with xferlib.stager("host") as stager:
            stager.put(np.zeros(3)).synchronize()
            thread = threading.Thread(target=put)
            thread.start()
            assert planning.wait(8)
            child = os.fork()
            if not child:
                with xferlib.stager("host") as its_own:
                    found = its_own.put([np.full(5, 1), np.full(6, 2)]).result()
                os._exit(0 if [int(array.sum()) for array in found] == [5, 12] else 1)
            _, status = os.waitpid(child, 0)
            go_on.set()
            thread.join()
            assert os.waitstatus_to_exitcode(status) == 0, status
    """)
