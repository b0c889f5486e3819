"""A tree whose home is the host: order between stores and fetches, what failures leave, and what is refused."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream

import xferlib
from tests.core.fakes import held, on_thread, tampered, until
from tests.pipeline.failing import failing_copies
from tests.pipeline.interrupts import at_line

SIZE = 5000


@pytest.fixture
def stager() -> Iterator[xferlib.Stager]:
    with xferlib.stager("host") as stager:
        yield stager


def group(value: int) -> dict[str, Any]:
    return {"w": np.full((SIZE,), value, np.float32), "m": [np.full((3, 5), value, np.int16), np.full((), value, np.float64)]}


def value_of(tree: dict[str, Any]) -> int:
    """Return the one value that a group is full of."""
    found = {float(value) for array in (tree["w"], *tree["m"]) for value in np.unique(np.asarray(array))}
    assert len(found) == 1, found
    return int(found.pop())


def home_of(stager: xferlib.Stager, names: str = "abc", **options: Any) -> xferlib.HostTree:
    return xferlib.HostTree({name: group(index) for index, name in enumerate(names)}, stager, **options)


def fetched_or_undefined(home: xferlib.HostTree, name: str) -> int | None:
    try:
        return value_of(home.fetch(name).result())
    except xferlib.XferError:
        return None


def waits(call: Any) -> Any:
    """Run what is to wait, and see it wait; return its future."""
    future = on_thread(call)
    with pytest.raises(TimeoutError):
        future.result(0.05)
    return future


def test_groups_come_and_go(stager: xferlib.Stager) -> None:
    with home_of(stager) as home:
        assert (list(home), len(home), "b" in home, "x" in home) == (["a", "b", "c"], 3, True, False)
        assert home.nbytes == 3 * (4 * SIZE + 30 + 8)
        for name, arrays in home.fetch_each():
            home.store(name, {"w": arrays["w"] + 10, "m": [array + 10 for array in arrays["m"]]})
        assert [value_of(home[name]) for name in home] == [10, 11, 12]
        assert [(name, value_of(tree)) for name, tree in home.fetch_each("b")] == [("b", 11)]
        both = home.fetch(["c", "a"]).result()
        assert [(name, value_of(tree)) for name, tree in both.items()] == [("c", 12), ("a", 10)]
        home.store(["a", "c"], {"c": group(7), "a": group(5)}).synchronize()
        assert [value_of(tree) for tree in home.tree.values()] == [5, 11, 7]


@pytest.mark.parametrize("names", [["a", "b"], ["b", "a"]])
@pytest.mark.parametrize("kind", [OrderedDict, MappingProxyType, UserDict])
def test_groups_are_stored_from_whatever_mapping(stager: xferlib.Stager, kind: Any, names: list[str]) -> None:
    """As they are taken from whatever mapping when the tree is made."""
    with xferlib.HostTree(kind({"b": group(1), "a": group(0)}), stager) as home:
        home.store(names, kind({"b": group(5), "a": group(4)})).synchronize()
        assert [value_of(home[name]) for name in ("a", "b")] == [4, 5]


def test_a_group_may_be_one_array_and_home_has_a_copy_of_what_it_was_given(stager: xferlib.Stager) -> None:
    given = np.arange(6, dtype=np.int32).reshape(2, 3).T
    zeros = np.broadcast_to(np.float32(0), (4, 4))
    with xferlib.HostTree({"x": given, "zeros": zeros, "empty": np.zeros((0, 3))}, stager) as home:
        given[:] = 9
        assert home["x"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert home.fetch("zeros").result().sum() == 0
        home.store("zeros", np.ones((4, 4), np.float32))
        assert home["zeros"].sum() == 16
        assert home.fetch("empty").result().shape == (0, 3)


def test_names_are_text(stager: xferlib.Stager) -> None:
    bad: Any
    with home_of(stager) as home:
        for bad in (b"a", [["a"]], [None], 3):
            with pytest.raises(TypeError, match="name"):
                home.fetch(bad)
            with pytest.raises(TypeError, match="name"):
                home.store(bad, group(5))
        for bad in (["a"], ("a",), None, b"a", iter("a")):
            with pytest.raises(TypeError, match="no name of a group"):
                home[bad]
        assert [value_of(home[name]) for name in home] == [0, 1, 2]


def test_arrays_of_a_group_lie_as_their_dtypes_want(stager: xferlib.Stager) -> None:
    with xferlib.HostTree({"a": [np.ones(3, np.uint8), np.ones(5), np.ones((), bool), np.ones(2, complex)]}, stager) as home:
        assert [array.ctypes.data % 256 for array in home["a"]] == [0] * 4


def test_a_fetch_sees_what_the_store_before_it_writes(stager: xferlib.Stager) -> None:
    """While the copy to the host is held, nothing that is there is given out."""
    backend: Any = stager.backend
    with home_of(stager) as home:
        with held(backend.d2h) as gate:
            store = home.store("a", group(50))
            assert not store.done()
            fetched = waits(lambda: home.fetch("a").result())
            read = waits(lambda: value_of(home["a"]))
            # Others are as they were, and come meanwhile.
            assert value_of(home.fetch("b").result()) == 1
            gate.set()
        assert value_of(fetched.result(20)) == 50
        assert read.result(20) == 50


def test_a_store_waits_for_the_fetch_that_still_reads(stager: xferlib.Stager) -> None:
    """While the copy to the device is held, its source is not written over, also if nobody has its transfer any more."""
    backend: Any = stager.backend
    with home_of(stager) as home:
        with held(backend.h2d) as gate:
            fetched, another = home.fetch("a"), home.fetch(["b", "a"])
            store = waits(lambda: home.store("a", group(50)))
            gate.set()
        assert value_of(fetched.result()) == value_of(another.result()["a"]) == 0
        store.result(20).synchronize()
        assert value_of(home.fetch("a").result()) == 50
        with held(backend.h2d) as gate:
            home.fetch("a")
            store = waits(lambda: home.store("a", group(60)))
            gate.set()
        store.result(20).synchronize()
        assert value_of(home["a"]) == 60


def test_a_store_waits_for_no_producer(stager: xferlib.Stager) -> None:
    gate, arrays = threading.Event(), group(0)
    with home_of(stager) as home, closing(Stream()) as stream:
        stream.submit(gate.wait, 20)
        stream.submit(arrays["w"].fill, 8)
        store = home.store("b", arrays, stream=stream)
        assert not store.done()
        gate.set()
        assert (home["b"]["w"] == 8).all()


def test_the_next_group_is_on_its_way_while_one_is_worked_on(stager: xferlib.Stager) -> None:
    backend: Any = stager.backend
    with home_of(stager, "abcd") as home:
        each = home.fetch_each(["a", "b", "d"])
        # The copies of the second are held: the first is there all the same, and the second has been asked for.
        assert value_of(next(home.fetch_each(["a"], ahead=0))[1]) == 0
        started = stager.stats().h2d_nbytes
        name, arrays = next(each)
        assert (name, value_of(arrays)) == ("a", 0)
        assert stager.stats().h2d_nbytes == started + 2 * home.nbytes // 4
        with held(backend.h2d) as gate:
            following = on_thread(lambda: next(each))
            assert until(lambda: stager.stats().h2d_nbytes == started + 3 * home.nbytes // 4)
            gate.set()
        assert [name for name, _ in (following.result(20), *each)] == ["b", "d"]


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("names", ["a", "ab", "aab", "abc", "abac"])
def test_a_group_comes_back_as_it_was_stored_however_short_the_round(stager: xferlib.Stager, names: str, ahead: int) -> None:
    want = {"a": 0, "b": 1, "c": 2}
    with home_of(stager) as home:
        for name, arrays in itertools.islice(home.fetch_each(itertools.cycle(names), ahead=ahead), 12):
            assert value_of(arrays) == want[name]
            want[name] += 10
            home.store(name, group(want[name]))
        assert {name: value_of(tree) for name, tree in home.tree.items()} == want


def test_fetches_that_are_over_are_forgotten(stager: xferlib.Stager) -> None:
    with home_of(stager) as home:
        for _ in range(50):
            home.fetch("a").synchronize()
        assert sum(isinstance(found, xferlib.Transfer) for found in gc.get_objects()) < 10


def test_no_more_stores_are_under_way_than_depth(stager: xferlib.Stager) -> None:
    backend: Any = stager.backend
    with home_of(stager, "abcd", depth=2) as home:
        with held(backend.d2h) as gate:
            home.store("a", group(20))
            home.store("b", group(21))
            third = waits(lambda: home.store("c", group(22)))
            gate.set()
        third.result(20)
        assert [value_of(tree) for tree in home.tree.values()] == [20, 21, 22, 3]


@pytest.mark.parametrize("debug", [False, True])
def test_threads_work_on_groups_of_their_own(debug: bool) -> None:
    with xferlib.stager("host", debug=debug) as stager, home_of(stager, "abcd", depth=1) as home:

        def work(name: str) -> None:
            for number in range(50):
                home.store(name, group(number))
                assert value_of(home.fetch(name).result()) == number

        for working in [on_thread(lambda name=name: work(name)) for name in home]:  # type: ignore[misc]  # mypy infers no lambda
            working.result(20)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_order_in_which_copies_end_each_fetch_has_what_was_stored_last(stager: xferlib.Stager, seed: int) -> None:
    """Both directions are held, and let go one copy at a time, in an order of chance."""
    chance, backend = random.Random(seed), stager.backend
    directions: dict[Any, threading.Semaphore] = {
        engine: threading.Semaphore(0)
        for engine in (backend.h2d, backend.d2h)  # type: ignore[attr-defined]  # of the host backend
    }

    def work() -> None:
        want, got = {name: index for index, name in enumerate("abcd")}, []
        with home_of(stager, "abcd") as home:
            for number in range(60):
                for engine, permits in directions.items():
                    engine.submit(permits.acquire)
                names = chance.sample("abcd", chance.choice([1, 1, 2]))
                if chance.random() < 0.5:
                    home.store(names, {name: group(100 + number) for name in names})
                    want |= dict.fromkeys(names, 100 + number)
                else:
                    got.append((home.fetch(names), {name: want[name] for name in names}))
            for transfer, expected in got:
                assert {name: value_of(tree) for name, tree in transfer.result().items()} == expected
            assert {name: value_of(tree) for name, tree in home.tree.items()} == want

    working = on_thread(work)
    for permits in chance.choices(list(directions.values()), k=600):
        permits.release()
    for permits in directions.values():
        permits.release(60)
    working.result(20)


def test_a_store_that_failed_leaves_its_groups_undefined_until_they_are_stored_again() -> None:
    with xferlib.stager(failing_copies("d2h", {1})) as stager, home_of(stager) as home:
        home.store("a", group(20)).synchronize()
        lost = home.store(["b", "c"], {"b": group(21), "c": group(22)})
        for ask in (
            lambda: home.fetch("b"),
            lambda: home["c"],
            lambda: home.tree,
            lambda: home.fetch(["a", "c"]),
            home.synchronize,
        ):
            for _ in range(2):
                with pytest.raises(xferlib.XferError, match=r"group '[bc]' is undefined: its last store failed .*Store it again"):
                    ask()
        with pytest.raises(xferlib.TransferError, match="copy 1 is lost"):
            lost.synchronize()
        assert value_of(home.fetch("a").result()) == 20
        home.store("b", group(31))
        assert value_of(home.fetch("b").result()) == 31
        home.store("c", group(32))
        home.synchronize()


def test_the_end_of_a_with_block_tells_of_a_store_that_failed_unless_something_else_is_raised() -> None:
    with xferlib.stager(failing_copies("d2h", {0, 1})) as stager:
        with pytest.raises(xferlib.XferError, match="group 'a' is undefined"), home_of(stager) as home:
            home.store("a", group(1))
        with pytest.raises(KeyError, match="mine"), home_of(stager) as home:
            home.store("a", group(1))
            raise KeyError("mine")
        with pytest.raises(xferlib.ClosedError):
            home.fetch("a")


def test_a_fetch_that_failed_does_no_harm_to_the_home() -> None:
    with xferlib.stager(failing_copies("h2d", {0})) as stager, home_of(stager) as home:
        with pytest.raises(xferlib.TransferError):
            home.fetch("a").result()
        assert value_of(home.fetch("a").result()) == 0
        home.store("a", group(3))
        assert value_of(home.fetch("a").result()) == 3


def test_a_group_that_is_undefined_is_told_of_in_its_place() -> None:
    with xferlib.stager(failing_copies("d2h", {0})) as stager, home_of(stager) as home:
        home.store("b", group(9))
        each = home.fetch_each()
        assert next(each)[0] == "a"
        with pytest.raises(xferlib.XferError, match="group 'b' is undefined"):
            next(each)
        each = home.fetch_each()
        assert next(each)[0] == "a"
        home.store("b", group(8))
        assert [(name, value_of(arrays)) for name, arrays in each] == [("b", 8), ("c", 2)]


def test_what_the_names_raise_comes_behind_the_groups_before(stager: xferlib.Stager) -> None:
    def names() -> Iterator[str]:
        yield "a"
        yield "b"
        raise OSError("no more names")

    got = []
    with home_of(stager) as home:
        each = home.fetch_each(names(), ahead=5)
        with pytest.raises(OSError, match="no more names"):
            for name, arrays in each:
                got.append((name, value_of(arrays)))
        assert list(each) == []
    assert got == [("a", 0), ("b", 1)]


def test_without_room_ahead_groups_come_one_by_one() -> None:
    most = 4 * SIZE + 4096
    with xferlib.stager("host", device_limit=most) as stager, home_of(stager) as home:
        got = []
        for name, arrays in home.fetch_each():
            got.append((name, value_of(arrays)))
            del arrays
        assert got == [("a", 0), ("b", 1), ("c", 2)]
        assert stager.stats().device_peak_nbytes <= most


@pytest.mark.parametrize("point", ["copy_d2h", "record_d2h"])
def test_a_store_that_is_interrupted_is_known_to_be(point: str) -> None:
    """When some of its copies have begun, or all of them."""
    cut = [False]

    def interrupted(*arguments: Any) -> Any:
        done = getattr(backend.inner, point)(*arguments)
        if cut[0]:
            cut[0] = False
            raise KeyboardInterrupt
        return done

    backend = tampered(**{point: interrupted})
    with xferlib.stager(backend) as stager, home_of(stager) as home:
        cut[0] = True
        with pytest.raises(KeyboardInterrupt):
            home.store(["a", "b"], {"a": group(20), "b": group(21)})
        for name in "ab":
            with pytest.raises(xferlib.XferError, match="is undefined: a store of it was cut off"):
                home.fetch(name)
        assert value_of(home.fetch("c").result()) == 2
        for value, name in enumerate("ab"):
            home.store(name, group(30 + value))
        assert [value_of(tree) for tree in home.tree.values()] == [30, 31, 2]


def test_wherever_a_call_is_interrupted_no_group_is_given_out_half_written(stager: xferlib.Stager) -> None:
    files, numbers = ("pipeline/host_tree.py", "xferlib/d2h.py", "xferlib/stager.py"), itertools.count(1)
    with home_of(stager) as home:
        want = {"a": {0}, "b": {1}, "c": {2}}
        for number in numbers:
            new = 100 + number
            if not at_line(number, files, lambda new=new: home.store(["a", "b"], {"a": group(new), "b": group(new)})):  # type: ignore[misc]
                break
            for name in "abc":
                got = fetched_or_undefined(home, name)
                assert got in want[name] or (name != "c" and got in (new, None))
            # What was cut off is made good by the next one, and harms nobody.
            home.store("b", group(new + 500))
            home.store("a", group(new + 500))
            want |= {"a": {new + 500}, "b": {new + 500}}
            assert [value_of(home[name]) for name in "abc"] == [new + 500, new + 500, 2]
        assert number > 50
        for number in itertools.count(1):
            if not at_line(number, files, lambda: home.fetch(["a", "c"])):
                break
            home.store("a", group(number))
            assert value_of(home.fetch("a").result()) == number
        assert number > 10


def test_a_store_that_is_refused_leaves_all_as_it_was(stager: xferlib.Stager) -> None:
    good = group(9)
    refused: list[tuple[Any, Any, type[Exception], str]] = [
        ("x", good, KeyError, "there is no group 'x': there are 'a', 'b', 'c'"),
        (["a", "x"], {"a": good, "x": good}, KeyError, "no group 'x'"),
        ([], {}, ValueError, "expected names of groups, each once"),
        (3, good, TypeError, "names=3: expected the name of a group, or names of several"),
        (["a", "a"], {"a": good}, ValueError, "each once"),
        (["a", "b"], {"a": good}, ValueError, r"expected a dict of the groups \['a', 'b'\], got \['a'\]"),
        (["a"], good["w"], ValueError, "got 'ndarray'"),
        ("a", {"w": good["w"]}, ValueError, "group 'a' has another structure"),
        ("a", good["w"], ValueError, "group 'a' has another structure"),
        ("a", {**good, "w": good["w"][1:]}, ValueError, r"group 'a': tree\.w is of shape \(4999,\).*home is of shape \(5000,\)"),
        ("a", {**good, "w": good["w"].astype(np.float16)}, ValueError, "of shape .* and dtype float16, and its home"),
        ("a", {**good, "w": "text"}, ValueError, "another structure"),
        ("a", {**good, "w": object()}, TypeError, "an array of the device or of NumPy"),
        ("a", {**good, "w": stager.put(good["w"])}, TypeError, "is a xferlib.transfer.Transfer"),
    ]
    with home_of(stager) as home:
        for names, tree, error, words in refused:
            with pytest.raises(error, match=words):
                home.store(names, tree)
        with pytest.raises(ValueError, match="0"):
            home.store("a", good, stream=0)
        assert [value_of(tree) for tree in home.tree.values()] == [0, 1, 2]
        with pytest.raises(KeyError, match="no group 'w'"):
            home["w"]
        with pytest.raises(KeyError, match="no group 'w'"):
            list(home.fetch_each(["a", "w"]))
        with pytest.raises(ValueError, match="ahead=-1"):
            home.fetch_each(ahead=-1)


def test_what_is_no_tree_of_groups_is_refused(stager: xferlib.Stager) -> None:
    trees: list[tuple[Any, type[Exception], str]] = [
        (np.zeros(3), TypeError, "expected a dict of groups by name"),
        ([np.zeros(3)], TypeError, "expected a dict of groups"),
        ({1: np.zeros(3)}, TypeError, "expected a dict of groups"),
        ({}, TypeError, "expected a dict of groups"),
        ({"a": []}, ValueError, "group 'a' has no array"),
        ({"a": {"w": np.zeros(3), "step": 3}}, ValueError, "text or numbers beside its arrays"),
        ({"a": object()}, TypeError, "group 'a': the array itself is a builtins.object"),
        ({"a": np.array(["text"], object)}, TypeError, "object"),
        ({"a": np.ma.masked_array([1, 2], [True, False])}, TypeError, "mask"),
    ]
    for tree, error, words in trees:
        with pytest.raises(error, match=words):
            xferlib.HostTree(tree, stager)
    with pytest.raises(ValueError, match="depth=0"):
        home_of(stager, depth=0)
    with pytest.raises(TypeError, match="The stager comes second"):
        xferlib.HostTree(stager, {"a": np.zeros(3)})  # type: ignore[arg-type]
    assert stager.stats().pinned_used_nbytes == 0


def test_a_tree_that_does_not_fit_says_what_to_do_and_takes_nothing() -> None:
    with xferlib.stager("host", pinned_limit=1 << 20) as stager:
        with pytest.raises(xferlib.AllocationError) as caught:
            xferlib.HostTree({"a": np.zeros(1 << 19, np.uint8), "b": np.zeros(1 << 20, np.uint8)}, stager)
        assert caught.value.__notes__ == [
            "group 'b' takes 1.0 MiB. Open the stager with a pinned_limit= for all of the tree",
        ]
        del caught
        # What the first group had is free again.
        stager.empty_pinned(1 << 20, np.uint8)


def test_what_is_read_is_a_view_that_nobody_writes_to_and_that_outlives_all(stager: xferlib.Stager) -> None:
    with home_of(stager) as home:
        seen = home["a"]
        with pytest.raises(ValueError, match="read-only"):
            seen["w"][0] = 1
        home.store("a", group(6)).synchronize()
        assert value_of(seen) == 6
        fetched = home.fetch("b")
    home.close()
    assert (value_of(seen), value_of(fetched.result())) == (6, 1)
    for ask in (lambda: home.fetch("a"), lambda: home["a"], lambda: home.store("a", group(1)), home.synchronize, lambda: home.tree):
        with pytest.raises(xferlib.ClosedError, match="this tree is closed"):
            ask()
    assert repr(home) == "<HostTree of 3 groups, 58.7 KiB on the host, closed>"


def test_closing_waits_for_what_is_under_way(stager: xferlib.Stager) -> None:
    backend: Any = stager.backend
    home = home_of(stager)
    with held(backend.d2h) as gate:
        store = home.store("a", group(20))
        closing = waits(home.close)
        gate.set()
    closing.result(20)
    assert store.done()


def test_whoever_is_in_a_call_while_the_tree_is_closed_hears_that_it_is_closed(stager: xferlib.Stager) -> None:
    class Closing(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            home.close()
            return super().__getitem__(name)

    def names() -> Iterator[str]:
        yield "a"
        home.close()

    home = home_of(stager)
    with pytest.raises(xferlib.ClosedError, match="this tree is closed"):
        home.fetch(names())
    home = home_of(stager)
    with pytest.raises(xferlib.ClosedError, match="this tree is closed"):
        home.store(["a", "b"], Closing(a=group(3), b=group(4)))


def test_a_stager_that_is_closed_first_leaves_the_home_readable() -> None:
    with xferlib.stager("host") as stager:
        home = home_of(stager)
        home.store("b", group(20))
    assert value_of(home["b"]) == 20
    with pytest.raises(xferlib.ClosedError):
        home.fetch("b")
    # Nothing is written, so nothing is lost.
    with pytest.raises(xferlib.ClosedError):
        home.store("b", group(30))
    assert value_of(home["b"]) == 20
    home.synchronize()
    home.close()


@pytest.mark.parametrize("own", [True, False])
def test_a_store_waits_for_a_save_that_still_reads(stager: xferlib.Stager, tmp_path: Path, own: bool) -> None:
    with home_of(stager) as home, xferlib.stager("host") as another:
        saving = stager if own else another
        backend: Any = saving.backend
        with held(backend.d2h) as gate:
            save = xferlib.save(tmp_path / "home.npz", home.tree, saving)
            store = waits(lambda: home.store("b", group(50)))
            gate.set()
        store.result(20).synchronize()
        with np.load(save.result(20)) as found:
            assert sorted(np.unique(found["b.w"])) == [1]
        assert value_of(home["b"]) == 50


@pytest.mark.parametrize("own", [True, False])
def test_a_store_waits_for_no_reader_that_was_dropped(stager: xferlib.Stager, own: bool) -> None:
    """On another thread, which never closed it."""
    with home_of(stager) as home, xferlib.stager("host") as another:
        reading = stager if own else another
        dropped, stored = threading.Event(), threading.Event()

        def drop() -> None:
            reading.reader(home.tree)
            gc.collect()
            dropped.set()
            # The next thread is to be another one.
            assert stored.wait(20)

        dropping = on_thread(drop)
        assert dropped.wait(20)
        storing = on_thread(lambda: home.store("b", group(50)).synchronize())
        try:
            storing.result(10)
        finally:
            # Whatever waits comes to an end.
            reading._ledger.jobs.readings.clear()
            stored.set()
        dropping.result(20)
        assert value_of(home["b"]) == 50


def test_a_store_is_refused_on_the_thread_that_still_reads_the_group(stager: xferlib.Stager) -> None:
    with home_of(stager) as home:
        with stager.reader(home.tree["b"]) as reader:
            with pytest.raises(xferlib.XferError, match="Close the reader first"):
                home.store(["a", "b"], {"a": group(50), "b": group(50)})
            assert [value_of(home[name]) for name in home] == [0, 1, 2]
            home.store("a", group(50)).synchronize()
        assert reader.described
        home.store("b", group(50)).synchronize()
        assert [value_of(home[name]) for name in home] == [50, 50, 2]


def test_it_is_saved_as_arrays_of_the_host_and_begun_again(stager: xferlib.Stager, tmp_path: Path) -> None:
    with home_of(stager) as home:
        home.store("c", group(33))
        first = xferlib.save(tmp_path / "home.npz", home.tree, stager)
        # It waits until the save has read the group.
        home.store("c", group(44))
        before = xferlib.save(tmp_path / "again.npz", home.tree, stager, snapshot=True)
        home.store("c", group(55)).synchronize()
        first.result(20)
        before.result(20)
    for name, value in (("home", 33), ("again", 44)):
        with np.load(tmp_path / f"{name}.npz") as found:
            tree = {key: {"w": found[f"{key}.w"], "m": [found[f"{key}.m.0"], found[f"{key}.m.1"]]} for key in "abc"}
        with xferlib.HostTree(tree, stager) as home:
            assert [value_of(home.fetch(key).result()) for key in home] == [0, 1, value]
