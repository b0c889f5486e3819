"""Batches that nobody else can rewrite are borrowed, and no other."""

from __future__ import annotations

import ctypes
import datetime
import itertools
import pickle
import queue
import sys
import sysconfig
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import xferlib
from xferlib.pipeline import unshared
from xferlib.pipeline.unshared import is_unshared
from xferlib.transfer import Transfer

pytestmark = pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="this Python does not count references exactly, and nothing is proved"
)

Pair = namedtuple("Pair", "image label")
DAY = datetime.date(2000, 1, 2)
LARGE = 3 << 20
_kept: list[Any] = []


def new(nbytes: int = 8) -> Any:
    return np.zeros(nbytes, np.uint8)


def kept(thing: Any) -> Any:
    """Refer to it from elsewhere, too."""
    _kept.append(thing)
    return thing


def part_of(array: Any) -> Any:
    return array[1:]


UNSHARED: dict[str, Callable[[], Any]] = {
    "an array": new,
    "one of no dimension": lambda: np.array(1.0),
    "a view of an array": lambda: part_of(new()),
    "a view of a view": lambda: part_of(new().reshape(2, 4)).T,
    "bytes": lambda: np.frombuffer(bytes([1, 2, 3, 4]), np.uint8).reshape(2, 2),
    "a dict": lambda: {"image": new(), "label": new()},
    "a list and a tuple": lambda: [new(), (new(), [new()])],
    "beside what is no array": lambda: {"image": new(), "name": "x" * 100, "number": 10**6, "none": None, "day": DAY, "empty": ()},
}


@pytest.mark.parametrize("make", UNSHARED.values(), ids=UNSHARED)
def test_what_was_made_for_the_batch_alone_is_unshared(make: Callable[[], Any]) -> None:
    assert is_unshared([make()])


@dataclass
class Record:
    image: Any


class Wide(tuple[Any, ...]):
    """It may have more than its items."""


class Marked(np.ndarray[Any, Any]):
    """An array of a class that may do anything."""


def noted() -> Any:
    array = new()
    _kept.append(weakref.ref(array))
    return array


def twice() -> Any:
    array = new()
    return [array, array]


def in_a_circle() -> Any:
    batch: list[Any] = [new()]
    batch.append(batch)
    return batch


SHARED: dict[str, Callable[[], Any]] = {
    "an array": lambda: kept(new()),
    "a view of one": lambda: part_of(kept(new())),
    "an array by its view": lambda: kept(new()[:]).base,
    "two views of one": lambda: np.split(new(), 2),
    "one of them": lambda: kept(np.split(new(), 2))[0][:],
    "a dict": lambda: kept({"image": new()}),
    "an array in a dict": lambda: {"image": kept(new())},
    "a dict in a list": lambda: [kept({"image": new()})],
    "the second of two": lambda: (new(), kept(new())),
    "one array twice": twice,
    "a list in itself": in_a_circle,
    "through a weak reference": noted,
    "memory that can be written": lambda: np.frombuffer(bytearray(8), np.uint8),
    "bytes": lambda: np.frombuffer(kept(bytes([1, 2, 3, 4])), np.uint8),
    "bytes that pickle has made an array of": lambda: np.frombuffer(
        kept(pickle.loads(pickle.dumps(np.arange(1000.0), 3))).base, np.uint8
    ),
    "a class of the user's": lambda: Record(new()),
    "a named tuple, which may have a finalizer": lambda: Pair(new(), new()),
    "an array in an attribute of a tuple": lambda: Wide((new(),)),
    "a dict of another class": lambda: OrderedDict(image=new()),
    "an array of another class": lambda: new().view(Marked),
    "an iterator": lambda: iter([new()]),
}


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_what_somebody_else_may_refer_to_is_shared(make: Callable[[], Any]) -> None:
    assert not is_unshared([make()])


class Pooled(NamedTuple):
    """Gives its array back to whoever made it."""

    image: Any

    def __del__(self) -> None:
        _kept.append(self.image)


def test_a_batch_that_gives_its_arrays_back_is_copied_first(stager: xferlib.Stager, waits: list[Transfer]) -> None:
    _kept.clear()

    def source() -> Iterator[Any]:
        for number in range(4):
            image = _kept.pop() if _kept else np.empty(LARGE, np.uint8)
            image[:] = number
            batch = [Pooled(image)]
            del image
            yield batch.pop()

    with xferlib.prefetch(source(), stager, 4) as loop:
        assert [set(batch.image.tolist()) for batch in loop] == [{0}, {1}, {2}, {3}]
    assert len(waits) == 4


