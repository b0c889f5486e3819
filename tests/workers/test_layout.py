"""Where the arrays of a batch lie in a slot."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from xferlib.memory.blocks import ALIGNMENT
from xferlib.pipeline.workers.layout import SlotLayout


@dataclass
class Batch:
    image: Any
    label: Any

    def __post_init__(self) -> None:
        assert self.image is not None


class Pair(NamedTuple):
    first: Any
    second: Any


def slot_of(layout: SlotLayout) -> Any:
    return np.zeros(layout.nbytes, np.uint8)


@pytest.mark.parametrize(
    "spec",
    [
        {"image": ((5, 3), np.uint8), "label": (5, "f4")},
        {"image": np.empty((5, 3), np.uint8), "label": np.empty(5, np.float32)},
        Batch(((5, 3), "u1"), np.empty(5, "f4")),
        [((5, 3), np.uint8), {"x": ([5], np.dtype("f4"))}],
        Pair(np.empty((5, 3), np.uint8), np.empty(5, np.float32)),
        (((5, 3), np.uint8), (5, np.float32)),
    ],
)
def test_views_have_the_structure_shapes_and_dtypes_of_the_spec(spec: Any) -> None:
    layout = SlotLayout(spec)
    slot = slot_of(layout)
    tree = pickle.loads(pickle.dumps(layout.whole)).views(slot)
    image, label = list(vars(tree).values()) if isinstance(tree, Batch) else tree.values() if isinstance(tree, dict) else tree
    label = label["x"] if isinstance(label, dict) else label
    assert type(tree) is type(spec)
    assert (image.shape, image.dtype, label.shape, label.dtype) == ((5, 3), np.uint8, (5,), np.float32)
    image[...], label[...] = 1, -1
    assert (image == 1).all()
    assert (label.ctypes.data - slot.ctypes.data) % ALIGNMENT == 0


def test_a_spec_of_one_array_gives_an_array() -> None:
    layout = SlotLayout(((2, 3), ml_dtypes.bfloat16))
    view = layout.whole.views(slot_of(layout))
    assert (view.shape, view.dtype) == ((2, 3), ml_dtypes.bfloat16)
    assert layout.nbytes == 4096


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ({}, ValueError, "there is no array"),
        ({"a": 3}, TypeError, r"a: expected an array, or a pair \(shape, dtype\) such as \(\(8, 3\), 'float32'\), got 3"),
        ((8,), TypeError, r"tree\[0\]: expected an array, or a pair \(shape, dtype\) such as .*, got 8"),
        ((np.uint8, (8,)), TypeError, r"tree\[0\]: expected an array.*, got <class 'numpy\.uint8'>"),
        ({"a": ((8,), "float99")}, TypeError, r"dtype 'float99' of \(\(8,\), 'float99'\) is none that NumPy knows"),
        ((0, np.float32), ValueError, "every array in .* is empty"),
        ((-1, np.float32), ValueError, "negative"),
        ((3, object), TypeError, "cannot be transferred"),
        ((3, "nonsense"), TypeError, "nonsense"),
    ],
)
def test_a_spec_that_says_no_memory_is_refused(spec: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SlotLayout(spec)


LAYOUT = SlotLayout({"image": ((6, 4), np.int32), "label": (6, np.int64)})


def returned(value: Any, slot: Any) -> Any:
    parts = pickle.loads(pickle.dumps(LAYOUT.whole.returned(value, slot)))
    return None if parts is None else parts.views(slot)


@pytest.mark.parametrize("count", [0, 1, 6, np.int16(3)])
def test_a_number_of_rows_cuts_every_first_axis(count: Any) -> None:
    part = returned(count, slot_of(LAYOUT))
    assert (part["image"].shape, part["label"].shape) == ((count, 4), (count,))


def test_returned_views_lie_where_they_lay() -> None:
    slot = slot_of(LAYOUT)
    tree = LAYOUT.whole.views(slot)
    tree["image"][...] = np.arange(24).reshape(6, 4)
    part = returned([tree["image"][::-2, 1:], tree["image"].T, tree["label"][3:3]], slot)
    assert part[0].tolist() == [[21, 22, 23], [13, 14, 15], [5, 6, 7]]
    assert part[1].tolist() == tree["image"].T.tolist()
    assert part[2].shape == (0,)
    assert np.shares_memory(part[0], slot)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (7, ValueError, "7 rows; .* room for 0 to 6"),
        (-1, ValueError, "-1 rows"),
        (True, TypeError, "fill returned True"),
        ("six", TypeError, "fill returned 'six'"),
        ([], TypeError, r"fill returned \[\]"),
        ([np.zeros(6)], ValueError, r"not in its slot .*\[0\]"),
    ],
)
def test_anything_else_that_fill_returns_is_an_error(value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        returned(value, slot_of(LAYOUT))


def test_an_array_that_begins_before_its_slot_is_an_error() -> None:
    # One byte: without strides, NumPy itself would take that.
    room = np.zeros(LAYOUT.nbytes + 1, np.uint8)
    with pytest.raises(ValueError, match="not in its slot"):
        returned([room[:8]], room[1:])


def test_rows_of_an_array_without_axes_are_an_error() -> None:
    layout = SlotLayout({"image": ((6, 4), np.int32), "scale": ((), np.float32)})
    with pytest.raises(ValueError, match="0 rows"):
        layout.whole.returned(0, slot_of(layout))
