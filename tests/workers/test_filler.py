"""What fills the slots in a worker, called where it can be seen."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import pytest

import xferlib
from tests.workers import fills
from xferlib.pipeline.workers.layout import SlotLayout
from xferlib.pipeline.workers.messages import Filled, Raised, Task
from xferlib.pipeline.workers.worker import _Filler


class Unsendable(xferlib.Host[int]):  # type: ignore[misc]  # Final for others.
    """Comes through the pickle of a task, and goes through none from there."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(1)

    def __reduce__(self) -> Any:
        if sys._getframe(1).f_code.co_name == "_sent":
            raise TypeError("cannot be pickled here")
        return Unsendable, ()


def test_an_order_before_its_run_is_a_failure_and_no_batch() -> None:
    layout = SlotLayout((64, np.int64))
    slot = np.zeros(layout.nbytes, np.uint8)
    filler = _Filler(layout.whole, [slot])
    order = Task(0, 0, 0, pickle.dumps(3), "0")
    refused = filler.reply(order)
    assert isinstance(refused, Raised)
    assert "before its run began" in refused.words
    filler.begin(pickle.dumps(fills.number))
    assert filler.reply(order) == Filled(None)
    assert (layout.views(slot) == 3).all()


def filled(fill: object, task: object) -> tuple[object, object]:
    layout = SlotLayout({"image": ((4, 3), np.float32), "label": ((4,), np.int64)})
    slot = np.zeros(layout.nbytes, np.uint8)
    filler = _Filler(layout.whole, [slot])
    filler.begin(pickle.dumps(fill))
    return filler.reply(Task(0, 0, 0, pickle.dumps(task), "0")), layout.views(slot)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("second", "tree.label"),
        ("array beside", "tree.name"),
        ("text in its place", "taken out"),
        ("out", "taken out"),
        ("twice", "tree.label"),
        ("swapped", "tree.image"),
        ("renamed", "renamed"),
        ("rows of another", "tree.label"),
    ],
)
def test_what_is_put_in_place_of_an_array_is_refused(task: str, words: str) -> None:
    """The memory of the slot would keep an older batch, and arrive as this one."""
    reply, _ = filled(fills.replaces, task)
    assert isinstance(reply, Raised)
    assert words in reply.words
    assert "TypeError" in reply.words


@pytest.mark.parametrize("task", ["rows", "all"])
def test_what_is_written_in_place_arrives(task: str) -> None:
    reply, views = filled(fills.replaces, task)
    assert isinstance(reply, Filled)
    assert (views["image"] == 1).all()  # type: ignore[index]  # A dict.


@pytest.mark.parametrize("rows", [None, 2])
def test_what_is_put_beside_the_arrays_goes_with_them(rows: int | None) -> None:
    reply, views = filled(fills.names, ({"name": ["a.png", "b.png"], "epoch": 3, "gone": xferlib.Host([None])}, rows))
    assert isinstance(reply, Filled)
    assert reply.tree is not None
    parts = pickle.loads(reply.tree)
    assert [part.shape for part in parts.arrays] == [(rows or 4, 3), (rows or 4,)]
    slot = np.zeros(4096, np.uint8)
    tree = parts.views(slot)
    assert (tree["name"], tree["epoch"], tree["gone"].value) == (["a.png", "b.png"], 3, [None])
    assert list(tree) == [*views, "name", "epoch", "gone"]  # type: ignore[misc]  # A dict.


def test_items_are_stacked_into_the_slot_of_a_worker() -> None:
    reply, views = filled(fills.stacks, [{"image": np.full(3, number), "label": number} for number in range(3)])
    assert isinstance(reply, Filled)
    assert reply.tree is not None
    assert pickle.loads(reply.tree).tree["count"].value == 3
    assert views["image"][:, 0].tolist() == [0, 1, 2, 0]  # type: ignore[index]  # A dict.
    assert views["label"].tolist() == [0, 1, 2, 0]  # type: ignore[index]


def test_what_cannot_be_sent_beside_the_arrays_is_raised() -> None:
    reply, _ = filled(fills.names, ({"lock": Unsendable()}, None))
    assert isinstance(reply, Raised)
    assert "cannot be pickled here" in reply.words
    assert "could not be sent to the process that has the ring" in reply.traceback


def test_views_that_are_returned_are_what_counts() -> None:
    reply, views = filled(fills.looks_elsewhere, 0)
    assert isinstance(reply, Filled)
    assert (views["image"] == 5).all()  # type: ignore[index]  # A dict.


@pytest.mark.parametrize("task", ["without", "list"])
def test_names_that_a_returned_tree_lacks_are_not_lost_in_silence(task: str) -> None:
    reply, _ = filled(fills.leaves_names, task)
    assert isinstance(reply, Raised)
    assert f"fill has put '{task}' into its slot (tree.name), and returned a tree without it" in reply.words


def test_names_in_a_returned_tree_are_what_counts() -> None:
    reply, _ = filled(fills.leaves_names, "with")
    assert isinstance(reply, Filled)
    assert reply.tree is not None
    assert pickle.loads(reply.tree).tree["name"].value == "other"