def test_nothing_is_proved_where_references_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unshared, "_IS_COUNTED", False)
    assert not is_unshared([new()])


def makes() -> Iterator[Any]:
    for number in range(4):
        yield np.full(LARGE, number, np.uint8)


def names() -> Iterator[Any]:
    for number in range(4):
        batch = np.full(LARGE, number, np.uint8)
        yield batch


def fills() -> Iterator[Any]:
    batch = np.zeros(LARGE, np.uint8)
    for number in range(4):
        batch[:] = number
        yield batch[:]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Transfer]:
    """Return the transfers of which somebody waits until their sources are staged."""
    waits: list[Transfer] = []
    wait_staged = Transfer.wait_staged

    def noted(transfer: Transfer) -> None:
        waits.append(transfer)
        wait_staged(transfer)

    monkeypatch.setattr(Transfer, "wait_staged", noted)
    return waits


def from_a_queue() -> Iterator[Any]:
    batches: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for number in range(4):
        batches.put([np.full(LARGE, number, np.uint8)])
    return iter(batches.get_nowait()[0] for _ in range(4))


SOURCES: dict[str, tuple[Callable[[], Any], bool]] = {
    "a generator that yields what it makes": (makes, True),
    "map": (lambda: map(partial(np.full, LARGE, dtype=np.uint8), range(4)), True),
    "a queue": (from_a_queue, True),
    "a generator that keeps a name": (names, False),
    "a generator that fills one array": (fills, False),
    "a list": (lambda: list(makes()), False),
    "a cycle": (lambda: itertools.islice(itertools.cycle(makes()), 4), False),
}


@pytest.mark.parametrize(("source", "borrowed"), SOURCES.values(), ids=SOURCES)
def test_a_loop_borrows_what_nobody_else_refers_to(
    source: Callable[[], Any], borrowed: bool, stager: xferlib.Stager, waits: list[Transfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = xferlib.Stager.put
    how: list[Any] = []

    def noted(stager: xferlib.Stager, tree: Any, *, borrow: Any) -> Any:
        how.append(borrow)
        return put(stager, tree, borrow=borrow)

    monkeypatch.setattr(xferlib.Stager, "put", noted)
    with xferlib.prefetch(source(), stager) as loop:
        assert [set(tree.tolist()) for tree in loop] == [{0}, {1}, {2}, {3}]
    assert len(waits) == (0 if borrowed else 4)
    assert how == [True if borrowed else "staged"] * 4


def test_a_batch_that_could_not_be_borrowed_is_told_with_its_place(stager: xferlib.Stager) -> None:
    with xferlib.prefetch((array for array in map(np.array, ["a", "b"])), stager) as loop:
        for number in range(2):
            with pytest.raises(TypeError) as raised:
                next(loop)
            assert any(f"batch {number} of the source" in note for note in raised.value.__notes__)


def unowned(memory: Any) -> Any:
    """Return an array over doubles of which it names no owner, as extensions make them of memory that they write again."""
    core: Any = np.core if np.lib.NumpyVersion(np.__version__) < "2.0.0" else np._core  # type: ignore[attr-defined]
    found = ctypes.pythonapi.PyCapsule_GetPointer
    found.restype, found.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    calls = ctypes.cast(found(core._multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    word, pointer = ctypes.c_int, ctypes.c_void_p
    # `PyArray_New(&PyArray_Type, 1, shape, NPY_DOUBLE, NULL, memory, 0, NPY_ARRAY_CARRAY, NULL)`.
    new = ctypes.PYFUNCTYPE(ctypes.py_object, pointer, word, pointer, word, pointer, pointer, word, word, pointer)(calls[93])
    shape = (ctypes.c_ssize_t * 1)(len(memory))
    return new(calls[2], 1, ctypes.addressof(shape), 12, None, ctypes.addressof(memory), 0, 0x501, None)


def test_memory_of_which_nobody_is_named_as_the_owner_is_somebody_elses() -> None:
    memory = (ctypes.c_double * 8)(1, 2)
    box = [unowned(memory)]
    assert (box[0].base, box[0].flags.owndata, box[0][1]) == (None, False, 2)
    assert not is_unshared(box)


def test_counting_costs_no_reference_afterwards() -> None:
    array = new()
    before = sys.getrefcount(array)
    is_unshared([{"image": array}])
    assert sys.getrefcount(array) == before
