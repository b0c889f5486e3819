"""Bad input: each a clear error that says what to do, before anything has started."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from xferlib_host import Stream

import xferlib
from tests.core.fakes import tampered

GOOD = np.zeros(3)


@pytest.fixture(autouse=True)
def nothing_starts(stager: xferlib.Stager) -> Any:
    """Whatever is refused has moved nothing and holds nothing."""
    yield
    stats = stager.stats()
    assert (stats.h2d_nbytes, stats.d2h_nbytes, stats.synchronous) == (0, 0, 0)
    stager.trim()
    assert stager.stats().device_nbytes == 0
    assert stager._pool.usage()[2] == 0


NO_SOURCES: list[tuple[Any, str]] = [
    (np.array([object()]), "arrays of dtype object cannot be transferred: expected numbers"),
    (np.zeros(2, [("a", "i4"), ("b", "f8")]), "Transfer each field"),
    (np.array(["text"]), "expected numbers"),
    (np.zeros(2, "V16"), "expected numbers"),
    (np.ma.masked_array([1.0, 2.0], [True, False]), r"mask would be lost.*filled"),
    (np.zeros(3, ">f8" if np.little_endian else "<f8"), r"native byte order.*astype"),
    ("text", r"got builtins\.str. put takes an array, or a tree of them: dict, list"),
    ({1, 2}, r"got builtins\.set. put takes an array, or a tree of them: dict, list"),
    ((n for n in [1]), r"got builtins\.generator. put takes an array, or a tree of them: dict, list.*xferlib\.prefetch\(source"),
    (3, r"got builtins\.int.*numpy\.asarray"),
    (memoryview(b"abc"), r"numpy\.asarray"),
]


@pytest.mark.parametrize(("leaf", "words"), NO_SOURCES)
def test_what_cannot_be_put_is_a_type_error(stager: xferlib.Stager, leaf: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words) as caught:
        stager.put(leaf)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(("leaf", "words"), [(leaf, words) for leaf, words in NO_SOURCES if not isinstance(leaf, str | int)])
def test_what_cannot_be_put_is_a_type_error_that_says_where_it_is(stager: xferlib.Stager, leaf: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words) as caught:
        stager.put({"good": GOOD, "bad": (leaf,)})
    assert caught.value.__notes__ == ["at tree.bad[0]"]


@pytest.mark.parametrize(
    "leaf",
    [np.array([object()]), np.zeros(2, [("a", "i4")]), np.ma.masked_array([1.0]), np.zeros(3, ">f8"), {1}],
)
def test_what_is_no_device_array_is_a_type_error(stager: xferlib.Stager, leaf: Any) -> None:
    with pytest.raises(TypeError, match=r"device array|dtype") as caught:
        stager.get({"bad": leaf})
    assert caught.value.__notes__ == ["at tree.bad"]


@pytest.mark.parametrize("tree", [None, [], {}, {"a": None}, ((), []), ["text"], {"a": 1.0}])
def test_a_tree_without_arrays_is_refused(stager: xferlib.Stager, tree: Any) -> None:
    for move in (stager.put, stager.get):
        with pytest.raises(ValueError, match="there is no array in"):
            move(tree)


@pytest.mark.parametrize(
    ("tree", "put_words", "get_words"),
    [
        (None, "a function gives that returns nothing", "a function gives that returns nothing"),
        ({}, "nothing to copy: leave it out", "nothing to copy: leave it out"),
        ([None, ()], "nothing to copy: leave it out", "nothing to copy: leave it out"),
        ([1, 2.0], "Convert numbers with numpy.asarray", "Numbers and text are on the host already"),
    ],
)
def test_what_to_do_with_a_tree_without_arrays_depends_on_what_it_has(
    stager: xferlib.Stager, tree: Any, put_words: str, get_words: str
) -> None:
    with pytest.raises(ValueError, match=f"{put_words}$"):
        stager.put(tree)
    with pytest.raises(ValueError, match=f"{get_words}$"):
        stager.get(tree)


def test_a_tree_without_arrays_is_not_printed_as_a_whole(stager: xferlib.Stager) -> None:
    for move in (stager.put, stager.get, stager.reader):
        with pytest.raises(ValueError, match="there is no array in") as caught:
            move({"name": [f"{number}.png" for number in range(10_000)]})
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (np.zeros(4), ValueError, r"wrong shape: expected \(3,\), got \(4,\)"),
        (np.zeros((3, 1)), ValueError, "wrong shape"),
        (np.zeros(3, np.float32), ValueError, "wrong dtype: expected float64, got float32. Nothing is converted"),
        (np.zeros(3, ">f8"), ValueError, "wrong dtype"),
        (np.zeros(6)[::2], ValueError, r"not contiguous in C order.*numpy\.empty"),
        (np.broadcast_to(np.zeros(1), 3), ValueError, "read-only|not contiguous"),
        (np.frombuffer(bytes(24)), ValueError, "read-only. Pass an array that may be written"),
        (np.ma.masked_array(GOOD), TypeError, "expected a NumPy array, got numpy.ma"),
        ([1, 2, 3], ValueError, "out has another structure"),
        ("text", TypeError, r"expected a NumPy array, got builtins\.str"),
        ([GOOD], ValueError, "out has another structure"),
    ],
)
def test_an_out_that_cannot_take_the_copy_is_refused(stager: xferlib.Stager, out: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        stager.get(GOOD, out=out)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [((4,), "f8", r"wrong shape: expected \(3,\), got \(4,\)"), ((2,), "f8", "wrong shape"), ((3,), "f4", "wrong dtype")],
)
def test_a_pinned_out_that_cannot_take_the_copy_is_refused(stager: xferlib.Stager, shape: Any, dtype: str, words: str) -> None:
    """Copied to as it lies, it would have less than it can hold, or be written behind its end."""
    with pytest.raises(ValueError, match=words):
        stager.get(GOOD, out=stager.empty_pinned(shape, dtype))


def test_out_leaves_that_overlap_are_refused(stager: xferlib.Stager) -> None:
    memory = np.zeros(5)
    for pair in ([memory[:3], memory[2:]], [memory[2:], memory[:3]], [memory[:3], memory[:3]]):
        with pytest.raises(ValueError, match="two arrays of out share memory"):
            stager.get([GOOD, GOOD], out=pair)


@pytest.mark.parametrize(
    ("into", "error", "words"),
    [
        (np.zeros(4), ValueError, r"into has the wrong shape: expected \(3,\), got \(4,\)"),
        (
            np.zeros(3, np.int64),
            ValueError,
            r"into is of dtype int64, and what is put into it of dtype float64\..*: put array\.astype\('int64'\)",
        ),
        (np.zeros(6)[::2], ValueError, "C order"),
        (np.frombuffer(bytes(24)), ValueError, "read-only"),
        ("text", TypeError, "expected a device array of backend 'host'.*got str"),
        ([np.zeros(3)], (TypeError, ValueError), "into has another structure|expected a device array"),
    ],
)
def test_an_into_that_cannot_take_the_copy_is_refused(stager: xferlib.Stager, into: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        stager.put(GOOD, into=into)


@pytest.mark.parametrize("borrow", [True, "staged"])
def test_what_overwrites_arrays_of_the_callers_cannot_be_borrowed(stager: xferlib.Stager, borrow: Any) -> None:
    with pytest.raises(ValueError, match=f"borrow={borrow!r} together with into: .*Leave borrow out"):
        stager.put(GOOD, into=np.zeros(3), borrow=borrow)


def test_into_leaves_that_overlap_are_refused(stager: xferlib.Stager) -> None:
    memory = np.zeros(5)
    with pytest.raises(ValueError, match="two arrays of into share memory"):
        stager.put([GOOD, GOOD], into=[memory[:3], memory[2:]])


def test_an_array_of_something_else_is_named(stager: xferlib.Stager) -> None:
    class Foreign:
        shape = (3,)
        dtype = np.dtype(np.float64)

    with pytest.raises(TypeError, match="Foreign"):
        stager.get(Foreign())
    with pytest.raises(TypeError, match="Foreign"):
        stager.put(GOOD, into=Foreign())


def test_the_stream_0_is_refused_and_so_is_what_is_no_stream(stager: xferlib.Stager) -> None:
    for move in (stager.put, stager.get):
        with pytest.raises(ValueError, match=r"stream=0 is ambiguous.*Pass the framework's own object"):
            move(GOOD, stream=0)
    with pytest.raises(TypeError, match=r"stream=.*xferlib_host\.Stream"):
        stager.get(GOOD, stream="fast")


class Foreign:
    """An array of another library, on a device or not."""

    def __dlpack__(self) -> None:
        raise AssertionError("it was asked for its memory")


class Convertible:
    """What NumPy can make an array of."""

    def __array__(self) -> Any:
        raise AssertionError("it was converted")


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (Foreign(), "Foreign. An array that is on a device already needs no put; convert one in host memory with numpy.asarray"),
        (Convertible(), "Convertible. Convert it with numpy.asarray$"),
        (Future(), "Future. Pass what its result() returns$"),
    ],
)
def test_what_to_do_with_what_is_no_array_depends_on_its_kind(stager: xferlib.Stager, leaf: Any, words: str) -> None:
    with pytest.raises(TypeError, match=r"(?m)got .*\." + words.replace("()", r"\(\)")) as caught:
        stager.put({"x": leaf})
    assert caught.value.__notes__ == ["at tree.x"]


def test_numbers_alone_are_no_batch_and_are_told_how_to_become_one(stager: xferlib.Stager) -> None:
    with pytest.raises(TypeError, match=r"bool. Convert numbers, or a list of them, with numpy.asarray"):
        stager.put(True)
    with pytest.raises(ValueError, match=r"there is no array in \[1.0, 2.0\]: .*Convert numbers with numpy.asarray$"):
        stager.put([1.0, 2.0])


def test_a_transfer_is_neither_put_nor_taken_for_an_array(stager: xferlib.Stager) -> None:
    with xferlib.stager("host") as other:
        transfer = other.put(GOOD)
        with pytest.raises(TypeError, match=r"Transfer\. Pass what its result\(\) returns"):
            stager.put(transfer)
        for use in (np.asarray, lambda transfer: GOOD + transfer):
            with pytest.raises(TypeError, match=r"a transfer is no array. Take its arrays with \.value, or with \.result\(\)"):
                use(transfer)


def test_a_slot_is_put_by_itself(stager: xferlib.Stager) -> None:
    with (
        xferlib.stager("host") as other,
        xferlib.Ring(other, {"x": ((3,), np.float32)}, slots=1) as ring,
        ring.acquire() as slot,
        pytest.raises(TypeError, match=r"Slot\. Give a loop the slot itself, or put it with its own put\(\)"),
    ):
        stager.put(slot)


def test_flags_that_are_off_refuse(stager: xferlib.Stager) -> None:
    with xferlib.stager(tampered(capabilities=xferlib.Capabilities())) as bare:
        for move in (bare.put, bare.get):
            for stream in (object(), 0):
                with pytest.raises(xferlib.CapabilityError, match="takes no stream"):
                    move(GOOD, stream=stream)
        with pytest.raises(xferlib.CapabilityError, match=r"cannot overwrite an array of yours. Leave into out"):
            bare.put(GOOD, into=np.zeros(3))


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "words"),
    [
        ((1 << 40,), np.uint8, xferlib.AllocationError, "more than pinned_limit=67108864"),
        ((-1,), np.uint8, ValueError, "negative dimensions"),
        (-1, np.uint8, ValueError, "negative dimensions"),
        (2.5, np.uint8, TypeError, "shape=2.5: expected a whole number, or several"),
        ((2, "3"), np.uint8, TypeError, r"shape=\(2, '3'\): expected a whole number, or several"),
        (np.float32, (3,), TypeError, "The shape comes first, the dtype second"),
        (3, object, TypeError, "expected numbers"),
        (3, ">f4", TypeError, "native byte order"),
        (3, [("a", "i4")], TypeError, "expected numbers"),
    ],
)
def test_pinned_arrays_that_cannot_be_are_refused(
    stager: xferlib.Stager, shape: Any, dtype: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        stager.empty_pinned(shape, dtype)


@pytest.mark.parametrize(("shape", "expected"), [(3, (3,)), ((), ()), ([2, 3], (2, 3)), (np.int64(2), (2,)), ((0, 4), (0, 4))])
def test_shapes_are_what_numpy_takes(stager: xferlib.Stager, shape: Any, expected: tuple[int, ...]) -> None:
    assert stager.empty_pinned(shape, np.int16).shape == expected


@pytest.mark.parametrize("name", ["pinned_limit", "device_limit"])
@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_is_greater_than_0(name: str, limit: int) -> None:
    options: dict[str, Any] = {name: limit}
    with pytest.raises(ValueError, match=rf"{name} is a number of bytes greater than 0, got {limit}"):
        xferlib.stager("host", **options)


@pytest.mark.parametrize("limit", ["1GiB", 1e9, True, np.True_, np.ones(2, int), np.array(1.5)])
def test_a_limit_that_is_no_int_is_named(limit: Any) -> None:
    with pytest.raises(TypeError, match="pinned_limit"):
        xferlib.stager("host", pinned_limit=limit)


@pytest.mark.parametrize(
    ("bytes_asked", "words"),
    [(1000, r"1000 bytes of pinned memory asked, .*pinned_limit=1 \(1 byte\)"), (3 << 20, r"3\.0 MiB of pinned memory asked")],
)
def test_what_is_less_than_a_kibibyte_is_said_in_bytes(bytes_asked: int, words: str) -> None:
    with xferlib.stager("host", pinned_limit=1) as small, pytest.raises(xferlib.AllocationError, match=words):
        small.empty_pinned(bytes_asked, np.uint8)


def test_a_put_above_the_device_limit_says_so() -> None:
    with (
        xferlib.stager("host", device_limit=1000) as small,
        pytest.raises(xferlib.AllocationError, match=r"device_limit=1000.*Raise device_limit"),
    ):
        small.put(np.zeros(2000))


def test_a_closed_stager_refuses(stager: xferlib.Stager) -> None:
    with xferlib.stager("host") as closed:
        pass
    for call in (
        lambda: closed.put(GOOD),
        lambda: closed.get(GOOD),
        lambda: closed.empty_pinned(3, np.uint8),
        lambda: closed.pin(GOOD),
        closed.trim,
    ):
        with pytest.raises(xferlib.ClosedError, match=r"this stager is closed. Open another one with xferlib\.stager"):
            call()
    assert "closed" in repr(closed)


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        (np.arange(10), {}),
        ([np.arange(10), np.arange(3)], {}),
        (np.zeros(2 << 20, np.uint8), {"borrow": True}),
        ([np.zeros(2 << 20, np.uint8), np.arange(3)], {"borrow": True}),
    ],
    ids=["array", "tree", "borrowed array", "borrowed tree"],
)
def test_nothing_is_put_for_a_stream_that_is_refused(stager: xferlib.Stager, tree: Any, options: dict[str, Any]) -> None:
    stream = Stream()
    stream.close()
    with pytest.raises(xferlib.ClosedError):
        stager.put(tree, stream=stream, **options)
    stats = stager.stats()
    assert (stats.h2d_nbytes, stats.device_nbytes) == (0, 0)


@pytest.mark.parametrize("stream", [7, 0.0, False])
def test_only_the_int_0_is_called_ambiguous(stager: xferlib.Stager, stream: object) -> None:
    for move in (stager.put, stager.get):
        with pytest.raises(TypeError, match=r"xferlib_host\.Stream"):
            move(GOOD, stream=stream)


def test_what_the_backend_refuses_to_read_says_where_it_stands(stager: xferlib.Stager) -> None:
    with pytest.raises(TypeError, match="without a mask") as caught:
        stager.get([GOOD, {"a": np.ma.masked_array([1.0])}])
    assert caught.value.__notes__ == ["at tree[1].a"]


def test_a_stream_is_checked_as_a_transfer_would() -> None:
    stream, ended = Stream(), Stream()
    ended.close()
    with xferlib.stager("host") as stager:
        stager.check_stream(stream)
        with pytest.raises(ValueError, match="ambiguous"):
            stager.check_stream(0)
        with pytest.raises(TypeError, match=r"xferlib_host\.Stream"):
            stager.check_stream("fast")
        with pytest.raises(xferlib.ClosedError, match="runs nothing any more"):
            stager.check_stream(ended)
    with pytest.raises(xferlib.ClosedError, match="this stager is closed"):
        stager.check_stream(stream)
    stream.close()


def test_what_the_backend_would_read_and_has_no_dtype_is_refused_by_name() -> None:
    with (
        xferlib.stager(tampered(as_source=lambda array, stream=None: None)) as stager,
        pytest.raises(TypeError, match=r"expected a device array of backend 'host', got .*\.Foreign$"),
    ):
        stager.get(Foreign())
