"""Items of a dataset in the rows of a batch."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

import xferlib

SPEC = {"image": ((4, 2, 3), np.float32), "at": [((4,), np.int32), ((4, 1), np.uint8)]}


def item(number: int) -> dict[str, Any]:
    return {"image": np.full((2, 3), number, np.float64), "at": [number, np.array([number], np.uint8)]}


def batch() -> dict[str, Any]:
    return {"image": np.zeros((4, 2, 3), np.float32), "at": [np.zeros(4, np.int32), np.zeros((4, 1), np.uint8)]}


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_each_item_is_a_row_and_the_others_stay(count: int) -> None:
    out = batch()
    assert xferlib.stack(map(item, range(1, count + 1)), out) == count
    rows = [*range(1, count + 1), *[0] * (4 - count)]
    assert out["image"][:, 1, 2].tolist() == rows
    assert out["image"].dtype == np.float32
    assert [out["at"][0].tolist(), out["at"][1][:, 0].tolist()] == [rows, rows]


def test_integers_at_the_ends_of_what_the_rows_hold_are_written() -> None:
    out = np.zeros((4, 2), np.int32)
    assert xferlib.stack([np.array([-(1 << 31), (1 << 31) - 1]), np.zeros(2, np.uint32)], out) == 2
    assert out[:2].tolist() == [[-(1 << 31), (1 << 31) - 1], [0, 0]]
    # Nothing of the smallest and the largest of nothing.
    assert xferlib.stack([np.zeros(0, np.int64)], np.zeros((4, 0), np.int32)) == 1


def test_one_array_is_a_tree_as_well() -> None:
    out = np.zeros((4, 2))
    assert xferlib.stack([[1.5, 2][0] * np.ones(2), np.zeros(2)], out) == 2
    assert out.tolist() == [[1.5, 1.5], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("items", "error", "words", "note"),
    [
        ([item(0)] * 5, ValueError, r"more items than rows: there is room for 4 \(tree.at\[0\]\)", None),
        (itertools.repeat(item(0)), ValueError, "more items than rows", None),
        ([item(0), {"image": 1}], ValueError, "item 1 has another structure: expected {.*, got {'image': array}", None),
        (
            [item(0), item(0) | {"image": np.zeros((3, 2))}],
            ValueError,
            "shape",
            "at tree.image: a row is of shape (2, 3) and dtype float32, and item 1 of shape (3, 2)",
        ),
        ([{"image": np.zeros((2, 3)), "at": [0.5, np.zeros(1, np.uint8)]}], TypeError, "Cannot cast", "at tree.at[0]: a row"),
        (
            [{"image": np.ma.zeros((2, 3)), "at": [1, np.zeros(1, np.uint8)]}],
            TypeError,
            "the mask would be lost",
            "at tree.image: a row",
        ),
        (
            [item(0), item(0) | {"at": [(1 << 40) + 5, np.zeros(1, np.uint8)]}],
            ValueError,
            "item 1 has integers from 1099511627781 to 1099511627781, and int32 holds those from -2147483648 to 2147483647",
            "at tree.at[0]: a row",
        ),
        (
            [item(0) | {"at": [0, np.array([256], np.uint16)]}],
            ValueError,
            "item 0 has integers from 256 to 256, and uint8 holds those from 0 to 255",
            "at tree.at[1]: a row",
        ),
        ([item(0) | {"at": [-(1 << 31) - 1, np.zeros(1, np.uint8)]}], ValueError, "from -2147483649", "at tree.at[0]: a row"),
        ([item(0) | {"at": [1 << 70, np.zeros(1, np.uint8)]}], ValueError, "to 1180591620717411303424", "at tree.at[0]: a row"),
        ([{"image": "a.png", "at": [1, np.zeros(1, np.uint8)]}], (TypeError, ValueError), "dimension", "at tree.image: a row"),
    ],
    ids=[
        "too many",
        "without end",
        "structure",
        "shape",
        "dtype",
        "masked",
        "too large",
        "unsigned",
        "too small",
        "beyond any",
        "text",
    ],
)
def test_items_that_are_no_rows_are_refused_and_the_ring_has_its_slots(
    stager: xferlib.Stager, items: list[Any], error: Any, words: str, note: str | None
) -> None:
    with pytest.raises(error, match=words) as caught:
        xferlib.stack(items, batch())
    assert [mine[: len(note or "")] for mine in getattr(caught.value, "__notes__", [])] == ([] if note is None else [note])
    with xferlib.Ring(stager, SPEC, slots=1) as ring:
        for _ in range(3):
            with pytest.raises(error, match=words):
                ring.collate(items)
        # Otherwise there would be none left.
        assert ring.collate([item(7)]).rows == 1


def test_a_loader_that_collates_into_a_ring(stager: xferlib.Stager) -> None:
    numbers = [range(0, 4), range(4, 8), range(8, 10)]
    with xferlib.Ring(stager, SPEC, slots=2) as ring:
        loader = (ring.collate([item(number) for number in part]) for part in numbers)
        with xferlib.prefetch(loader, stager) as loop:
            found = [(batch["image"][:, 0, 0].tolist(), batch["at"][0].tolist()) for batch in loop]
    assert found == [(list(part), list(part)) for part in numbers]


def test_names_of_items_ride_along_as_lists(stager: xferlib.Stager) -> None:
    items = [item(number) | {"name": f"{number}.png", "id": number} for number in range(3)]
    with xferlib.Ring(stager, SPEC, slots=2) as ring:
        batch = ring.collate(items).put().result()
        assert (batch["name"], batch["id"]) == (["0.png", "1.png", "2.png"], [0, 1, 2])
        assert batch["at"][0].tolist() == [0, 1, 2]
        # Each slot has its own.
        assert ring.collate([item(0)]).put().result().keys() == SPEC.keys()
        with pytest.raises(ValueError, match=r"item 1 has \['name'\] beside its arrays, and those before it have \['name', 'id'\]"):
            ring.collate([items[0], item(1) | {"name": "1.png"}])
        with pytest.raises(ValueError, match=r"item 1 has \['name'\] beside its arrays, and those before it have \[\]"):
            ring.collate([item(0), item(1) | {"name": "1.png"}])
        # An array that the spec lacks is none that rides along.
        with pytest.raises(ValueError, match="item 0 has another structure"):
            ring.collate([item(0) | {"mask": np.zeros(3)}])


def test_rows_of_the_batch_itself_may_be_items() -> None:
    out = batch()
    xferlib.stack(map(item, range(4)), out)
    xferlib.stack([{"image": out["image"][row], "at": [3 - row, out["at"][1][row]]} for row in (3, 2, 1, 0)], out)
    assert out["image"][:, 1, 2].tolist() == [3, 2, 1, 0]
    assert out["at"][1][:, 0].tolist() == [3, 2, 1, 0]
    rows = np.arange(6).reshape(3, 2)
    assert xferlib.stack(rows[::-1, ::-1], rows) == 3
    assert rows.tolist() == [[5, 4], [3, 2], [1, 0]]


def test_a_batch_is_filled_again_and_has_the_names_of_its_own_items() -> None:
    out = batch() | {"epoch": 3}
    for first in (0, 2):
        items = [item(number) | {"name": f"{number}.png"} for number in range(first, first + 2)]
        assert xferlib.stack(items, out) == 2
        assert (out["name"], out["epoch"]) == ([f"{first}.png", f"{first + 1}.png"], 3)
        assert out["at"][0][:2].tolist() == [first, first + 1]
    # The names would be those of other items.
    with pytest.raises(ValueError, match=r"item 0 has \[\] beside its arrays, and out has \['name'\]"):
        xferlib.stack([item(4)], out)


class Named(NamedTuple):
    image: Any
    name: Any


@pytest.mark.parametrize("out", [Named(np.zeros((4, 2)), "a"), Named(np.zeros((4, 2)), np.zeros(())), [np.zeros((4, 2)), [1]]])
def test_where_a_batch_has_no_rows_it_says_so(out: Any) -> None:
    with pytest.raises(TypeError, match=r"out has .* \(tree\[1\].*: expected a NumPy array of rows"):
        xferlib.stack([], out)
