"""Device arrays of which NumPy knows nothing: the backend says what they are, and the core asks nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.core.fakes import tampered
from xferlib.pipeline.memory_estimate import tree_nbytes
from xferlib.tree import trees_of

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


@dataclass(frozen=True)
class Box:
    """An array without shape and dtype. It is a dataclass, and no tree for that."""

    memory: Any


@dataclass(frozen=True)
class Batch:
    image: Any
    label: Any


def describe(array: Any) -> Any:
    return (array.memory.shape, array.memory.dtype) if isinstance(array, Box) else None


def boxing() -> Any:
    """Return a host backend whose device arrays are boxes."""
    backend = tampered(name="boxes", describe=describe)
    inner = backend.inner
    backend.as_array = lambda *where, **more: Box(inner.as_array(*where, **more))
    for name in ("place", "as_source", "as_target"):
        method = getattr(inner, name)
        setattr(backend, name, lambda box, stream=None, method=method: method(getattr(box, "memory", None), stream))
    return backend


@pytest.fixture
def boxes() -> Iterator[xferlib.Stager]:
    with xferlib.stager(boxing(), pinned_limit=4 << 20) as stager:
        yield stager


def test_what_was_put_is_got_again(boxes: xferlib.Stager) -> None:
    for pinned in (True, False):
        array: Any = boxes.put(VALUES).result()
        out = boxes.empty_pinned((3, 4), np.float32) if pinned else np.empty((3, 4), np.float32)
        assert np.array_equal(boxes.get(array).result(), VALUES)
        assert boxes.get(array, out=out).result() is out
        assert np.array_equal(out, VALUES)
        assert isinstance(array, Box)


def test_leaves_of_a_tree_are_arrays_and_no_trees(boxes: xferlib.Stager) -> None:
    tree = boxes.put(Batch(VALUES, [VALUES[0], 3])).result()
    assert isinstance(tree.image, Box)
    again = boxes.get(tree).result()
    assert np.array_equal(again.image, VALUES)
    assert np.array_equal(again.label[0], VALUES[0])
    assert again.label[1] == 3


def test_an_array_of_the_callers_is_overwritten(boxes: xferlib.Stager) -> None:
    target = Box(np.zeros((3, 4), np.float32))
    assert boxes.put(VALUES, into=target).result() is target
    assert np.array_equal(target.memory, VALUES)
    boxes.put([VALUES + 1], into=[target]).synchronize()
    assert np.array_equal(target.memory, VALUES + 1)


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        (Box(np.zeros((4, 3), np.float32)), ValueError, r"into has the wrong shape: expected \(3, 4\), got \(4, 3\)"),
        (Box(np.zeros((3, 4), np.int32)), ValueError, "into is of dtype int32, and what is put into it of dtype float32"),
        (object(), TypeError, "expected a device array of backend 'boxes' to put into"),
    ],
)
def test_a_target_that_is_not_alike_is_refused(boxes: xferlib.Stager, target: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        boxes.put(VALUES, into=target)


def test_out_that_is_not_alike_is_refused(boxes: xferlib.Stager) -> None:
    array = boxes.put(VALUES).result()
    with pytest.raises(ValueError, match="out has the wrong dtype: expected float32, got float64"):
        boxes.get(array, out=np.zeros((3, 4)))


def test_what_the_backend_does_not_describe_it_refuses(boxes: xferlib.Stager) -> None:
    with pytest.raises(TypeError, match="the device arrays of backend 'host' are NumPy arrays"):
        boxes.get(object())


def test_batches_are_prefetched(boxes: xferlib.Stager) -> None:
    with xferlib.prefetch([Batch(VALUES + step, step) for step in range(3)], boxes) as loop:
        assert [float(batch.image.memory[0, 0]) for batch in loop] == [0, 1, 2]


def test_results_are_counted_and_fill_rows(boxes: xferlib.Stager) -> None:
    large = Box(np.zeros(1 << 20, np.uint8))
    with xferlib.Drain(boxes, depth=2) as drain:
        drain.submit(large)
        # That is all that the limit has room for.
        assert drain.bill is not None
        assert drain.bill.pinned_nbytes == 4 << 20
        drain.end()
        assert [len(result) for result in drain.results()] == [1 << 20]
    out = np.zeros((6, 4), np.float32)
    with xferlib.drain([Box(VALUES), Box(VALUES[0]), Box(VALUES[1:])], boxes, out=out) as results:
        assert [len(result) for result in results] == [3, 4, 2]
    assert np.array_equal(out, np.concatenate([VALUES, VALUES[:1], VALUES[1:]]))


def test_arrays_that_numpy_knows_are_taken_as_they_say(boxes: xferlib.Stager) -> None:
    trees = trees_of(boxes.backend)
    assert trees.describe(VALUES) == ((3, 4), np.dtype(np.float32))
    assert trees.describe(object()) is None
    assert tree_nbytes([Box(VALUES), VALUES, object(), "text"], trees) == 2 * VALUES.nbytes
